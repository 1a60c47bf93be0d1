"""Every fault at the socket between sidecar and DynamoDB: nothing is written twice, nothing is thought written that is
not, and connections are closed. Also where each request is delivered twice, whichever of the two answers comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from uuid import uuid4

import pytest
from price_keeper.budgets.hard import budget_lease
from price_keeper.budgets.hard.budget_lease import BudgetLeases
from price_keeper.clock import SystemClock
from price_keeper.domain import Scope
from price_keeper.errors import StoreUnavailable
from price_keeper.ledger.aggregator import read_spent_pico
from price_keeper.ledger.lease_file import BudgetLeaseFile
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.rates.bucket_client import BucketClient
from price_keeper.rates.token_bucket import RateLimit
from price_keeper.stores.contract import Key, Put, Store, Update
from price_keeper.stores.dynamodb import MAX_ATTEMPTS, DynamoStore
from price_keeper.tasks import Tasks

from tests.support.bucket_harness import bucket
from tests.support.engines import PREFIX, Engines
from tests.support.lease_rows import new_budget_key, read_bucket, read_lease_row
from tests.support.raw_clients import descriptors, eventually
from tests.support.recording_harness import open_recording_harness
from tests.support.token_service_instances import open_instances, read_session_rows
from tests.support.wire_faults import (
    THROTTLES,
    AtAccept,
    Break,
    Fault,
    FaultKind,
    FaultPoint,
    Slow,
    Surplus,
    Twice,
    dynamodb_error,
)
from tests.support.wire_proxy import WireProxy, wire_proxy

STOPS_AFTER = 0.05
EVERY = b"POST"
TWICE: dict[str, Fault] = {
    "at once": Twice(),
    "later": Twice(0.02),
    "and the second answer": Twice(shows_second=True),
}


@dataclass
class Line:
    wire: WireProxy
    store: DynamoStore
    direct: Store
    key: Key

    async def counted(self) -> int:
        found = await self.direct.get(self.key, consistent=True)
        assert found is not None
        return int(found["n"])  # type: ignore[call-overload]

    def befalls(self, fault: Fault) -> None:
        """The next request, with no other before it."""
        self.wire.plan([fault])


async def _no_wait(_: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
async def line(engines: Engines, tmp_path: Path, pk: str) -> AsyncIterator[Line]:
    async with engines.open("ministack", tmp_path) as direct, wire_proxy(engines.endpoints["ministack"]) as wire:
        store = DynamoStore(region="us-east-1", table_prefix=PREFIX, endpoint=wire.url, sleep=_no_wait)
        await store.open()
        key = Key("rate-buckets", pk, "BUCKET#rpm")
        await direct.put(Put(key, {"n": 0}))
        yield Line(wire, store, direct, key)
        await store.close()
        await eventually(lambda: wire.open == wire.injected["deaf at accept"])  # of whose end it does not hear


async def test_exchange_broken_at_any_point_is_applied_at_most_once(line: Line) -> None:
    addition, written = Update(line.key, add={"n": 1}), 0
    await line.store.get(line.key)
    before = descriptors()
    for how, where in product([FaultKind.CLOSE, FaultKind.RESET, FaultKind.HALF, FaultKind.STALL], FaultPoint):
        fault = Break(where, how, STOPS_AFTER)
        is_done = where is not FaultPoint.REQUEST

        line.befalls(fault)
        assert await line.store.get(line.key, consistent=True) == {"n": written}
        assert line.wire.requests == 2

        line.befalls(fault)
        with pytest.raises(StoreUnavailable) as refused:
            await line.store.update(addition)
        written += is_done
        assert refused.value.maybe_applied
        assert (line.wire.requests, await line.counted()) == (1, written), fault

        line.befalls(fault)
        await line.store.transact([addition])
        written += 1
        assert (line.wire.requests, await line.counted()) == (2, written), fault
    assert line.wire.injected.total() == 3 * 4 * len(FaultPoint)
    await eventually(lambda: descriptors() <= before)


async def test_slow_or_surplus_answer_changes_nothing(line: Line) -> None:
    written = 0
    for fault in (Slow(0.01, 1), Slow(0.01, 13), Surplus()):
        line.wire.always = {EVERY: fault}
        for _ in range(3):
            assert await line.store.update(Update(line.key, add={"n": 1})) == {"n": written + 1}
            await line.store.transact([Update(line.key, add={"n": 1})])
            written += 2
            assert await line.store.get(line.key, consistent=True) == {"n": written}
    assert line.wire.requests == 27


async def test_former_answer_is_not_taken_for_current_one(line: Line) -> None:
    written = 0
    for later in (0.001, 0.003, 0.01):
        line.wire.always = {EVERY: Surplus(None, later)}
        for _ in range(10):
            await line.store.transact([Update(line.key, add={"n": 1})])
            written += 1
            assert await line.store.get(line.key, consistent=True) == {"n": written}
            assert await line.store.get(Key("rate-buckets", line.key.pk, "NONE")) is None
    assert await line.counted() == written


async def test_garbage_after_answer_makes_outcome_unknown_at_most(line: Line) -> None:
    line.wire.always = {EVERY: Surplus(b"x")}
    for number in range(1, 6):
        adding = line.store.update(Update(line.key, add={"n": 1}))
        (outcome,) = await asyncio.gather(adding, return_exceptions=True)
        assert getattr(outcome, "maybe_applied", True)
        assert (await line.counted(), line.wire.requests) == (number, number)


async def test_throttled_connections_are_kept(line: Line) -> None:
    for number, kind in enumerate(THROTTLES, 1):
        line.wire.next(*[dynamodb_error(kind)] * (MAX_ATTEMPTS - 1))
        await line.store.update(Update(line.key, add={"n": 1}))
        assert (await line.counted(), line.wire.connections) == (number, 1)


async def test_transaction_in_progress_is_polled_until_done(line: Line) -> None:
    line.wire.next(*[dynamodb_error("TransactionInProgressException")] * (MAX_ATTEMPTS - 1))
    await line.store.transact([Update(line.key, add={"n": 1})])
    assert (await line.counted(), line.wire.requests) == (1, MAX_ATTEMPTS)


async def test_connection_failures_at_start_are_retried(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("price_keeper.stores.dynamodb.READ_TIMEOUT_SECONDS", 0.2)
    for number, how in enumerate((AtAccept.RESET, AtAccept.DEAF), 1):
        store = DynamoStore(region="us-east-1", table_prefix=PREFIX, endpoint=line.wire.url, sleep=_no_wait)
        await store.open()
        line.wire.at_accept.extend([how] * 3)
        await store.transact([Update(line.key, add={"n": 1})])
        assert (await line.counted(), line.wire.injected.total()) == (number, 3 * number)
        await store.close()


async def test_fifty_concurrent_failures_leave_nothing_open(line: Line) -> None:
    before = descriptors()
    line.wire.random("fifty", {"close": 0.2, "reset": 0.2, "half": 0.2})
    adding = [line.store.transact([Update(line.key, add={"n": 1})]) for _ in range(50)]
    outcomes = await asyncio.gather(*adding, return_exceptions=True)
    line.wire.stop_faults()
    done = outcomes.count(None)
    assert all(isinstance(each, StoreUnavailable) for each in outcomes if each is not None)
    assert done > 30
    assert done <= await line.counted() <= 50
    await line.store.close()
    await eventually(lambda: descriptors() <= before)


# Delivered twice, as nothing that adds may be.


@pytest.mark.parametrize("how", TWICE)
async def test_duplicated_request_is_applied_once(
    line: Line, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_lease, "TOP_UP_TIMEOUT_SECONDS", 60.0)  # however slowly the engine answers
    line.wire.always = {EVERY: TWICE[how]}
    for check in (spend_counts_once, a_limit_is_taken_from_once, money_is_held_once, sessions_are_as_many_as_may_be):
        before = line.wire.injected["twice"]
        await check(line, tmp_path)
        assert line.wire.injected["twice"] > before + 2


async def spend_counts_once(line: Line, folder: Path) -> None:
    async with open_recording_harness(folder / "journal", line.store, SystemClock()) as rec:
        for number in range(1, 4):
            rec.spend(1000, *(rec.counter(f"label{each}") for each in range(60)))
            async with asyncio.timeout(60):
                while not await rec.flusher.flush():
                    pass
            for each in (0, 59):
                assert await rec.read_counts(rec.counter(f"label{each}")) == (number, 1000 * number)


async def a_limit_is_taken_from_once(line: Line, _: Path) -> None:
    clock = SystemClock()
    limiter = BucketClient(line.store, lambda: int(clock.now() * 1000), clock)
    never = bucket(RateLimit("rpm", 100_000, 0, 60_000))
    for number in range(1, 11):
        await limiter.acquire([never], {"rpm": 1_000})
        item = await line.direct.get(never.key, consistent=True)
        assert item is not None
        assert (item["rpm_tk"], item["rpm_tc"]) == (100_000 - 1_000 * number, 1_000 * number)


async def money_is_held_once(line: Line, folder: Path) -> None:
    clock, name, quota = SystemClock(), new_budget_key(), 10**9
    holds = BudgetLeaseFile(folder, UlidFactory(clock.now, lambda size: uuid4().bytes[:size]).new())
    async with Tasks(clock) as tasks:
        lease = BudgetLeases(line.store, clock, tasks, holds, partial(read_spent_pico, line.store)).get(name, quota, 1)
        for _ in range(5):
            assert await lease.reserve(quota // 10) is not None
            there, hold = await read_bucket(line.direct, name), await read_lease_row(line.direct, name, holds.holder)
            assert there.unleased + hold.leased == quota
            assert hold.leased >= lease.in_flight


async def sessions_are_as_many_as_may_be(line: Line, _: Path) -> None:
    scope = Scope(str(uuid4()), "web")
    async with open_instances(line.store, SystemClock(), 1, 3) as (one,):
        issued = [await one.sessions.login(scope) for _ in range(6)]
        assert set(await read_session_rows(line.direct, scope)) == {each.sid for each in issued[-3:]}
        await one.sessions.refresh(issued[-1].refresh.token)
        assert len(await read_session_rows(line.direct, scope)) == 3
