"""Faults on the wire between a flush and DynamoDB: whatever answer is lost, what was spent counts once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from price_keeper.stores import dynamodb
from price_keeper.stores.dynamodb import DynamoStore

from tests.support.engines import PREFIX, Engines
from tests.support.fault_proxy import BlackHole, CutAnswer, DropAnswer, Fault, Pass, Reset, dynamodb_error, fault_proxy
from tests.support.recording_harness import open_recording_harness
from tests.support.wire_faults import Break, FaultKind, FaultPoint, Surplus, Twice

FAULTS: dict[str, Fault] = {
    "dropped": DropAnswer(),
    "reset": Reset(),
    "cut": CutAnswer(),
    "never answered": BlackHole(),
    "throttled": dynamodb_error("ThrottlingException"),
    "server error": dynamodb_error("InternalServerError", 500),
    "delivered twice": Twice(),
    "delivered twice, and answered late": Twice(shows_second=True),
    "answered twice": Surplus(None, 0.002),
}
BREAKS = [
    Break(FaultPoint.REQUEST),
    Break(FaultPoint.HEAD, FaultKind.HALF, 0.05),
    Break(FaultPoint.END, FaultKind.RESET),
]


async def _no_sleep(_: float) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize("what", [*FAULTS, "all of them"])
async def test_flush_with_lost_answers_counts_once(
    what: str, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamodb, "READ_TIMEOUT_SECONDS", 0.2)
    chance = random.Random(what)
    kinds = [*FAULTS.values(), *BREAKS] if what == "all of them" else [FAULTS[what]]
    async with engines.open("ministack", tmp_path), fault_proxy(engines.endpoints["ministack"]) as proxy:
        store = DynamoStore(region="us-east-1", table_prefix=PREFIX, endpoint=proxy.url, sleep=_no_sleep)
        await store.open()
        async with open_recording_harness(tmp_path / "journal", store) as rec:
            spent = 0
            for number in range(12):
                pico = chance.randrange(1, 10**9)
                rec.spend(pico, *(rec.counter(f"label{each}") for each in range(60)))
                spent += pico
                proxy.plan([chance.choice([Pass(), *kinds]) for _ in range(chance.randrange(12))])
                await rec.flusher.flush()
                if number % 4 == 3:
                    proxy.plan([])
                    while not await rec.flusher.flush():
                        pass
                    for each in (0, 30, 59):
                        assert await rec.read_counts(rec.counter(f"label{each}")) == (number + 1, spent)
            assert len(rec.segments()) == 1
        await store.close()
