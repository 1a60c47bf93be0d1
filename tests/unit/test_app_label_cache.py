"""Apps' own labels as they are kept: read seldom, waited for briefly, forgotten in time, and never mixed up."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast
from uuid import uuid4

import pytest
from price_keeper.budgets import app_label_cache as limits
from price_keeper.budgets.app_label_cache import AppLabelCache
from price_keeper.budgets.budget_state import BudgetState
from price_keeper.budgets.effective_settings import resolve_settings
from price_keeper.budgets.label_selector import LabelResolver
from price_keeper.config import Config
from price_keeper.domain import Caller, Scope
from price_keeper.errors import Busy, InvalidRequest
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.operations import Operation
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Put, Store, Update
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.inference_profiles import (
    NO_APP_LABELS,
    UNREAD_APP_LABELS,
    AppLabels,
    ResolvedAppLabel,
    parse_profile,
)
from price_keeper.usage.meter_factory import MeterFactory
from price_keeper.usage.token_usage import make_plain_usage

from tests.support.budget_fleet import CountingStore
from tests.support.clock import ManualClock, settle
from tests.support.memory_store import MemoryStore

CONFIG = Config.development()
ARN = "arn:aws:bedrock:eu-west-1:123456789012:application-inference-profile/abc123"
USAGE = make_plain_usage(1000, 100, 0)
TARGET = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "eu-west-1", ARN, "/")


def item(input: int = 2, format: str = "nova", arn: str = ARN) -> Item:
    prices = {"input": input, "output": 7, "cache_read": 1, "cache_write_5m": 1, "cache_write_1h": 1}
    return {"inference_profile_arn": arn, "format": format, "prices_usd_per_1m": prices}


def app(name: str = "web") -> Caller:
    return Caller(str(uuid4()), name, "client")


@dataclass
class Rig:
    clock: ManualClock
    store: CountingStore
    own: AppLabelCache
    new: list[AppLabels] = field(default_factory=list)

    async def put(self, who: Caller, label: str = "fast", **changes: Any) -> None:
        assert who.app is not None
        await self.store._store.put(Put(schema.inference_profile_key(who.org, who.app, label), item(**changes)))
        await self.store._store.update(Update(schema.app_config_key(who.org, who.app), add={"profiles_made": 1}))

    async def names(self, who: Caller) -> list[str]:
        return list((await self.own.get(who)).by_name)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    clock, store, new = ManualClock(), CountingStore(cast(Store, MemoryStore())), list[AppLabels]()
    own = AppLabelCache(CONFIG.labels, cast(Store, store), clock, lambda _, found: new.append(found))
    yield Rig(clock, store, own, new)
    await settle()


# When they are read.


async def test_concurrent_readers_share_one_read(rig: Rig) -> None:
    who = app()
    await rig.put(who)
    found = await asyncio.gather(*(rig.names(who) for _ in range(50)))
    assert found == [["fast"]] * 50
    assert (rig.store.calls, len(rig.new)) == (["get", "query"], 1)


async def test_soft_expired_labels_are_refreshed_in_background(rig: Rig) -> None:
    who = app()
    await rig.names(who)
    await rig.put(who)
    await rig.clock.advance(limits.REFRESH_SECONDS - 1)
    assert await rig.names(who) == []
    assert rig.store.calls == ["get"]
    await rig.clock.advance(1)
    known = rig.own.cached(who)
    assert known is not None
    assert list(known.by_name) == []
    await settle()
    assert await rig.names(who) == ["fast"]
    assert rig.store.calls == ["get", "get", "query"]


async def test_expired_labels_are_awaited(rig: Rig) -> None:
    who = app()
    await rig.names(who)
    await rig.put(who)
    await rig.clock.advance(limits.STALE_SECONDS)
    assert rig.own.cached(who) is None
    assert await rig.names(who) == ["fast"]


async def test_store_outage_keeps_labels_and_backs_off(rig: Rig) -> None:
    known, unknown = app(), app()
    await rig.put(known)
    await rig.names(known)
    await rig.clock.advance(3600)
    rig.store.is_away = True
    rig.store.calls.clear()
    for _ in range(10):
        assert await rig.names(known) == ["fast"]
        assert await rig.own.get(unknown) is UNREAD_APP_LABELS
        await settle()
    assert len(rig.store.calls) == 2
    assert rig.own.last_read(Scope(unknown.org, "web")) is None
    await rig.put(unknown)
    rig.store.is_away = False
    await rig.clock.advance(limits.STORE_RETRY_SECONDS)
    rig.own.cached(unknown)
    await settle()
    assert await rig.names(unknown) == ["fast"]


async def test_hanging_store_delays_a_caller_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    who, gate = app(), asyncio.Event()
    await rig.put(who)
    monkeypatch.setattr(limits, "LOAD_TIMEOUT_SECONDS", 0.02)

    async def hangs(_: str) -> None:
        await gate.wait()

    rig.store.before_call = hangs
    assert await rig.own.get(who) is UNREAD_APP_LABELS
    await rig.clock.advance(10)
    assert rig.own.cached(who) is UNREAD_APP_LABELS  # at once
    assert rig.store.calls == ["get"]
    gate.set()
    await settle()
    assert await rig.names(who) == ["fast"]


async def test_failed_load_of_an_evicted_app_makes_its_next_calls_wait_no_longer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    who, gate = app(), asyncio.Event()

    async def hangs(_: str) -> None:
        rig.store.before_call = None
        await gate.wait()
        rig.store.is_away = True

    rig.store.before_call = hangs
    first = asyncio.create_task(rig.own.get(who))
    await settle()
    monkeypatch.setattr(limits, "MAX_APPS", 1)
    await rig.own.get(app())
    monkeypatch.undo()
    assert rig.own.cached(who) is None  # it was evicted
    gate.set()
    assert await first is UNREAD_APP_LABELS
    rig.store.calls.clear()
    for _ in range(10):
        assert await rig.own.get(who) is UNREAD_APP_LABELS
    assert rig.store.calls == []


async def test_labels_read_earlier_replace_nothing_newer(rig: Rig) -> None:
    who, gate = app(), asyncio.Event()
    scope = Scope(who.org, "web")
    await rig.put(who, input=1)
    await rig.names(who)

    async def waits(_: str) -> None:
        rig.store.before_call = None
        await gate.wait()

    await rig.clock.advance(limits.REFRESH_SECONDS)
    rig.store.before_call = waits
    rig.own.cached(who)
    await settle()
    await rig.clock.advance(1)
    old, now = rig.own.last_read(scope), rig.clock.monotonic()
    await rig.put(who, "faster")
    await rig.own.refresh(scope, {"profiles_made": 2}, now)
    await rig.store._store.put(Put(schema.inference_profile_key(who.org, "web", "late"), item()))
    gate.set()
    await settle()
    found = rig.own.last_read(scope)
    assert found is not None
    assert found is not old
    assert list(found.by_name) == ["fast", "faster"]


async def test_local_change_is_read_before_next_call(rig: Rig) -> None:
    who = app()
    await rig.names(who)
    await rig.put(who)
    rig.own.invalidate(Scope(who.org, "web"))
    assert await rig.names(who) == ["fast"]
    rig.own.invalidate(Scope(str(uuid4()), "web"))  # nothing is cached for it


async def test_caller_without_app_has_no_labels_and_no_read(rig: Rig) -> None:
    assert await rig.own.get(Caller(str(uuid4()), None, "client")) is NO_APP_LABELS
    assert rig.store.calls == []


# What is kept.


async def test_unchanged_labels_keep_identity(rig: Rig) -> None:
    who = app()
    for label in ("fast", "slow"):
        await rig.put(who, label)
    before = (await rig.own.get(who)).by_name
    await rig.clock.advance(limits.STALE_SECONDS)
    assert await rig.own.get(who) is rig.new[0]
    await rig.put(who, "slow", input=3)
    await rig.clock.advance(limits.STALE_SECONDS)
    after = (await rig.own.get(who)).by_name
    assert after["fast"] is before["fast"]
    assert after["slow"] is not before["slow"]
    assert after["slow"].price_table.version != before["slow"].price_table.version
    assert len(rig.new) == 2


@pytest.mark.parametrize(("most_apps", "most_kept"), [(3, 1000), (1000, 6)])
async def test_cache_size_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch, most_apps: int, most_kept: int) -> None:
    monkeypatch.setattr(limits, "MAX_APPS", most_apps)
    monkeypatch.setattr(limits, "MAX_LABELS_IN_ALL", most_kept)
    everybody = [app() for _ in range(10)]
    await rig.put(everybody[0], "a")
    await rig.put(everybody[0], "b")
    first = await rig.own.get(everybody[0])
    for who in everybody[1:]:
        for label in ("a", "b"):
            await rig.put(who, label)
        assert await rig.names(who) == ["a", "b"]
        await rig.clock.advance(limits.STALE_SECONDS)
        assert await rig.names(everybody[0]) == ["a", "b"]
    assert len(rig.own._entries) == 3
    assert rig.own.last_read(Scope(everybody[0].org, "web")) is first  # a frequent caller is not evicted
    assert rig.own._row_count == sum(len(kept.rows) for kept in rig.own._entries.values()) == 6


async def test_configured_label_name_wins_over_app_label(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    who = app()
    for label in ("premium", "guardrails", "fast"):
        await rig.put(who, label)
    assert await rig.names(who) == ["fast"]
    assert "the app label premium cannot be used: the configuration has that name" in caplog.text
    before = len(caplog.records)
    await rig.clock.advance(limits.STALE_SECONDS)
    await rig.names(who)
    assert len(caplog.records) == before  # it is logged once


async def test_configured_model_and_alias_are_no_app_labels_in_any_form(rig: Rig) -> None:
    who = app()
    for label in ("deepseek.r1", "us.deepseek.r1", "gpt-4o", "fast"):
        await rig.put(who, label)
    configured = {"premium": replace(CONFIG.labels["premium"], model="eu.deepseek.r1", aliases=("gpt-4o",))}
    own = AppLabelCache(configured, cast(Store, rig.store), rig.clock, lambda _, __: None)
    assert list((await own.get(who)).by_name) == ["fast"]


# Names.


def own_of(**items: Item) -> AppLabels:
    return AppLabels(parse_profile(name, found) for name, found in items.items())


def test_arn_resolves_to_first_app_label_with_it() -> None:
    configured = {"premium": replace(CONFIG.labels["premium"], model=ARN)}
    assert LabelResolver(configured, allows_unlabelled=False).resolve(ARN, own_of(a=item())).label == "premium"
    labels = LabelResolver(CONFIG.labels, allows_unlabelled=False)
    for order in (("b", "a"), ("a", "b")):
        found = labels.resolve(ARN, own_of(**{name: item() for name in order}))
        assert (found.requested, found.label, found.model) == (ARN, "a", ARN)


def test_own_label_of_exact_arn_goes_before_form_of_configured_model() -> None:
    model = CONFIG.labels["premium"].model.removeprefix("global.")
    arn = f"arn:aws:bedrock:eu-west-1:123456789012:inference-profile/eu.{model}"
    own = own_of(mine=item(arn=arn))
    for allows_unlabelled in (False, True):
        labels = LabelResolver(CONFIG.labels, allows_unlabelled=allows_unlabelled)
        assert labels.resolve(arn, own).label == "mine"
        assert labels.resolve(arn).label == "premium"
        assert labels.resolve_configured(arn) is None  # the app's labels have to be read first
        assert labels.resolve(arn.replace("eu-west-1", "eu-west-2"), own).label == "premium"
        assert labels.resolve(f"eu.{model}", own).label == "premium"
    with pytest.raises(Busy):
        LabelResolver(CONFIG.labels, allows_unlabelled=False).resolve(arn, UNREAD_APP_LABELS)
    aliased = {"premium": replace(CONFIG.labels["premium"], aliases=(arn,))}
    assert LabelResolver(aliased, allows_unlabelled=False).resolve(arn, own).label == "premium"


def test_unread_app_labels_ask_caller_to_retry() -> None:
    labels = LabelResolver(CONFIG.labels, allows_unlabelled=False)
    assert labels.resolve("premium", UNREAD_APP_LABELS).label == "premium"
    with pytest.raises(Busy) as refused:
        labels.resolve("fast", UNREAD_APP_LABELS)
    assert refused.value.retry_after is not None
    with pytest.raises(InvalidRequest):
        labels.resolve("fast", NO_APP_LABELS)


def test_unlabelled_models_are_checked_after_app_labels() -> None:
    labels = LabelResolver(CONFIG.labels, allows_unlabelled=True)
    assert labels.resolve(ARN, own_of(fast=item())).label == "fast"
    assert labels.resolve(ARN).label == labels.resolve(ARN, UNREAD_APP_LABELS).label == ""


# Two apps with one name.


def choice(found: AppLabels, name: str = "fast") -> ResolvedAppLabel:
    chosen = found.resolve(name)
    assert chosen is not None
    return chosen


@pytest.fixture
def metering(tmp_path: Path) -> Iterator[MeterFactory]:
    clock, no_tariffs = ManualClock(), cast(Any, None)
    journal = Journal(tmp_path, UlidFactory(clock.now, os.urandom, ""))
    yield MeterFactory(CONFIG, journal, no_tariffs, clock)
    journal.close()


def test_pricing_follows_app_profile(metering: MeterFactory) -> None:
    ours, kinds = metering, (Operation.CONVERSE, Operation.INVOKE)
    one, two = choice(own_of(fast=item(2))), choice(own_of(fast=item(3, "anthropic")))
    for operation in kinds:
        for each, price, format in ((one, 2, "nova"), (two, 3, "anthropic")):
            terms = ours.pricing_for(each, operation, b"POST")
            assert terms is not None
            assert ours.pricing_for(each, operation, b"POST") is terms
            assert (terms.counted_label, terms.format) == ("fast", format)
            assert terms.pricer_for(TARGET).price(USAGE).pico == (1000 * price + 100 * 7) * 10**6
    assert len(ours._profile_pricing_cache) == 2
    assert ours._pricing_cache == {}
    first, second = (ours.pricing_for(one, kind, b"POST") for kind in kinds)
    assert first is not None and second is not None  # noqa: PT018
    assert first.forecast is second.forecast  # what answers cost is learned of all of them
    del one, two, each, terms, first, second
    gc.collect()
    assert len(ours._profile_pricing_cache) == 0


def test_asynchronous_job_of_app_label_has_no_price(metering: MeterFactory) -> None:
    with pytest.raises(InvalidRequest, match="asynchronous jobs of 'fast' have no price here"):
        metering.pricing_for(choice(own_of(fast=item())), Operation.ASYNC_INVOKES, b"POST")


def build_state(scope: Scope, ordering: list[str], **quotas: int) -> BudgetState:
    today = find_span(Period.DAY, 1_795_003_200, load_zone("UTC"))
    budget: Item = {"model_ordering": cast(Any, ordering), "quotas": cast(Any, quotas)} if ordering or quotas else {}
    return BudgetState(scope, today, resolve_settings(budget, None, CONFIG.defaults, (), 0), CONFIG.labels, dict)


def test_changed_format_applies_in_chain() -> None:
    scope = Scope(str(uuid4()), "web")
    one = build_state(scope, ["premium", "fast"], premium=0, fast=10)
    one.apply_app_labels(own_of(fast=item(format="anthropic")))
    assert one.decide("premium", True).label == "fast"
    one.apply_app_labels(None)  # the store was away
    assert one.decide("premium", True).label == "fast"
    one.apply_app_labels(own_of(fast=item(format="nova")))
    with pytest.raises(InvalidRequest, match=r"Converse would be served by fast \(nova\)"):
        one.decide("premium", True)
    assert one.decide("premium", False).label == one.find_enforced_label("premium") == "fast"
    one.apply_app_labels(NO_APP_LABELS)
    assert one.find_enforced_label("premium") is one.find_enforced_label("fast") is None


def test_shared_budget_state_keeps_app_labels_out_of_chain() -> None:
    """Also where a hand-written item has one in the org's chain, or the configuration lost it."""
    one = build_state(Scope(str(uuid4())), ["premium", "fast"], premium=0, fast=10)
    assert one.decide_app_label("fast", True).label == "fast"  # paid from the quota of that name
    with pytest.raises(InvalidRequest, match="other is not among"):
        one.decide_app_label("other", True)
    assert one.find_enforced_label("premium") is None
    assert one._fallback_routes.keys() <= {("premium", False)}
    free = build_state(Scope(str(uuid4())), [])
    assert free.decide_app_label("fast", True).label == "fast"


@pytest.mark.parametrize(
    "changes",
    [
        {"arn": "arn:aws:bedrock:eu-west-1:123456789012:application-inference-profile/a..b"},
        {"arn": "arn:aws:bedrock:evil.example:123456789012:application-inference-profile/a"},
        {"arn": ARN + "\n"},
        {"input": Decimal("1E-9")},
        {"input": 10**7},
        {"input": Decimal("NaN")},
        {"input": "1"},
        {"format": "novel"},
    ],
)
def test_malformed_app_label_is_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"inference_profile_arn|prices_usd_per_1m|format"):
        parse_profile("fast", item(**changes))


def test_app_labels_do_not_change_configuration() -> None:
    configured = MappingProxyType(dict(CONFIG.labels))
    one = build_state(Scope(str(uuid4()), "web"), [])
    one.apply_app_labels(own_of(fast=item()))
    assert one.decide("fast", False).label == "fast"
    assert dict(CONFIG.labels) == dict(configured)
