"""Apply rate limits to calls: reserve estimated tokens before a call, settle the actual usage after it.

START HERE: `RateLimiter.reserve_cached` (no I/O) and `reserve`. Both return a `RateReservation`, raise SlowDown when
the limit is reached, and add the x-ratelimit headers to the response.

`RateLimitCache` keeps the limits of each caller: those of its app and those of its org. They are refreshed in the
background, and concurrent callers share one read. While the store is unavailable the last known limits apply, or those
in the snapshot; a caller that is in neither has no limits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from price_keeper.clock import Clock
from price_keeper.domain import Caller, Scope
from price_keeper.errors import StoreError, TooManyRequests
from price_keeper.exchange import Header
from price_keeper.ledger.ledger_entries import Receipt
from price_keeper.rates.rate_lease_manager import RateDecision, RateLeaseManager
from price_keeper.rates.rate_limit_settings import REQUESTS, TOKENS, ScopeRateLimits, parse_rate_limits
from price_keeper.rates.token_bucket import MILLI, RateBucket
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Store
from price_keeper.tasks import Tasks
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry

MAX_RETRY_AFTER_SECONDS: Final = 60.0

_NOTHING_USED: Final = {REQUESTS: 0, TOKENS: 0}
_NO_TOKENS: Final = {TOKENS: 0}
_REMAINING_HEADERS: Final = {REQUESTS: b"x-ratelimit-remaining-requests", TOKENS: b"x-ratelimit-remaining-tokens"}
_UNIT_NAMES: Final = {REQUESTS: "requests", TOKENS: "tokens"}


class SettingsSnapshot(Protocol):
    """Settings as the store last answered them, kept on this machine's disk for when it is away."""

    def record_settings(self, scope: Scope, item: Item | None) -> None: ...

    def find_settings(self, scope: Scope) -> Item | None:
        """Empty if the store had none for this scope; None if it is not known."""


class RateReservation:
    """One call that was let through: told once what became of it, and closed at the end, whatever that was."""

    __slots__ = ("_decision", "_lease_manager", "_tokens")

    def __init__(self, lease_manager: RateLeaseManager, decision: RateDecision, tokens: int) -> None:
        self._lease_manager = lease_manager
        self._decision: RateDecision | None = decision
        self._tokens = tokens

    def on_completed(self, receipt: Receipt | None) -> None:
        """An estimate never gives anything back: nobody knows."""
        decision, self._decision = self._decision, None
        if decision is None:
            return
        if receipt is None:
            self._lease_manager.settle(decision, _NO_TOKENS)
            return
        _, is_estimated, input, output, _, written_5m, written_1h, _, _ = receipt.counts
        used = input + output + written_5m + written_1h
        self._lease_manager.settle(decision, {TOKENS: MILLI * (max(used, self._tokens) if is_estimated else used)})

    def on_cancelled(self) -> None:
        """What has not ended by now was never sent."""
        decision, self._decision = self._decision, None
        if decision is not None:
            self._lease_manager.settle(decision, _NOTHING_USED)


class RateLimiter:
    def __init__(self, limits_cache: RateLimitCache, lease_manager: RateLeaseManager, *, serves_offline: bool) -> None:
        """`serves_alone`: also while the store is away, by the whole of each limit."""
        self._limits_cache = limits_cache
        self._lease_manager = lease_manager
        self._serves_offline = serves_offline

    def cached_limits(self, caller: Caller) -> CallerRateLimits | None:
        """Without asking anybody; None if somebody has to be asked first."""
        return self._limits_cache.cached(caller)

    def reserve_cached(
        self, limits: CallerRateLimits, tokens: int, response_headers: list[Header]
    ) -> RateReservation | None:
        """As `admitted`, of limits that there are; None, and the call counts as wanted, where there is not enough of
        them here. Raises SlowDown."""
        if limits.is_exact:
            return None
        tokens = limits.cap_estimate(tokens)
        costs = {REQUESTS: MILLI, TOKENS: MILLI * tokens}
        admission = self._lease_manager.try_admit(limits.name, limits.buckets, costs)
        return None if admission is None else self._build_reservation(limits, admission, tokens, response_headers)

    async def reserve(
        self, caller: Caller, tokens: int, response_headers: list[Header], *, is_demand_counted: bool = False
    ) -> RateReservation | None:
        """None where there are no limits. `tokens` are those that the call is taken to use; `told` is what the answer
        gets. `is_counted`: `at_once` has been asked. Raises SlowDown and Busy."""
        limits = self._limits_cache.cached(caller) or await self._limits_cache.load(caller)
        if not limits.buckets:
            return None
        tokens = limits.cap_estimate(tokens)
        costs = {REQUESTS: MILLI, TOKENS: MILLI * tokens}
        admission = await self._lease_manager.admit(
            limits.name,
            limits.buckets,
            costs,
            is_exact=limits.is_exact,
            serves_offline=self._serves_offline,
            is_demand_counted=is_demand_counted,
        )
        return self._build_reservation(limits, admission, tokens, response_headers)

    def _build_reservation(
        self, limits: CallerRateLimits, admission: RateDecision, tokens: int, response_headers: list[Header]
    ) -> RateReservation:
        response_headers += limits.limit_headers
        for name, amount in self._lease_manager.estimate_remaining(admission):
            response_headers.append((_REMAINING_HEADERS[name], b"%d" % (amount // MILLI if amount > 0 else 0)))
        if not admission.is_admitted:
            raise _build_refusal(limits, admission)
        return RateReservation(self._lease_manager, admission, tokens)

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        counts = self._lease_manager.counts

        def sample_decisions() -> list[tuple[dict[str, str], float]]:
            ways = ("local", "waited", "exact", "alone", "refused_locally", "refused_by_store", "refused_alone")
            return [({"how": way}, getattr(counts, way)) for way in ways]

        telemetry.add(metrics.LIMITED_CALLS, sample_decisions)
        telemetry.add(metrics.LIMIT_WRITES, lambda: [({"path": path}, n) for path, n in counts.top_ups.items()])
        telemetry.add(metrics.LIMITS_GIVEN_BACK, lambda: counts.given_back)
        telemetry.add(metrics.LIMITS_UNASKED, lambda: counts.failed)
        telemetry.add(metrics.LEASES, lambda: len(self._lease_manager))
        held_by_limit = self._lease_manager.held_by_limit
        telemetry.add(metrics.LEASED, lambda: [({"limit": name}, n / MILLI) for name, n in held_by_limit().items()])


def _build_refusal(limits: CallerRateLimits, admission: RateDecision) -> TooManyRequests:
    rates = " and ".join(f"{rate} {_UNIT_NAMES[name]}" for name, rate in limits.rates.items())
    wait = MAX_RETRY_AFTER_SECONDS if admission.wait_ms is None else admission.wait_ms / MILLI
    return TooManyRequests(f"{limits.name} is limited to {rates} a minute", retry_after=wait)


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
    refresh_at: float = -math.inf
    expires_at: float = -math.inf
    read_done: asyncio.Event | None = None
    is_stale: bool = False


class RateLimitCache:
    def __init__(self, store: Store, clock: Clock, tasks: Tasks, snapshot: SettingsSnapshot) -> None:
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
                math.inf,
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
            entry.expires_at, entry.is_stale = math.inf, True
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
