"""`price-keeper` and the simulator without the second that their imports take: a process that has them forks for each.

The result is a process as any other: it has an id of its own, exits as an interpreter does, and its exit code or signal
is reported. Where an environment or a wrapper must be there before the interpreter starts, `commands` starts a new one.

Run as `python -m tests.support.preloaded_cli SOCKET`. A request is a module, its arguments, folder and environment as
JSON, sent with the three files that it reads and writes; the answer is its process id and, when it has ended, its
exit code. The process ends with the one that started it.
"""

from __future__ import annotations

import atexit
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Before what the virtual environment has installed, which may be another checkout.
PYTHON_PATH = f"{ROOT / 'proxy'}{os.pathsep}{ROOT}"
CLI = "price_keeper.cli"
SIMULATOR = "bedrock_simulator"
SECONDS = 300  # a guard against hanging; it takes one
_MOST_BYTES = 1 << 20
_FAILED = 70

_SCRIPT = """\
#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    asked = {{"module": {module!r}, "arguments": sys.argv[1:], "folder": os.getcwd(), "environ": dict(os.environ)}}
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    pid, *code = server.makefile().read().split()
    sys.exit(int(code[0]) if code else {failed})
"""


class PreloadedProcess:
    """What a test uses of `subprocess.Popen`, for a process that another one forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._answers = connection.makefile("r")
        self._connection = connection
        self._lock = threading.Lock()
        self.returncode: int | None = None
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
                self._read_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                if not select.select([self._connection], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
                self._read_code()
        assert self.returncode is not None
        return self.returncode

    def _read_code(self) -> None:
        self.returncode = int(self._answers.readline())
        self._answers.close()
        self._connection.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def preloaded() -> Iterator[str]:
    """The text of a program that is `price-keeper`."""
    with _run_server() as path:
        yield _SCRIPT.format(python=sys.executable, path=path, module=CLI, failed=_FAILED)


def start_preloaded(
    module: str, arguments: Sequence[str], *, folder: Path, environ: dict[str, str], files: Sequence[int]
) -> PreloadedProcess:
    """`python -m module arguments`, forked. `files` are its standard input, output and error."""
    request = {"module": module, "arguments": arguments, "folder": str(folder), "environ": environ}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_own_server())
    socket.send_fds(connection, [json.dumps(request).encode()], [*files])
    return PreloadedProcess(connection)


@cache
def _own_server() -> str:
    """The socket of one that lives as long as this process."""
    with ExitStack() as stack:
        path = stack.enter_context(_run_server())
        atexit.register(stack.pop_all().close)
    return path


@contextmanager
def _run_server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own paths may be too long for a socket
        path = Path(folder, "s")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.preloaded_cli", str(path)],
            cwd=ROOT,
            env=dict(os.environ) | {"PYTHONPATH": PYTHON_PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        try:
            until = time.monotonic() + SECONDS
            while not path.exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            yield str(path)
        finally:
            process.kill()
            process.communicate()


def _serve(path: str) -> None:
    for package in (CLI, SIMULATOR):
        for module in pkgutil.iter_modules(import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                import_module(module.name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path + ".new")
        listening.listen()
        os.rename(path + ".new", path)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            caller, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _start(caller)
            caller.close()


def _start(caller: socket.socket) -> None:
    """In one process the command; in another, which waits for it, the answers to the caller."""
    request, files, _, _ = socket.recv_fds(caller, _MOST_BYTES, 3)
    pid = os.fork()
    if pid:
        try:
            for file in files:  # a pipe of the caller's ends when the command closes it
                os.close(file)
            caller.send(f"{pid}\n".encode())
            caller.send(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
        finally:
            os._exit(0)
    caller.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    command = json.loads(request)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environ"])
    sys.argv[1:] = command["arguments"]
    tempfile.tempdir = None  # which may be another one by its environment
    runpy.run_module(command["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _serve(sys.argv[1])
