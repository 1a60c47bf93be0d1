"""`price-keeper` without the second that its imports take: a process that has them forks for each command.

Run as `python -m tests.support.preloaded_cli SOCKET`. A command is its arguments, folder and environment as JSON, sent
with the three files that it reads and writes; the answer is its exit code.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from price_keeper import cli
from price_keeper.cli.entry_point import main

ROOT = Path(__file__).parents[2]
SECONDS = 60
_MOST_BYTES = 1 << 20

_SCRIPT = """\
#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    asked = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environ": dict(os.environ)}}
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    sys.exit(int(server.recv(16) or 70))
"""


@contextmanager
def preloaded() -> Iterator[str]:
    """The text of a program that is `price-keeper`."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own paths may be too long for a socket
        path = Path(folder, "s")
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
        process = subprocess.Popen([sys.executable, "-m", "tests.support.preloaded_cli", str(path)], env=environ)
        try:
            until = time.monotonic() + SECONDS
            while not path.exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            yield _SCRIPT.format(python=sys.executable, path=str(path))
        finally:
            process.kill()
            process.wait()


def serve(path: str) -> None:
    for module in pkgutil.iter_modules(cli.__path__, f"{cli.__name__}."):
        import_module(module.name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path + ".new")
        listening.listen()
        os.rename(path + ".new", path)
        while True:
            caller, _ = listening.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run_command(caller)
            caller.close()


def _run_command(caller: socket.socket) -> None:
    request, files, _, _ = socket.recv_fds(caller, _MOST_BYTES, 3)
    for number, file in enumerate(files):
        os.dup2(file, number)
    code = 70
    try:
        command = json.loads(request)
        os.chdir(command["folder"])
        os.environ.clear()
        os.environ.update(command["environ"])
        code = _code(command["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        caller.send(str(code).encode())
        os._exit(code)


def _code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:  # argparse, of a mistake or after --help
        return int(str(ended.code))


if __name__ == "__main__":
    serve(sys.argv[1])
