"""Real DynamoDB-compatible servers, each a process of its own on 127.0.0.1."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_port

STARTING_SECONDS = 60

# Both engines count with Python's decimals, 28 digits unless told otherwise; DynamoDB keeps 38. The wider context is
# set before any thread is started, and new threads copy it.
_WIDE = "import decimal, runpy, sys; decimal.DefaultContext.prec = 38; decimal.setcontext(decimal.DefaultContext);"

# ministack deletes expired items once a minute by the real clock, which runs past the days of simulated clocks: rows
# would vanish while a test uses them. DynamoDB takes hours or days for that, and readers check the expiry themselves.
_NO_REAPER = (
    "import threading; start = threading.Thread.start;"
    " threading.Thread.start = lambda each: None if each.name == 'dynamodb-ttl-reaper' else start(each);"
)


@contextmanager
def moto_server(folder: Path) -> Iterator[str]:
    port = free_port()
    code = f"{_WIDE} from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with _process([sys.executable, "-c", code], {}, folder / "moto.log", port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def ministack_server(folder: Path) -> Iterator[str]:
    port = free_port()
    code = f"{_WIDE} {_NO_REAPER} sys.argv = ['ministack']; runpy.run_module('ministack', run_name='__main__')"
    settings = {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "SERVICES": "dynamodb,cloudformation",
        "LOG_LEVEL": "WARNING",
        "TMPDIR": str(folder),
    }
    with _process([sys.executable, "-c", code], settings, folder / "ministack.log", port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _process(command: list[str], settings: dict[str, str], log: Path, port: int) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | settings, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            _wait_for_answer(process, port, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_answer(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at its start:\n{log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2)
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"the server did not answer in {STARTING_SECONDS} s:\n{log.read_text()[-2000:]}")
