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

from tests.support.commands import SECONDS, called
from tests.support.control import ADMIN_KEY, Impatient, Rig, rig
from tests.support.engines import Engines

T = TypeVar("T")


@dataclass
class Served:
    rig: Rig
    folder: Path
    loop: asyncio.AbstractEventLoop
    over: asyncio.Event

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """In the server's thread, and waited for."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)

    def call(self, *arguments: str, code: int = 0, stdin: str = "", **environment: str) -> CompletedProcess[str]:
        """A command, as the administrator has it."""
        known = {"PRICE_KEEPER_API_URL": self.rig.url, "PRICE_KEEPER_API_KEY": ADMIN_KEY} | environment
        told = called(*arguments, folder=self.folder, stdin=stdin, **known)
        assert (told.returncode, "Traceback" in told.stderr) == (code, False), told.stderr
        assert not any(key in told.stdout + told.stderr for key in (ADMIN_KEY, known["PRICE_KEEPER_API_KEY"]) if key)
        return told


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """At the real time, since commands go by it."""
    begun: SimpleQueue[Served | BaseException] = SimpleQueue()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(folder, begun)))
    thread.start()
    found = begun.get(timeout=SECONDS)
    if isinstance(found, BaseException):
        thread.join()
        raise found
    try:
        yield found
    finally:
        found.loop.call_soon_threadsafe(found.over.set)
        thread.join()


async def _serve(folder: Path, begun: SimpleQueue[Served | BaseException]) -> None:
    over = asyncio.Event()
    try:
        async with Engines({}).open("sqlite", folder) as store, rig(store, folder, Impatient(time.time())) as running:
            begun.put(Served(running, folder, asyncio.get_running_loop(), over))
            await over.wait()
    except BaseException as failure:
        begun.put(failure)
