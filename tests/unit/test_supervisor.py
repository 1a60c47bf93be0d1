"""The supervisor alone, with workers that do as a test wishes; it runs in a process of its own, as it forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from price_keeper.workers.supervisor import Supervisor
from price_keeper.workers.worker_slot import WorkerSlot

from tests.support.commands import ROOT, SECONDS
from tests.support.workers import children, has_exited, wait_until

_BEGIN = """
import os, signal, sys, time
from price_keeper.errors import ConfigError, PriceKeeperError
from price_keeper.workers import supervisor
from price_keeper.workers.worker_slot import WorkerSlot
supervisor.STOP_SECONDS = 2.0
deaths = sys.argv[1]
def work(place, tell):
{work}
def reread():
    with open(deaths + "/read", "a") as file:
        file.write("x")
    return not os.path.exists(deaths + "/unreadable")
def on_started(told):
    print("all have started", told, flush=True)
try:
    sys.exit(supervisor.Supervisor(WorkerSlot(0, 3), work, on_started, reread).run())
except PriceKeeperError as failure:
    print(type(failure).__name__, failure, flush=True)
    sys.exit(3)
"""
_WAITS = """
    tell({"worker": place.number})
    signal.sigwait([signal.SIGTERM])
"""
_HELD = """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
"""


@contextmanager
def supervised(work: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    code = _BEGIN.replace("{work}", _HELD + work)
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            for pid in (*children(process.pid), process.pid):
                if not has_exited(pid):
                    os.kill(pid, signal.SIGKILL)


_HEEDS = """
    if place.number == 1 and not os.path.exists(deaths + "/may-start"):
        while not os.path.exists(deaths + "/may-start"):
            time.sleep(0.01)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    tell({"worker": place.number})
    while (came := signal.sigwait([signal.SIGTERM, signal.SIGHUP])) == signal.SIGHUP:
        with open(f"{deaths}/heard-{place.number}", "a") as file:
            file.write("x")
"""


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_workers_start_and_stop_together(tmp_path: Path) -> None:
    with supervised(_WAITS, tmp_path) as process:
        assert line(process) == "all have started {'worker': 0}"
        pids = children(process.pid)
        assert len(pids) == 3
        process.terminate()
        assert process.wait(SECONDS) == 0
        assert all(map(has_exited, pids))
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ('raise ConfigError(["a: is wrong", "b: too"])', "ConfigError a: is wrong"),
        ('raise PriceKeeperError("it cannot be")', "PriceKeeperError it cannot be"),
        ('raise OSError(5, "broken")', "PriceKeeperError [Errno 5] broken"),
        ("os._exit(7)", "PriceKeeperError worker 1 did not start: it ended with 7"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "PriceKeeperError worker 1 did not start: it was killed by signal 9",
        ),
    ],
)
def test_worker_failing_to_start_stops_all_with_its_reason(tmp_path: Path, ending: str, message: str) -> None:
    with supervised(f"    if place.number == 1:\n        {ending}\n{_WAITS}", tmp_path) as process:
        assert line(process) == message
        assert process.wait(SECONDS) == 3
        assert children(process.pid) == []
    assert (tmp_path / "log").read_text() == ""


def test_crash_during_restart_is_logged_with_reason(tmp_path: Path) -> None:
    """The second start of worker 2 fails; there is no third, as all workers stop then."""
    work = """
    made = os.path.join(deaths, "made")
    if place.number == 2:
        if os.path.exists(made):
            raise PriceKeeperError("not this time")
        open(made, "w").close()
"""
    with supervised(work + _WAITS, tmp_path) as process:
        line(process)
        last = children(process.pid)[-1]
        os.kill(last, signal.SIGKILL)
        log = tmp_path / "log"
        wait_until(lambda: "worker 2 died (it was killed by signal 9); it is started again in 1 s" in log.read_text())
        wait_until(lambda: "worker 2 died (not this time); it is started again in 2 s" in log.read_text())
        process.terminate()
        assert process.wait(SECONDS) == 0
    assert "started again in 4 s" not in log.read_text()
    assert "Traceback" not in log.read_text()


def test_worker_that_does_not_stop_is_killed_and_logged(tmp_path: Path) -> None:
    with supervised(f"    tell({{}})\n    time.sleep({SECONDS})\n" + _WAITS, tmp_path) as process:
        line(process)
        pids = children(process.pid)
        process.terminate()
        assert process.wait(SECONDS) == 1
        assert all(map(has_exited, pids))
    killed = "worker 0, worker 1, worker 2"
    assert (tmp_path / "log").read_text() == f"workers did not end within 2 s and are killed: {killed}\n"


def test_bug_in_worker_is_shown_and_stops_all(tmp_path: Path) -> None:
    with supervised(f"    if place.number == 1:\n        1 / 0\n{_WAITS}", tmp_path) as process:
        assert line(process) == "PriceKeeperError worker 1 did not start: it ended with 1"
        assert process.wait(SECONDS) == 3
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()


def test_worker_failing_at_shutdown_is_reported(tmp_path: Path) -> None:
    work = f"{_WAITS}    if place.number == 1:\n        raise PriceKeeperError('the journal is broken')\n"
    with supervised(work, tmp_path) as process:
        line(process)
        process.terminate()
        assert process.wait(SECONDS) == 1
    assert (tmp_path / "log").read_text() == (
        "worker 1 ends: the journal is broken; unless all are stopping, it is started again\n"
    )


def test_stop_during_start_is_no_failure(tmp_path: Path) -> None:
    with supervised("    signal.sigwait([signal.SIGTERM])\n", tmp_path) as process:
        wait_until(lambda: len(children(process.pid)) == 3)
        process.terminate()
        assert process.wait(SECONDS) == 0


def test_worker_is_not_restarted_while_stopping() -> None:
    alone = Supervisor(WorkerSlot(0, 2), lambda *_: None, lambda _: None)
    alone._workers[1].schedule_restart(0.0)
    alone._handle_signal(signal.SIGTERM)
    assert [worker.restart_at for worker in alone._workers] == [None, None]
    assert alone._has_ended


def test_sighup_reaches_workers_that_still_start(tmp_path: Path) -> None:
    def heard() -> list[int]:
        files = [tmp_path / f"heard-{number}" for number in range(3)]
        return [file.stat().st_size if file.exists() else 0 for file in files]

    with supervised(_HEEDS, tmp_path) as process:
        wait_until(lambda: len(children(process.pid)) == 3)
        for each in (process.pid, children(process.pid)[1]):
            os.kill(each, signal.SIGHUP)
        wait_until(lambda: heard()[::2] == [1, 1])
        assert heard()[1] == 0
        (tmp_path / "may-start").touch()
        assert line(process) == "all have started {'worker': 0}"
        wait_until(lambda: heard() == [1, 1, 1])
        (tmp_path / "unreadable").touch()
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: (tmp_path / "read").stat().st_size == 2)
        process.terminate()
        process.send_signal(signal.SIGHUP)
        assert process.wait(SECONDS) == 0
        assert heard() == [1, 1, 1]
