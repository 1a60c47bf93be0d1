"""`config.yaml` and the environment, read into frozen dataclasses, or refused with every mistake at once.

keys        every key, its default, and the rules between keys: the part that knows this product
prices      the keys of labels and their prices
alerts      the keys of alerts
checks      what a single value of this product must be
encryption  which addresses may be called over plain http
reader      nodes to dataclasses, by the types of their fields
overrides   the environment, laid over the file
kinds       how each type of field is read from text
tree        YAML with a line for every node, bounded in size and depth
problems    where a mistake is, and how it is told
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
