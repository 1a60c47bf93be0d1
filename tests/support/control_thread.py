"""A control port in a thread of its own, for tests that wait for its answers as any program does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from subprocess import CompletedProcess
from typing import Any, TypeVar

from tests.support.commands import SECONDS, call_in_process
from tests.support.control_harness import ADMIN_KEY, ControlHarness, TickingClock, open_control_harness
from tests.support.engines import Engines

T = TypeVar("T")


@dataclass
class ControlThread:
    harness: ControlHarness
    folder: Path
    loop: asyncio.AbstractEventLoop
    stopped: asyncio.Event

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """In the server's thread, and waited for."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)

    def run_command(self, *arguments: str, code: int = 0, stdin: str = "", **environment: str) -> CompletedProcess[str]:
        """A command, as the administrator has it."""
        variables = {"PRICE_KEEPER_API_URL": self.harness.url, "PRICE_KEEPER_API_KEY": ADMIN_KEY} | environment
        process = call_in_process(*arguments, folder=self.folder, stdin=stdin, **variables)
        assert (process.returncode, "Traceback" in process.stderr) == (code, False), process.stderr
        assert not any(
            key in process.stdout + process.stderr for key in (ADMIN_KEY, variables["PRICE_KEEPER_API_KEY"]) if key
        )
        return process


@contextmanager
def control_in_thread(folder: Path) -> Iterator[ControlThread]:
    """At the real time, since commands go by it."""
    begun: SimpleQueue[ControlThread | BaseException] = SimpleQueue()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(folder, begun)))
    thread.start()
    started = begun.get(timeout=SECONDS)
    if isinstance(started, BaseException):
        thread.join()
        raise started
    try:
        yield started
    finally:
        started.loop.call_soon_threadsafe(started.stopped.set)
        thread.join()


async def _serve(folder: Path, begun: SimpleQueue[ControlThread | BaseException]) -> None:
    stopped = asyncio.Event()
    try:
        async with (
            Engines({}).open("sqlite", folder) as store,
            open_control_harness(store, folder, TickingClock(time.time())) as running,
        ):
            begun.put(ControlThread(running, folder, asyncio.get_running_loop(), stopped))
            await stopped.wait()
    except BaseException as failure:
        begun.put(failure)
