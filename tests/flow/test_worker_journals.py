"""What several workers leave when all are killed, and who brings it to the store."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from price_keeper.ledger.aggregator import sum_shards
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.stores.sqlite import SqliteStore

from tests.support.commands import price_keeper
from tests.support.sidecar_crashes import SCOPE, SidecarSetup
from tests.support.simulated import BedrockProcess
from tests.support.workers import build_setup, run_workers, wait_until

CALLS = 60
SLOW = {"dir": "journal", "flush_interval_secs": 300, "flush_interval_max_secs": 300}  # all of it waits in the journals


def requests_in(lineup: SidecarSetup) -> int:
    async def read() -> int:
        store = await SqliteStore(lineup.folder / "price-keeper.db", time.time).open()
        try:
            day = time.strftime("DAY#%Y%m%d", time.gmtime())
            return int((await sum_shards(store, Counter(SCOPE.key, "premium", day, 8)))["requests"])
        finally:
            await store.close()

    return asyncio.run(read())


def folders(lineup: SidecarSetup) -> list[str]:
    return sorted(path.name for path in lineup.journal.glob("worker-*"))


def _left_by_three(folder: Path, bedrock: str) -> SidecarSetup:
    lineup = build_setup(folder, bedrock, 3, journal=SLOW)
    with run_workers(lineup) as workers:
        assert {workers.call()[0] for _ in range(CALLS)} == {200}
        assert all(workers.samples("unflushed_usd").values())
        workers.kill_all()
    assert requests_in(lineup) == 0
    assert folders(lineup) == ["worker-1", "worker-2"]
    return lineup


def test_one_process_flushes_journals_of_three(tmp_path: Path, bedrock: BedrockProcess) -> None:
    lineup = _left_by_three(tmp_path, bedrock.url)
    found = price_keeper("doctor", folder=tmp_path, PRICE_KEEPER_JWT_SECRET="a secret of this test, long enough")
    assert "segments that wait to be brought to the store: 3" in found.stdout
    build_setup(tmp_path, bedrock.url, 1, journal=SLOW | {"flush_interval_secs": 0.1, "flush_interval_max_secs": 0.1})
    lineup.options = ()
    with run_workers(lineup) as workers:
        wait_until(lambda: folders(lineup) == [])
        assert requests_in(lineup) == CALLS
        assert workers.running.stop() == 0
    assert requests_in(lineup) == CALLS


def test_store_outage_keeps_orphaned_journals_as_unflushed(tmp_path: Path, bedrock: BedrockProcess) -> None:
    lineup = _left_by_three(tmp_path, bedrock.url)
    build_setup(tmp_path, bedrock.url, 1, journal=SLOW | {"flush_interval_secs": 0.1, "flush_interval_max_secs": 0.1})
    lineup.options = ()
    store = sqlite3.connect(lineup.folder / "price-keeper.db", isolation_level=None)
    # Refuses every flush from the first one on. A lock on the file would keep the process from starting.
    store.execute("""CREATE TRIGGER away BEFORE INSERT ON "request-dedup" BEGIN SELECT RAISE(ABORT, 'away'); END""")
    with closing(store), run_workers(lineup) as workers:
        wait_until(lambda: "spend cannot be flushed, and waits in the journal" in workers.running.errors)
        assert "price_keeper_journal_segments_waiting 3\n" in workers.metrics()
        assert folders(lineup) == ["worker-1", "worker-2"]
        assert "price_keeper_unflushed_usd 0\n" not in workers.metrics()
        store.execute("DROP TRIGGER away")
        wait_until(lambda: folders(lineup) == [])
        assert requests_in(lineup) == CALLS
        assert "price_keeper_unflushed_usd 0\n" in workers.metrics()
        assert workers.running.stop() == 0


def test_fewer_workers_keep_their_own_journals(tmp_path: Path, bedrock: BedrockProcess) -> None:
    lineup = _left_by_three(tmp_path, bedrock.url)
    build_setup(tmp_path, bedrock.url, 2, journal=SLOW | {"flush_interval_secs": 0.1, "flush_interval_max_secs": 0.1})
    lineup.options = ("--workers", "2")
    with run_workers(lineup) as workers:
        wait_until(lambda: requests_in(lineup) == CALLS and folders(lineup) == ["worker-1"])
        assert workers.running.stop() == 0
    assert requests_in(lineup) == CALLS


def test_replay_finds_journals_of_all_workers(tmp_path: Path, bedrock: BedrockProcess) -> None:
    lineup = _left_by_three(tmp_path, bedrock.url)
    for words in (f"{CALLS} calls of 0.0", "0 calls of 0.0"):
        done = price_keeper("replay", "journal", folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert words in done.stdout
        assert requests_in(lineup) == CALLS
    with run_workers(lineup):
        refused = price_keeper("replay", "journal", folder=tmp_path)
    assert (refused.returncode, "another process writes to the journal" in refused.stderr) == (1, True)
