"""Short ways to a configuration, or to what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from price_keeper.config.config_sections import Config, parse_config
from price_keeper.errors import ConfigError

CONFIG_YAML = Path(__file__).parents[2] / "config.yaml"
ORG = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
LABELS = """
labels:
  one:
    model: amazon.nova-lite-v1:0
    format: nova
    prices_usd_per_1m: {input: 1, output: 2}
"""


def read(text: str, environ: Mapping[str, str] | None = None) -> Config:
    return parse_config(text + LABELS, "config.yaml", environ or {})


def problems(text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "config.yaml", environ or {})
    return list(caught.value.problems)


def label(changes: str = "", prices: str = "{input: 1, output: 2}", format: str = "nova") -> str:
    return f"labels:\n  one:\n    model: m\n    format: {format}\n    prices_usd_per_1m: {prices}\n{changes}"
