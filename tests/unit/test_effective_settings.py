"""What holds for an org or an app: inheritance, what was written by hand, and settings that wait for their turn."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from price_keeper.budgets.effective_settings import (
    DEFAULT_ALERT_THRESHOLDS,
    UNUSABLE_ORDERING_LABEL,
    EffectiveSettings,
    find_change_time,
    resolve_settings,
)
from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.org_calendar import Period, load_zone

NOW = 1_795_003_200.0
DEFAULTS = DefaultsConfig()
MICRO = 10**6

ORG: dict[str, Any] = {
    "org_name": "Acme",
    "timezone": "America/New_York",
    "quota_scope": "APP",
    "period": "week",
    "agg_shard_count": 16,
    "model_ordering": ["premium", "economy"],
    "quotas": {"premium": 5, "economy": 7, "guardrails": 1},
    "sticky_fallback_enabled": False,
    "enforcement": "shadow",
    "tight_mode_threshold_pct": 80,
    "refresh_interval_normal_secs": 100,
    "refresh_interval_tight_secs": Decimal("2.5"),
    "alert_thresholds_pct": [90, 10],
    "version": 4,
}


def plan(org: Any, app: Any = None, now: float = NOW) -> EffectiveSettings:
    return resolve_settings(org, app, DEFAULTS, DEFAULT_ALERT_THRESHOLDS, now)


def test_settings_without_items_are_defaults_without_budget() -> None:
    assert plan(None) == EffectiveSettings(
        load_zone("UTC"), "APP", 8, Period.DAY, (), {}, True, "soft", 95, 300.0, 60.0, DEFAULT_ALERT_THRESHOLDS, 0
    )


def test_org_settings_override_defaults() -> None:
    quotas = {"premium": 5 * MICRO, "economy": 7 * MICRO, "guardrails": MICRO}
    zone = load_zone("America/New_York")
    assert plan(ORG) == EffectiveSettings(
        zone,
        "APP",
        16,
        Period.WEEK,
        ("premium", "economy"),
        quotas,
        False,
        "shadow",
        80,
        100.0,
        2.5,
        (10, 90),
        4,
        org_name="Acme",
    )


# attribute, what the app says, field of the settings, its expected value, and whether the app needs a budget of its own
OWN = [
    ("model_ordering", ["economy"], "ordering", ("economy",), True),
    ("quotas", {"premium": 1, "economy": 2}, "quotas", {"premium": MICRO, "economy": 2 * MICRO}, True),
    ("sticky_fallback_enabled", True, "is_sticky", True, True),
    ("enforcement", "soft", "enforcement", "soft", True),
    ("tight_mode_threshold_pct", 50, "tight_pct", 50, False),
    ("refresh_interval_normal_secs", 50, "normal_secs", 50.0, False),
    ("refresh_interval_tight_secs", 1, "tight_secs", 1.0, False),
    ("alert_thresholds_pct", [], "thresholds", (), False),
]
ORGS_ALONE = [("timezone", "UTC"), ("quota_scope", "ORG"), ("period", "day"), ("agg_shard_count", 8)]


@pytest.mark.parametrize(("attribute", "value", "field", "expected", "is_budget"), OWN, ids=[row[0] for row in OWN])
def test_app_settings_override_org_settings(
    attribute: str, value: Any, field: str, expected: Any, is_budget: bool
) -> None:
    found = plan(ORG, {attribute: value})
    fields = [name for name in EffectiveSettings.__slots__ if getattr(found, name) != getattr(plan(ORG), name)]
    assert (getattr(found, field), fields) == (expected, [field])
    whole = ORG | {"quota_scope": "ORG"}
    assert (plan(whole, {attribute: value}) == plan(whole)) is is_budget


@pytest.mark.parametrize(("attribute", "value"), ORGS_ALONE)
def test_org_only_attributes_of_app_are_ignored(attribute: str, value: Any) -> None:
    assert plan(ORG, {attribute: value}) == plan(ORG)


def test_version_grows_with_every_relevant_change() -> None:
    assert plan(ORG, {"version": 3}).version == 7
    assert plan(ORG | {"quota_scope": "ORG"}, {"version": 3}).version == 4  # all apps share one budget
    assert plan(ORG | {"version": "x"}, {"version": 3}).version == 3


def test_tight_interval_is_never_longer_than_normal() -> None:
    assert plan(ORG, {"refresh_interval_normal_secs": 1}).tight_secs == 1.0


# What was written by hand.

MONEY = [
    ({"quotas": None}, ("premium", "economy"), {"premium": 0, "economy": 0}),
    ({"quotas": "5"}, ("premium", "economy"), {"premium": 0, "economy": 0}),
    ({"quotas": {"premium": "5", "economy": True}}, ("premium", "economy"), {"premium": 0, "economy": 0}),
    ({"quotas": {"premium": -1, "economy": Decimal("1.5")}}, ("premium", "economy"), {"premium": 0, "economy": 0}),
    ({"quotas": {"premium": 10**16, "economy": 1}}, ("premium", "economy"), {"premium": 0, "economy": MICRO}),
    ({"quotas": {"premium": 1, "economy": 1, "a#b": 1}}, ("premium", "economy"), {"premium": MICRO, "economy": MICRO}),
    ({"model_ordering": "premium", "quotas": {}}, (UNUSABLE_ORDERING_LABEL,), {UNUSABLE_ORDERING_LABEL: 0}),
    (
        {"model_ordering": [], "quotas": {"premium": 1}},
        (UNUSABLE_ORDERING_LABEL,),
        {"premium": MICRO, UNUSABLE_ORDERING_LABEL: 0},
    ),
    ({"model_ordering": [7, ""], "quotas": {}}, (UNUSABLE_ORDERING_LABEL,), {UNUSABLE_ORDERING_LABEL: 0}),
    ({"model_ordering": None, "quotas": 7}, (UNUSABLE_ORDERING_LABEL,), {UNUSABLE_ORDERING_LABEL: 0}),
    ({"model_ordering": ["premium", 7, "premium"], "quotas": {"premium": 1}}, ("premium",), {"premium": MICRO}),
]


@pytest.mark.parametrize(("written", "ordering", "quotas"), MONEY)
def test_invalid_quota_fails_closed(written: dict[str, Any], ordering: tuple[str, ...], quotas: dict[str, int]) -> None:
    found = plan(ORG | written)
    assert (found.ordering, found.quotas) == (ordering, quotas)
    assert found.problems
    if None not in written.values():  # which in an app would leave it to the org
        of_app = plan(ORG, {"model_ordering": ["premium", "economy"]} | written)
        assert (of_app.ordering, of_app.quotas) == (ordering, quotas)


@pytest.mark.parametrize("app", [None, {"quotas": {"premium": 5}}, {"model_ordering": ["premium", "economy"]}])
def test_settings_quotas_without_a_label_of_the_ordering_leave_it_unlimited(app: Any) -> None:
    found = plan(ORG | {"quotas": {"premium": 5}}, app)
    assert (found.ordering, found.quotas, found.problems) == (("premium", "economy"), {"premium": 5 * MICRO}, ())
    assert plan(ORG | {"quotas": {}}).quotas == {}


PASSED_OVER = [
    ("timezone", "Mars/Olympus", "zone", load_zone("UTC")),
    ("timezone", 7, "zone", load_zone("UTC")),
    ("quota_scope", "org", "quota_scope", "APP"),
    ("period", ["day"], "period", Period.DAY),
    ("agg_shard_count", 7, "shards", 8),
    ("agg_shard_count", True, "shards", 8),
    ("sticky_fallback_enabled", "no", "is_sticky", True),
    ("enforcement", "Hard", "enforcement", "soft"),
    ("tight_mode_threshold_pct", 0, "tight_pct", 95),
    ("refresh_interval_normal_secs", 0, "normal_secs", 300.0),
    ("refresh_interval_tight_secs", "5", "tight_secs", 60.0),
    ("alert_thresholds_pct", [50, "x"], "thresholds", DEFAULT_ALERT_THRESHOLDS),
    ("version", -1, "version", 0),
]


@pytest.mark.parametrize(("attribute", "value", "field", "expected"), PASSED_OVER)
def test_invalid_attribute_is_ignored_and_reported(attribute: str, value: Any, field: str, expected: Any) -> None:
    found = plan({attribute: value})
    assert getattr(found, field) == expected
    assert len(found.problems) == 1
    assert f"org: {attribute}: " in found.problems[0]


def test_invalid_app_attribute_falls_back_to_org() -> None:
    found = plan(ORG, {"enforcement": "Hard", "alert_thresholds_pct": 7, "tight_mode_threshold_pct": 101})
    assert (found.enforcement, found.thresholds, found.tight_pct) == ("shadow", (10, 90), 80)
    assert [line.split(": ")[:2] for line in found.problems] == [
        ["app", "alert_thresholds_pct"],
        ["app", "enforcement"],
        ["app", "tight_mode_threshold_pct"],
    ]


# Settings that wait.

WAITING = ORG | {
    "settled": {"timezone": "Asia/Tokyo", "quota_scope": "ORG", "period": "month"},
    "settled_until_epoch": int(NOW) + 60,
}


def test_settled_values_apply_until_change_time() -> None:
    before = plan(WAITING)
    assert (before.zone.key, before.quota_scope, before.period) == ("Asia/Tokyo", "ORG", Period.MONTH)
    assert plan(WAITING, now=NOW + 59.999) == before
    assert plan(WAITING, now=NOW + 60) == plan(ORG)
    assert before.quotas == plan(ORG).quotas


def test_change_time_is_reported_to_caches() -> None:
    assert find_change_time(WAITING, NOW) == NOW + 60
    assert find_change_time(WAITING, NOW + 60) is None
    assert find_change_time(ORG, NOW) is None
    assert find_change_time(None, NOW) is None


@pytest.mark.parametrize(
    "corrupted", [{"settled": "x"}, {"settled_until_epoch": "soon"}, {"settled_until_epoch": True}]
)
def test_malformed_change_time_is_ignored(corrupted: dict[str, Any]) -> None:
    assert plan(WAITING | corrupted) == plan(ORG)
    assert find_change_time(WAITING | corrupted, NOW) is None


def test_missing_settled_value_comes_from_org() -> None:
    found = plan(WAITING | {"settled": {"timezone": "Nowhere", "period": "month"}})
    assert (found.zone.key, found.quota_scope, found.period) == ("America/New_York", "APP", Period.MONTH)
