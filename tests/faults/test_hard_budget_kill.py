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
from pathlib import Path
from typing import Any

import pytest
from price_keeper.domain import PICO_PER_USD
from price_keeper.ledger.lease_rows import HardBudgetKey
from price_keeper.stores.contract import Store
from price_keeper.stores.sqlite import SqliteStore

from tests.support.effort import seed
from tests.support.engines import PREFIX, Engines
from tests.support.hard_budget_processes import (
    CLIENTS_EACH,
    PICO,
    LoadClients,
    ProcessFaults,
    ProcessFleet,
    max_call_pico,
    parse_tag,
    run_fleet,
    wait_until_exhausted,
)
from tests.support.hard_budget_store import StoredBudget, price_by_hand, put_hard_budget, read_stored_budget
from tests.support.simulated import bedrock_process, read_ledger

SIDECARS = 8
SOAKS = "PRICE_KEEPER_KILLS" in os.environ
KILLS = int(os.environ.get("PRICE_KEEPER_KILLS", "6")) // 2  # with each of the two chains
SEED = seed(is_exploring=SOAKS)
ENGINES = ["sqlite", "ministack"] if SOAKS else ["sqlite"]
CHAINS = [["premium"], ["premium", "economy"]] if SOAKS else [["premium"]]
WORST_CASES = 500 + (40 * KILLS if SOAKS else 0)  # in the first quota; a kill uses one up for every call under way
LEAST_SHARE = 0.97
A_CALL_PICO = {"premium": 1_150 * PICO, "economy": 460 * PICO}  # more or less
LONGEST_PAUSE_SECONDS = 45  # of a sidecar that found the bucket dry again and again, and some more
FILE = "price-keeper.db"
LATENCY_MS = 25  # so that every kill meets calls under way


@pytest.mark.parametrize("labels", CHAINS, ids=" ".join)
@pytest.mark.parametrize("engine", ENGINES)
async def test_killed_and_paused_processes_never_exceed_hard_budget(
    engine: str, labels: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    print(f"PRICE_KEEPER_SEED={SEED}")
    chance, ledger = random.Random(SEED), tmp_path / "ledger"
    quotas = {label: WORST_CASES * max_call_pico(label) // (1 + number) for number, label in enumerate(labels)}
    engines = None if engine == "sqlite" else request.getfixturevalue("engines")  # whose servers take seconds to start
    settings = _settings(engines, tmp_path)
    with bedrock_process("--ledger", str(ledger)) as bedrock:
        bedrock.plan(always={"latency_ms": LATENCY_MS, "frame_ms": 1})
        async with (
            _opened(engines, tmp_path) as store,
            run_fleet(SIDECARS, tmp_path, bedrock.url, settings) as fleet,
        ):
            names = await put_hard_budget(store, fleet, quotas)
            async with LoadClients(fleet, labels, SEED) as clients:
                mishaps = _mishaps(fleet, clients, chance)
                await mishaps.run(sum(quotas[label] // A_CALL_PICO[label] for label in labels))
                refusing, dead = await _refusing(fleet, store, names)
            await fleet.finish()
            over = {label: await read_stored_budget(store, name) for label, name in names.items()}
    _compare(ledger, mishaps, refusing, dead, over)


def _mishaps(fleet: ProcessFleet, clients: LoadClients, chance: random.Random) -> ProcessFaults:
    lost = min(2, KILLS // 3)
    return ProcessFaults(fleet, clients, chance, KILLS, pauses=max(2, KILLS // 3), stops=max(1, KILLS // 10), lost=lost)


async def _refusing(
    fleet: ProcessFleet, store: Store, names: dict[str, HardBudgetKey]
) -> tuple[dict[str, StoredBudget], set[str]]:
    """When every sidecar that lives refuses: what there is then, and which holders are dead. Money returned late
    may still be used, by those who ask again after a pause."""
    deadline = time.monotonic() + LONGEST_PAUSE_SECONDS
    while True:
        await wait_until_exhausted(fleet)
        dead = {holder for keeper in fleet.dead for holder in keeper.open_leases}
        stored = {label: await read_stored_budget(store, name) for label, name in names.items()}
        is_used = all(_used(each, dead) >= LEAST_SHARE * each.bucket.quota for each in stored.values())
        if is_used or time.monotonic() > deadline:
            return stored, dead
        await asyncio.sleep(0.3)


def _compare(
    ledger: Path,
    mishaps: ProcessFaults,
    refusing: dict[str, StoredBudget],
    dead: set[str],
    over: dict[str, StoredBudget],
) -> None:
    entries, clients = read_ledger(ledger), mishaps.clients
    assert not {parse_tag(entry["body"]) for entry in entries} & clients.refused_tags
    for label, at_end in over.items():
        billed = sum(price_by_hand(entry, label) for entry in entries)
        _tell(label, billed, at_end, refusing[label], dead)
        assert 0 < billed <= at_end.spent <= at_end.bucket.quota
        # All that is not spent is in the bucket again.
        at_end.check()
        assert at_end.used == at_end.leased == at_end.spent
        assert all(hold.is_closed for hold in at_end.lease_rows.values())
        # Only what was under way at a kill is taken for its worst case.
        assert at_end.estimated <= mishaps.kills * CLIENTS_EACH * 2
        assert at_end.spent - billed <= at_end.estimated * max_call_pico(label)
        refusing[label].check()
        assert _used(refusing[label], dead) >= LEAST_SHARE * at_end.bucket.quota
    print(
        f"{clients.answered} answered, {clients.abandoned_calls} left, "
        f"{clients.broken_connections} broken, refused: {clients.errors}"
    )
    print("; ".join(mishaps.history))


def _used(stored: StoredBudget, dead: set[str]) -> int:
    """What is spent, and what the dead hold until their journals are brought to the store."""
    return stored.spent + sum(hold.leased - hold.used for holder, hold in stored.lease_rows.items() if holder in dead)


def _tell(label: str, billed: int, at_end: StoredBudget, refusing: StoredBudget, dead: set[str]) -> None:
    quota = at_end.bucket.quota
    shares = {
        "billed": billed,
        "recorded": at_end.spent,
        "used or held by the dead": _used(refusing, dead),
        "base": at_end.bucket.spent_without_lease,
    }
    summary = ", ".join(f"{what} {pico / quota:.4%}" for what, pico in shares.items())
    worst = quota / max_call_pico(label)
    print(
        f"\n{label}: {quota / PICO_PER_USD:.6f} USD, {worst:.0f} worst cases; {summary}; {at_end.estimated} estimates"
    )


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
