"""Botocore's chain of AWS credential providers, run in a thread and bounded in time.

A provider reads files, calls services or runs a command, and any of these may hang. A chain that does not answer is
abandoned and replaced, at most `MAX_ABANDONED` times at once. The store uses this module too, so it imports nothing
else of this package.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from signal import SIGKILL
from typing import Any, TypeAlias

from price_keeper.tasks import DaemonThreadPool

RENEW_INTERVAL_SECONDS = 60.0  # botocore itself renews a quarter of an hour before expiry, when asked
ANSWER_TIMEOUT_SECONDS = 5.0  # for an answer; one that comes later is taken at the next look
ABANDON_AFTER_SECONDS = 60.0  # after which another chain is asked, as this one may hold a lock
COMMAND_TIMEOUT_SECONDS = 60.0  # for a command, which is killed then
MAX_ABANDONED = 4  # chains that were given up and are still at it: each has a thread

FindCredentials: TypeAlias = Callable[[], Any]
CredentialsFuture: TypeAlias = "asyncio.Future[Any]"


class ProviderTimeout(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer in {seconds:g} seconds")


class ProviderChain:
    """`make` makes one that is asked for what it finds; both may take their time."""

    def __init__(
        self, make: Callable[[], FindCredentials] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make or _botocore_chain
        self._find: FindCredentials = _LazyChain(self._make)
        self._now = now
        self._threads = DaemonThreadPool()  # its own: a command that has said what is wrong ends without them as well
        self._pending: CredentialsFuture | None = None  # the one under way, which all who ask share
        self._began = 0.0
        self._abandoned: set[CredentialsFuture] = set()

    async def load(self, seconds: float = ANSWER_TIMEOUT_SECONDS) -> Any:
        """Raises whatever its providers do, or SilentProvider."""
        if self._pending is not None and not self._pending.done() and self._now() - self._began > ABANDON_AFTER_SECONDS:
            self.replace()
        pending = self._pending or self._start()
        await asyncio.wait([pending], timeout=seconds)
        if not pending.done():
            raise ProviderTimeout(seconds)
        if pending is self._pending:
            self._pending = None
        return pending.result()

    def replace(self) -> None:
        """Another chain takes the place of this one, unless too many say nothing as it is: what it has found it reads
        only once."""
        if self._pending is not None and not self._pending.done():
            if len(self._abandoned) >= MAX_ABANDONED:
                return
            self._abandoned.add(self._pending)
            self._pending.add_done_callback(self._abandoned.discard)
        self._pending = None
        self._find = _LazyChain(self._make)

    def _start(self) -> CredentialsFuture:
        pending = self._pending = asyncio.get_running_loop().run_in_executor(self._threads, self._find)
        pending.add_done_callback(_retrieve_exception)
        self._began = self._now()
        return pending


class _LazyChain:
    """A chain that is made where it is asked."""

    def __init__(self, make: Callable[[], FindCredentials]) -> None:
        self._make = make
        self._find: FindCredentials | None = None

    def __call__(self) -> Any:
        self._find = self._find or self._make()
        return self._find()


def _retrieve_exception(pending: CredentialsFuture) -> None:
    """Nobody may be left to be told of its failure."""
    if not pending.cancelled():
        pending.exception()


class _BoundedProcess(subprocess.Popen[bytes]):
    def __init__(self, line: list[str], stdout: int, stderr: int) -> None:
        # Its session is its own, so that what it starts can be ended with it.
        super().__init__(line, stdout=stdout, stderr=stderr, start_new_session=True)

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        try:
            return super().communicate(input, timeout or COMMAND_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            with self, suppress(ProcessLookupError):  # closes its pipes, and waits for it
                os.killpg(self.pid, SIGKILL)
            raise


def _botocore_chain() -> FindCredentials:
    from botocore.credentials import ProcessProvider  # 75 ms that those without AWS need not pay
    from botocore.session import Session

    session = Session()

    def bounded(profile: str) -> Any:
        return ProcessProvider(profile, lambda: session.full_config, _BoundedProcess)

    def find() -> Any:
        # Botocore has no other way to bound a command, and would wait for it for ever; nor that of another profile,
        # which provides what a role is assumed with.
        chain = session.get_component("credential_provider")
        chain.get_provider("custom-process")._popen = _BoundedProcess
        chain.get_provider("assume-role")._profile_provider_builder._create_process_provider = bounded
        provided = session.get_credentials()
        return provided.get_frozen_credentials() if provided is not None else None

    return find
