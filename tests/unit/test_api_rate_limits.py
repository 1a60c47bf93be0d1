"""The control API's limit on each caller, over several processes on one store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple
from pathlib import Path

import pytest
from price_keeper.config import Config
from price_keeper.config.config_sections import ControlApiConfig
from price_keeper.control.api_rate_limits import LocalApiRateLimiter, SharedApiRateLimiter
from price_keeper.control.control_services import build_rate_limiter
from price_keeper.control.usage_endpoints import MAX_ITEMS
from price_keeper.errors import StoreUnavailable
from price_keeper.rates.bucket_client import BucketClient
from price_keeper.rates.rate_lease_manager import RateLeaseManager
from price_keeper.stores import schema
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock, settle
from tests.support.control_harness import open_control_harness
from tests.support.engines import Engines
from tests.support.memory_store import MemoryStore

BURST, PER_SECOND = 40, 4.0
WHO = "org-550e8400-e29b-41d4-a716-446655440000-app-web"


class Away(MemoryStore):
    async def transact(self, *_: object, **__: object) -> None:
        raise StoreUnavailable("the store is away", maybe_applied=False)


@asynccontextmanager
async def rates(
    store: MemoryStore, clock: ManualClock, burst: int = BURST, per_second: float = PER_SECOND
) -> AsyncIterator[SharedApiRateLimiter]:
    async with Tasks(clock) as tasks:
        leasing = RateLeaseManager(BucketClient(store, lambda: int(clock.now() * 1000), clock), clock, tasks)
        yield SharedApiRateLimiter(leasing, LocalApiRateLimiter(clock.monotonic, burst, per_second), burst, per_second)
        await leasing.stop()


async def flood(each: SharedApiRateLimiter, who: str = WHO, calls: int = 3 * BURST) -> int:
    let_in = 0
    for _ in range(calls):
        let_in += (await each.take(who)).wait_seconds == 0
    return let_in


async def test_two_processes_share_one_bucket() -> None:
    store, clock = MemoryStore(), ManualClock()
    async with rates(store, clock) as one, rates(store, clock) as other:
        first = await flood(one)
        second = await flood(other)
        assert BURST * 0.9 <= first + second <= BURST
        assert second < BURST / 2
        let_in, seconds = 0, 120
        for _ in range(seconds * 2):
            await clock.advance(0.5)
            let_in += await flood(one, calls=3) + await flood(other, calls=3)
        assert 0.85 * seconds * PER_SECOND <= let_in <= seconds * PER_SECOND + BURST


async def test_callers_do_not_share_a_bucket() -> None:
    store, clock = MemoryStore(), ManualClock()
    async with rates(store, clock) as one:
        await flood(one)
        assert (await one.take("admin@127.0.0.1")).wait_seconds == 0


async def test_limit_result_has_remaining_and_wait() -> None:
    store, clock = MemoryStore(), ManualClock()
    async with rates(store, clock) as one:
        taken = await one.take(WHO)
        assert taken.limit == BURST
        assert BURST * 0.9 <= taken.remaining < BURST
        assert 0 < taken.reset_seconds <= BURST / PER_SECOND
        await flood(one)
        refused = await one.take(WHO)
        assert refused.remaining == 0
        assert refused.headers["X-RateLimit-Remaining"] == "0"
        assert 0 < refused.wait_seconds <= 20
        await clock.advance(refused.wait_seconds)
        await settle()
        assert (await one.take(WHO)).wait_seconds == 0


async def test_rate_limit_raised_in_the_configuration_applies_to_a_bucket_that_exists() -> None:
    store, clock = MemoryStore(), ManualClock()
    async with rates(store, clock) as before:
        await flood(before)
    async with rates(store, clock, 10 * BURST, 10 * PER_SECOND) as after:
        await clock.advance(60)
        assert await flood(after, calls=20 * BURST) >= 9 * BURST


async def test_rate_limit_by_default_admits_five_thousand_submissions_a_second() -> None:
    limits = Config.development().control_api
    limiter, seconds = LocalApiRateLimiter((clock := ManualClock()).monotonic, *astuple(limits)), 60
    admitted = 0
    for _ in range(seconds * 10):
        await clock.advance(0.1)
        admitted += sum([(await limiter.take(WHO)).wait_seconds == 0 for _ in range(10)])
    assert admitted * MAX_ITEMS / seconds >= 5000


@pytest.mark.parametrize(("burst", "shared"), [(3, False), (7, True)])
async def test_rate_limit_configured_is_the_one_applied(burst: int, shared: bool) -> None:
    config = ControlApiConfig(burst_requests=burst, requests_per_second=1)
    async with Tasks(clock := ManualClock()) as tasks:
        leasing = RateLeaseManager(BucketClient(MemoryStore(), lambda: int(clock.now() * 1000), clock), clock, tasks)
        limiter = build_rate_limiter(config, clock, leasing if shared else None)
        assert (await limiter.take(WHO)).limit == burst
        assert sum([(await limiter.take(WHO)).wait_seconds == 0 for _ in range(20)]) <= burst - 1
        await leasing.stop()


async def test_unauthenticated_caller_writes_no_row() -> None:
    store, clock = MemoryStore(), ManualClock()
    async with rates(store, clock) as one:
        assert await flood(one, "@192.0.2.1") == BURST
    assert store.items == {}


async def test_bucket_row_belongs_to_caller() -> None:
    store, clock = MemoryStore(), ManualClock()
    async with rates(store, clock) as one:
        await one.take(WHO)
    assert list(store.items) == [schema.control_bucket_key(WHO)]


@pytest.mark.filterwarnings("error")
async def test_store_outage_applies_full_limit_per_process() -> None:
    clock = ManualClock()
    async with rates(Away(), clock) as one:
        assert await flood(one) == BURST


async def test_unauthenticated_requests_to_control_port_write_no_row(tmp_path: Path) -> None:
    clock = ManualClock()
    async with Engines({}).open("sqlite", tmp_path) as store, Tasks(clock) as tasks:
        leasing = RateLeaseManager(BucketClient(store, lambda: int(clock.now() * 1000), clock), clock, tasks)
        shared = SharedApiRateLimiter(leasing, LocalApiRateLimiter(clock.monotonic, 3, 1.0), 3, 1.0)
        async with open_control_harness(store, tmp_path, clock, shared) as api:
            statuses = [(await api.ask("GET", "/openapi.json", who=None)).status for _ in range(5)]
            assert statuses == [200] * 3 + [429] * 2
            assert len(leasing) == 0
            assert (await api.ask("GET", "/api/v1/orgs")).status == 200
            assert len(leasing) == 1
        await leasing.stop()
