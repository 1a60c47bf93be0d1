"""Two real sidecars under load, with faults by chance at the socket, to DynamoDB and to Bedrock: when they stop, the
books of the store equal Bedrock's.

The seed is printed, and `PRICE_KEEPER_SEED` gives the same schedule of faults again. As long as fits into `make test`;
`make soak` makes it minutes (`PRICE_KEEPER_WIRE_SECONDS`).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter as Tally
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from price_keeper.domain import PICO_PER_MICRO
from price_keeper.ledger.aggregator import sum_shards
from price_keeper.ledger.lease_rows import HardBudgetKey
from price_keeper.ledger.ledger_entries import Counter, Receipt
from price_keeper.stores.contract import Store
from price_keeper.stores.dynamodb import MAX_CONNECTIONS
from price_keeper.upstream import connection_pool

from tests.support.caller_connections import Http1Connection, Http2Connection
from tests.support.effort import seed
from tests.support.engines import PREFIX, Engines
from tests.support.hard_budget_processes import (
    CLIENTS_EACH,
    MODELS,
    LoadClients,
    ManagedSidecar,
    ProcessFleet,
    max_call_pico,
    parse_tag,
    run_fleet,
)
from tests.support.hard_budget_store import price_by_hand, put_hard_budget, read_stored_budget
from tests.support.sidecar_crashes import JournalContents, SegmentCopies
from tests.support.simulated import bedrock_process, read_ledger
from tests.support.wire_faults import BEDROCK_RATES, STORE_RATES
from tests.support.wire_proxy import WireProxy, wire_proxy

SECONDS = float(os.environ.get("PRICE_KEEPER_WIRE_SECONDS", "4"))
SEED = seed(is_exploring="PRICE_KEEPER_WIRE_SECONDS" in os.environ)
SIDECARS = 2
STORM = 3  # times the usual rates, in the last third of a run: more exchanges are spoilt than not
WORST_CASES = 150  # in the quota that must be reached; the other label's is not
LONG_SECONDS = 60
GROWTH = 48 * 1024 * 1024  # a process that kept its calls would grow by far more in some minutes
FREE = ("Exception", "slow")  # faults that leave no call of Bedrock's in doubt, by their names


@dataclass
class Run:
    """Everything there is to compare when it is over."""

    fleet: ProcessFleet
    clients: LoadClients
    names: dict[str, HardBudgetKey]
    wires: dict[str, WireProxy]
    ledger: list[dict[str, Any]] = field(default_factory=list)
    books: list[JournalContents] = field(default_factory=list)
    grown: int = 0

    @cached_property
    def exact(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for books in self.books:
            exact = books.exact_counts
            assert not found.keys() & exact.keys()
            found |= exact
        return found

    @cached_property
    def estimated(self) -> list[Receipt]:
        return [receipt for books in self.books for receipt in books.estimated_receipts]


async def test_random_faults_keep_books_equal_to_bedrock(engines: Engines, tmp_path: Path) -> None:
    print(f"PRICE_KEEPER_SEED={SEED}")
    async with engines.open("ministack", tmp_path) as store, running(engines, store, tmp_path) as run:
        weather(run, 1)
        open_before = [descriptors_of(keeper) for keeper in run.fleet.sidecars]
        async with run.clients:
            await asyncio.sleep(SECONDS / 3)
            small = [resident(keeper) for keeper in run.fleet.sidecars]
            await asyncio.sleep(SECONDS / 3)
            weather(run, STORM)
            await asyncio.sleep(SECONDS / 3)
            run.grown = max(resident(keeper) - was for keeper, was in zip(run.fleet.sidecars, small, strict=True))
        for wire in run.wires.values():
            wire.stop_faults()
        for keeper, before in zip(run.fleet.sidecars, open_before, strict=True):
            await until_closed(keeper, before)
        await run.fleet.finish()
        run.ledger = read_ledger(tmp_path / "ledger")
        run.books = [JournalContents.read(keeper.folder / "copies") for keeper in run.fleet.sidecars]
        tell(run)
        nothing_is_lost_or_doubled(run)
        await the_store_says_the_same(run, store)
        await no_hard_budget_is_passed(run, store)
        assert run.grown < GROWTH


def weather(run: Run, times: int) -> None:
    for link, rates in (("store", STORE_RATES), ("bedrock", BEDROCK_RATES)):
        run.wires[link].random(f"{SEED} {link} {times}", {kind: times * rate for kind, rate in rates.items()})


@asynccontextmanager
async def running(engines: Engines, store: Store, folder: Path) -> AsyncIterator[Run]:
    with ExitStack() as stack:
        bedrock = stack.enter_context(bedrock_process("--ledger", str(folder / "ledger")))
        bedrock.plan(always={"latency_ms": 5, "frame_ms": 1})
        async with wire_proxy(engines.endpoints["ministack"]) as to_store, wire_proxy(bedrock.url) as to_bedrock:
            settings = {"engine": "dynamodb", "endpoint": to_store.url, "region": "us-east-1", "table_prefix": PREFIX}
            async with run_fleet(SIDECARS, folder, to_bedrock.url, settings) as fleet:
                for keeper in fleet.sidecars:
                    stack.enter_context(SegmentCopies(keeper.journal, keeper.folder / "copies"))
                quotas = {
                    "premium": WORST_CASES * max_call_pico("premium"),
                    "economy": 10**9 * max_call_pico("economy"),
                }
                names = await put_hard_budget(store, fleet, quotas)
                clients = LoadClients(fleet, list(quotas), SEED, [Http1Connection.connect, Http2Connection.connect])
                yield Run(fleet, clients, names, {"store": to_store, "bedrock": to_bedrock})


def resident(keeper: ManagedSidecar) -> int:
    assert keeper.running is not None
    pages = int(Path(f"/proc/{keeper.running.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors_of(keeper: ManagedSidecar) -> int:
    assert keeper.running is not None
    return len(os.listdir(f"/proc/{keeper.running.process.pid}/fd"))


async def until_closed(keeper: ManagedSidecar, before: int) -> None:
    """All connections but those that are kept for a while; and in a long run these too."""
    kept, patience = (
        (2, connection_pool.IDLE_TIMEOUT_SECONDS + 30)
        if SECONDS >= LONG_SECONDS
        else (CLIENTS_EACH + MAX_CONNECTIONS, 10)
    )
    async with asyncio.timeout(patience):
        while descriptors_of(keeper) > before + kept:  # noqa: ASYNC110 - of what happens in another process
            await asyncio.sleep(0.1)


def tell(run: Run) -> None:
    print()
    for link, wire in run.wires.items():
        kinds: Tally[str] = Tally()
        for name, number in wire.injected.items():
            kinds[name.partition(" at ")[0]] += number
        summary = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
        print(f"{link}: {wire.injected.total()} faults in {wire.requests} requests: {summary}")
    clients, exact, estimated = run.clients, len(run.exact), len(run.estimated)
    print(
        f"{clients.sent_calls} requests: {clients.answered} answered, "
        f"{clients.abandoned_calls} left, {clients.broken_connections} broken, "
        f"errors {clients.errors}; recorded {exact + estimated}, of them {estimated} estimated; "
        f"grown by {run.grown // 1024} kB"
    )


def nothing_is_lost_or_doubled(run: Run) -> None:
    arrived = Tally(parse_tag(entry["body"]) for entry in run.ledger)
    assert [tag for tag, number in arrived.items() if number > 1] == []  # no call was sent twice
    entries = {entry["request_id"]: entry for entry in run.ledger}
    ran = {number for number, entry in entries.items() if entry.get("usage")}
    exact, estimated = run.exact, run.estimated
    whole = {number for number, entry in entries.items() if parse_tag(entry["body"]) in run.clients.answered_tags}
    assert len(whole) == run.clients.answered  # no answer was made up
    assert whole <= exact.keys()  # and each is recorded, and not as an estimate
    for number, counts in exact.items():
        entry = entries[number]
        assert counts.pico == price_by_hand(entry, label_of(entry)), number
    assert all(receipt.counts.pico > 0 and receipt.counts.estimated_requests == 1 for receipt in estimated)
    named = [receipt.about["request"] for receipt in estimated if receipt.about["request"]]
    assert len(set(named)) == len(named)
    assert set(named) <= ran - exact.keys()
    unnamed = len(estimated) - len(named)
    assert (
        len(ran - exact.keys() - set(named)) <= unnamed
    )  # all other calls that ran are among those without a response
    assert unnamed <= count_unresolved(run.wires["bedrock"].injected)  # and nothing else is taken for having run
    for books in run.books:
        recorded = sum(seal.requests for seal in books.seals.values())
        assert recorded == len(books.receipts) == books.intents - books.unpaid_calls


def label_of(entry: dict[str, Any]) -> str:
    return next(label for label, model in MODELS.items() if model == entry["model"])


def count_unresolved(injected: Tally[str]) -> int:
    return sum(number for name, number in injected.items() if not any(free in name for free in FREE))


async def the_store_says_the_same(run: Run, store: Store) -> None:
    for label, name in run.names.items():
        sums = await sum_shards(store, Counter(*name, 8))
        pico = int(sums["cost_usd_micros"] * PICO_PER_MICRO)
        sealed = [
            counts
            for books in run.books
            for seal in books.seals.values()
            for part in seal.parts
            for counter, counts in part
            if counter.label == label and not counter.is_lease
        ]
        assert (int(sums["requests"]), pico) == (
            sum(counts.requests for counts in sealed),
            sum(counts.pico for counts in sealed),
        )
        assert int(sums["estimated_requests"]) == sum(counts.estimated_requests for counts in sealed)


async def no_hard_budget_is_passed(run: Run, store: Store) -> None:
    for label, name in run.names.items():
        at_end = await read_stored_budget(store, name)
        at_end.check()
        billed = sum(price_by_hand(entry, label) for entry in run.ledger)
        assert billed <= at_end.spent <= at_end.bucket.quota
        assert at_end.used == at_end.leased == at_end.spent  # all that is not spent is in the bucket again
