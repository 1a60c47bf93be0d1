"""No more memory than it has (RLIMIT_AS): large bodies and streams are refused, and the sidecar lives and keeps count.

No more than its cgroup may have: the kernel ends it, and the books are exact all the same.
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

from tests.support.afflicted import asked, by_hand, checks, counted, tried, until
from tests.support.cgroups import cgroup, missing
from tests.support.crashing import SCOPE, Books, Copies, Lineup, Load, compare
from tests.support.simulated import read_ledger
from tests.support.threads import Threads

SECONDS = float(os.environ.get("PRICE_KEEPER_AFFLICTED_SECONDS", "1"))
CALLERS = 12
DEATHS = 1 if SECONDS <= 1 else 5
NO_CGROUP = missing()
MEGABYTE = 1024 * 1024
NO_MEMORY, FAILED = (503, "ServiceUnavailableException"), (500, "InternalServerException")


class LargeCalls(Threads):
    """Callers with bodies of one size, half of them of streams. What they were answered is counted."""

    def __init__(self, lineup: Lineup, size: int) -> None:
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


def test_with_too_little_for_large_bodies_it_refuses_rather_than_dies(tmp_path: Path) -> None:
    with tried(tmp_path) as trial:
        lineup = trial.lineup()
        with lineup.serving() as running, Load(lineup, 2, random.Random(20261119)) as load:
            until(lambda: len(load.whole) > 10)
            with _little_memory(running.process.pid, 4 * MEGABYTE), LargeCalls(lineup, 3_000_000) as large:
                time.sleep(SECONDS)
            assert running.process.poll() is None
            assert asked(lineup, lineup.token())[0] == 200
            until(lambda: set(checks(running.control).values()) == {"ok"})
            load.__exit__()
            assert running.stop() == 0
        served, found = trial.served(), counted(tmp_path / "price-keeper.db")
    assert set(load.whole) <= set(served)
    assert found == by_hand(served)
    assert {answer for answer in large.answers if answer[0] not in (0, 200)} == {NO_MEMORY}
    print(f"4 MB for {CALLERS} bodies of 3 MB: {dict(large.answers)}, {len(load.whole)} small calls whole")


def test_with_none_at_all_whatever_becomes_of_it_counts(tmp_path: Path) -> None:
    """Libraries of C may end the process then, which is no worse than a kill; it must not stand still."""
    with tried(tmp_path) as trial:
        lineup = trial.lineup()
        with Load(lineup, 2, random.Random(20261119)) as load:
            with lineup.serving() as running:
                until(lambda: len(load.whole) > 10)
                with _little_memory(running.process.pid, 0), LargeCalls(lineup, 300_000) as large:
                    time.sleep(SECONDS)
                has_died = running.process.poll() is not None
                assert has_died or asked(lineup, lineup.token())[0] == 200
                assert has_died or running.stop() == 0
            with lineup.serving() as running:
                so_far = len(load.whole)
                until(lambda: len(load.whole) > so_far)
                load.__exit__()
                assert running.stop() == 0
        served, found = trial.served(), counted(tmp_path / "price-keeper.db")
    assert set(load.whole) <= set(served)
    requests, estimated = (sum(counts[each] for counts in found.values()) for each in (0, 1))
    assert requests - estimated <= len(served) <= requests  # what was under way at a death is among the estimated
    assert requests - estimated >= len(load.whole)
    assert estimated or found == by_hand(served)
    assert {answer for answer in large.answers if answer[0] not in (0, 200)} <= {NO_MEMORY, FAILED}
    print(f"none: {'died' if has_died else 'lived'}, {dict(large.answers)}, {estimated} of {requests} are estimated")


@pytest.mark.skipif(bool(NO_CGROUP), reason=NO_CGROUP)
def test_what_the_kernel_ends_for_its_memory_has_recorded_every_answer_once_and_exactly(tmp_path: Path) -> None:
    with tried(tmp_path) as trial, cgroup() as group:
        lineup = trial.lineup()
        lineup.around = group.around
        with Load(lineup, 3, random.Random(20261119)) as load, Copies(lineup.journal, tmp_path / "copies"):
            for deaths in range(1, DEATHS + 1):
                with lineup.serving() as running:
                    so_far = len(load.whole)
                    until(lambda so_far=so_far: len(load.whole) > so_far + 10)
                    group.limit(group.used + MEGABYTE)
                    with LargeCalls(lineup, 3_000_000):
                        assert running.process.wait(30) == -signal.SIGKILL
                    assert group.killed == deaths
                    group.limit(None)
            with lineup.serving() as running:
                so_far = len(load.whole)
                until(lambda: len(load.whole) > so_far + 10)
                load.__exit__()
                assert running.stop() == 0
    books = Books.read(tmp_path / "copies")
    compare(books, load.whole, {entry["request_id"]: entry for entry in read_ledger(trial.ledger)})
    assert counted(tmp_path / "price-keeper.db") == books.sums(SCOPE.key)
    print(f"{DEATHS} ended by the kernel: {len(load.whole)} whole answers, {len(books.estimated)} estimates")


@contextmanager
def _little_memory(pid: int, spare: int) -> Iterator[None]:
    """No more than what it has by now, and so much."""
    limit, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + spare, hard))
    yield
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, hard))
