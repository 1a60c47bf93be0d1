"""`kill -9` at the moments that load alone seldom meets: while a sidecar starts and recovers, while it drains, and of
the supervisor of several workers. The books hold every answer once, and nothing else.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bedrock_simulator import DEFAULT_KEYS

from tests.support.afflicted import Trial, counted, tried, until
from tests.support.commands import SECONDS, surroundings
from tests.support.crashing import SCOPE, SECRET, Books, Copies, Lineup, Load, compare
from tests.support.workers import is_gone, serving

KILLS = int(os.environ.get("PRICE_KEEPER_KILLS", "6"))


def test_while_it_starts_and_recovers(tmp_path: Path) -> None:
    chance = random.Random(20261119)
    with tried(tmp_path) as trial:
        lineup = trial.lineup()
        trial.bedrock.plan(always={"latency_ms": 40})  # so that hardly a moment has no call under way
        with Load(lineup, 3, chance) as load, Copies(lineup.journal, tmp_path / "copies"):
            _killed_under_load(lineup, load)
            for number in range(KILLS // 2):
                _killed_while_starting(lineup, changes=1 + number % 4)
            _ends_in_order(lineup, load)
        books = _books(trial, load)
    assert books.estimated
    print(f"{KILLS // 2} kills of a start: {len(load.whole)} whole answers, {len(books.estimated)} estimates")


def test_while_it_drains(tmp_path: Path) -> None:
    chance = random.Random(20261120)
    with tried(tmp_path) as trial:
        lineup = trial.lineup()
        with Load(lineup, 3, chance) as load, Copies(lineup.journal, tmp_path / "copies"):
            for _ in range(KILLS // 3):
                with lineup.serving() as running:
                    _called(load)
                    running.process.send_signal(signal.SIGTERM)
                    time.sleep(chance.uniform(0, 0.15))
                    running.process.kill()
                    running.process.wait()
            _ends_in_order(lineup, load)
        _books(trial, load)


def test_of_the_supervisor_ends_its_workers_in_order(tmp_path: Path) -> None:
    with tried(tmp_path) as trial:
        lineup = trial.lineup()
        lineup.options = ("--workers", "2")
        with Load(lineup, 4, random.Random(20261121)) as load, Copies(lineup.journal, tmp_path / "copies"):
            with serving(lineup) as crew:
                _called(load)
                crew.running.process.kill()
                crew.running.process.wait()
                until(lambda: all(map(is_gone, crew.pids)))
                assert crew.running.errors.count("the supervisor of the workers is gone, so this one ends") == 2
            with serving(lineup) as crew:
                _called(load)
                load.__exit__()
                assert crew.running.stop() == 0
        books = _books(trial, load)
    assert not books.estimated  # none was cut: they drained
    assert not any(path.stat().st_size > 200 for path in lineup.journal.rglob("*.seg"))


def _killed_under_load(lineup: Lineup, load: Load) -> None:
    with lineup.serving() as running:
        _called(load)
        running.process.kill()
        running.process.wait()


def _killed_while_starting(lineup: Lineup, changes: int) -> None:
    """As soon as something in its journal has changed so often, or it serves."""
    with _started(lineup) as process:
        seen, left = _state(lineup.journal), changes
        until_when = time.monotonic() + SECONDS
        while left and time.monotonic() < until_when and "/ready" not in (lineup.folder / "start.out").read_text():
            now = _state(lineup.journal)
            if now != seen:
                seen, left = now, left - 1
        process.kill()


@contextmanager
def _started(lineup: Lineup) -> Iterator[subprocess.Popen[bytes]]:
    keys = {"AWS_ACCESS_KEY_ID": DEFAULT_KEYS.access_key, "AWS_SECRET_ACCESS_KEY": DEFAULT_KEYS.secret_key}
    with (lineup.folder / "start.out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "price_keeper.cli", "serve"],
            cwd=lineup.folder,
            env=surroundings({"PRICE_KEEPER_JWT_SECRET": SECRET, **keys}),
            stdout=out,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _state(journal: Path) -> dict[str, tuple[int, int]]:
    """By file: its size, and when it was last written to."""
    found = {}
    for entry in os.scandir(journal):
        try:
            told = entry.stat()
        except FileNotFoundError:
            continue
        found[entry.name] = (told.st_size, told.st_mtime_ns)
    return found


def _ends_in_order(lineup: Lineup, load: Load) -> None:
    with lineup.serving() as running:
        _called(load)
        load.__exit__()
        assert running.stop() == 0


def _called(load: Load) -> None:
    so_far = len(load.whole)
    until(lambda: len(load.whole) > so_far + 15)


def _books(trial: Trial, load: Load) -> Books:
    books = Books.read(trial.folder / "copies")
    compare(books, load.whole, trial.served())
    assert books.sums(SCOPE.key) == counted(trial.folder / "price-keeper.db")
    return books
