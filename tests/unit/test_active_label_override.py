"""The label that a person puts in force: beside the sticky state, for the rest of the period at most."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
from price_keeper.budgets.active_label import (
    Override,
    build_move,
    clear_override,
    parse_override,
    parse_override_version,
    set_override,
)
from price_keeper.budgets.effective_settings import resolve_settings
from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.domain import Scope
from price_keeper.errors import ConfigError
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Put, Store, Update

from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryStore

SCOPE = Scope("e0000000-0000-4000-8000-000000000001", "shop")
ORDERING = ("premium", "standard", "economy")


class Impatient(ManualClock):
    """Time stands still, and sleeping takes none."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


CLOCK = Impatient()
NOW = CLOCK.now()
DAY = find_span(Period.DAY, NOW, load_zone("America/New_York"))
KEY = schema.sticky_state_key(SCOPE, DAY.key)


async def put(store: Any, label: str = "economy", **changes: Any) -> Override:
    values: dict[str, Any] = {"reason": "a quiet day", "who": "ann", "until": None, "ordering": ORDERING} | changes
    return await set_override(cast(Store, store), CLOCK, SCOPE, DAY, label, **values)


async def test_override_without_end_holds_until_period_ends() -> None:
    store = MemoryStore()
    override = await put(store)
    assert override == Override("economy", "a quiet day", "ann", float(DAY.end), 1)
    assert store.items[KEY] == {
        "override_label": "economy",
        "override_reason": "a quiet day",
        "override_who": "ann",
        "override_until_epoch": DAY.end,
        "override_version": 1,
        EXPIRY_ATTRIBUTE: DAY.end + 3600,
    }
    assert parse_override(store.items[KEY], DAY.end - 0.01) == override
    assert parse_override(store.items[KEY], DAY.end) is None


@pytest.mark.parametrize(
    ("until", "ends"), [(NOW + 60, NOW + 60), (NOW + 0.5, NOW + 1), (DAY.end + 1, DAY.end), (float("inf"), DAY.end)]
)
async def test_override_end_is_limited_to_period_end(until: float, ends: float) -> None:
    assert (await put(MemoryStore(), until=until)).until == ends


MISTAKES = [
    ({"label": "premum"}, 'label: "premum" is not in the ordering; did you mean "premium"?'),
    ({"label": "x", "ordering": ()}, 'label: "x" is not in the ordering; there are none'),
    ({"reason": ""}, 'reason: expected 1 to 200 printable characters, found ""'),
    ({"reason": "  "}, "reason: expected 1 to 200 printable characters, found "),
    ({"reason": "x" * 201}, "reason: expected 1 to 200 printable characters, found "),
    ({"reason": "a\x1b[31m"}, "reason: expected 1 to 200 printable characters, found "),
    ({"who": ""}, "who: expected 1 to 128 printable characters, found "),
    ({"until": NOW}, "until: over already; expected a time to come"),
]


@pytest.mark.parametrize(("changes", "complaint"), MISTAKES)
async def test_override_with_invalid_values_writes_nothing(changes: dict[str, Any], complaint: str) -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError) as caught:
        await put(store, **changes)
    (reported,) = caught.value.problems
    assert reported.startswith(complaint)
    assert store.items == {}


async def test_override_reports_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        await put(MemoryStore(), label="x", reason="", who="", until=0)
    assert [line.partition(":")[0] for line in caught.value.problems] == ["label", "reason", "who", "until"]


async def test_override_and_clear_keep_sticky_state() -> None:
    store = MemoryStore()
    sticky = {"active_model_label": "standard", "active_model_index": 1, EXPIRY_ATTRIBUTE: DAY.end + 7200}
    await store.put(Put(KEY, sticky))
    await put(store, "premium")
    assert sticky.items() <= store.items[KEY].items()  # nor is its end brought nearer
    assert await clear_override(cast(Store, store), SCOPE, DAY)
    assert store.items[KEY] == sticky | {"override_version": 2}


async def test_override_ending_soon_expires_later() -> None:
    store = MemoryStore()
    await store.put(Put(KEY, {EXPIRY_ATTRIBUTE: DAY.end}))
    await put(store)
    assert store.items[KEY][EXPIRY_ATTRIBUTE] == DAY.end + 3600


async def test_override_version_grows_with_every_change() -> None:
    store = MemoryStore()
    assert not await clear_override(cast(Store, store), SCOPE, DAY)
    assert store.items == {}
    assert (await put(store)).version == 1
    assert (await put(store, "premium")).version == 2
    assert await clear_override(cast(Store, store), SCOPE, DAY)
    assert not await clear_override(cast(Store, store), SCOPE, DAY)
    assert (parse_override(store.items[KEY], NOW), parse_override_version(store.items[KEY])) == (None, 3)
    assert (await put(store)).version == 4


MALFORMED = [
    {"override_label": 7},
    {"override_label": "a#b"},
    {"override_until_epoch": "soon"},
    {"override_until_epoch": True},
    {"override_until_epoch": None},
]


@pytest.mark.parametrize("change", MALFORMED)
async def test_malformed_override_row_is_ignored(change: dict[str, Any]) -> None:
    store = MemoryStore()
    await put(store)
    assert parse_override(store.items[KEY] | change, NOW) is None
    assert parse_override(None, NOW) is None
    assert parse_override_version({"override_version": "x"}) == 0


async def test_concurrent_overrides_each_get_a_version(exact_store: Store) -> None:
    """And a fallback written at the same time is not lost."""
    await exact_store.put(Put(KEY, {}))
    fallback = Update(KEY, set={"active_model_index": 1, EXPIRY_ATTRIBUTE: DAY.end + 3600})
    sets = [put(exact_store, label) for label in ORDERING * 4]
    done = await asyncio.gather(*sets, exact_store.update(fallback))
    item = await exact_store.get(KEY, consistent=True)
    overrides = [each for each in done if isinstance(each, Override)]
    assert sorted(each.version for each in overrides) == list(range(1, 13))
    assert parse_override(item, NOW) == max(overrides, key=lambda each: each.version)
    assert item is not None
    assert item["active_model_index"] == 1


@pytest.mark.parametrize("day", ["2026-11-18", "2026-11-01", "2026-03-08"], ids=["plain", "25 hours", "23 hours"])
def test_fallback_expires_an_hour_after_the_next_local_midnight(day: str) -> None:
    zone = load_zone("America/New_York")
    noon = datetime.fromisoformat(f"{day}T12:00:00").replace(tzinfo=zone)
    org: dict[str, Any] = {
        "timezone": zone.key,
        "quota_scope": "APP",
        "model_ordering": list(ORDERING),
        "quotas": dict.fromkeys(ORDERING, 1),
    }
    settings = resolve_settings(org, None, DefaultsConfig(), ORDERING, noon.timestamp())
    move = build_move(1, 0, SCOPE, find_span(Period.DAY, noon.timestamp(), zone), settings, noon.timestamp())
    expiry = move.set[EXPIRY_ATTRIBUTE]
    assert isinstance(expiry, int)
    assert datetime.fromtimestamp(expiry, zone).replace(tzinfo=None) == datetime.fromisoformat(
        f"{day}T01:00:00"
    ) + timedelta(days=1)
