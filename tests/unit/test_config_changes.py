"""Which keys a reload applies: exactly labels and prices; all others are reported as needing a restart."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.config import Config
from price_keeper.config.config_changes import (
    MAX_NAMES_SHOWN,
    RELOADABLE_KEYS,
    apply_reloadable,
    compare_catalogs,
    list_restart_keys,
)
from price_keeper.config.config_sections import (
    EndpointConfig,
    GuardrailsConfig,
    IdentityConfig,
    LabelConfig,
    PricesConfig,
    TierPrices,
    TlsConfig,
    UnitPrices,
    WebhookConfig,
)
from price_keeper.config.value_checks import Address

UNIT = UnitPrices(*(Decimal(1) for _ in range(10)))


def full() -> Config:
    """With everything that may be left out."""
    config = Config.development()
    return replace(
        config,
        listen=replace(config.listen, health=Address("127.0.0.1", 1), tls=TlsConfig("a", "b")),
        auth=replace(config.auth, identity=IdentityConfig("org", "app")),
        alerts=replace(config.alerts, webhook=WebhookConfig("https://one.example", "NAMED")),
        default_price=TierPrices(Decimal(1), Decimal(2)),
        guardrails=GuardrailsConfig(UNIT),
    )


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Of every key, as a file would have it."""
    if is_dataclass(value) and not isinstance(value, Address):
        for each in fields(value):
            yield from paths(getattr(value, each.name), f"{path}.{each.name}".removeprefix("."))
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for number, each in enumerate(value):
            yield from paths(each, f"{path}.{number}")
    else:
        yield path


def altered(value: Any, path: list[str]) -> Any:
    """Any object is another value to who compares."""
    if not path:
        return object()
    name, *below = path
    if isinstance(value, tuple):
        index = int(name)
        return (*value[:index], altered(value[index], below), *value[index + 1 :])
    return replace(value, **{name: altered(getattr(value, name), below)})


FULL = full()
PATHS = list(paths(FULL))


def test_every_config_section_is_covered() -> None:
    assert {path.split(".")[0] for path in PATHS} == {each.name for each in fields(Config)}
    assert len(PATHS) > 60


@given(st.sets(st.sampled_from(PATHS)))
def test_each_changed_key_is_reloaded_or_reported_for_restart(wanted: set[str]) -> None:
    found = FULL
    for path in wanted:
        found = altered(found, path.split("."))
    restarts = {path for path in wanted if path.split(".")[0] not in RELOADABLE_KEYS}
    assert set(list_restart_keys(FULL, found)) == restarts
    whole = apply_reloadable(FULL, found)
    for each in fields(Config):
        assert getattr(whole, each.name) is getattr(found if each.name in RELOADABLE_KEYS else FULL, each.name)
    assert list_restart_keys(FULL, whole) == []


def test_reloadable_keys_are_labels_and_prices() -> None:
    assert set(RELOADABLE_KEYS) == {"labels", "unlabelled", "default_price", "guardrails"}


def test_cross_section_rules_do_not_mix_reloadable_and_other_keys() -> None:
    """Or a whole that is made of two sound configurations could be one that a start refuses."""
    for rule in Config.rules:
        asked = set(inspect.signature(rule).parameters)
        assert asked <= set(RELOADABLE_KEYS) or asked.isdisjoint(RELOADABLE_KEYS), rule


def test_changes_are_described_by_label_and_key() -> None:
    prices = PricesConfig(Decimal(1), Decimal(2))
    one, two = LabelConfig("m", "nova", prices), LabelConfig("n", "nova", prices)
    before = Config(labels={"stays": one, "goes": two, "moves": two})
    moved = replace(two, model="o", endpoints=(EndpointConfig("eu-west-1"),))
    after = Config(labels={"comes": two, "moves": moved, "stays": one}, unlabelled="meter", default_price=prices)
    assert str(compare_catalogs(before, after)) == (
        "added: comes; removed: goes; changed: moves (model, endpoints); other keys: unlabelled, default_price"
    )
    assert str(compare_catalogs(after, after)) == "nothing in them is another"
    price = replace(one, prices_usd_per_1m=replace(prices, input=Decimal(3)))
    assert str(compare_catalogs(before, replace(before, labels={**before.labels, "stays": price}))) == (
        "changed: stays (prices_usd_per_1m)"
    )


@pytest.mark.parametrize(("count", "more"), [(MAX_NAMES_SHOWN, ""), (MAX_NAMES_SHOWN + 5, " and 5 more")])
def test_change_description_is_bounded_to_one_line(count: int, more: str) -> None:
    label = LabelConfig("m", "nova", PricesConfig(Decimal(1), Decimal(2)))
    before, after = Config(labels={}), Config(labels={f"l{number}": label for number in range(count)})
    assert str(compare_catalogs(before, after)).endswith(f", l{MAX_NAMES_SHOWN - 1}{more}")
