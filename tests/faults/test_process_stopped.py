"""SIGSTOP, and SIGCONT a while later: no process adopts a stopped sidecar's journal, others are served, all is exact.

A few seconds in `make test`, a minute by PRICE_KEEPER_STOPPED_SECONDS. Hard budgets: `test_hard_budget_kill.py`.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tests.support.commands import price_keeper
from tests.support.sidecar_crashes import SECRET, CrashLoad, SidecarSetup
from tests.support.sidecar_trials import (
    price_by_hand,
    read_counts_by_label,
    read_readiness,
    run_trial,
    wait_until,
    write_sections,
)
from tests.support.workers import has_exited, run_workers

SECONDS = float(os.environ.get("PRICE_KEEPER_STOPPED_SECONDS", "2"))


@contextmanager
def stopped(pid: int, store: Path | None = None) -> Iterator[None]:
    """With the file of a store, at a moment when it does not write there: otherwise its lock would block all others."""
    _stop(pid)
    while store is not None and not _is_free(store):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
        _stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


def _is_free(store: Path) -> bool:
    with closing(sqlite3.connect(store, timeout=0)) as file, suppress(sqlite3.OperationalError):
        file.execute("BEGIN IMMEDIATE")
        return True
    return False


def test_stopped_sidecar_keeps_its_journal_while_other_serves(tmp_path: Path) -> None:
    with run_trial(tmp_path) as trial:
        one, other = trial.add_sidecar("one"), trial.add_sidecar("other")
        with one.run_sidecar() as pausing, other.run_sidecar() as going:
            with CrashLoad(one, 3, random.Random(1)) as paused, CrashLoad(other, 3, random.Random(2)) as served:
                wait_until(lambda: len(paused.complete_requests) > 20 and len(served.complete_requests) > 20)
                with stopped(pausing.process.pid):
                    time.sleep(0.2)  # for what had been sent before
                    still, so_far = len(paused.complete_requests), len(served.complete_requests)
                    taken = price_keeper(
                        "replay", str(one.journal), folder=other.folder, PRICE_KEEPER_JWT_SECRET=SECRET
                    )
                    assert (taken.returncode, "another process writes to the journal" in taken.stderr) == (1, True)
                    time.sleep(SECONDS)
                    assert len(paused.complete_requests) == still
                    meanwhile = len(served.complete_requests) - so_far
                wait_until(lambda: len(paused.complete_requests) > still + 20)
                wait_until(lambda: set(read_readiness(pausing.control).values()) == {"ok"})
            assert (pausing.stop(), going.stop()) == (0, 0)
        everything = trial.read_used_requests()
    assert meanwhile > 20
    assert served.failed_calls == 0
    assert set(paused.complete_requests) | set(served.complete_requests) <= set(everything)
    assert read_counts_by_label(tmp_path / "price-keeper.db") == price_by_hand(everything)
    print(
        f"stopped for {SECONDS:g} s: {meanwhile} calls by the other, "
        f"{paused.failed_calls} of its own broken, nothing lost"
    )


def test_journal_of_stopped_worker_is_adopted_only_after_its_end(tmp_path: Path) -> None:
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar()
        lineup.options = ("--workers", "2")
        with run_workers(lineup) as workers:
            wait_until(
                lambda: workers.call() == (200, "premium") and all(workers.samples("recorded_requests_total").values())
            )
            with stopped(workers.pids[1], tmp_path / "price-keeper.db"):
                workers.running.process.kill()
                wait_until(lambda: has_exited(workers.pids[0]))  # which notices, and brings to its end what it has
                lineup.options = ()
                write_sections(lineup, listen={"data": "127.0.0.1:0"})  # the port is still the stopped one's
                _run_once(lineup)
                assert (lineup.journal / "worker-1").is_dir()
            wait_until(lambda: has_exited(workers.pids[1]))
        _run_once(lineup)
        assert not (lineup.journal / "worker-1").exists()
        assert read_counts_by_label(tmp_path / "price-keeper.db") == price_by_hand(trial.read_used_requests())


def _run_once(lineup: SidecarSetup) -> None:
    """A process that starts on a journal adopts at once what former workers left."""
    with lineup.run_sidecar() as running:
        assert running.stop() == 0
        assert "estimated" not in running.errors
