"""No more memory than RLIMIT_AS: large bodies and streams are refused, and the sidecar lives and keeps count.

No more than its cgroup allows: the kernel kills it, and the books are exact all the same.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from tests.support.cgroups import cgroup, why_unavailable
from tests.support.sidecar_crashes import (
    SCOPE,
    CrashLoad,
    JournalContents,
    SegmentCopies,
    SidecarSetup,
    check_against_ledger,
)
from tests.support.sidecar_trials import (
    call_once,
    price_by_hand,
    read_counts_by_label,
    read_readiness,
    run_trial,
    wait_until,
)
from tests.support.simulated import read_ledger
from tests.support.threads import ThreadGroup

SECONDS = float(os.environ.get("PRICE_KEEPER_AFFLICTED_SECONDS", "1"))
CALLERS = 12
DEATHS = 1 if SECONDS <= 1 else 5
NO_CGROUP = why_unavailable()
MEGABYTE = 1024 * 1024
NO_MEMORY, FAILED = (503, "ServiceUnavailableException"), (500, "InternalServerException")


class LargeCalls(ThreadGroup):
    """Callers with bodies of one size, half of them of streams. Their statuses are counted."""

    def __init__(self, lineup: SidecarSetup, size: int) -> None:
        super().__init__()
        self.answers: Counter[tuple[int, str]] = Counter()
        self._lineup = lineup
        text = "word " * (size // 5)
        self._body = json.dumps({"messages": [{"role": "user", "content": [{"text": text}]}]}).encode()
        self._threads = [Thread(target=self._call_on, args=(number,)) for number in range(CALLERS)]

    def _call_on(self, number: int) -> None:
        path = "/model/premium/converse-stream" if number % 2 else "/model/premium/converse"
        headers = {"Authorization": f"Bearer {self._lineup.token()}", "Content-Type": "application/json"}
        while not self._stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._lineup.port, timeout=30)
            try:
                connection.request("POST", path, self._body, headers)
                answer = connection.getresponse()
                answer.read()
                self.answers[answer.status, answer.headers.get("x-amzn-errortype", "")] += 1
            except (OSError, http.client.HTTPException):
                self.answers[0, ""] += 1
                self._stop.wait(0.05)
            finally:
                connection.close()


def test_low_memory_limit_refuses_large_bodies_and_survives(tmp_path: Path) -> None:
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar()
        with lineup.run_sidecar() as running, CrashLoad(lineup, 2, random.Random(20261119)) as load:
            wait_until(lambda: len(load.complete_requests) > 10)
            with _little_memory(running.process.pid, 4 * MEGABYTE), LargeCalls(lineup, 3_000_000) as large:
                time.sleep(SECONDS)
            assert running.process.poll() is None
            assert call_once(lineup, lineup.token())[0] == 200
            wait_until(lambda: set(read_readiness(running.control).values()) == {"ok"})
            load.__exit__()
            assert running.stop() == 0
        served, found = trial.read_used_requests(), read_counts_by_label(tmp_path / "price-keeper.db")
    assert set(load.complete_requests) <= set(served)
    assert found == price_by_hand(served)
    assert {answer for answer in large.answers if answer[0] not in (0, 200)} == {NO_MEMORY}
    print(f"4 MB for {CALLERS} bodies of 3 MB: {dict(large.answers)}, {len(load.complete_requests)} small calls whole")


def test_exhausted_memory_loses_no_recorded_call(tmp_path: Path) -> None:
    """Libraries of C may end the process then, which is no worse than a kill; it must not stand still."""
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar()
        with CrashLoad(lineup, 2, random.Random(20261119)) as load:
            with lineup.run_sidecar() as running:
                wait_until(lambda: len(load.complete_requests) > 10)
                before = len(load.complete_requests)
                with _little_memory(running.process.pid, 0), LargeCalls(lineup, 300_000) as large:
                    time.sleep(SECONDS)
                in_shortage = len(load.complete_requests) - before
                has_died = running.process.poll() is not None
                assert has_died or call_once(lineup, lineup.token())[0] == 200
                assert has_died or running.stop() == 0
            with lineup.run_sidecar() as running:
                so_far = len(load.complete_requests)
                wait_until(lambda: len(load.complete_requests) > so_far)
                load.__exit__()
                assert running.stop() == 0
        served, found = trial.read_used_requests(), read_counts_by_label(tmp_path / "price-keeper.db")
    assert set(load.complete_requests) <= set(served)
    requests, estimated = (sum(counts[each] for counts in found.values()) for each in (0, 1))
    assert requests - estimated <= len(served) <= requests  # what was under way at a death is among the estimated
    # Usage that cannot be parsed for want of memory is estimated, though the caller has the whole answer.
    assert requests - estimated >= len(load.complete_requests) - in_shortage
    assert estimated or found == price_by_hand(served)
    assert {answer for answer in large.answers if answer[0] not in (0, 200)} <= {NO_MEMORY, FAILED}
    print(f"none: {'died' if has_died else 'lived'}, {dict(large.answers)}, {estimated} of {requests} are estimated")


@pytest.mark.skipif(bool(NO_CGROUP), reason=NO_CGROUP)
def test_out_of_memory_kill_keeps_every_answered_call(tmp_path: Path) -> None:
    with run_trial(tmp_path) as trial, cgroup() as group:
        lineup = trial.add_sidecar()
        lineup.wrapper_command = group.wrapper_command
        with CrashLoad(lineup, 3, random.Random(20261119)) as load, SegmentCopies(lineup.journal, tmp_path / "copies"):
            for deaths in range(1, DEATHS + 1):
                with lineup.run_sidecar() as running:
                    so_far = len(load.complete_requests)
                    wait_until(lambda so_far=so_far: len(load.complete_requests) > so_far + 10)
                    group.limit(group.used_bytes + MEGABYTE)
                    with LargeCalls(lineup, 3_000_000):
                        assert running.process.wait(30) == -signal.SIGKILL
                    assert group.count_killed == deaths
                    group.limit(None)
            with lineup.run_sidecar() as running:
                so_far = len(load.complete_requests)
                wait_until(lambda: len(load.complete_requests) > so_far + 10)
                load.__exit__()
                assert running.stop() == 0
    books = JournalContents.read(tmp_path / "copies")
    check_against_ledger(
        books, load.complete_requests, {entry["request_id"]: entry for entry in read_ledger(trial.ledger)}
    )
    assert read_counts_by_label(tmp_path / "price-keeper.db") == books.sum_by_label(SCOPE.key)
    print(
        f"{DEATHS} ended by the kernel: {len(load.complete_requests)} "
        f"whole answers, {len(books.estimated_receipts)} estimates"
    )


@contextmanager
def _little_memory(pid: int, spare: int) -> Iterator[None]:
    """Its present size, plus this much."""
    limit, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + spare, hard))
    yield
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, hard))
