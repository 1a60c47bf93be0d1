"""Select a label under a hard budget: the first whose budget has the whole cost ceiling of the call, which is
reserved.

Nothing here waits for the store while this process has leased enough money; a body whose tokens only Bedrock can bound
waits for its CountTokens. A budget that is too small for one call may still be enough for a smaller one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from price_keeper.budgets.budget_state import BudgetState, Decision
from price_keeper.budgets.hard.budget_lease import BudgetLease, BudgetLeases, CostReservation, RefusalReason
from price_keeper.budgets.hard.cost_ceiling import CallPrices, apply_count, compute_ceiling
from price_keeper.config import Config
from price_keeper.config.config_sections import ASYNC_JOB_LABEL
from price_keeper.domain import PICO_PER_USD, CostCeiling, ResolvedLabel, format_dollars
from price_keeper.errors import Busy, QuotaExceeded, RecordingUnavailable, Refusal, TooManyRequests
from price_keeper.ledger.lease_rows import HardBudgetKey
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.operations import Operation
from price_keeper.tasks import run_large_work
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.guardrail_usage import build_guardrail_prices
from price_keeper.usage.inference_profiles import ResolvedAppLabel
from price_keeper.usage.meter import OperationPricing
from price_keeper.usage.price_list import identify_model
from price_keeper.usage.price_table import find_highest_piece_prices
from price_keeper.usage.price_updates import PriceTables
from price_keeper.usage.prompt_router import is_prompt_router

LARGE_REQUEST_BYTES = 64 * 1024  # a larger body takes over a millisecond to bound, so a thread does it
MIN_RETRY_SECONDS = 1.0
MAX_MODELS = 1024  # cached; callers may name any model

_get_pico = attrgetter("pico")

# Asks Bedrock's CountTokens for the input tokens of a call at its target. Raises a Refusal.
CountInputTokens = Callable[[UpstreamTarget, Operation, bytes], Awaitable[int]]


class RequestContent(NamedTuple):
    """The parts of a request that its cost ceiling follows from."""

    operation: Operation
    headers: Mapping[bytes, bytes]
    body: bytes


class Candidate(NamedTuple):
    """A label that may serve, with its pricing and the targets that it can be sent to."""

    resolved: ResolvedLabel
    pricing: OperationPricing
    targets: Sequence[UpstreamTarget]


class ReservedCandidate(NamedTuple):
    """The label that serves. `reservation` is settled by the call's receipt or cancelled; None where the label has no
    quota."""

    decision: Decision
    candidate: Candidate
    ceiling: CostCeiling | None = None
    reservation: CostReservation | None = None


class HardLabelSelector:
    """Finds the label whose hard budget can pay for a call, and reserves the call's cost ceiling."""

    def __init__(
        self, config: Config, leases: BudgetLeases, price_tables: PriceTables, count_input_tokens: CountInputTokens
    ) -> None:
        self._labels = config.labels
        self._unit_prices = build_guardrail_prices(config.guardrails) if config.guardrails is not None else None
        self.leases = leases
        self._price_tables = price_tables
        self._count_input_tokens = count_input_tokens

    def build_lease_counter(self, reservation: CostReservation, shards: int) -> Counter:
        """The counter of the lease that pays; the call is charged to it too."""
        scope, label, period = reservation.key
        return Counter.for_lease(scope, label, self.leases.holder, period, shards)

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        telemetry.add(metrics.HARD_BUDGET_HELD_USD, lambda: self.leases.leased_pico / PICO_PER_USD)
        telemetry.add(metrics.HARD_BUDGET_TOP_UPS, lambda: self.leases.top_ups)
        telemetry.add(metrics.HARD_BUDGET_REFUSALS, lambda: self.leases.refusals)

    async def reserve(
        self,
        budget: BudgetState,
        content: RequestContent,
        decide: Callable[[Collection[str]], Decision],
        build_candidate: Callable[[Decision], Candidate],
    ) -> ReservedCandidate:
        """Reserve the ceiling from the first budget that has enough. `decide` returns the next label, given those whose
        budget is insufficient for this call. Raises a Refusal."""
        insufficient: dict[str, tuple[BudgetLease, int]] = {}
        while True:
            try:
                decision = decide(insufficient)
            except (QuotaExceeded, TooManyRequests):
                if insufficient:
                    raise _build_refusal(budget, insufficient) from None
                raise
            candidate = build_candidate(decision)
            label = candidate.pricing.counted_label
            quota = budget.settings.quotas.get(label)
            if quota is None:
                return ReservedCandidate(decision, candidate)
            prices = self._find_prices(candidate)
            ceiling = await self._compute_ceiling(candidate, content, prices)
            lease = self.leases.get(
                HardBudgetKey(budget.scope.key, label, budget.span.key), quota, budget.settings.version
            )
            reservation = (
                CostReservation(lease, ceiling.pico)
                if lease.try_reserve(ceiling.pico)
                else await lease.reserve(ceiling.pico)
            )
            if reservation is None:
                insufficient[decision.label] = lease, ceiling.pico
            elif self._find_prices(candidate) == prices:
                return ReservedCandidate(decision, _fix_prices(prices, candidate), ceiling, reservation)
            else:  # the prices changed while the store was read; decide again
                reservation.on_never_sent()

    def _find_prices(self, candidate: Candidate) -> CallPrices:
        resolved, pricing, targets = candidate
        if isinstance(resolved, ResolvedAppLabel):
            return CallPrices((resolved.profile.price_table,), self._unit_prices)
        label = self._labels.get(resolved.label)
        if pricing.counted_label == ASYNC_JOB_LABEL or not resolved.model:
            if label is None:
                return CallPrices((), self._unit_prices)
            return CallPrices((), self._unit_prices, label.pico_per_async_job, label.pico_per_unit)
        price_tables = tuple(
            self._price_tables.for_label(resolved.label, target.region, target.model) for target in targets
        )
        pieces = find_highest_piece_prices(price_tables)
        if is_prompt_router(resolved.model):
            price_tables = (*price_tables, *self._price_tables.all_tables())  # of whatever it may invoke
        return CallPrices(price_tables, self._unit_prices, piece_prices=pieces)

    async def _compute_ceiling(self, candidate: Candidate, content: RequestContent, prices: CallPrices) -> CostCeiling:
        """The highest ceiling over the label's models, if its targets have several."""
        targets = candidate.targets
        if len(targets) > 1:
            targets = [*{_normalize_model(target.model): target for target in reversed(targets)}.values()]
        ceilings = [await self._compute_ceiling_at(target, candidate, content, prices) for target in targets]
        return max(ceilings, key=_get_pico)

    async def _compute_ceiling_at(
        self, target: UpstreamTarget, candidate: Candidate, content: RequestContent, prices: CallPrices
    ) -> CostCeiling:
        resolved, pricing, _ = candidate
        label = self._labels.get(resolved.label)
        max_output_tokens = None if label is None else label.max_output_tokens
        arguments = (
            content.operation,
            pricing.format,
            content.body,
            content.headers,
            prices,
            max_output_tokens,
            target.model,
        )
        is_large = len(content.body) > LARGE_REQUEST_BYTES
        ceiling = await run_large_work(compute_ceiling, *arguments) if is_large else compute_ceiling(*arguments)
        if ceiling.needs_count:
            return apply_count(ceiling, prices, await self._count_input_tokens(target, content.operation, ceiling.body))
        return ceiling


@lru_cache(MAX_MODELS)
def _normalize_model(model: str) -> object:
    """The same for all regions and inference profiles of a model."""
    found = identify_model(model)
    return model if found is None else found.name


def _fix_prices(prices: CallPrices, candidate: Candidate) -> Candidate:
    """Price the call at the prices of its ceiling, whichever target serves it and whatever the prices are by then."""
    # Prices of guardrails, asynchronous jobs and labels of apps never change while a call is in flight.
    if len(prices.price_tables) != len(candidate.targets):
        return candidate
    price_at = {target: table.pricer for target, table in zip(candidate.targets, prices.price_tables, strict=True)}
    return candidate._replace(pricing=replace(candidate.pricing, pricer_for=price_at.__getitem__))


def _build_refusal(budget: BudgetState, insufficient: Mapping[str, tuple[BudgetLease, int]]) -> Refusal:
    """Why no budget has enough for the call: money that is only reserved or leased elsewhere may come back."""
    reasons = {lease.status.reason for lease, _ in insufficient.values()}
    wait = max(MIN_RETRY_SECONDS, min(lease.status.retry_after for lease, _ in insufficient.values()))
    if RefusalReason.DISK_FAILED in reasons:
        return RecordingUnavailable("the cost of this call cannot be recorded on disk", retry_after=wait)
    if reasons & {RefusalReason.STORE_UNAVAILABLE, RefusalReason.LEASE_CLOSED}:
        return Busy("a hard budget is not spent from while the store does not answer", retry_after=wait)
    smallest = min(ceiling for _, ceiling in insufficient.values())
    message = f"this call of {budget.display_name} may cost up to {format_dollars(smallest)}"
    if RefusalReason.CONTENTION in reasons or any(
        _is_reserved_elsewhere(budget, label, ceiling) for label, (_, ceiling) in insufficient.items()
    ):
        return TooManyRequests(
            f"{message}, and what is left is reserved for other calls: {budget.format_amounts(insufficient)}",
            retry_after=wait,
            details=budget.refusal_details,
        )
    return QuotaExceeded(
        f"{message}, which is more than is left: {budget.format_amounts(insufficient)}; {budget.reset_message}",
        details=budget.refusal_details,
    )


def _is_reserved_elsewhere(budget: BudgetState, label: str, ceiling: int) -> bool:
    """Whether the unspent quota would be enough, so that it is leased or reserved elsewhere."""
    quota = budget.settings.quotas.get(label, 0)
    return quota - budget.get_tracker(label).spent >= ceiling
