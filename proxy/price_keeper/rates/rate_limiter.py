"""Apply rate limits to calls: reserve estimated tokens before a call, settle the actual usage after it.

START HERE: `RateLimiter.reserve_cached` (no I/O) and `reserve`. Both return a `RateReservation`, raise TooManyRequests
when the limit is reached, and add the x-ratelimit headers to the response.

`RateLimitCache` keeps the limits of each caller: those of its app and those of its org. They are refreshed in the
background, and concurrent callers share one read. While the store is unavailable the last known limits apply, or those
in the snapshot; a caller that is in neither has no limits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from price_keeper.clock import Clock
from price_keeper.domain import Caller, Scope, describe_scope, find_name
from price_keeper.errors import TooManyRequests
from price_keeper.exchange import Header
from price_keeper.ledger.ledger_entries import Receipt
from price_keeper.rates.rate_lease_manager import RateDecision, RateLeaseManager
from price_keeper.rates.rate_limit_settings import REQUESTS, TOKENS, ScopeRateLimits, parse_rate_limits
from price_keeper.rates.token_bucket import MILLI, RateBucket
from price_keeper.single_flight import SingleFlight
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Store
from price_keeper.telemetry import metrics
from price_keeper.telemetry.logs import log_read_failure
from price_keeper.telemetry.metrics import MetricsRegistry

MAX_RETRY_AFTER_SECONDS: Final = 60.0
MAX_AGE_SECONDS: Final = 60.0  # older limits are read again while the call waits
REFRESH_AFTER_SECONDS: Final = 50.0  # older limits are read again in the background
STORE_RETRY_SECONDS: Final = 3.0  # while the store is away
STORE_TIMEOUT_SECONDS = 2.0  # how long one call waits for the store
MAX_CALLERS: Final = 20_000

_NOTHING_USED: Final = {REQUESTS: 0, TOKENS: 0}
_NO_TOKENS: Final = {TOKENS: 0}
_REMAINING_HEADERS: Final = {REQUESTS: b"x-ratelimit-remaining-requests", TOKENS: b"x-ratelimit-remaining-tokens"}
_LIMIT_HEADERS: Final = {REQUESTS: b"x-ratelimit-limit-requests", TOKENS: b"x-ratelimit-limit-tokens"}
_UNIT_NAMES: Final = {REQUESTS: "requests", TOKENS: "tokens"}

_log = logging.getLogger("price_keeper.selection")


class SettingsSnapshot(Protocol):
    """The settings that the store last returned, kept on the local disk for when the store is away."""

    def start_read(self) -> int:
        """Begin a consistent read; returns its number."""

    def record_settings(self, scope: Scope, item: Item | None, read_number: int | None = None) -> None: ...

    def find_settings(self, scope: Scope) -> Item | None:
        """Return the settings, empty if the store had none for this scope, None if the snapshot does not know it."""


class RateReservation:
    """The tokens reserved for one admitted call: settled once, by `on_completed` or else by `on_never_sent`."""

    __slots__ = ("_decision", "_lease_manager", "_tokens")

    def __init__(self, lease_manager: RateLeaseManager, decision: RateDecision, tokens: int) -> None:
        self._lease_manager = lease_manager
        self._decision: RateDecision | None = decision
        self._tokens = tokens

    def on_completed(self, receipt: Receipt | None) -> None:
        """Settle with the actual usage. An estimated usage never gives tokens back, as the actual one is not known."""
        decision, self._decision = self._decision, None
        if decision is None:
            return
        if receipt is None:
            self._lease_manager.settle(decision, _NO_TOKENS)
            return
        counts = receipt.counts
        written = counts.cache_write_5m_tokens + counts.cache_write_1h_tokens
        used = counts.input_tokens + counts.output_tokens + written
        if counts.estimated_requests:
            used = max(used, self._tokens)
        self._lease_manager.settle(decision, {TOKENS: MILLI * used})

    def on_never_sent(self) -> None:
        """Give everything back. A call that was not completed before this was never sent."""
        decision, self._decision = self._decision, None
        if decision is not None:
            self._lease_manager.settle(decision, _NOTHING_USED)


class RateLimiter:
    """Reserves rate limit tokens for calls."""

    def __init__(self, limits_cache: RateLimitCache, lease_manager: RateLeaseManager, *, serves_offline: bool) -> None:
        """`serves_offline`: admit calls while the store is away, each process up to the whole of each limit."""
        self._limits_cache = limits_cache
        self._lease_manager = lease_manager
        self._serves_offline = serves_offline

    def cached_limits(self, caller: Caller) -> CallerRateLimits | None:
        """Return the caller's limits without I/O; None if they must be loaded first."""
        return self._limits_cache.cached(caller)

    def reserve_cached(
        self, limits: CallerRateLimits, tokens: int, response_headers: list[Header]
    ) -> RateReservation | None:
        """Like `reserve`, without I/O. None if the local lease has not enough tokens, or the limits are exact; a lease
        has then counted the call as demand. Raises TooManyRequests."""
        if limits.is_exact:
            return None
        tokens = min(tokens, limits.max_estimate)
        costs = {REQUESTS: MILLI, TOKENS: MILLI * tokens}
        admission = self._lease_manager.try_admit(limits.name, limits.buckets, costs)
        return None if admission is None else self._build_reservation(limits, admission, tokens, response_headers)

    async def reserve(
        self, caller: Caller, tokens: int, response_headers: list[Header], *, is_demand_counted: bool = False
    ) -> RateReservation | None:
        """Reserve `tokens`, the estimated usage of the call; None if the caller has no limits.

        `response_headers` gets the x-ratelimit headers. `is_demand_counted`: `reserve_cached` was called before and
        counted this call as demand. Raises TooManyRequests and Busy.
        """
        limits = self._limits_cache.cached(caller) or await self._limits_cache.load(caller)
        if not limits.buckets:
            return None
        tokens = min(tokens, limits.max_estimate)
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
    message = f"{limits.display_name} is limited to {rates} a minute"
    return TooManyRequests(message, retry_after=wait, details={"client_id": limits.name})


@dataclass(slots=True, eq=False)
class CallerRateLimits:
    """The limits of one caller. `rates`, per minute, are the lower ones of both levels.

    `max_estimate`, of a call's tokens, is half of the bucket, so that any call can be admitted; the rest is charged
    afterwards."""

    name: str
    display_name: str  # the org or app, for people
    buckets: tuple[RateBucket, ...] = ()
    rates: Mapping[str, int] = field(default_factory=dict)
    is_exact: bool = False
    max_estimate: int = sys.maxsize
    limit_headers: tuple[Header, ...] = ()  # for the responses of this caller's calls


@dataclass(slots=True, eq=False)
class _CachedLimits:
    limits: CallerRateLimits
    refresh_at: float = -math.inf
    expires_at: float = -math.inf
    is_stale: bool = False


class RateLimitCache:
    """The limits of each caller: a cache of the settings in the store, refreshed in the background."""

    def __init__(self, store: Store, clock: Clock, snapshot: SettingsSnapshot) -> None:
        self._store = store
        self._snapshot = snapshot
        self._clock = clock
        self._entries: dict[tuple[str, str | None], _CachedLimits] = {}
        self._reads = SingleFlight[_CachedLimits, None]()

    def cached(self, caller: Caller) -> CallerRateLimits | None:
        """Return the limits without I/O, and start a refresh if one is due; None if the store must be read first."""
        entry = self._entries.get((caller.org, caller.app))
        if entry is None:
            return None
        moment = self._clock.monotonic()
        if moment >= entry.expires_at:  # also during the first read
            return None
        if moment >= entry.refresh_at:
            self._start_read(caller, entry)
        return entry.limits

    async def load(self, caller: Caller) -> CallerRateLimits:
        """Read the limits from the store, and wait at most STORE_TIMEOUT_SECONDS."""
        entry = self._get_or_create_entry(caller)
        try:
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                self._start_read(caller, entry)
                await self._reads.wait(entry)
        except TimeoutError:
            # The last known limits hold from now on, so that no other call waits for this store.
            entry.refresh_at, entry.expires_at = self._clock.monotonic() + STORE_RETRY_SECONDS, math.inf
        return entry.limits

    def _get_or_create_entry(self, caller: Caller) -> _CachedLimits:
        name = (caller.org, caller.app)
        entry = self._entries.get(name)
        if entry is None:
            if len(self._entries) >= MAX_CALLERS:
                del self._entries[next(iter(self._entries))]
            remembered = [(scope, self._snapshot.find_settings(scope)) for scope in _list_scopes(caller)]
            entry = self._entries[name] = _CachedLimits(_build_limits(caller, remembered))
        return entry

    def _start_read(self, caller: Caller, entry: _CachedLimits) -> None:
        self._reads.start(entry, lambda: self._read(caller, entry))

    async def _read(self, caller: Caller, entry: _CachedLimits) -> None:
        began = self._clock.monotonic()
        entry.refresh_at = began + STORE_RETRY_SECONDS
        try:
            limits = await self._fetch(caller)
            entry.refresh_at, entry.expires_at, entry.is_stale = (
                began + REFRESH_AFTER_SECONDS,
                began + MAX_AGE_SECONDS,
                False,
            )
            # Equal limits keep their object, because a lease holder recognises its buckets by identity.
            if (limits.buckets, limits.is_exact) != (entry.limits.buckets, entry.limits.is_exact):
                entry.limits = limits
            entry.limits.display_name = limits.display_name
        except Exception as failure:  # every kind: the calls that wait must get an answer
            if not entry.is_stale:
                subject = f"the rate limits of {caller.client_id}"
                log_read_failure(_log, subject, "the last known ones, or none, apply", failure)
            entry.expires_at, entry.is_stale = math.inf, True

    async def _fetch(self, caller: Caller) -> CallerRateLimits:
        keys = [schema.org_config_key(caller.org)]
        if caller.app is not None:
            keys.append(schema.app_config_key(caller.org, caller.app))
        read_number = self._snapshot.start_read()
        read = [*zip(_list_scopes(caller), await self._store.get_many(keys, consistent=True), strict=True)]
        for scope, item in read:
            self._snapshot.record_settings(scope, item, read_number)
        return _build_limits(caller, read)


def _list_scopes(caller: Caller) -> list[Scope]:
    org_scope = Scope(caller.org)
    return [org_scope] if caller.app is None else [org_scope, Scope(caller.org, caller.app)]


def _parse_items(items: Sequence[tuple[Scope, Item | None]]) -> list[ScopeRateLimits]:
    levels = []
    for scope, item in items:
        try:
            limits = parse_rate_limits(scope, item)
        except ValueError as failure:
            _log.warning(
                "%s: rate limits ignored: %s; it has none of its own until they are corrected with "
                "`price-keeper app put` or `org put`",
                scope.key,
                failure,
            )
            continue
        if limits is not None:
            levels.append(limits)
    return levels


def _build_limits(caller: Caller, items: Sequence[tuple[Scope, Item | None]]) -> CallerRateLimits:
    """Merge the limits of org and app, the app's bucket first.

    If one level is exact, all are, because both buckets are written in one transaction.
    """
    levels = _parse_items(items)
    org_name, app_name = find_name(items[0][1], "org_name"), find_name(items[-1][1], "app_name")
    display_name = describe_scope(Scope(caller.org, caller.app), org_name, app_name)
    rates: dict[str, int] = {}
    for limits in levels:
        for rate, number in limits.rates.items():
            rates[rate] = min(number, rates.get(rate, number))
    buckets = tuple(limits.bucket for limits in reversed(levels))
    halves = [limit.capacity // MILLI // 2 for bucket in buckets for limit in bucket.limits if limit.name == TOKENS]
    limit_headers = tuple((_LIMIT_HEADERS[rate], b"%d" % number) for rate, number in rates.items())
    is_exact = any(limits.is_exact for limits in levels)
    return CallerRateLimits(
        caller.client_id, display_name, buckets, rates, is_exact, min(halves, default=sys.maxsize), limit_headers
    )
