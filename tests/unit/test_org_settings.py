"""The settings of orgs and apps: every mistake told at once, and what is written when there is none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from typing import Any, cast

import pytest
from price_keeper.budgets.effective_settings import resolve_settings
from price_keeper.budgets.org_settings import (
    CHANGE_LEAD_SECONDS,
    InvalidSettings,
    SettingsWrite,
    put_app,
    put_org,
    validate_app,
    validate_org,
)
from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.domain import AMOUNT_FORMS
from price_keeper.errors import CancellationReason, ReasonCode, TransactionFailed
from price_keeper.stores import schema
from price_keeper.stores.conflict_retry import MAX_ATTEMPTS
from price_keeper.stores.contract import Delete, Item, Key, Put, Store, Update

from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryStore

ACME = "e0000000-0000-4000-8000-000000000001"
LABELS = ("premium", "standard", "economy", "guardrails", "async-jobs")
DEFAULTS = DefaultsConfig()
BODY: dict[str, Any] = {
    "org_name": "Acme",
    "timezone": "America/New_York",
    "quota_scope": "APP",
    "model_ordering": ["premium", "economy"],
    "quotas": {"premium": 5, "economy": 0},
}
NOON = 1_795_003_200.0  # of UTC; in New York the day ends 17 hours later
MIDNIGHT = NOON + 17 * 3600


def org(body: Any, before: Item | None = None) -> dict[str, Any]:
    return cast(dict[str, Any], validate_org(body, LABELS, before, DEFAULTS))


def refused(body: Any, before: Item | None = None) -> tuple[str, ...]:
    with pytest.raises(InvalidSettings) as caught:
        org(body, before)
    return caught.value.problems


def app_refused(body: Any, above: dict[str, Any] = BODY) -> tuple[str, ...]:
    with pytest.raises(InvalidSettings) as caught:
        validate_app(body, LABELS, above)
    return caught.value.problems


def test_body_becomes_item_attributes() -> None:
    assert org(BODY) == BODY | {"period": "day", "agg_shard_count": 8}
    everything = BODY | {
        "quotas": {"premium": 10**15, "economy": 0, "guardrails": 3},
        "period": "month",
        "enforcement": "shadow",
        "agg_shard_count": 64,
        "sticky_fallback_enabled": False,
        "tight_mode_threshold_pct": 100,
        "refresh_interval_normal_secs": 10,
        "refresh_interval_tight_secs": 0.5,
        "alert_thresholds_pct": [120, 50, 50],
    }
    assert org(everything) == everything | {
        "refresh_interval_tight_secs": Decimal("0.5"),
        "alert_thresholds_pct": [50, 120],
    }
    assert validate_app({"app_name": "Shop", "enforcement": None}, LABELS, BODY) == {"app_name": "Shop"}


def test_every_mistake_is_reported_at_once() -> None:
    body = {
        "timezone": "America/NewYork",
        "quota_scope": "org",
        "model_ordering": ["premum", "premium", "premium", "guardrails", 7],
        "quotas": {"premium": -1, "nothing": 1, "economy": 1.0},
        "quota": {},
        "agg_shard_count": 9,
        "enforcement": "harsh",
        "tight_mode_threshold_pct": 101,
        "refresh_interval_normal_secs": float("nan"),
        "sticky_fallback_enabled": "yes",
        "period": "year",
        "alert_thresholds_pct": [0],
    }
    assert refused(body) == (
        'quota: unknown setting; did you mean "quotas"?',
        "org_name: required, but missing",
        "timezone: unknown time zone 'America/NewYork'; the nearest known one is 'America/New_York'",
        'quota_scope: expected one of ORG, APP, found "org"',
        'period: expected one of day, week, month, found "year"',
        'model_ordering.0: there is no label "premum" in the configuration; did you mean "premium"?',
        'model_ordering.2: "premium" is there already',
        "model_ordering.3: no model, but what counts guardrails: give it a quota, and leave it out here",
        "model_ordering.4: there is no label 7 in the configuration; "
        "there are premium, standard, economy, guardrails, async-jobs",
        f"quotas.premium: expected an amount from 0 to 1000000000 USD, such as {AMOUNT_FORMS}; found -1",
        'quotas.nothing: there is no label "nothing" in the configuration; '
        "there are premium, standard, economy, guardrails, async-jobs",
        f"quotas.economy: expected an amount from 0 to 1000000000 USD, such as {AMOUNT_FORMS}; found 1.0",
        'sticky_fallback_enabled: expected true or false, found "yes"',
        "tight_mode_threshold_pct: expected a whole number from 1 to 100, found 101",
        "refresh_interval_normal_secs: expected 0.001 to 86400 seconds with at most 3 decimals, found nan",
        'enforcement: expected one of soft, hard, shadow, found "harsh"',
        "alert_thresholds_pct: expected a whole number from 1 to 999, found 0",
        "agg_shard_count: expected one of 8, 16, 32, 64, found 9",
    )


SINGLE = [
    ({"org_name": ""}, 'org_name: expected 1 to 128 printable characters, found ""'),
    ({"org_name": " x"}, 'org_name: expected 1 to 128 printable characters, found " x"'),
    ({"org_name": "a\nb"}, "org_name: expected 1 to 128 printable characters, found "),
    ({"org_name": "x" * 129}, "org_name: expected 1 to 128 printable characters, found "),
    ({"org_name": None}, "org_name: required, but missing"),
    ({"model_ordering": []}, "model_ordering: expected a list of 1 to 32 labels, found 0 of them"),
    ({"model_ordering": ["premium"] * 33}, "model_ordering: expected a list of 1 to 32 labels, found 33 of them"),
    ({"model_ordering": "premium"}, 'model_ordering: expected a list of 1 to 32 labels, found "premium"'),
    ({"quotas": [1]}, "quotas: expected a mapping of labels to amounts, found [1]"),
    ({"quotas": {"premium": True, "economy": 0}}, "quotas.premium: expected an amount from 0 to"),
    ({"quotas": {"premium": 10**15 + 1, "economy": 0}}, "quotas.premium: expected an amount from 0 to"),
    (
        {"refresh_interval_normal_secs": 5, "refresh_interval_tight_secs": 6},
        "refresh_interval_tight_secs: more than refresh_interval_normal_secs, which is 5",
    ),
    ({"client_secret_hash": "x"}, "client_secret_hash: unknown setting; allowed are org_name, timezone, "),
    ({"x" * 5000: 1}, f"{'x' * 64}: unknown setting"),
]


@pytest.mark.parametrize(("change", "complaint"), SINGLE)
def test_mistake_states_allowed_values(change: dict[str, Any], complaint: str) -> None:
    (message,) = refused(BODY | change)
    assert message.startswith(complaint)
    assert len(message) < 400


@pytest.mark.parametrize("body", [[], "x", None, 7])
def test_body_must_be_a_mapping(body: Any) -> None:
    assert refused(body)[0].startswith("expected a mapping of settings, found ")


def test_shard_count_is_fixed_at_creation() -> None:
    assert org(BODY, {"agg_shard_count": 32})["agg_shard_count"] == 32
    assert org(BODY | {"agg_shard_count": 32}, {"agg_shard_count": 32})["agg_shard_count"] == 32
    assert refused(BODY | {"agg_shard_count": 8}, {"agg_shard_count": 32}) == (
        "agg_shard_count: fixed at 32 when the org was made",
    )
    assert refused(BODY | {"agg_shard_count": 16}, {}) == ("agg_shard_count: fixed at 8 when the org was made",)


def test_settings_quotas_naming_fewer_labels_than_the_ordering_are_accepted() -> None:
    name = {"app_name": "Shop"}
    for quotas in ({"premium": 1}, {}):
        assert org(BODY | {"quotas": quotas})["quotas"] == quotas
        assert validate_app(name | {"quotas": quotas}, LABELS, BODY)["quotas"] == quotas
    ordering = name | {"model_ordering": ["premium", "standard"]}
    assert validate_app(ordering, LABELS, BODY) == ordering


def test_app_labels_may_have_quotas_with_own_budget() -> None:
    good = {"app_name": "Shop", "model_ordering": ["premium", "fast"], "quotas": {"premium": 1, "fast": 2}}
    assert validate_app(good, LABELS, BODY, ["fast"]) == good
    assert "there is no label" in app_refused(good)[0]
    for whose in (BODY, {}):  # APP is the default
        assert validate_app(good, LABELS, whose, ["fast"]) == good
    with pytest.raises(InvalidSettings) as caught:
        validate_app(good, LABELS, BODY | {"quota_scope": "ORG"}, ["fast"])
    why = '"fast" is a label of the app\'s own, and all apps share one budget (quota_scope: ORG)'
    assert caught.value.problems == (f"model_ordering.1: {why}", f"quotas.fast: {why}")


def test_org_only_settings_are_refused_for_apps() -> None:
    for attribute in ("timezone", "quota_scope", "period", "agg_shard_count", "org_name"):
        (message,) = app_refused({"app_name": "Shop", attribute: BODY.get(attribute, 8)})
        assert message.startswith(f"{attribute}: unknown setting")


# Writing.


class _Overtaken(MemoryStore):
    """Something may happen between what a writer reads and what it writes."""

    before_next_transaction: Callable[[], Awaitable[None]] | None = None

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        assert consistent, "what is about to be replaced is read as it stands"
        return await super().get(key)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        assert consistent, "what is about to be replaced is read as it stands"
        return await super().get_many(keys)

    async def transact(self, writes: Any, *, token: str | None = None) -> None:
        happens, self.before_next_transaction = self.before_next_transaction, None
        if happens is not None:
            await happens()
        await super().transact(writes, token=token)


class _Impatient(ManualClock):
    async def sleep(self, seconds: float) -> None:
        assert 0 <= seconds <= 0.25


class Put1:
    """One org in a store of its own."""

    def __init__(self, now: float = NOON) -> None:
        self.memory, self.clock = _Overtaken(), _Impatient(now)
        self.store = cast(Store, self.memory)

    async def org(self, **changes: Any) -> SettingsWrite:
        written = await put_org(self.store, self.clock, ACME, BODY | changes, LABELS, DEFAULTS)
        assert written.item == self.memory.items[schema.org_config_key(ACME)]
        return written

    async def app(self, body: Any) -> SettingsWrite:
        written = await put_app(self.store, self.clock, ACME, "shop", body, LABELS)
        assert written.item == self.memory.items[schema.app_config_key(ACME, "shop")]
        return written

    def holds(self, item: Item, at: float) -> tuple[str, str, str]:
        found = resolve_settings(item, None, DEFAULTS, (), at)
        return found.zone.key, found.quota_scope, found.period.value


async def test_new_org_is_written_and_registered() -> None:
    put = Put1()
    written = await put.org()
    stamps = {"version": 1, "created_at_epoch": int(NOON), "updated_at_epoch": int(NOON)}
    assert written.item == org(BODY) | stamps
    assert (written.is_new, written.takes_effect_at) == (True, None)
    assert put.memory.items[schema.org_entry_key(ACME)] == {"org_name": "Acme"}


async def test_put_replaces_settings_and_keeps_other_attributes() -> None:
    put = Put1()
    secrets = {"client_id": "org-1", "client_secret_hash": "$2b$12$x", "something": 7}
    await put.store.put(Put(schema.org_config_key(ACME), secrets | {"enforcement": "shadow"}))
    written = await put.org(org_name="Acme 2", timezone="UTC")
    stamps = {"version": 1, "created_at_epoch": int(NOON), "updated_at_epoch": int(NOON)}
    assert written.item == secrets | org(BODY | {"org_name": "Acme 2", "timezone": "UTC"}) | stamps
    assert not written.is_new
    await put.clock.advance(60)
    again = await put.org(timezone="UTC")
    assert (again.item["version"], again.item["created_at_epoch"]) == (2, int(NOON))
    assert (again.item["updated_at_epoch"], again.item["client_secret_hash"]) == (int(NOON) + 60, "$2b$12$x")
    assert put.memory.items[schema.org_entry_key(ACME)] == {"org_name": "Acme"}


async def test_app_labels_are_those_in_the_store() -> None:
    put = Put1()
    await put.org()
    await put.app({"app_name": "Shop"})
    body = {"app_name": "Shop", "model_ordering": ["fast"], "quotas": {"fast": 2}}
    arn = "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.amazon.nova-lite-v1:0"
    good: Item = {"inference_profile_arn": arn, "format": "nova", "prices_usd_per_1m": {"input": 1, "output": 2}}
    for item, count, app in ((good, 0, "shop"), (good, 1, "shopping"), (good | {"format": 1}, 1, "shop")):
        await put.store.put(Put(schema.inference_profile_key(ACME, app, "fast"), item))
        await put.store.update(Update(schema.app_config_key(ACME, "shop"), set={"profiles_made": count}))
        with pytest.raises(InvalidSettings, match="there is no label"):
            await put.app(body)
        await put.store.delete(Delete(schema.inference_profile_key(ACME, app, "fast")))
    await put.store.put(Put(schema.inference_profile_key(ACME, "shop", "fast"), good))
    written = await put.app(body)
    assert (written.item["model_ordering"], written.item["profiles_made"]) == (["fast"], 1)
    with pytest.raises(InvalidSettings, match="there is no label"):
        await put.org(model_ordering=["fast"], quotas={"fast": 1})


async def test_app_requires_existing_org() -> None:
    put = Put1()
    with pytest.raises(InvalidSettings, match="put it first"):
        await put.app({"app_name": "Shop"})
    await put.org()
    await put.store.put(Put(schema.app_config_key(ACME, "shop"), {"client_secret_hash": "$2b$12$y", "quotas": {}}))
    written = await put.app({"app_name": "Shop", "model_ordering": ["economy"]})
    stamps = {"version": 1, "created_at_epoch": int(NOON), "updated_at_epoch": int(NOON)}
    assert written.item == {
        "app_name": "Shop",
        "model_ordering": ["economy"],
        "client_secret_hash": "$2b$12$y",
        **stamps,
    }
    assert not written.is_new


async def test_changed_zone_applies_after_period_ends() -> None:
    put = Put1()
    first = (await put.org()).item
    written = await put.org(timezone="Asia/Tokyo", quota_scope="ORG", period="month")
    assert written.takes_effect_at == MIDNIGHT
    assert put.holds(written.item, MIDNIGHT - 0.01) == put.holds(first, 0) == ("America/New_York", "APP", "day")
    assert put.holds(written.item, MIDNIGHT) == ("Asia/Tokyo", "ORG", "month")


async def test_second_change_keeps_change_time_and_reverting_drops_it() -> None:
    put = Put1()
    await put.org()
    await put.org(timezone="Asia/Tokyo")
    await put.clock.advance(3600)
    second = await put.org(timezone="Europe/Paris", period="week")
    assert second.takes_effect_at == MIDNIGHT
    assert put.holds(second.item, MIDNIGHT - 1)[0] == "America/New_York"
    assert put.holds(second.item, MIDNIGHT) == ("Europe/Paris", "APP", "week")
    back = await put.org()
    assert back.takes_effect_at is None
    assert {"settled", "settled_until_epoch"}.isdisjoint(back.item)


async def test_change_after_change_time_waits_for_new_period() -> None:
    put = Put1()
    await put.org()
    await put.org(timezone="Asia/Tokyo")
    await put.clock.advance(MIDNIGHT - NOON)
    third = await put.org(timezone="UTC")
    assert third.takes_effect_at == MIDNIGHT + 10 * 3600  # of Tokyo, where it is two in the afternoon
    assert put.holds(third.item, MIDNIGHT)[0] == "Asia/Tokyo"


async def test_change_shortly_before_period_end_waits_for_period_after() -> None:
    for early, expected in ((CHANGE_LEAD_SECONDS + 1, MIDNIGHT), (CHANGE_LEAD_SECONDS, MIDNIGHT + 86_400)):
        put = Put1(MIDNIGHT - early)
        await put.org()
        assert (await put.org(timezone="Asia/Tokyo")).takes_effect_at == expected


async def test_pending_change_cannot_be_changed_shortly_before_it_applies() -> None:
    put = Put1()
    await put.org()
    await put.org(timezone="Asia/Tokyo")
    await put.clock.advance(MIDNIGHT - NOON - CHANGE_LEAD_SECONDS)
    await put.org(timezone="Europe/Rome")  # there is just enough time for all to read it
    await put.org(timezone="Asia/Tokyo")
    await put.clock.advance(1)
    for change in ({}, {"timezone": "UTC"}):
        with pytest.raises(InvalidSettings, match=r"^timezone: .* takes effect in 149 seconds; .* after it$"):
            await put.org(**change)
    with pytest.raises(InvalidSettings, match=r"^period: "):
        await put.org(timezone="Asia/Tokyo", period="week")
    written = await put.org(timezone="Asia/Tokyo", enforcement="shadow")
    assert (written.takes_effect_at, written.item["enforcement"]) == (MIDNIGHT, "shadow")


async def test_app_is_validated_again_when_org_changed_concurrently() -> None:
    put = Put1()
    await put.org()
    arn = "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.amazon.nova-lite-v1:0"
    profile: Item = {"inference_profile_arn": arn, "format": "nova", "prices_usd_per_1m": {"input": 1, "output": 2}}
    await put.app({"app_name": "Shop"})
    await put.store.put(Put(schema.inference_profile_key(ACME, "shop", "fast"), profile))
    await put.store.update(Update(schema.app_config_key(ACME, "shop"), set={"profiles_made": 1}))

    async def overtake() -> None:
        await put.org(quota_scope="ORG")  # where labels of an app's own have no quotas

    put.memory.before_next_transaction = overtake
    with pytest.raises(InvalidSettings, match="all apps share one budget"):
        await put.app({"app_name": "Shop", "quotas": {"fast": 1}})
    assert "quotas" not in put.memory.items[schema.app_config_key(ACME, "shop")]


async def test_put_losing_race_reads_again() -> None:
    put = Put1()

    async def overtake() -> None:
        await put.org(agg_shard_count=64, org_name="First")

    put.memory.before_next_transaction = overtake
    written = await put_org(put.store, _Impatient(), ACME, BODY, LABELS, DEFAULTS)
    assert not written.is_new
    assert (written.item["agg_shard_count"], written.item["version"], written.item["org_name"]) == (64, 2, "Acme")


async def test_org_created_concurrently_without_version_is_read_again() -> None:
    put = Put1()

    async def overtake() -> None:
        await put.store.put(Put(schema.org_config_key(ACME), {"agg_shard_count": 64, "client_secret_hash": "x"}))

    put.memory.before_next_transaction = overtake
    written = await put.org()
    assert (written.is_new, written.item["agg_shard_count"], written.item["client_secret_hash"]) == (False, 64, "x")


async def test_repeated_conflict_gives_up_and_throttling_is_raised_at_once() -> None:
    for code, attempts in ((ReasonCode.CONFLICT, MAX_ATTEMPTS), (ReasonCode.THROTTLED, 1)):
        store = _Refusing(code)
        with pytest.raises(TransactionFailed):
            await put_org(cast(Store, store), _Impatient(), ACME, BODY, LABELS, DEFAULTS)
        assert store.asked == attempts


class _Refusing(MemoryStore):
    def __init__(self, code: ReasonCode) -> None:
        super().__init__()
        self.code, self.asked = code, 0

    async def transact(self, writes: Any, *, token: str | None = None) -> None:
        self.asked += 1
        raise TransactionFailed([CancellationReason(self.code), CancellationReason(ReasonCode.NONE)])
