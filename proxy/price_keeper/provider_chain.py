"""Botocore's chain of AWS credential providers, run in a thread and limited in time.

A provider reads files, calls services or runs a command, and any of these may hang. A chain that does not return is
abandoned and replaced; at most MAX_ABANDONED chains are abandoned at once. Credentials in the environment come first in
a chain, and need no botocore. Both the store and the Bedrock client use this module, so it imports only `tasks`. Start
with `ProviderChain.load`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from signal import SIGKILL
from typing import Any, NamedTuple, TypeAlias

from price_keeper.tasks import DaemonThreadPool

RENEW_INTERVAL_SECONDS = 60.0  # botocore renews credentials 15 minutes before their expiry, but only when called
ANSWER_TIMEOUT_SECONDS = 5.0  # for one `load`; a result that arrives later is returned by the next `load`
ABANDON_AFTER_SECONDS = 60.0  # then a new chain is made, because this one may hold a lock forever
COMMAND_TIMEOUT_SECONDS = 60.0  # for a credential_process command, which is then killed
MAX_ABANDONED = 4  # abandoned chains that still run; each occupies a thread

FindCredentials: TypeAlias = Callable[[], Any]
CredentialsFuture: TypeAlias = "asyncio.Future[Any]"


class ProviderTimeout(Exception):
    """The chain did not return in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer in {seconds:g} seconds")


class ProviderChain:
    """Loads credentials in a thread. Concurrent callers share one load (single-flight). `make` builds a function that
    finds credentials; both run in the thread, because both may take long."""

    def __init__(
        self, make: Callable[[], FindCredentials] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make or _default_chain
        self._find: FindCredentials = _LazyChain(self._make)
        self._now = now
        self._threads = DaemonThreadPool()  # its own, so that hanging providers never delay exit, as in CLI commands
        # The running load, shared by all callers. Not a SingleFlight: it may be abandoned while it runs, and a result
        # that comes after all callers have left is kept for the next one.
        self._pending: CredentialsFuture | None = None
        self._began = 0.0
        self._abandoned: set[CredentialsFuture] = set()

    async def load(self, seconds: float = ANSWER_TIMEOUT_SECONDS) -> Any:
        """The frozen credentials, or None if no provider has any. Raises ProviderTimeout, and what providers raise."""
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
        """Abandon this chain and make a new one on the next load, because a chain reads its sources only once. Does
        nothing if MAX_ABANDONED chains still run."""
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
    """Builds its chain at the first call, so that this happens in the thread."""

    def __init__(self, make: Callable[[], FindCredentials]) -> None:
        self._make = make
        self._find: FindCredentials | None = None

    def __call__(self) -> Any:
        self._find = self._find or self._make()
        return self._find()


def _retrieve_exception(pending: CredentialsFuture) -> None:
    """Mark the exception as retrieved: all callers may have timed out, and asyncio would log a warning."""
    if not pending.cancelled():
        pending.exception()


class _BoundedProcess(subprocess.Popen[bytes]):
    """A command that is killed, with its children, after COMMAND_TIMEOUT_SECONDS."""

    def __init__(self, line: list[str], stdout: int, stderr: int) -> None:
        # A session of its own makes it a process group, so that its children can be killed with it.
        super().__init__(line, stdout=stdout, stderr=stderr, start_new_session=True)

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        try:
            return super().communicate(input, timeout or COMMAND_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            with self, suppress(ProcessLookupError):  # leaving the block closes the pipes and waits for the process
                os.killpg(self.pid, SIGKILL)
            raise


class EnvironmentCredentials(NamedTuple):
    """Credentials from environment variables, with the attributes of botocore's."""

    access_key: str
    secret_key: str
    token: str | None
    account_id: str | None


def read_environment(environment: Mapping[str, str]) -> EnvironmentCredentials | None:
    """The credentials that botocore's chain would find first. None if there are none, or only botocore can judge them:
    incomplete ones, and those that expire."""
    access_key, secret_key = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if not access_key or not secret_key or environment.get("AWS_CREDENTIAL_EXPIRATION"):
        return None
    token = environment.get("AWS_SECURITY_TOKEN") or environment.get("AWS_SESSION_TOKEN") or None
    return EnvironmentCredentials(access_key, secret_key, token, environment.get("AWS_ACCOUNT_ID") or None)


def _default_chain() -> FindCredentials:
    found = read_environment(os.environ)
    return _botocore_chain() if found is None else lambda: found


def _botocore_chain() -> FindCredentials:
    from botocore.credentials import ProcessProvider  # takes 75 ms, which a process without AWS is spared
    from botocore.session import Session

    session = Session()

    def bounded(profile: str) -> Any:
        return ProcessProvider(profile, lambda: session.full_config, _BoundedProcess)

    def find() -> Any:
        # Botocore offers no other way to limit the time of a command, and would wait forever. The same holds for the
        # command of a source profile, with whose credentials a role is assumed.
        chain = session.get_component("credential_provider")
        chain.get_provider("custom-process")._popen = _BoundedProcess
        chain.get_provider("assume-role")._profile_provider_builder._create_process_provider = bounded
        provided = session.get_credentials()
        return provided.get_frozen_credentials() if provided is not None else None

    return find
