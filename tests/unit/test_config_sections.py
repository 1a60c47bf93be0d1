"""The keys and their defaults, prices and overrides, and that config.yaml says the same."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from price_keeper.config.config_reader import get_item_type, has_children, is_list, is_mapping, strip_optional
from price_keeper.config.config_sections import Config, KeyConfig, load_config, parse_config
from price_keeper.config.value_checks import Address
from price_keeper.errors import ConfigError

from tests.support.configs import CONFIG_YAML, LABELS, label, problems, read

# --- config.yaml ------------------------------------------------------------------------------------------------


def test_config_yaml_shows_defaults_and_demonstration_labels() -> None:
    shown = load_config(CONFIG_YAML, {})
    assert shown == Config(labels=Config.development().labels)


def test_development_configuration_needs_no_aws() -> None:
    assert Config.development().upstream.endpoint == "simulated"
    assert Config.development().store.engine == "sqlite"


Way = tuple[str, ...]


def keys_of(kind: Any, path: Way = ()) -> Iterator[tuple[Any, Way]]:
    """Every path of the configuration, with * for an entry of a list or a mapping; and the section that it ends in."""
    kind, _ = strip_optional(kind)
    if not has_children(kind):
        return
    if is_list(kind) or is_mapping(kind):
        yield from keys_of(get_item_type(kind), (*path, "*"))
        return
    for field in dataclasses.fields(kind):
        below = (*path, field.name)
        yield kind, below
        yield from keys_of(get_type_hints(kind)[field.name], below)


def paths_in(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in below:
        yield (*path, str(key))
        yield from paths_in(child, (*path, str(key)))


def matches(known: tuple[str, ...], shown: tuple[str, ...]) -> bool:
    return len(known) == len(shown) and all(k in ("*", s) for k, s in zip(known, shown, strict=True))


def test_config_yaml_shows_every_key() -> None:
    """A section that may stand in several places, as prices may, is shown in full in one of them."""
    everything = yaml.safe_load(re.sub(r"(?m)^( *)#(?=\w)", r"\1", CONFIG_YAML.read_text()))
    shown = set(paths_in(everything))
    ways: dict[tuple[Any, str], list[Way]] = {}
    for section, path in keys_of(Config):
        ways.setdefault((section, path[-1]), []).append(path)
    assert len(ways) > 80
    hidden = [paths for paths in ways.values() if not any(matches(path, other) for path in paths for other in shown)]
    assert hidden == []


def test_each_commented_key_of_config_yaml_is_valid() -> None:
    text = CONFIG_YAML.read_text()
    unused = re.findall(r"(?m)^ *#\w+:.*$", text)
    assert len(unused) == 19
    for line in unused:
        try:
            parse_config(text.replace(line, line.replace("#", "", 1)), "config.yaml", {})
        except ConfigError as error:  # only what goes against another key, never a key or a value that is wrong
            assert re.search("only allowed with|not for HS256|exactly one of", str(error)), error  # noqa: PT017


def test_file_is_named_as_given(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("labels: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert caught.value.problems == (f"{path}:1: labels: at least one label is needed",)


# --- overrides --------------------------------------------------------------------------------------------------


def test_every_key_can_be_overridden() -> None:
    environ = {
        "PRICE_KEEPER__STORE__ENGINE": "dynamodb",
        "PRICE_KEEPER__LISTEN__HEALTH": "[::]:8082",
        "PRICE_KEEPER__JOURNAL__MAX_UNFLUSHED_USD": "2.50",
        "PRICE_KEEPER__AUTH__KEYS": "[{kid: b, alg: EdDSA, public_key_file: k.pub}]",
        "PRICE_KEEPER__AUTH__KEYS__0__KID": "c",
        "PRICE_KEEPER__LABELS__ONE__MODEL": "other",
        "PRICE_KEEPER__LABELS__ONE__PRICES_USD_PER_1M__SERVICE_TIERS": "{flex: {input: 1, output: 1}}",
        "PRICE_KEEPER__ON_STORE_DOWN": "refuse",
        "PRICE_KEEPER_JWT_SECRET": "not an override",
        "PRICE_KEEPER_API_KEY": "nor this",
    }
    config = read("", environ)
    assert config.store.engine == "dynamodb"
    assert config.listen.health == Address("::", 8082)
    assert config.journal.max_unflushed_usd == Decimal("2.50")
    assert config.auth.keys == (KeyConfig("c", "EdDSA", public_key_file="k.pub"),)
    assert config.labels["one"].model == "other"
    assert config.labels["one"].prices_usd_per_1m.service_tiers["flex"].input == 1
    assert config.on_store_down == "refuse"


def test_whole_configuration_may_come_from_environment() -> None:
    one = "{one: {model: m, format: nova, prices_usd_per_1m: {input: 1, output: 2}}}"
    assert parse_config("", "", {"PRICE_KEEPER__LABELS": one}) == parse_config(label(), "", {})


def test_mistakes_in_variables_are_reported() -> None:
    environ = {
        "PRICE_KEEPER__STORE__ENGIN": "x",
        "PRICE_KEEPER__STORE__ENGINE": "mysql",
        "PRICE_KEEPER__LABELS__ON__MODEL": "x",
        "PRICE_KEEPER__AUTH__ADMIN_API_KEY": "sk-live-1",
        "PRICE_KEEPER__AUTH__MODE": "identity",
    }
    assert problems(LABELS, environ) == [
        "PRICE_KEEPER__AUTH__ADMIN_API_KEY: auth.admin_api_key: a secret never stands in the configuration itself; "
        "name its source with admin_api_key_env or admin_api_key_file",
        "PRICE_KEEPER__AUTH__MODE: auth.identity: required with mode: identity",
        'PRICE_KEEPER__LABELS__ON__MODEL: labels.on: unknown key; did you mean "one"?',
        'PRICE_KEEPER__STORE__ENGIN: store.engin: unknown key; did you mean "engine"?',
        'PRICE_KEEPER__STORE__ENGINE: store.engine: expected one of sqlite, dynamodb, found "mysql"',
    ]


def test_all_mistakes_are_reported_at_once() -> None:
    assert problems("store:\n  engine: mysql\n  regoin: x\nlabels:\n  a: {model: m}\nauth: {max_sessions: x}\n") == [
        'config.yaml:2: store.engine: expected one of sqlite, dynamodb, found "mysql"',
        'config.yaml:3: store.regoin: unknown key; did you mean "region"?',
        "config.yaml:5: labels.a.format: required, but missing",
        "config.yaml:5: labels.a.prices_usd_per_1m: required, but missing",
        'config.yaml:6: auth.max_sessions: expected a whole number, found "x"',
    ]
