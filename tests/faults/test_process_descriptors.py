"""Out of file descriptors: new connections are refused, calls in flight continue, nothing spins, floods or is lost."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from price_keeper.telemetry.incident import REPEAT_SECONDS

from tests.support.control_harness import ADMIN_KEY
from tests.support.sidecar_crashes import CrashLoad
from tests.support.sidecar_trials import (
    call_once,
    fetch,
    price_by_hand,
    read_counts_by_label,
    read_cpu_seconds,
    read_readiness,
    run_trial,
    wait_until,
)

SECONDS = float(os.environ.get("PRICE_KEEPER_AFFLICTED_SECONDS", "1"))
STRANGERS = 80  # connections
CALLS = 20
PROBES = 5
SPARE = 2
# Of lines: the org; lines and syncs of the journal, its mapping; flushes, notes, Bedrock, newcomers; and ends of four.
KINDS = 12


def test_exhausted_descriptors_refuse_new_connections_only(tmp_path: Path) -> None:
    """A few are still there when the limit falls; the strangers take them."""
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar()
        with (
            lineup.run_sidecar() as running,
            CrashLoad(lineup, 3, random.Random(20261119)) as load,
            ExitStack() as strangers,
        ):
            wait_until(lambda: len(load.complete_requests) > 20)
            pid, token, fell = running.process.pid, lineup.token(), time.monotonic()
            limit = _limited(pid, len(os.listdir(f"/proc/{pid}/fd")) + SPARE)
            for _ in range(STRANGERS):
                strangers.enter_context(closing(socket.create_connection(("127.0.0.1", lineup.port), 5)))
            began, worked, answered = time.monotonic(), read_cpu_seconds(pid), len(load.complete_requests)
            time.sleep(SECONDS)
            answers = Counter(call_once(lineup, token)[0] for _ in range(CALLS))
            turned_away = CALLS - answers[200]
            while_away, worked = len(load.complete_requests) - answered, read_cpu_seconds(pid) - worked
            assert worked < 0.8 * (time.monotonic() - began)  # the load alone takes a part; a loop that spins, all
            assert set(answers) <= {0, 200, 503}
            assert turned_away
            assert while_away > 10  # who is connected is served
            strangers.close()
            _limited(pid, limit)
            wait_until(lambda: set(read_readiness(running.control).values()) == {"ok"})
            answers += Counter(call_once(lineup, token)[0] for _ in range(CALLS))
            assert answers[200] >= CALLS
            load.__exit__()
            assert running.stop() == 0
            # Which parts are short of a descriptor is chance, but none of them floods the log.
            complaints = Counter(line.split(" ", 1)[1] for line in running.errors.splitlines())
            assert max(complaints.values()) <= 1 + (time.monotonic() - fell) // REPEAT_SECONDS, running.errors
            assert len(complaints) <= KINDS, running.errors
        served = trial.read_used_requests()
    assert set(load.complete_requests) <= set(served)
    assert len(served) == len(load.complete_requests) + answers[200]  # no paid call lost its answer
    assert read_counts_by_label(tmp_path / "price-keeper.db") == price_by_hand(served)
    print(f"{while_away} calls answered during that time, {turned_away} of {CALLS} new connections refused")


def _limited(pid: int, soft: int) -> int:
    """The limit so far."""
    before, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    return before


@pytest.mark.parametrize("descriptors", [64, 96])
def test_low_descriptor_limit_leaves_room_for_probes(tmp_path: Path, descriptors: int) -> None:
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar()
        lineup.wrapper_command = ("prlimit", f"--nofile={descriptors}")
        with lineup.run_sidecar() as running:
            token, control = lineup.token(), int(running.control.rpartition(":")[2])
            with _strangers(lineup.port):
                assert fetch(running.control, "/ready")[0] == 200
            wait_until(lambda: call_once(lineup, token)[0] == 200)
            with _strangers(control):
                for path in ("/health", "/ready", "/metrics"):
                    assert [fetch(running.control, path)[0] for _ in range(PROBES)] == [200] * PROBES
                assert [call_once(lineup, token)[0] for _ in range(CALLS)] == [200] * CALLS
            wait_until(lambda: fetch(running.control, "/ready")[0] == 200)
            assert running.stop() == 0
            assert "Too many open files" not in running.errors
        served = trial.read_used_requests()
    assert read_counts_by_label(tmp_path / "price-keeper.db") == price_by_hand(served)


def test_low_descriptor_limit_leaves_room_beside_status_pages(tmp_path: Path) -> None:
    """All that is on this machine, or behind a proxy on it, has one address."""
    page = f"GET /status/events HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {ADMIN_KEY}\r\n\r\n".encode()
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar()
        lineup.wrapper_command = ("prlimit", "--nofile=64")
        lineup.environment = {"PRICE_KEEPER_API_KEY": ADMIN_KEY}
        with lineup.run_sidecar() as running, ExitStack() as pages:
            control = int(running.control.rpartition(":")[2])
            answers = Counter[bytes]()
            for _ in range(STRANGERS):
                opened = pages.enter_context(closing(socket.create_connection(("127.0.0.1", control), 5)))
                opened.sendall(page)
                answers[opened.recv(12)] += 1
            assert set(answers) == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
            assert [fetch(running.control, "/health")[0] for _ in range(PROBES)] == [200] * PROBES
            pages.close()
            assert running.stop() == 0


@contextmanager
def _strangers(port: int) -> Iterator[None]:
    with ExitStack() as strangers:
        for _ in range(2 * STRANGERS):
            strangers.enter_context(closing(socket.create_connection(("127.0.0.1", port), 5)))
        yield
