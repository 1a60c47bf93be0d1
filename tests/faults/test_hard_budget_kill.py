"""Eight processes spend one hard budget as fast as they can, some of them killed and some paused: never a pico-dollar
more than there is, and nearly all of it.

What was spent is what the simulated Bedrock's ledger says, priced by hand. As many kills as fit into `make test`;
`make soak` makes a hundred on each engine.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from proxy.calendar_days import Period, span
from proxy.hard.rows import Bucket, Hold, Name
from proxy.model import Scope
from proxy.recording.aggregator import spent_so_far, sum_of_shards
from proxy.recording.entries import PICO_PER_USD, Counter
from proxy.stores import schema
from proxy.stores.contract import Put, Store, Value, every_row
from proxy.stores.sqlite import SqliteStore
from tests.support.engines import PREFIX, Engines
from tests.support.hard_processes import (
    APP,
    CLIENTS_EACH,
    MODELS,
    PICO,
    PRICES,
    Clients,
    Fleet,
    Mishaps,
    all_dry,
    fleet_of,
    tag_in,
    worst_pico,
    zone_by_day,
)
from tests.support.simulated import bedrock_process, read_ledger

SIDECARS = 8
SOAKS = "PRICE_KEEPER_KILLS" in os.environ
KILLS = int(os.environ.get("PRICE_KEEPER_KILLS", "6")) // 2  # with each of the two chains
SEED = int(os.environ.get("PRICE_KEEPER_SEED", str(random.randrange(10**6))))
ENGINES = ["sqlite", "ministack"] if SOAKS else ["sqlite"]
CHAINS = [["premium"], ["premium", "economy"]] if SOAKS else [["premium"]]
WORST_CASES = 500 + (40 * KILLS if SOAKS else 0)  # in the first quota; a kill uses one up for every call under way
LEAST_SHARE = 0.97
A_CALL_PICO = {"premium": 1_150 * PICO, "economy": 460 * PICO}  # more or less
LONGEST_PAUSE_SECONDS = 45  # of a sidecar that found the bucket dry again and again, and some more
FILE = "price-keeper.db"
LATENCY_MS = 25  # so that every kill meets calls under way


@dataclass
class Stored:
    """What the store says of one label."""

    bucket: Bucket
    holds: dict[str, Hold]
    spent: int
    estimated: int  # calls of which nobody learned what they cost

    @property
    def out(self) -> int:
        return sum(hold.out for hold in self.holds.values())

    @property
    def used(self) -> int:
        return sum(hold.used for hold in self.holds.values())

    def check(self) -> None:
        assert self.bucket.left + self.out + self.bucket.base == self.bucket.quota
        assert self.bucket.left >= 0
        assert self.bucket.base >= 0
        assert self.spent <= self.bucket.quota


@pytest.mark.parametrize("labels", CHAINS, ids=" ".join)
@pytest.mark.parametrize("engine", ENGINES)
async def test_never_more_than_the_quota(
    engine: str, labels: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    print(f"PRICE_KEEPER_SEED={SEED}")
    chance, ledger = random.Random(SEED), tmp_path / "ledger"
    quotas = {label: WORST_CASES * worst_pico(label) // (1 + number) for number, label in enumerate(labels)}
    engines = None if engine == "sqlite" else request.getfixturevalue("engines")  # whose servers take seconds to start
    settings = _settings(engines, tmp_path)
    with bedrock_process("--ledger", str(ledger)) as bedrock:
        bedrock.plan(always={"latency_ms": LATENCY_MS, "frame_ms": 1})
        async with (
            _opened(engines, tmp_path) as store,
            fleet_of(SIDECARS, tmp_path, bedrock.url, settings) as fleet,
        ):
            names = await _budget(store, fleet, quotas)
            async with Clients(fleet, labels, SEED) as clients:
                mishaps = _mishaps(fleet, clients, chance)
                await mishaps.befall(sum(quotas[label] // A_CALL_PICO[label] for label in labels))
                refusing, dead = await _refusing(fleet, store, names)
            await fleet.end()
            over = {label: await _stored(store, name) for label, name in names.items()}
    _compare(ledger, mishaps, refusing, dead, over)


async def _budget(store: Store, fleet: Fleet, quotas: dict[str, int]) -> dict[str, Name]:
    """Hard, and for a day that does not end soon; its names by label."""
    item: dict[str, Value] = {
        "timezone": zone_by_day(),
        "model_ordering": list(quotas),
        "quotas": {label: pico // PICO for label, pico in quotas.items()},
        "enforcement": "hard",
        "version": 1,
    }
    await store.put(Put(schema.org_config(fleet.org), item))
    today = span(Period.DAY, time.time(), ZoneInfo(zone_by_day())).key
    return {label: Name(Scope(fleet.org, APP).key, label, today) for label in quotas}


def _mishaps(fleet: Fleet, clients: Clients, chance: random.Random) -> Mishaps:
    lost = min(2, KILLS // 3)
    return Mishaps(fleet, clients, chance, KILLS, pauses=max(2, KILLS // 3), stops=max(1, KILLS // 10), lost=lost)


async def _refusing(fleet: Fleet, store: Store, names: dict[str, Name]) -> tuple[dict[str, Stored], set[str]]:
    """When every sidecar that lives refuses: what there is then, and who of the holders is dead. What comes back late
    may still be used, by those who ask again after a pause."""
    deadline = time.monotonic() + LONGEST_PAUSE_SECONDS
    while True:
        await all_dry(fleet)
        dead = {holder for keeper in fleet.dead for holder in keeper.holders}
        stored = {label: await _stored(store, name) for label, name in names.items()}
        is_used = all(_used(each, dead) >= LEAST_SHARE * each.bucket.quota for each in stored.values())
        if is_used or time.monotonic() > deadline:
            return stored, dead
        await asyncio.sleep(0.3)


def _compare(
    ledger: Path, mishaps: Mishaps, refusing: dict[str, Stored], dead: set[str], over: dict[str, Stored]
) -> None:
    entries, clients = read_ledger(ledger), mishaps.clients
    assert not {tag_in(entry["body"]) for entry in entries} & clients.refused
    for label, at_end in over.items():
        billed = sum(_cost(entry, label) for entry in entries)
        _tell(label, billed, at_end, refusing[label], dead)
        assert 0 < billed <= at_end.spent <= at_end.bucket.quota
        # All that is not spent is in the bucket again.
        at_end.check()
        assert at_end.used == at_end.out == at_end.spent
        assert all(hold.is_closed for hold in at_end.holds.values())
        # Only what was under way at a kill is taken for its worst case.
        assert at_end.estimated <= mishaps.kills * CLIENTS_EACH * 2
        assert at_end.spent - billed <= at_end.estimated * worst_pico(label)
        refusing[label].check()
        assert _used(refusing[label], dead) >= LEAST_SHARE * at_end.bucket.quota
    print(f"{clients.answered} answered, {clients.left} left, {clients.broken} broken, refused: {clients.errors}")
    print("; ".join(mishaps.told))


def _used(stored: Stored, dead: set[str]) -> int:
    """What is spent, and what the dead hold until their journals are brought to the store."""
    return stored.spent + sum(hold.out - hold.used for holder, hold in stored.holds.items() if holder in dead)


def _tell(label: str, billed: int, at_end: Stored, refusing: Stored, dead: set[str]) -> None:
    quota = at_end.bucket.quota
    shares = {
        "billed": billed,
        "recorded": at_end.spent,
        "used or held by the dead": _used(refusing, dead),
        "base": at_end.bucket.base,
    }
    told = ", ".join(f"{what} {pico / quota:.4%}" for what, pico in shares.items())
    worst = quota / worst_pico(label)
    print(f"\n{label}: {quota / PICO_PER_USD:.6f} USD, {worst:.0f} worst cases; {told}; {at_end.estimated} estimates")


def _cost(entry: dict[str, Any], label: str) -> int:
    """What the simulated Bedrock says, priced by hand."""
    if entry["model"] != MODELS[label] or not entry.get("usage"):
        return 0
    usage, prices = entry["usage"], PRICES[label]
    return sum(usage[f"{kind}_tokens"] * round(price * PICO) for kind, price in prices.items())


async def _stored(store: Store, name: Name) -> Stored:
    bucket = None
    while bucket != (bucket := Bucket.of(await store.get(name.bucket, consistent=True) or {})):  # so nothing moves
        rows = [row async for row in every_row(store, name.holds)]
    counted = await sum_of_shards(store, Counter(*name, max(schema.SHARD_COUNTS)))
    holds = {row.key.sk.rpartition("#")[2]: Hold.of(row.item) for row in rows}
    return Stored(bucket, holds, await spent_so_far(store, name), int(counted["estimated_requests"]))


def _settings(engines: Engines | None, folder: Path) -> dict[str, Any]:
    if engines is None:
        return {"path": str(folder / FILE)}
    endpoint = engines.endpoints["ministack"]
    return {"engine": "dynamodb", "endpoint": endpoint, "region": "us-east-1", "table_prefix": PREFIX}


@asynccontextmanager
async def _opened(engines: Engines | None, folder: Path) -> AsyncIterator[Store]:
    if engines is not None:
        async with engines.open("ministack", folder) as store:
            yield store
        return
    embedded = await SqliteStore(folder / FILE, time.time).open()
    try:
        yield embedded
    finally:
        await embedded.close()
