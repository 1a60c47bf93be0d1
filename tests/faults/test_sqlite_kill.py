"""`kill -9` of processes that write to one SQLite file: what was acknowledged is there, and nothing is half done."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from time import sleep, time

from price_keeper.stores.contract import Query, iterate_rows
from price_keeper.stores.sqlite import SqliteStore

from tests.support.sqlite_hammer import COUNTER, PARTITION

KILLS = 50


class Hammer:
    """The writing process, and what it said was written."""

    def __init__(self, path: Path, name: str, folder: Path) -> None:
        self._said = folder / f"{name}.said"
        self._output = self._said.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.sqlite_hammer", str(path), name],
            stdout=self._output,
            stdin=subprocess.DEVNULL,
        )

    def wait_until_it_writes(self) -> None:
        while self._said.stat().st_size < 100:
            assert self._process.poll() is None
            sleep(0.002)

    def kill(self) -> list[str]:
        """The acknowledged writes. A last line cut short by the kill was acknowledged too, but is unreadable."""
        self._process.send_signal(signal.SIGKILL)
        assert self._process.wait() == -signal.SIGKILL
        self._output.close()
        whole_lines = self._said.read_bytes().decode().split("\n")[:-1]
        assert whole_lines[0] == "ready"
        return whole_lines[1:]

    def end(self) -> None:
        """Whatever happened to the test, no process keeps writing after it."""
        self._process.kill()
        self._process.wait()
        self._output.close()


async def _written(path: Path) -> tuple[set[str], int]:
    store = await SqliteStore(path, time).open()
    rows = {row.key.sk async for row in iterate_rows(store, Query("audit", PARTITION), page_size=5000)}
    counter = await store.get(COUNTER)
    await store.close()
    assert counter is not None
    total = counter["requests"]
    assert isinstance(total, int)
    return rows, total


def _is_sound(path: Path) -> bool:
    connection = sqlite3.connect(path)
    try:
        return bool(connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))
    finally:
        connection.close()


def test_every_acknowledged_write_survives_kill_9(tmp_path: Path) -> None:
    """Two writers share the file; the one that has run longer is killed, and another takes its place."""
    path, moment = tmp_path / "store.db", random.Random(20261118)
    acknowledged: set[str] = set()
    hammers = [Hammer(path, "first", tmp_path)]
    try:
        for kill in range(KILLS):
            hammers.append(Hammer(path, f"next{kill}", tmp_path))
            hammers[kill].wait_until_it_writes()
            sleep(moment.uniform(0, 0.1))  # where in its work the kill finds it
            acknowledged |= set(hammers[kill].kill())
            if kill % 10 == 9:
                _check(path, acknowledged)
        hammers[KILLS].wait_until_it_writes()
        acknowledged |= set(hammers[KILLS].kill())
    finally:
        for hammer in hammers:
            hammer.end()
    rows, total = asyncio.run(_written(path))
    assert acknowledged <= rows
    assert len(rows) == total
    assert len(acknowledged) > KILLS * 20
    assert _is_sound(path)


def _check(path: Path, acknowledged: set[str]) -> None:
    """While another process keeps writing, so only what was acknowledged before is certain."""
    rows, _ = asyncio.run(_written(path))
    assert acknowledged <= rows
