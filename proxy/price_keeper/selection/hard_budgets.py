"""Which label serves a call under a hard budget: the first whose budget has its whole worst case, which is then held.

Nothing here waits for the store while enough is held by this process. What a label's budget cannot hold for this call
another call may still be small enough for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from price_keeper import telemetry as metrics
from price_keeper.aside import run_large_work
from price_keeper.config import Config
from price_keeper.config.prices import ASYNC_JOB_LABEL
from price_keeper.errors import Busy, RecordingUnavailable, QuotaExceeded, Refusal, TooManyRequests
from price_keeper.forwarding.forwarder import UpstreamTarget
from price_keeper.forwarding.model_path import Operation
from price_keeper.hard.purse import CostReservation, BudgetLease, RefusalReason
from price_keeper.hard.purses import BudgetLeases
from price_keeper.hard.rows import HardBudgetKey
from price_keeper.hard.worst import Prices, Worst, counted, worst_case
from price_keeper.metering.guardrails import guardrail_prices
from price_keeper.metering.price_list import model_of
from price_keeper.metering.price_updates import Tariffs
from price_keeper.metering.profiles import OwnChoice
from price_keeper.model import ResolvedLabel
from price_keeper.recording.entries import PICO_PER_USD, Counter
from price_keeper.recording.meter import Terms
from price_keeper.selection.standing import Decision, BudgetState
from price_keeper.telemetry import MetricsRegistry

LARGE_BYTES = 64 * 1024  # of a body, which takes a millisecond to weigh
LEAST_WAIT_SECONDS = 1.0
MODELS_REMEMBERED = 1024  # callers may name any

_pico = attrgetter("pico")

# Asks Bedrock how many tokens a call's input has, at the place where it would be sent. Raises a Refusal.
Count = Callable[[UpstreamTarget, Operation, bytes], Awaitable[int]]


class Asking(NamedTuple):
    """What is asked of a label."""

    operation: Operation
    headers: Mapping[bytes, bytes]
    body: bytes


class Candidate(NamedTuple):
    choice: ResolvedLabel
    terms: Terms
    targets: Sequence[UpstreamTarget]


class Paid(NamedTuple):
    """`held` is to be settled by the call's receipt, or let go; None where the label has no quota."""

    decision: Decision
    candidate: Candidate
    worst: Worst | None = None
    held: CostReservation | None = None


class HardBudgets:
    def __init__(self, config: Config, purses: BudgetLeases, tariffs: Tariffs, count: Count) -> None:
        self._labels = config.labels
        self._units = guardrail_prices(config.guardrails) if config.guardrails is not None else None
        self.purses = purses
        self._tariffs = tariffs
        self._count = count

    def hold_counter(self, held: CostReservation, shards: int) -> Counter:
        """What is charged with the call that this is held for."""
        scope, label, period = held.key
        return Counter.of_hold(scope, label, self.purses.holder, period, shards)

    def add_to(self, telemetry: MetricsRegistry) -> None:
        telemetry.add(metrics.HARD_BUDGET_HELD_USD, lambda: self.purses.leased_pico / PICO_PER_USD)
        telemetry.add(metrics.HARD_BUDGET_TOP_UPS, lambda: self.purses.top_ups)
        telemetry.add(metrics.HARD_BUDGET_REFUSALS, lambda: self.purses.refusals)

    async def paid(
        self,
        standing: BudgetState,
        asking: Asking,
        decide: Callable[[Collection[str]], Decision],
        candidate_of: Callable[[Decision], Candidate],
    ) -> Paid:
        """`decide` says which label is next, of those that are not too dry for this call. Raises a Refusal."""
        dry: dict[str, tuple[BudgetLease, int]] = {}
        while True:
            try:
                decision = decide(dry)
            except (QuotaExceeded, TooManyRequests):
                if dry:
                    raise _too_dry(standing, dry) from None
                raise
            candidate = candidate_of(decision)
            label = candidate.terms.counted_as
            quota = standing.settings.quotas.get(label)
            if quota is None:
                return Paid(decision, candidate)
            prices = self._prices(candidate)
            worst = await self._worst(candidate, asking, prices)
            purse = self.purses.get(HardBudgetKey(standing.scope.key, label, standing.span.key), quota, standing.settings.version)
            held = CostReservation(purse, worst.pico) if purse.try_reserve(worst.pico) else await purse.reserve(worst.pico)
            if held is None:
                dry[decision.label] = purse, worst.pico
            elif self._prices(candidate) == prices:
                return Paid(decision, _at(prices, candidate), worst, held)
            else:  # they changed while the store was asked
                held.on_cancelled()

    def _prices(self, candidate: Candidate) -> Prices:
        choice, terms, targets = candidate
        if isinstance(choice, OwnChoice):
            return Prices((choice.profile.tariff,), self._units)
        known = self._labels.get(choice.label)
        if terms.counted_as == ASYNC_JOB_LABEL or not choice.model:
            return Prices((), self._units, None if known is None else known.pico_per_async_job)
        tariffs = tuple(self._tariffs.for_label(choice.label, each.region, each.model) for each in targets)
        return Prices(tariffs, self._units)

    async def _worst(self, candidate: Candidate, asking: Asking, prices: Prices) -> Worst:
        """Of whichever of the label's models is called, where its places have several."""
        targets = candidate.targets
        if len(targets) > 1:
            targets = [*{_model_name(each.model): each for each in reversed(targets)}.values()]
        worsts = [await self._worst_at(target, candidate, asking, prices) for target in targets]
        return max(worsts, key=_pico)

    async def _worst_at(self, target: UpstreamTarget, candidate: Candidate, asking: Asking, prices: Prices) -> Worst:
        choice, terms, _ = candidate
        known = self._labels.get(choice.label)
        most = None if known is None else known.max_output_tokens
        asked = (asking.operation, terms.format, asking.body, asking.headers, prices, most, target.model)
        is_large = len(asking.body) > LARGE_BYTES
        worst = await run_large_work(worst_case, *asked) if is_large else worst_case(*asked)
        if worst.needs_count:
            return counted(worst, prices, await self._count(target, asking.operation, worst.body))
        return worst


@lru_cache(MODELS_REMEMBERED)
def _model_name(model: str) -> object:
    """The same wherever a model is, and whichever of its inference profiles is called."""
    found = model_of(model)
    return model if found is None else found.name


def _at(prices: Prices, candidate: Candidate) -> Candidate:
    """At the prices that it is held for, wherever it goes and whatever they are by then."""
    if len(prices.tariffs) != len(candidate.targets):  # the others' never change: of guardrails, jobs, apps' own labels
        return candidate
    held = {target: tariff.price for target, tariff in zip(candidate.targets, prices.tariffs, strict=True)}
    return candidate._replace(terms=replace(candidate.terms, price_at=held.__getitem__))


def _too_dry(standing: BudgetState, dry: Mapping[str, tuple[BudgetLease, int]]) -> Refusal:
    """Why no budget has as much: what is only held by others may come back."""
    whys = {purse.status.reason for purse, _ in dry.values()}
    wait = max(LEAST_WAIT_SECONDS, min(purse.status.retry_after for purse, _ in dry.values()))
    if RefusalReason.DISK_FAILED in whys:
        return RecordingUnavailable("what this call costs cannot be written down", retry_after=wait)
    if whys & {RefusalReason.STORE_UNAVAILABLE, RefusalReason.LEASE_CLOSED}:
        return Busy("a hard budget is not spent from while the store cannot be asked", retry_after=wait)
    least = min(worst for _, worst in dry.values())
    what = f"this call may cost up to {least / PICO_PER_USD:.6f} USD"
    if RefusalReason.CONTENTION in whys or any(_is_held(standing, label, worst) for label, (_, worst) in dry.items()):
        return TooManyRequests(f"{what}, and what is left is held for other calls: {standing.format_amounts(dry)}", retry_after=wait)
    return QuotaExceeded(f"{what}, which is more than is left: {standing.format_amounts(dry)}; {standing.reset_message}")


def _is_held(standing: BudgetState, label: str, worst: int) -> bool:
    quota = standing.settings.quotas.get(label, 0)
    return quota - standing.get_tracker(label).spent >= worst
