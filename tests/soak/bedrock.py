"""The simulated Bedrock as a process of its own, whose books are short: one line for each call that ran.

python -m tests.soak.bedrock FILE
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import orjson
import uvloop
from bedrock_simulator import simulated_bedrock
from bedrock_simulator.ledger import Entry, Ledger

from tests.support.simulated import BedrockProcess

TOKENS = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_5m_tokens", "cache_write_1h_tokens")


class Ran(NamedTuple):
    """A call that used something: what it costs."""

    request: str
    invocation: str
    model: str
    arrived: float
    done: float
    is_whole: bool  # as far as Bedrock knows
    fault: str
    tokens: tuple[int, ...]


class CompactLedger(Ledger):
    """Nothing is kept in memory."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file_descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, entry: Entry) -> None:
        self.arrived += 1

    def finish(self, entry: Entry) -> None:
        if entry.usage is None:
            return
        tokens = tuple(getattr(entry.usage, name) for name in TOKENS)
        about = entry.request_id, entry.invocation_id, entry.model, entry.arrived, time.time()
        ran = Ran(*about, entry.is_whole, entry.fault, tokens)
        os.write(self._file_descriptor, orjson.dumps((*ran,)) + b"\n")


def read(file: Path) -> Iterator[Ran]:
    with file.open("rb") as lines:
        for line in lines:
            *rest, tokens = orjson.loads(line)
            yield Ran(*rest, tuple(tokens))


@contextmanager
def bedrock_with_books(file: Path) -> Iterator[BedrockProcess]:
    command = [sys.executable, "-m", "tests.soak.bedrock", str(file)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, "the simulated Bedrock ended at its start"
            yield BedrockProcess(url, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


async def _serve(file: Path) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with simulated_bedrock() as bedrock:
        bedrock.ledger = CompactLedger(file)
        print(bedrock.url, flush=True)
        await stopped.wait()


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1])))
