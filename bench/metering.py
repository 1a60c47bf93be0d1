"""What metering adds to a call: who pays, its intent, reading its answer, its price, its receipt, a journal on disk.

Rounds of every kind take turns in one process, and the best counts.

Run as: python -m bench.metering
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from time import perf_counter
from typing import cast

from price_keeper import data_port_wiring
from price_keeper.app import open_store
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.budgets.label_selector import LabelResolver, build_decision_headers
from price_keeper.clock import SystemClock
from price_keeper.config import Config
from price_keeper.config.config_sections import JournalConfig
from price_keeper.config.config_sections import StoreConfig as StoreConfig
from price_keeper.domain import Caller, ResolvedLabel
from price_keeper.ledger.journal import Journal as RealJournal
from price_keeper.ledger.ledger_entries import Intent, Receipt
from price_keeper.ledger.recording import open_recording
from price_keeper.operations import Operation
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Value
from price_keeper.tasks import Tasks
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.eventstream import FrameWatcher, encode_frame
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.meter_factory import MeterFactory
from price_keeper.usage.usage_reader import build_reader

LABEL = "premium"
MODEL = Config.development().labels[LABEL].model
CALLER = Caller("550e8400-e29b-41d4-a716-446655440000", "web", "client")
CHOICE = ResolvedLabel(LABEL, LABEL, MODEL)
TARGETS = [UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", MODEL, "/")]
HEADERS = [(b"content-type", b"application/json"), (b"x-amzn-requestid", b"7c9e6679-7425-40de-944b-e07fc1f90ae7")]
STREAM = [(b"content-type", b"application/vnd.amazon.eventstream"), HEADERS[1]]
ANSWER = json.dumps(
    {
        "metrics": {"latencyMs": 812},
        "output": {"message": {"role": "assistant", "content": [{"text": "An answer of some length. " * 20}]}},
        "stopReason": "end_turn",
        "usage": {"inputTokens": 120, "outputTokens": 130, "totalTokens": 250},
    },
    separators=(",", ":"),  # as Bedrock writes it
).encode()
FRAMES = 200


def _frames() -> bytes:
    def event(name: str, payload: dict[str, object]) -> bytes:
        headers = {":event-type": name, ":content-type": "application/json", ":message-type": "event"}
        return encode_frame(headers, json.dumps(payload).encode())

    delta = {"contentBlockIndex": 0, "delta": {"text": " some words"}, "p": "abcdefghijklmnopqrstuvwxyz"}
    return event("contentBlockDelta", delta) * FRAMES


class NoJournal:
    def write_intent(self, _: Intent) -> int:
        return 1

    def record(self, _: int, __: Receipt | None) -> None:
        pass


@dataclass
class Rig:
    """What a running sidecar has, with a scope of three labels with quotas that is warm."""

    metering: MeterFactory
    unrecorded: MeterFactory
    standings: BudgetRegistry
    labels: LabelResolver


class Bench:
    def __init__(self, folder: Path, rig: Rig) -> None:
        self.rig = rig
        payer = rig.standings.cached(CALLER)
        assert payer is not None
        self.account = payer.get_charged_counters(LABEL)
        self.file = os.open(folder / "floor", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.stream = _frames()

    def decided(self) -> None:
        """As the pipeline does it, to the headers of the answer and the account that pays."""
        choice = self.rig.labels.resolve_configured(LABEL)
        payer = self.rig.standings.cached(CALLER)
        assert choice is not None
        assert payer is not None
        build_decision_headers(payer.budget.decide(choice.label, False))
        payer.get_charged_counters(choice.label)

    def metered(self) -> None:
        """As a Converse call has it, but for what is written."""
        self._call(self.rig.unrecorded)

    def recorded(self) -> None:
        """All of it."""
        self._call(self.rig.metering)

    def _call(self, metering: MeterFactory) -> None:
        terms = metering.pricing_for(CHOICE, Operation.CONVERSE, b"POST")
        assert terms is not None
        meter = metering.open_meter(terms, self.account, CALLER, TARGETS, 480)
        meter.on_sent(TARGETS[0])
        meter.on_head(200, dict(HEADERS))
        meter.on_data(ANSWER)
        meter.on_end(True)
        meter.close()

    def floor(self) -> None:
        os.write(self.file, b"x" * 190)
        os.write(self.file, b"x" * 150)

    def watched(self) -> None:
        """What every stream has anyway: its frames are checked."""
        FrameWatcher({}).feed(self.stream)

    def read(self) -> None:
        build_reader(Operation.CONVERSE_STREAM, "anthropic", STREAM[0][1], dict(STREAM)).feed(self.stream)


def best_of(works: list[Callable[[], None]], rounds: int, times: int) -> list[float]:
    best = [float("inf")] * len(works)
    gc.disable()
    for _ in range(rounds):
        for number, work in enumerate(works):
            best[number] = min(best[number], _once(work, times))
    gc.enable()
    return best


def _once(work: Callable[[], None], times: int) -> float:
    began = perf_counter()
    for _ in range(times):
        work()
    return (perf_counter() - began) / times * 1e6


@asynccontextmanager
async def rig_in(folder: Path) -> AsyncIterator[Rig]:
    clock = SystemClock()
    journal = JournalConfig(dir=str(folder / "journal"), max_unflushed_usd=Decimal(10**6))  # as nothing is flushed
    config = replace(Config.development(), journal=journal)
    quotas: dict[str, Value] = {"model_ordering": list(config.labels), "quotas": dict.fromkeys(config.labels, 10**15)}
    async with (
        Tasks(clock) as tasks,
        open_store(StoreConfig(path=str(folder / "store.db")), clock, tasks) as store,
        open_recording(config, store, clock) as recording,
    ):
        await store.put(Put(schema.org_config_key(CALLER.org), quotas))
        tariffs = await data_port_wiring.load_price_tables(config, store, clock, tasks)
        standings = BudgetRegistry(config, store, recording.flusher, clock, tasks)
        await standings.load(CALLER)
        labels = LabelResolver(config.labels, allows_unlabelled=False)
        unrecorded = MeterFactory(config, cast(RealJournal, NoJournal()), tariffs, clock)
        yield Rig(MeterFactory(config, recording.flusher.journal, tariffs, clock), unrecorded, standings, labels)
        recording.flusher.journal.close()


async def compare(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with rig_in(Path(folder)) as rig:
            bench = Bench(Path(folder), rig)
            works = [bench.metered, bench.recorded, bench.decided, bench.floor]
            metered, recorded, decided, floor = best_of(works, rounds, 2000)
            watched, read = best_of([bench.watched, bench.read], rounds, 20)
    print(f"metering a request: {metered:.2f} us; with its two lines in the journal: {recorded:.2f} us")
    print(f"metering a frame: {read / FRAMES:.3f} us, of which {watched / FRAMES:.3f} us are to see that it is sound")
    print(f"for comparison, two system calls that write two such lines: {floor:.2f} us")
    print(f"deciding who pays and what serves: {decided:.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    asyncio.run(compare(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
