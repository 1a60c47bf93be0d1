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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from decimal import Decimal
from inspect import iscoroutinefunction
from pathlib import Path
from time import perf_counter

from proxy import dataplane
from proxy.app import opened_store
from proxy.clock import SystemClock
from proxy.config import Config
from proxy.config.keys import Journal, Store
from proxy.forwarding.eventstream import FrameWatcher, encode
from proxy.forwarding.forwarder import Target
from proxy.forwarding.model_path import Operation
from proxy.forwarding.upstream import Endpoint
from proxy.metering.reading import reader_of
from proxy.model import Caller
from proxy.recording.composed import opened_recording
from proxy.recording.metering import Metering
from proxy.selection.labels import Choice
from proxy.tasks import Tasks

LABEL = "premium"
MODEL = Config.development().labels[LABEL].model
CALLER = Caller("550e8400-e29b-41d4-a716-446655440000", "web", "client")
CHOICE = Choice(LABEL, LABEL, MODEL)
TARGETS = [Target(Endpoint("127.0.0.1", 1, False), "us-east-1", MODEL, "/")]
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
        return encode(headers, json.dumps(payload).encode())

    delta = {"contentBlockIndex": 0, "delta": {"text": " some words"}, "p": "abcdefghijklmnopqrstuvwxyz"}
    return event("contentBlockDelta", delta) * FRAMES


class Bench:
    def __init__(self, folder: Path, metering: Metering) -> None:
        self.metering = metering
        self.file = os.open(folder / "floor", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.stream = _frames()

    async def metered(self) -> None:
        """All of it, as a Converse call has it."""
        meter = await self.metering.meter(CALLER, CHOICE, Operation.CONVERSE, b"POST", TARGETS, 480)
        meter.sent_to(TARGETS[0])
        meter.head(200, HEADERS)
        meter.data(ANSWER)
        meter.end(True)
        meter.close()

    def floor(self) -> None:
        os.write(self.file, b"x" * 190)
        os.write(self.file, b"x" * 150)

    def watched(self) -> None:
        """What every stream has anyway: its frames are checked."""
        FrameWatcher({}).feed(self.stream)

    def read(self) -> None:
        reader_of(Operation.CONVERSE_STREAM, "anthropic", STREAM[0][1], STREAM).feed(self.stream)


async def best_of(works: list[Callable[[], Awaitable[None] | None]], rounds: int, times: int) -> list[float]:
    best = [float("inf")] * len(works)
    gc.disable()
    for _ in range(rounds):
        for number, work in enumerate(works):
            best[number] = min(best[number], await _once(work, times))
    gc.enable()
    return best


async def _once(work: Callable[[], Awaitable[None] | None], times: int) -> float:
    began = perf_counter()
    if iscoroutinefunction(work):
        for _ in range(times):
            await work()
    else:
        for _ in range(times):
            work()
    return (perf_counter() - began) / times * 1e6


@asynccontextmanager
async def metering_in(folder: Path) -> AsyncIterator[Metering]:
    clock = SystemClock()
    journal = Journal(dir=str(folder / "journal"), max_unflushed_usd=Decimal(10**6))  # as nothing is flushed
    config = replace(Config.development(), journal=journal)
    async with (
        Tasks(clock) as tasks,
        opened_store(Store(path=str(folder / "store.db")), clock, tasks) as store,
        opened_recording(config, store, clock) as recording,
    ):
        tariffs = await dataplane.prices(config, store, clock, tasks)
        yield dataplane.metering(config, store, recording.recorder, tariffs, clock, tasks)
        recording.recorder.journal.close()


async def compare(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with metering_in(Path(folder)) as metering:
            bench = Bench(Path(folder), metering)
            metered, floor = await best_of([bench.metered, bench.floor], rounds, 2000)
            watched, read = await best_of([bench.watched, bench.read], rounds, 20)
    print(f"a request: {metered:.2f} us; two system calls that write as much: {floor:.2f} us")
    print(f"a frame: {read / FRAMES:.3f} us, of which {watched / FRAMES:.3f} us are to see that it is sound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    asyncio.run(compare(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
