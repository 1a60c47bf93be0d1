"""`config.yaml` and the environment, read into frozen dataclasses, or refused with every mistake at once.

Start with `config_sections`: every key, its default and its rules.
config_reader    YAML and environment variables to dataclasses, by the types of their fields
value_checks     what a single value must be
label_names      which label a name in a request stands for
yaml_tree        YAML with a line for every node, bounded in size and depth
config_problems  where a mistake is, and how it is reported
config_changes   what a reload applies
May import: domain, errors, operations, model_ids, price_dimensions.
"""

from price_keeper.config.config_sections import (
    Config,
    LabelConfig,
    ListenConfig,
    PricesConfig,
    StoreConfig,
    UpstreamConfig,
    load_config,
    parse_config,
    read_config_file,
)
from price_keeper.config.value_checks import Address

__all__ = [
    "Address",
    "Config",
    "LabelConfig",
    "ListenConfig",
    "PricesConfig",
    "StoreConfig",
    "UpstreamConfig",
    "load_config",
    "parse_config",
    "read_config_file",
]
