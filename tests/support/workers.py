"""Several real workers on one data port, in a test's hands: their processes and their reports."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from tests.support.commands import SECONDS, Sidecar
from tests.support.sidecar_crashes import SidecarSetup

_APART = "/tmp/workers-"
_STARTED = 17  # in a process's `stat`, behind its state and its parent
TURN = json.dumps({"messages": [{"role": "user", "content": [{"text": "hello"}]}]}).encode()


def wait_until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """The oldest first, as they are started in order of their numbers. Ids start again when they are used up."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, *arguments = path.read_text().rpartition(")")[2].split()
            if int(parent) == pid and state != "Z":
                pids.append((int(arguments[_STARTED]), int(path.parent.name)))
    return [child for _, child in sorted(pids)]


def has_exited(pid: int) -> bool:
    return _state(pid) in ("", "Z")


def _state(pid: int) -> str:
    """The letter that the kernel has for it; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def kill_with_workers(supervisor: int) -> None:
    """Kill all of them as a power failure does. Returns when all have exited.

    Workers drain and flush once their supervisor exits, and a supervisor starts dead workers again. So the supervisor
    is stopped first and killed last: neither happens, however long this takes.
    """
    os.kill(supervisor, signal.SIGSTOP)
    wait_until(lambda: _state(supervisor) == "T")
    pids = [*children(supervisor), supervisor]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(map(has_exited, pids)))


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


@dataclass
class WorkerProcesses:
    setup: SidecarSetup
    running: Sidecar
    token: str
    pids: list[int] = field(default_factory=list)
    turn: bytes = TURN  # what is asked

    def metrics(self) -> str:
        return get(f"{self.running.control}/metrics")[1]

    def ready(self) -> tuple[int, dict[str, str]]:
        status, body = get(f"{self.running.control}/ready")
        return status, json.loads(body)["checks"]

    def samples(self, name: str) -> dict[str, float]:
        """By worker; several of one worker are added up."""
        found: dict[str, float] = {}
        for labels, value in re.findall(rf"^price_keeper_{name}{{(.*)}} (\S+)$", self.metrics(), re.MULTILINE):
            worker = re.findall(r'worker="(\d+)"', labels)[0]
            found[worker] = found.get(worker, 0) + float(value)
        return found

    def request(self, path: str = "converse", label: str = "premium") -> http.client.HTTPConnection:
        """On a connection of its own, with its answer to be had."""
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(self.running.data).port, timeout=SECONDS)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        connection.request("POST", f"/model/{label}/{path}", self.turn, headers)
        return connection

    def call(self) -> tuple[int, str]:
        """Its status, and the label that served it."""
        connection = self.request()
        try:
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.headers.get("x-price-keeper-label", "")
        finally:
            connection.close()

    def kill_all(self) -> None:
        kill_with_workers(self.running.process.pid)
        self.running.process.wait()


def build_setup(folder: Path, bedrock: str, workers: int, **sections: Any) -> SidecarSetup:
    """On SQLite unless told otherwise. `sections` override those of the configuration."""
    store = sections.get("store", {"path": "price-keeper.db"})
    setup = SidecarSetup(folder, bedrock, store, options=("--workers", str(workers)))
    setup.write_config(**sections)
    return setup


@contextmanager
def short_socket_folder() -> Iterator[Path]:
    """Where commands have such folders; with a short name, as a socket's must be. A surrounding one contains it."""
    around = os.environ.get("TMPDIR", "")
    if around.startswith(_APART):
        yield Path(around)
        return
    with TemporaryDirectory(prefix=_APART, ignore_cleanup_errors=True) as folder, patch.dict(os.environ, TMPDIR=folder):
        yield Path(folder)


@contextmanager
def run_workers(setup: SidecarSetup) -> Iterator[WorkerProcesses]:
    """Nothing of it is left behind, whatever happens: neither a process nor the folder of its sockets."""
    with short_socket_folder(), setup.run_sidecar() as running:
        pid = running.process.pid
        workers = WorkerProcesses(setup, running, setup.token(), children(pid))
        try:
            yield workers
        finally:
            for worker_pid in {*children(pid), *workers.pids}:
                if not has_exited(worker_pid):
                    with suppress(ProcessLookupError):
                        os.kill(worker_pid, signal.SIGKILL)
