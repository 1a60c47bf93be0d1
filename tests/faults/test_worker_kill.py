"""`kill -9` of workers under load: the books of all together hold every answer once, exactly, and nothing else."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.faults.test_recording_kill import _counted, _minus, _store_config
from tests.support.engines import Engines
from tests.support.sidecar_crashes import MODELS, SCOPE, CrashLoad, JournalContents, SegmentCopies, check_against_ledger
from tests.support.simulated import bedrock_process, read_ledger
from tests.support.workers import WorkerProcesses, build_setup, children, has_exited, run_workers, wait_until

WORKERS = 3
CLIENTS = 8
CALLS = 40  # between two deaths


@pytest.mark.parametrize("engine", ["sqlite", "ministack"])
def test_killed_workers_record_every_answer_once(engine: str, engines: Engines, tmp_path: Path) -> None:
    file = tmp_path / "ledger"
    with bedrock_process("--ledger", str(file)) as bedrock:
        lineup = build_setup(tmp_path, bedrock.url, WORKERS, store=_store_config(engine, engines))
        before = asyncio.run(_counted(lineup, engines))  # which makes what is not there yet
        with SegmentCopies(lineup.journal, tmp_path / "copies"), run_workers(lineup) as workers:
            with CrashLoad(lineup, CLIENTS, random.Random(20261119)) as load:
                for number in (1, 0, 2):
                    _killed_under_load(workers, load, number)
                _called(load)
                shown = workers.samples("journal_lost_calls_total")
            assert workers.running.stop() == 0
    books, counted = JournalContents.read(tmp_path / "copies"), asyncio.run(_counted(lineup, engines))
    check_against_ledger(books, load.complete_requests, {entry["request_id"]: entry for entry in read_ledger(file)})
    assert books.sum_by_label(SCOPE.key) == {label: _minus(counted[label], before[label]) for label in MODELS}
    assert sum(shown.values()) == len(books.estimated_receipts)  # each worker reports what it found in its own journal
    assert not any(path.stat().st_size > 200 for path in lineup.journal.rglob("*.seg"))
    assert workers.running.errors.count("was killed by signal 9); it is started again in 1 s") == WORKERS
    print(
        f"{len(load.complete_requests)} whole answers, "
        f"{len(books.estimated_receipts)} estimates, {len(books.seals)} segments"
    )


def _killed_under_load(workers: WorkerProcesses, load: CrashLoad, number: int) -> None:
    _called(load)
    alive = children(workers.running.process.pid)
    os.kill(workers.pids[number], signal.SIGKILL)
    wait_until(lambda: has_exited(workers.pids[number]))
    wait_until(lambda: set(children(workers.running.process.pid)) - set(alive))
    wait_until(lambda: _is_ready(workers))


def _called(load: CrashLoad) -> None:
    so_far = len(load.complete_requests)
    wait_until(lambda: len(load.complete_requests) > so_far + CALLS)


def _is_ready(workers: WorkerProcesses) -> bool:
    try:
        return workers.ready()[0] == 200
    except OSError:  # the first one has the control port
        return False
