"""How sessions are written: all or nothing, and not left in doubt as long as anything can tell what became of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from uuid import uuid4

from price_keeper.clock import Clock
from price_keeper.errors import Busy, CancellationReason, ReasonCode, StoreError, StoreThrottled, StoreUnavailable
from price_keeper.stores.contract import Key, Store, Value, Write

FIRST_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 1.0
MAX_WAITING_LOGINS = 1000  # logins of one client in this process; past this the answer would come too late
MAX_RESENDS = 3  # of a transaction whose answer was lost, under its token

_log = logging.getLogger("price_keeper.auth")


class SessionWriter:
    def __init__(self, store: Store, clock: Clock, chance: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._chance = chance

    async def transact(self, writes: Sequence[Write]) -> None:
        """Sent again under the same token after a lost answer, so that it is not left in doubt what became of it."""
        token, is_unsure = str(uuid4()), False
        for attempt in range(1, MAX_RESENDS + 1):
            try:
                await self._store.transact(writes, token=token)
            except (StoreUnavailable, StoreThrottled) as failure:
                is_unsure = is_unsure or (isinstance(failure, StoreUnavailable) and failure.maybe_applied)
                if not is_unsure:
                    raise
                if attempt == MAX_RESENDS:  # that the last one was not carried out says nothing of the first
                    raise StoreUnavailable(str(failure), maybe_applied=True) from None
                await self.back_off(attempt)
            else:
                return

    async def transact_confirmed(self, writes: Sequence[Write], key: Key, expected: Mapping[str, Value]) -> None:
        """As `transact`. If all answers are lost the item tells, which carries what nobody else can have written.

        Raises StoreUnavailable with `maybe_applied` only where that cannot be read either.
        """
        try:
            await self.transact(writes)
        except StoreUnavailable as failure:
            if not failure.maybe_applied:
                raise
            try:
                item = await self._store.get(key, consistent=True) or {}
            except StoreError:
                raise failure from None
            if any(item.get(name) != value for name, value in expected.items()):
                raise StoreUnavailable(str(failure)) from None

    async def back_off(self, attempt: int) -> None:
        """Full jitter, so that those who lost do not meet again."""
        if attempt:
            longest = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
            await self._clock.sleep(longest * self._chance())


class ClientLocks:
    """One login of a client at a time of this process: more could only make each other lose."""

    def __init__(self) -> None:
        self._locks: dict[str, _ClientLock] = {}

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        client_lock = self._locks.setdefault(client, _ClientLock())
        if client_lock.waiters >= MAX_WAITING_LOGINS:
            raise Busy("too many logins of this client are under way", retry_after=1)
        client_lock.waiters += 1
        try:
            async with client_lock.lock:
                yield
        finally:
            client_lock.waiters -= 1
            if not client_lock.waiters:
                del self._locks[client]


class _ClientLock:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiters = 0


def is_condition_failure(reasons: Sequence[CancellationReason]) -> bool:
    return any(reason.code is ReasonCode.CONDITION_FAILED for reason in reasons)


def is_race(reasons: Sequence[CancellationReason]) -> bool:
    """Whether somebody else's change stood in the way, and nothing but that."""
    codes = {reason.code for reason in reasons} - {ReasonCode.NONE}
    return bool(codes) and codes <= {ReasonCode.CONDITION_FAILED, ReasonCode.CONFLICT}


@contextmanager
def translate_store_errors() -> Iterator[None]:
    try:
        yield
    except StoreError as failure:
        _log.warning("no session can be changed: %s", failure)
        raise Busy("sessions cannot be looked up while the store is away; try again", retry_after=5) from None
