"""Lets calls through by their caller's limits: tokens are estimated before a call, and counted after it."""

from __future__ import annotations

from typing import Final

from price_keeper import telemetry as metrics
from price_keeper.errors import TooManyRequests
from price_keeper.exchange import Header
from price_keeper.limits.admission import RateDecision
from price_keeper.limits.bucket import MILLI
from price_keeper.limits.leasing import RateLeaseManager
from price_keeper.limits.settings import REQUESTS, TOKENS
from price_keeper.model import Caller
from price_keeper.recording.entries import Receipt
from price_keeper.selection.callers_limits import CallersLimits, LimitsKept
from price_keeper.telemetry import MetricsRegistry

LONGEST_WAIT_SECONDS: Final = 60.0

_NOTHING_USED: Final = {REQUESTS: 0, TOKENS: 0}
_NO_TOKENS: Final = {TOKENS: 0}
_REMAINING: Final = {REQUESTS: b"x-ratelimit-remaining-requests", TOKENS: b"x-ratelimit-remaining-tokens"}
_IN_WORDS: Final = {REQUESTS: "requests", TOKENS: "tokens"}


class Limited:
    """One call that was let through: told once what became of it, and closed at the end, whatever that was."""

    __slots__ = ("_admission", "_leasing", "_tokens")

    def __init__(self, leasing: RateLeaseManager, admission: RateDecision, tokens: int) -> None:
        self._leasing = leasing
        self._admission: RateDecision | None = admission
        self._tokens = tokens

    def ended(self, receipt: Receipt | None) -> None:
        """An estimate never gives anything back: nobody knows."""
        admission, self._admission = self._admission, None
        if admission is None:
            return
        if receipt is None:
            self._leasing.settle(admission, _NO_TOKENS)
            return
        _, is_estimated, input, output, _, written_5m, written_1h, _, _ = receipt.counts
        used = input + output + written_5m + written_1h
        self._leasing.settle(admission, {TOKENS: MILLI * (max(used, self._tokens) if is_estimated else used)})

    def on_cancelled(self) -> None:
        """What has not ended by now was never sent."""
        admission, self._admission = self._admission, None
        if admission is not None:
            self._leasing.settle(admission, _NOTHING_USED)


class Admitting:
    def __init__(self, kept: LimitsKept, leasing: RateLeaseManager, *, serves_alone: bool) -> None:
        """`serves_alone`: also while the store is away, by the whole of each limit."""
        self._kept = kept
        self._leasing = leasing
        self._serves_alone = serves_alone

    def known(self, caller: Caller) -> CallersLimits | None:
        """Without asking anybody; None if somebody has to be asked first."""
        return self._kept.known(caller)

    def at_once(self, limits: CallersLimits, tokens: int, told: list[Header]) -> Limited | None:
        """As `admitted`, of limits that there are; None, and the call counts as wanted, where there is not enough of
        them here. Raises SlowDown."""
        if limits.is_exact:
            return None
        tokens = limits.taken_for(tokens)
        costs = {REQUESTS: MILLI, TOKENS: MILLI * tokens}
        admission = self._leasing.try_admit(limits.name, limits.buckets, costs)
        return None if admission is None else self._let_in(limits, admission, tokens, told)

    async def admitted(
        self, caller: Caller, tokens: int, told: list[Header], *, is_counted: bool = False
    ) -> Limited | None:
        """None where there are no limits. `tokens` are those that the call is taken to use; `told` is what the answer
        gets. `is_counted`: `at_once` has been asked. Raises SlowDown and Busy."""
        limits = self._kept.known(caller) or await self._kept.learned(caller)
        if not limits.buckets:
            return None
        tokens = limits.taken_for(tokens)
        costs = {REQUESTS: MILLI, TOKENS: MILLI * tokens}
        admission = await self._leasing.admit(
            limits.name,
            limits.buckets,
            costs,
            is_exact=limits.is_exact,
            serves_offline=self._serves_alone,
            is_demand_counted=is_counted,
        )
        return self._let_in(limits, admission, tokens, told)

    def _let_in(self, limits: CallersLimits, admission: RateDecision, tokens: int, told: list[Header]) -> Limited:
        told += limits.told
        for name, amount in self._leasing.estimate_remaining(admission):
            told.append((_REMAINING[name], b"%d" % (amount // MILLI if amount > 0 else 0)))
        if not admission.is_admitted:
            raise _refusal(limits, admission)
        return Limited(self._leasing, admission, tokens)

    def add_to(self, telemetry: MetricsRegistry) -> None:
        counts = self._leasing.counts

        def decided() -> list[tuple[dict[str, str], float]]:
            ways = ("local", "waited", "exact", "alone", "refused_locally", "refused_by_store", "refused_alone")
            return [({"how": way}, getattr(counts, way)) for way in ways]

        telemetry.add(metrics.LIMITED_CALLS, decided)
        telemetry.add(metrics.LIMIT_WRITES, lambda: [({"path": path}, n) for path, n in counts.top_ups.items()])
        telemetry.add(metrics.LIMITS_GIVEN_BACK, lambda: counts.given_back)
        telemetry.add(metrics.LIMITS_UNASKED, lambda: counts.failed)
        telemetry.add(metrics.LEASES, lambda: len(self._leasing))
        held = self._leasing.held_by_limit
        telemetry.add(metrics.LEASED, lambda: [({"limit": name}, n / MILLI) for name, n in held().items()])


def _refusal(limits: CallersLimits, admission: RateDecision) -> TooManyRequests:
    rates = " and ".join(f"{rate} {_IN_WORDS[name]}" for name, rate in limits.rates.items())
    wait = LONGEST_WAIT_SECONDS if admission.wait_ms is None else admission.wait_ms / MILLI
    return TooManyRequests(f"{limits.name} is limited to {rates} a minute", retry_after=wait)
