"""What recording costs in DynamoDB: write units for 1,000 requests, counted from what the engine says it consumed.

A sidecar's journal, flusher and pace run as they are, against an engine that speaks DynamoDB's protocol; only time is
simulated. A fleet is as many such sidecars, each with its share of the requests.

Run as: python -m bench.write_units
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from price_keeper.ledger.aggregator import EARLIEST_LOOK, LATEST_LOOK
from price_keeper.ledger.counter_writes import LISTING_SECONDS
from price_keeper.ledger.ledger_entries import Counter

from tests.support.clock import ManualClock
from tests.support.engines import TEST_CREDENTIALS, Engines
from tests.support.recording_harness import RecordingHarness, open_recording_harness
from tests.support.servers import ministack_server

RATES = (1, 10, 100, 1000)  # requests a second of the whole fleet
FLEETS = (1, 100, 1000)
SECONDS = LISTING_SECONDS  # in which each entry in the list of active counters is written once
MONTH_SECONDS = 30 * 86_400
USD_A_MILLION_UNITS = 0.625  # on demand, us-east-1
ID_BYTES, ITEM_BYTES = 36, 400 * 1024  # of a request's id in a set, and of an item at most
# Of each counter, by the whole fleet together.
AGGREGATIONS_A_SECOND = 1 / (60 * (EARLIEST_LOOK + LATEST_LOOK) / 2)


@dataclass
class Meter:
    """Adds up what answers say was consumed."""

    units: float = 0.0

    def attach(self, client: Any) -> None:
        client.meta.events.register("before-parameter-build.dynamodb.TransactWriteItems", self._ask)
        client.meta.events.register("after-call.dynamodb.TransactWriteItems", self._count)

    def _ask(self, params: dict[str, Any], **_: Any) -> None:
        params["ReturnConsumedCapacity"] = "TOTAL"

    def _count(self, parsed: dict[str, Any], **_: Any) -> None:
        self.units += sum(each["CapacityUnits"] for each in parsed.get("ConsumedCapacity", []))


async def units_of_one(rec: RecordingHarness, meter: Meter, rate: float, counters: list[Counter]) -> tuple[float, int]:
    """The units and requests of one sidecar with so many requests a second, after it has found its pace."""
    for _ in range(5):
        rec.spend(1, *counters)
        await rec.flusher.flush()
    meter.units, requests, owed = 0.0, 0, 0.0
    seconds = max(SECONDS, 20 / rate)
    began = rec.clock.now()
    while rec.clock.now() - began < seconds:
        pause = rec.flusher._interval.seconds
        await rec.clock.advance(pause)
        owed += rate * pause
        for _ in range(int(owed)):
            rec.spend(1, *counters)
        requests, owed = requests + int(owed), owed % 1
        await rec.flusher.flush()
    return meter.units, requests


def rows(per_request: dict[float, float]) -> Iterator[tuple[int, int, float, float]]:
    for fleet, rate in itertools.product(FLEETS, RATES):
        units = 1000 * per_request[rate / fleet] + thousand_totals(rate)
        yield fleet, rate, units, usd_of(units, rate)


def thousand_totals(rate: float) -> float:
    """The units of the totals written while 1,000 requests come: one put of one unit each time."""
    return 1000 * AGGREGATIONS_A_SECOND / rate


def usd_of(units_of_thousand: float, rate: float) -> float:
    """For a month."""
    return units_of_thousand / 1000 * rate * MONTH_SECONDS / 1e6 * USD_A_MILLION_UNITS


def with_ids() -> float:
    """Units for 1,000 requests of the other design's, until its item is full: each write pays for the whole item."""
    writes = ITEM_BYTES // ID_BYTES
    return 1000 * sum(1 + number * ID_BYTES // 1024 for number in range(writes)) / writes


async def main() -> None:
    folder = Path(tempfile.mkdtemp())
    with pytest.MonkeyPatch.context() as patch, ministack_server(folder) as endpoint:
        for name, value in TEST_CREDENTIALS.items():
            patch.setenv(name, value)
        async with Engines({"ministack": endpoint}).open("ministack", folder) as store:
            meter = Meter()
            meter.attach(store.client)  # type: ignore[attr-defined]
            per_request: dict[float, float] = {}
            for number, rate in enumerate(sorted({rate / fleet for fleet in FLEETS for rate in RATES})):
                async with open_recording_harness(
                    folder / f"journal{number}", store, ManualClock(), max_usd=10**6
                ) as rec:
                    units, requests = await units_of_one(rec, meter, rate, [rec.counter()])
                    per_request[rate] = units / requests
    print("| sidecars | requests/s in all | units for 1,000 requests | USD a month | a write for each request |")
    print("|---|---|---|---|---|")
    for fleet, rate, thousand, usd in rows(per_request):
        plain = usd_of(1000 + thousand_totals(rate), rate)
        print(f"| {fleet:,} | {rate:,} | {thousand:,.1f} | {usd:,.2f} | {plain:,.2f} |")
    print(f"\nWith the ids of requests in the counters: {with_ids():,.0f} units for 1,000 requests")


if __name__ == "__main__":
    asyncio.run(main())
