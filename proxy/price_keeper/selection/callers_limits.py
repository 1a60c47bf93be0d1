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
from price_keeper.model import Caller, Scope
from price_keeper.rates.rate_limit_settings import REQUESTS, TOKENS, ScopeRateLimits, parse_rate_limits
from price_keeper.rates.token_bucket import MILLI, RateBucket
from price_keeper.selection.notes import BudgetSnapshot
from price_keeper.selection.spent import NEVER
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Store
from price_keeper.tasks import Tasks

MAX_AGE_SECONDS: Final = 60.0  # after which a call waits until they are read again
REFRESH_AFTER_SECONDS: Final = 50.0  # after which a call has them read again, and goes on
STORE_RETRY_SECONDS: Final = 3.0  # while the store is away
STORE_TIMEOUT_SECONDS = 2.0  # for the store, of a call
MAX_CALLERS: Final = 20_000

_LIMIT_HEADERS: Final = {REQUESTS: b"x-ratelimit-limit-requests", TOKENS: b"x-ratelimit-limit-tokens"}

_log = logging.getLogger("price_keeper.selection")


@dataclass(slots=True, eq=False)
class CallerRateLimits:
    """`rates` a minute are the least of both levels."""

    name: str
    buckets: tuple[RateBucket, ...] = ()
    rates: Mapping[str, int] = field(default_factory=dict)
    is_exact: bool = False

    token_capacity: int | None = None  # at once, if there is a limit to them
    limit_headers: tuple[Header, ...] = ()  # to whoever is let through

    def cap_estimate(self, tokens: int) -> int:
        """Whatever a call is taken for, it comes in when half of all is there: what it used is counted afterwards."""
        capacity = self.token_capacity
        return tokens if capacity is None or tokens <= capacity // 2 else capacity // 2


@dataclass(slots=True)
class _CachedLimits:
    limits: CallerRateLimits
    refresh_at: float = -NEVER
    expires_at: float = -NEVER
    read_done: asyncio.Event | None = None
    is_stale: bool = False


class RateLimitCache:
    def __init__(self, store: Store, clock: Clock, tasks: Tasks, snapshot: BudgetSnapshot) -> None:
        self._store = store
        self._snapshot = snapshot
        self._clock = clock
        self._tasks = tasks
        self._entries: dict[tuple[str, str | None], _CachedLimits] = {}

    def cached(self, caller: Caller) -> CallerRateLimits | None:
        """Without asking anybody; None if the store has to be asked first."""
        entry = self._entries.get((caller.org, caller.app))
        if entry is None:
            return None
        moment = self._clock.monotonic()
        if moment >= entry.expires_at:  # so too while they are read for the first time
            return None
        if moment >= entry.refresh_at:
            self._start_read(caller, entry)
        return entry.limits

    async def load(self, caller: Caller) -> CallerRateLimits:
        """Asks the store, and waits for a while."""
        entry = self._get_or_create_entry(caller)
        try:
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                await self._start_read(caller, entry).wait()
        except TimeoutError:
            entry.refresh_at, entry.expires_at = (
                self._clock.monotonic() + STORE_RETRY_SECONDS,
                NEVER,
            )  # nobody else is to wait for it
        return entry.limits

    def _get_or_create_entry(self, caller: Caller) -> _CachedLimits:
        name = (caller.org, caller.app)
        found = self._entries.get(name)
        if found is None:
            if len(self._entries) >= MAX_CALLERS:
                del self._entries[next(iter(self._entries))]
            remembered = [(scope, self._snapshot.find_settings(scope)) for scope in _list_scopes(caller)]
            found = self._entries[name] = _CachedLimits(_merge_levels(caller.client_id, _parse_items(remembered)))
        return found

    def _start_read(self, caller: Caller, entry: _CachedLimits) -> asyncio.Event:
        if entry.read_done is None:
            entry.read_done = asyncio.Event()
            self._tasks.spawn(self._read(caller, entry, entry.read_done))
        return entry.read_done

    async def _read(self, caller: Caller, entry: _CachedLimits, done: asyncio.Event) -> None:
        began = self._clock.monotonic()
        entry.refresh_at = began + STORE_RETRY_SECONDS
        try:
            found = await self._fetch(caller)
            entry.refresh_at, entry.expires_at, entry.is_stale = (
                began + REFRESH_AFTER_SECONDS,
                began + MAX_AGE_SECONDS,
                False,
            )
            limits = _merge_levels(caller.client_id, found)
            # The same ones stay, as whoever holds a lease on them knows them by what they are.
            if (limits.buckets, limits.is_exact) != (entry.limits.buckets, entry.limits.is_exact):
                entry.limits = limits
        except Exception as failure:  # of whatever kind: those who wait must get an answer
            if not entry.is_stale:
                what = str(failure) if isinstance(failure, StoreError) else type(failure).__name__
                _log.warning("the limits of %s cannot be read, and what is known holds: %s", caller.client_id, what)
            entry.expires_at, entry.is_stale = NEVER, True
        finally:
            entry.read_done = None
            done.set()

    async def _fetch(self, caller: Caller) -> list[ScopeRateLimits]:
        keys = [schema.org_config_key(caller.org)]
        if caller.app is not None:
            keys.append(schema.app_config_key(caller.org, caller.app))
        read = [*zip(_list_scopes(caller), await self._store.get_many(keys, consistent=True), strict=True)]
        for scope, item in read:
            self._snapshot.record_settings(scope, item)
        return _parse_items(read)


def _list_scopes(caller: Caller) -> list[Scope]:
    org_scope = Scope(caller.org)
    return [org_scope] if caller.app is None else [org_scope, Scope(caller.org, caller.app)]


def _parse_items(items: Sequence[tuple[Scope, Item | None]]) -> list[ScopeRateLimits]:
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


def _merge_levels(name: str, found: list[ScopeRateLimits]) -> CallerRateLimits:
    """The app's first. One that is exact makes all so, as both are written in one transaction."""
    rates: dict[str, int] = {}
    for limits in found:
        for rate, number in limits.rates.items():
            rates[rate] = min(number, rates.get(rate, number))
    buckets = tuple(limits.bucket for limits in reversed(found))
    token_capacities = [
        limit.capacity // MILLI for bucket in buckets for limit in bucket.limits if limit.name == TOKENS
    ]
    limit_headers = tuple((_LIMIT_HEADERS[rate], b"%d" % number) for rate, number in rates.items())
    is_exact = any(limits.is_exact for limits in found)
    return CallerRateLimits(name, buckets, rates, is_exact, min(token_capacities, default=None), limit_headers)
