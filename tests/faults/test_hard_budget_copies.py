"""A living sidecar's journal is copied and replayed elsewhere: what it holds of a hard budget stays held."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

from price_keeper.stores.sqlite import SqliteStore

from tests.support.commands import price_keeper
from tests.support.hard_budget_processes import (
    LoadClients,
    ManagedSidecar,
    max_call_pico,
    run_fleet,
    wait_until,
    wait_until_exhausted,
)
from tests.support.hard_budget_store import price_by_hand, put_hard_budget, read_stored_budget
from tests.support.simulated import bedrock_process, read_ledger

FILE = "price-keeper.db"
WORST_CASES = 60  # in the quota
COPIES = 6


async def replayed_elsewhere(keeper: ManagedSidecar, name: str) -> tuple[int, str]:
    """As on another machine, where the lock on the original cannot be seen."""
    copy = keeper.folder / name
    await asyncio.to_thread(shutil.copytree, keeper.journal, copy, ignore=shutil.ignore_patterns("lock", "new-*"))
    done = await asyncio.to_thread(price_keeper, "replay", str(copy), folder=keeper.folder)
    return done.returncode, done.stderr


async def test_replay_of_copies_of_living_sidecars_passes_no_hard_budget(tmp_path: Path) -> None:
    quota, ledger = WORST_CASES * max_call_pico("premium"), tmp_path / "ledger"
    with bedrock_process("--ledger", str(ledger)) as bedrock:
        bedrock.plan(always={"latency_ms": 25, "frame_ms": 1})
        store = await SqliteStore(tmp_path / FILE, time.time).open()
        try:
            async with run_fleet(3, tmp_path, bedrock.url, {"path": str(tmp_path / FILE)}) as fleet:
                name = (await put_hard_budget(store, fleet, {"premium": quota}))["premium"]
                async with LoadClients(fleet, ["premium"], 1) as clients:
                    await wait_until(lambda: clients.answered >= WORST_CASES // 4)
                    for number in range(COPIES):
                        keeper = fleet.sidecars[number % 3]
                        code, output = await replayed_elsewhere(keeper, f"copy{number}")
                        assert (code, "--owner-is-dead" in output) == (1, True)
                    await wait_until_exhausted(fleet)
                await fleet.finish()
                stored = await read_stored_budget(store, name)
        finally:
            await store.close()
    billed = sum(price_by_hand(entry, "premium") for entry in read_ledger(ledger))
    print(f"billed {billed / quota:.1%} of the quota")
    assert 0 < billed <= stored.spent <= quota
    stored.check()
