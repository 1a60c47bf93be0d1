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

from tests.support.commands import SECONDS, build_environment
from tests.support.sidecar_crashes import (
    SCOPE,
    SECRET,
    CrashLoad,
    JournalContents,
    SegmentCopies,
    SidecarSetup,
    check_against_ledger,
)
from tests.support.sidecar_trials import FaultTrial, read_counts_by_label, run_trial, wait_until
from tests.support.simulated import read_ledger
from tests.support.workers import has_exited, run_workers

KILLS = int(os.environ.get("PRICE_KEEPER_KILLS", "6"))


def test_kill_during_start_and_recovery_counts_once(tmp_path: Path) -> None:
    chance = random.Random(20261119)
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar()
        trial.bedrock.plan(always={"latency_ms": 300})
        with CrashLoad(lineup, 3, chance) as load, SegmentCopies(lineup.journal, tmp_path / "copies"):
            _killed_during_a_call(trial, lineup, load)
            for number in range(KILLS // 2):
                _killed_while_starting(lineup, changes=1 + number % 4)
            _ends_in_order(lineup, load)
        books = _books(trial, load)
    assert books.estimated_receipts
    print(
        f"{KILLS // 2} kills of a start: {len(load.complete_requests)} "
        f"whole answers, {len(books.estimated_receipts)} estimates"
    )


def test_kill_during_drain_counts_once(tmp_path: Path) -> None:
    chance = random.Random(20261120)
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar()
        with CrashLoad(lineup, 3, chance) as load, SegmentCopies(lineup.journal, tmp_path / "copies"):
            for _ in range(KILLS // 3):
                with lineup.run_sidecar() as running:
                    _called(load)
                    running.process.send_signal(signal.SIGTERM)
                    time.sleep(chance.uniform(0, 0.15))
                    running.process.kill()
                    running.process.wait()
            _ends_in_order(lineup, load)
        _books(trial, load)


def test_killed_supervisor_lets_workers_drain(tmp_path: Path) -> None:
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar()
        lineup.options = ("--workers", "2")
        with CrashLoad(lineup, 4, random.Random(20261121)) as load, SegmentCopies(lineup.journal, tmp_path / "copies"):
            with run_workers(lineup) as workers:
                _called(load)
                workers.running.process.kill()
                workers.running.process.wait()
                wait_until(lambda: all(map(has_exited, workers.pids)))
                assert workers.running.errors.count("the supervisor has died; this worker drains and ends") == 2
            with run_workers(lineup) as workers:
                _called(load)
                load.__exit__()
                assert workers.running.stop() == 0
        books = _books(trial, load)
    assert not books.estimated_receipts  # none was cut: they drained
    assert not any(path.stat().st_size > 200 for path in lineup.journal.rglob("*.seg"))


def _killed_during_a_call(trial: FaultTrial, lineup: SidecarSetup, load: CrashLoad) -> None:
    """Bedrock is asked while the sidecar is stopped: what it has not answered then, the sidecar never gets."""

    def is_stopped_during_a_call() -> bool:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "\nState:\tT" in Path(f"/proc/{process.pid}/status").read_text())
        if not all(entry["is_done"] for entry in read_ledger(trial.ledger)):
            return True
        process.send_signal(signal.SIGCONT)
        return False

    with lineup.run_sidecar() as running:
        process = running.process
        _called(load)
        wait_until(is_stopped_during_a_call)
        process.kill()
        process.wait()


def _killed_while_starting(lineup: SidecarSetup, changes: int) -> None:
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
def _started(lineup: SidecarSetup) -> Iterator[subprocess.Popen[bytes]]:
    keys = {"AWS_ACCESS_KEY_ID": DEFAULT_KEYS.access_key, "AWS_SECRET_ACCESS_KEY": DEFAULT_KEYS.secret_key}
    with (lineup.folder / "start.out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "price_keeper.cli", "serve"],
            cwd=lineup.folder,
            env=build_environment({"PRICE_KEEPER_JWT_SECRET": SECRET, **keys}),
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
            status = entry.stat()
        except FileNotFoundError:
            continue
        found[entry.name] = (status.st_size, status.st_mtime_ns)
    return found


def _ends_in_order(lineup: SidecarSetup, load: CrashLoad) -> None:
    with lineup.run_sidecar() as running:
        _called(load)
        load.__exit__()
        assert running.stop() == 0


def _called(load: CrashLoad) -> None:
    so_far = len(load.complete_requests)
    wait_until(lambda: len(load.complete_requests) > so_far + 15)


def _books(trial: FaultTrial, load: CrashLoad) -> JournalContents:
    books = JournalContents.read(trial.folder / "copies")
    check_against_ledger(books, load.complete_requests, trial.read_used_requests())
    assert books.sum_by_label(SCOPE.key) == read_counts_by_label(trial.folder / "price-keeper.db")
    return books
