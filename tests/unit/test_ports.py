"""The ports that tests give to processes belong to them alone."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.support.ports import PORTS, free_port

ROOT = Path(__file__).parents[2]
TAKING = """
import os
from tests.support import ports
os.getpid = lambda: {pid}  # so that all begin at the same place
for _ in range(50):
    print(ports.free_port(), flush=True)
input()
"""


def test_port_is_given_out_once() -> None:
    given = [free_port() for _ in range(100)]
    assert len(set(given)) == 100
    assert set(given) <= set(PORTS)


def test_port_belongs_to_one_living_process() -> None:
    command = [sys.executable, "-c", TAKING.format(pid=7)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    given = [[next(iter(process.stdout)) for _ in range(50)] for process in processes if process.stdout]
    for process in processes:
        process.communicate("\n")
        assert process.returncode == 0
    assert len({port for each in given for port in each}) == 150


def test_port_in_use_is_skipped() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        taking = f"from tests.support import ports\nports._candidates = lambda: iter(({port},))\nports.free_port()"
        done = subprocess.run([sys.executable, "-c", taking], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "is free" in done.stderr
