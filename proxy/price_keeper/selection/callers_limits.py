"""Keeps the limits of each caller: its app's own, and its org's beside them.

They are read as often as other settings, in the background, and once for all who wait. While the store is away, what
was known or noted holds, and where nothing was, there are none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from price_keeper.clock import Clock
from price_keeper.errors import StoreError
from price_keeper.exchange import Header
from price_keeper.limits.bucket import MILLI, RateBucket
from price_keeper.limits.settings import REQUESTS, TOKENS, ScopeRateLimits, parse_rate_limits
from price_keeper.model import Caller, Scope
from price_keeper.selection.notes import Notes
from price_keeper.selection.spent import NEVER
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Store
from price_keeper.tasks import Tasks

SECONDS: Final = 60.0  # after which a call waits until they are read again
SOON_SECONDS: Final = 50.0  # after which a call has them read again, and goes on
ASK_AGAIN_SECONDS: Final = 3.0  # while the store is away
WAIT_SECONDS = 2.0  # for the store, of a call
MOST_CALLERS: Final = 20_000

_LIMIT: Final = {REQUESTS: b"x-ratelimit-limit-requests", TOKENS: b"x-ratelimit-limit-tokens"}

_log = logging.getLogger("price_keeper.selection")


@dataclass(slots=True, eq=False)
class CallersLimits:
    """`rates` a minute are the least of both levels."""

    name: str
    buckets: tuple[RateBucket, ...] = ()
    rates: Mapping[str, int] = field(default_factory=dict)
    is_exact: bool = False

    most_tokens: int | None = None  # at once, if there is a limit to them
    told: tuple[Header, ...] = ()  # to whoever is let through

    def taken_for(self, tokens: int) -> int:
        """Whatever a call is taken for, it comes in when half of all is there: what it used is counted afterwards."""
        most = self.most_tokens
        return tokens if most is None or tokens <= most // 2 else most // 2


@dataclass(slots=True)
class _Kept:
    limits: CallersLimits
    due: float = -NEVER
    old: float = -NEVER
    reading: asyncio.Event | None = None
    is_stale: bool = False


class LimitsKept:
    def __init__(self, store: Store, clock: Clock, tasks: Tasks, notes: Notes) -> None:
        self._store = store
        self._notes = notes
        self._clock = clock
        self._tasks = tasks
        self._kept: dict[tuple[str, str | None], _Kept] = {}

    def known(self, caller: Caller) -> CallersLimits | None:
        """Without asking anybody; None if the store has to be asked first."""
        kept = self._kept.get((caller.org, caller.app))
        if kept is None:
            return None
        moment = self._clock.monotonic()
        if moment >= kept.old:  # so too while they are read for the first time
            return None
        if moment >= kept.due:
            self._read_soon(caller, kept)
        return kept.limits

    async def learned(self, caller: Caller) -> CallersLimits:
        """Asks the store, and waits for a while."""
        kept = self._kept_of(caller)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._read_soon(caller, kept).wait()
        except TimeoutError:
            kept.due, kept.old = self._clock.monotonic() + ASK_AGAIN_SECONDS, NEVER  # nobody else is to wait for it
        return kept.limits

    def _kept_of(self, caller: Caller) -> _Kept:
        name = (caller.org, caller.app)
        found = self._kept.get(name)
        if found is None:
            if len(self._kept) >= MOST_CALLERS:
                del self._kept[next(iter(self._kept))]
            noted = [(scope, self._notes.settings_of(scope)) for scope in _scopes(caller)]
            found = self._kept[name] = _Kept(_together(caller.client_id, _limits_in(noted)))
        return found

    def _read_soon(self, caller: Caller, kept: _Kept) -> asyncio.Event:
        if kept.reading is None:
            kept.reading = asyncio.Event()
            self._tasks.spawn(self._read(caller, kept, kept.reading))
        return kept.reading

    async def _read(self, caller: Caller, kept: _Kept, over: asyncio.Event) -> None:
        began = self._clock.monotonic()
        kept.due = began + ASK_AGAIN_SECONDS
        try:
            found = await self._found(caller)
            kept.due, kept.old, kept.is_stale = began + SOON_SECONDS, began + SECONDS, False
            limits = _together(caller.client_id, found)
            # The same ones stay, as whoever holds a lease on them knows them by what they are.
            if (limits.buckets, limits.is_exact) != (kept.limits.buckets, kept.limits.is_exact):
                kept.limits = limits
        except Exception as failure:  # of whatever kind: those who wait must get an answer
            if not kept.is_stale:
                what = str(failure) if isinstance(failure, StoreError) else type(failure).__name__
                _log.warning("the limits of %s cannot be read, and what is known holds: %s", caller.client_id, what)
            kept.old, kept.is_stale = NEVER, True
        finally:
            kept.reading = None
            over.set()

    async def _found(self, caller: Caller) -> list[ScopeRateLimits]:
        keys = [schema.org_config_key(caller.org)]
        if caller.app is not None:
            keys.append(schema.app_config_key(caller.org, caller.app))
        read = [*zip(_scopes(caller), await self._store.get_many(keys, consistent=True), strict=True)]
        for scope, item in read:
            self._notes.settings(scope, item)
        return _limits_in(read)


def _scopes(caller: Caller) -> list[Scope]:
    whole = Scope(caller.org)
    return [whole] if caller.app is None else [whole, Scope(caller.org, caller.app)]


def _limits_in(items: Sequence[tuple[Scope, Item | None]]) -> list[ScopeRateLimits]:
    found = []
    for scope, item in items:
        try:
            limits = parse_rate_limits(scope, item)
        except ValueError as failure:
            _log.warning("%s: limits: %s; passed over", scope.key, failure)
            continue
        if limits is not None:
            found.append(limits)
    return found


def _together(name: str, found: list[ScopeRateLimits]) -> CallersLimits:
    """The app's first. One that is exact makes all so, as both are written in one transaction."""
    rates: dict[str, int] = {}
    for limits in found:
        for rate, number in limits.rates.items():
            rates[rate] = min(number, rates.get(rate, number))
    buckets = tuple(limits.bucket for limits in reversed(found))
    most = [limit.capacity // MILLI for bucket in buckets for limit in bucket.limits if limit.name == TOKENS]
    told = tuple((_LIMIT[rate], b"%d" % number) for rate, number in rates.items())
    is_exact = any(limits.is_exact for limits in found)
    return CallersLimits(name, buckets, rates, is_exact, min(most, default=None), told)
