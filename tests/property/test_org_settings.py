"""Settings of orgs against simple models: inheritance, when a change takes effect, and writers at once."""

from __future__ import annotations

import asyncio
import zoneinfo
from typing import Any, NamedTuple, cast
from uuid import uuid4

from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.budgets.effective_settings import (
    DEFAULT_ALERT_THRESHOLDS,
    EffectiveSettings,
    find_change_time,
    resolve_settings,
)
from price_keeper.budgets.org_settings import CHANGE_LEAD_SECONDS, InvalidSettings, put_org
from price_keeper.clock import SystemClock
from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Put, Store

from tests.support.clock import ManualClock
from tests.support.effort import tries
from tests.support.memory_store import MemoryStore

ACME = "e0000000-0000-4000-8000-000000000001"
LABELS = ("premium", "standard", "economy")
DEFAULTS = DefaultsConfig()
NOW = 1_795_003_200.0

# ---------------------------------------------------------------- inheritance

_LABELS = st.lists(st.sampled_from(LABELS), min_size=1, unique=True)
_QUOTAS = st.dictionaries(st.sampled_from(LABELS), st.integers(0, 100))
_OWN = {
    "model_ordering": _LABELS,
    "quotas": _QUOTAS,
    "sticky_fallback_enabled": st.booleans(),
    "enforcement": st.sampled_from(["soft", "shadow"]),
    "tight_mode_threshold_pct": st.integers(1, 100),
    "refresh_interval_normal_secs": st.integers(1, 1000),
    "refresh_interval_tight_secs": st.integers(1, 1000),
    "alert_thresholds_pct": st.lists(st.integers(1, 999), unique=True).map(sorted),
    "version": st.integers(1, 9),
}
_ORGS = _OWN | {
    "timezone": st.sampled_from(["UTC", "Asia/Tokyo"]),
    "quota_scope": st.sampled_from(["ORG", "APP"]),
    "period": st.sampled_from(["day", "week", "month"]),
    "agg_shard_count": st.sampled_from([8, 16, 32, 64]),
}
_OF_THE_BUDGET = {"model_ordering", "quotas", "sticky_fallback_enabled", "enforcement", "version"}


def merged(org: dict[str, Any], app: dict[str, Any]) -> dict[str, Any]:
    """The model: two dicts, one over the other, over the defaults."""
    own = {name: value for name, value in app.items() if name in _OWN}
    if org.get("quota_scope") == "ORG":
        own = {name: value for name, value in own.items() if name not in _OF_THE_BUDGET}
    defaults: dict[str, Any] = {
        "model_ordering": [],
        "quotas": None,
        "sticky_fallback_enabled": True,
        "enforcement": "soft",
        "tight_mode_threshold_pct": 95,
        "refresh_interval_normal_secs": 300,
        "refresh_interval_tight_secs": 60,
        "alert_thresholds_pct": list(DEFAULT_ALERT_THRESHOLDS),
        "timezone": "UTC",
        "quota_scope": "APP",
        "period": "day",
        "agg_shard_count": 8,
    }
    found = defaults | org | own
    if found["quotas"] is None:
        found["quotas"] = dict.fromkeys(found["model_ordering"], 0)
    found["version"] = org.get("version", 0) + own.get("version", 0)
    normal = found["refresh_interval_normal_secs"]
    found["refresh_interval_tight_secs"] = min(found["refresh_interval_tight_secs"], normal)
    return found


def as_item(plan: EffectiveSettings) -> dict[str, Any]:
    return {
        "model_ordering": list(plan.ordering),
        "quotas": {label: pico // 10**6 for label, pico in plan.quotas.items()},
        "sticky_fallback_enabled": plan.is_sticky,
        "enforcement": plan.enforcement,
        "tight_mode_threshold_pct": plan.tight_pct,
        "refresh_interval_normal_secs": plan.normal_secs,
        "refresh_interval_tight_secs": plan.tight_secs,
        "alert_thresholds_pct": list(plan.thresholds),
        "timezone": plan.zone.key,
        "quota_scope": plan.quota_scope,
        "period": plan.period.value,
        "agg_shard_count": plan.shards,
        "version": plan.version,
    }


@settings(max_examples=tries(150))
@given(org=st.fixed_dictionaries({}, optional=_ORGS), app=st.fixed_dictionaries({}, optional=_ORGS))
def test_app_inherits_attribute_by_attribute(org: dict[str, Any], app: dict[str, Any]) -> None:
    assert as_item(resolve_settings(org, app, DEFAULTS, DEFAULT_ALERT_THRESHOLDS, NOW)) == merged(org, app)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=4) | st.sampled_from(LABELS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(LABELS) | st.text(), inner, max_size=3),
    max_leaves=6,
)
_MALFORMED = st.dictionaries(st.sampled_from([*_ORGS, "settled", "settled_until_epoch"]), _ANYTHING)


@settings(max_examples=tries(150))
@given(org=_MALFORMED, app=_MALFORMED)
def test_settings_written_by_hand_unlimited_labels_are_those_usable_quotas_do_not_name(org: Any, app: Any) -> None:
    plan = resolve_settings(org, app, DEFAULTS, DEFAULT_ALERT_THRESHOLDS, NOW)
    items = (app, org) if plan.quota_scope == "APP" else (org,)
    quotas = next((item["quotas"] for item in items if item.get("quotas") is not None), None)
    for label in set(plan.ordering) - plan.quotas.keys():
        assert isinstance(quotas, dict)
        assert label not in quotas
    assert all(isinstance(quota, int) and quota >= 0 for quota in plan.quotas.values())
    assert 0 < plan.tight_secs <= plan.normal_secs
    for item in (org, app) if plan.quota_scope == "APP" else (org,):
        if item.get("model_ordering") is not None:
            assert plan.ordering, "an ordering that is there never means that there is no budget"


# ---------------------------------------------------------------- when a change takes effect


class Trio(NamedTuple):
    timezone: str
    quota_scope: str
    period: str


# With clock changes near or at midnight, of half an hour and of a whole day, and far from UTC.
ZONES = [
    *("UTC", "America/New_York", "Europe/Berlin", "Asia/Tokyo", "America/Havana", "America/Sao_Paulo", "Asia/Beirut"),
    *("Australia/Lord_Howe", "Pacific/Apia", "Pacific/Kiritimati", "Asia/Kathmandu", "Africa/Cairo"),
]
_TRIOS = st.builds(
    Trio, st.sampled_from(ZONES), st.sampled_from(["ORG", "APP"]), st.sampled_from(["day", "week", "month"])
)
_WAITS = st.sampled_from([0.0, 1.0, CHANGE_LEAD_SECONDS, 3600.0, 86_400.0]) | st.floats(0, 40 * 86_400)
_STARTS = st.integers(1_260_000_000, 1_890_000_000)  # 2009 to 2029


def next_period(trio: Trio, at: float) -> int:
    """The model: the first second with another key, looked for by halving."""
    zone, period = load_zone(trio.timezone), Period(trio.period)
    key = find_span(period, at, zone).key
    low, high = int(at), int(at) + 40 * 86_400
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if find_span(period, middle, zone).key == key else (low, middle)
    return high


class Model:
    def __init__(self, trio: Trio) -> None:
        self.now_holds = trio
        self.waits: Trio | None = None
        self.turns = 0

    def at(self, at: float) -> Trio:
        return self.waits if self.waits is not None and at >= self.turns else self.now_holds

    def put(self, wanted: Trio, now: float) -> bool:
        """Whether it is taken."""
        self.now_holds, self.waits = self.at(now), self.waits if now < self.turns else None
        if self.waits is not None and now > self.turns - CHANGE_LEAD_SECONDS and wanted != self.waits:
            return False
        if wanted == self.now_holds:
            self.waits = None
        else:
            self.turns = (
                self.turns if self.waits is not None else next_period(self.now_holds, now + CHANGE_LEAD_SECONDS)
            )
            self.waits = wanted
        return True


def trio_of(item: Item, at: float) -> Trio:
    plan = resolve_settings(item, None, DEFAULTS, DEFAULT_ALERT_THRESHOLDS, at)
    return Trio(plan.zone.key, plan.quota_scope, plan.period.value)


def body(trio: Trio, **changes: Any) -> dict[str, Any]:
    quotas = {"model_ordering": ["premium"], "quotas": {"premium": 1}}
    return {"org_name": "Acme", **trio._asdict(), **quotas, **changes}


@settings(max_examples=tries(75))
@given(start=_STARTS, first=_TRIOS, changes=st.lists(st.tuples(_WAITS, _TRIOS), min_size=1, max_size=6))
async def test_changed_zone_period_or_scope_applies_as_in_model(start: int, first: Trio, changes: Any) -> None:
    memory, clock, model = MemoryStore(), ManualClock(start), Model(first)
    store, key = cast(Store, memory), schema.org_config_key(ACME)
    await put_org(store, clock, ACME, body(first), LABELS, DEFAULTS)
    for wait, wanted in changes:
        await clock.advance(wait)
        before, now = memory.items[key], clock.now()
        try:
            await put_org(store, clock, ACME, body(wanted), LABELS, DEFAULTS)
            is_taken = True
        except InvalidSettings:
            is_taken = False
        assert is_taken is model.put(wanted, now)
        after = memory.items[key]
        for at in (now, now + CHANGE_LEAD_SECONDS, model.turns - 0.001, model.turns, model.turns + 1, now + 9e6):
            if at >= now:
                assert trio_of(after, at) == model.at(at)
        _check_who_reads_late(before, after, now)
        assert find_change_time(after, now) == (model.turns if model.waits is not None else None)


def _check_who_reads_late(before: Item, after: Item, now: float) -> None:
    """A reader that sees the change only after a while has followed the same settings until then."""
    for at in (now, now + CHANGE_LEAD_SECONDS / 2, now + CHANGE_LEAD_SECONDS - 0.01):
        assert trio_of(before, at) == trio_of(after, at)


def test_zones_of_tests_exist() -> None:
    assert set(ZONES) <= zoneinfo.available_timezones()


# ---------------------------------------------------------------- writers at once

WRITERS = 12


async def test_concurrent_writers_are_neither_lost_nor_mixed(exact_store: Store) -> None:
    org = str(uuid4())
    key, kept = schema.org_config_key(org), {"client_secret_hash": "$2b$12$x", "version": 5}
    await exact_store.put(Put(key, kept))
    bodies = [
        body(Trio("UTC", "APP", "day"), org_name=f"Acme {number}", quotas={"premium": number, "economy": number})
        for number in range(WRITERS)
    ]
    written = await asyncio.gather(
        *(put_org(exact_store, SystemClock(), org, each, LABELS, DEFAULTS) for each in bodies)
    )
    assert sorted(cast(int, each.item["version"]) for each in written) == list(range(6, 6 + WRITERS))
    last = max(written, key=lambda each: cast(int, each.item["version"]))
    item = await exact_store.get(key, consistent=True)
    assert item == last.item
    assert item is not None
    assert item["client_secret_hash"] == kept["client_secret_hash"]
    assert {name: item[name] for name in bodies[0]} in bodies
    assert await exact_store.get(schema.org_entry_key(org), consistent=True) == {"org_name": item["org_name"]}


async def test_concurrent_creations_have_one_winner(exact_store: Store) -> None:
    org = str(uuid4())
    made = await asyncio.gather(
        *(put_org(exact_store, SystemClock(), org, body(Trio("UTC", "APP", "day")), LABELS, DEFAULTS) for _ in range(6))
    )
    assert sorted(each.is_new for each in made) == [False] * 5 + [True]
