"""Lets calls through by their caller's limits: tokens are estimated before a call, and counted after it."""

from __future__ import annotations

from typing import Final

from price_keeper.errors import TooManyRequests
from price_keeper.exchange import Header
from price_keeper.model import Caller
from price_keeper.rates.rate_lease_manager import RateDecision, RateLeaseManager
from price_keeper.rates.rate_limit_settings import REQUESTS, TOKENS
from price_keeper.rates.token_bucket import MILLI
from price_keeper.recording.entries import Receipt
from price_keeper.selection.callers_limits import CallerRateLimits, RateLimitCache
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry

MAX_RETRY_AFTER_SECONDS: Final = 60.0

_NOTHING_USED: Final = {REQUESTS: 0, TOKENS: 0}
_NO_TOKENS: Final = {TOKENS: 0}
_REMAINING_HEADERS: Final = {REQUESTS: b"x-ratelimit-remaining-requests", TOKENS: b"x-ratelimit-remaining-tokens"}
_UNIT_NAMES: Final = {REQUESTS: "requests", TOKENS: "tokens"}


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
