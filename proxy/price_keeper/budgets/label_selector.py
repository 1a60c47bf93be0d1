"""Select the label that serves a call, the counters it is charged to, and its price. Start here to read this package.

`LabelResolver` finds the label that a caller's model name stands for. `LabelSelector` then asks the caller's budget
which label of the fallback chain serves. `select_cached` never waits and returns None if the store has to be read
or the budget is hard; `select` loads what is missing, and under a hard budget reserves the cost of the call. Both
raise a Refusal if no label may serve, and extend `response_headers` in any case.

After a reload a selector has a successor. A call that was waiting at that moment is selected again by the
successor, so one decision never mixes two configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

from price_keeper.budgets.budget_registry import BudgetRegistry, CallerDay
from price_keeper.budgets.budget_state import Decision
from price_keeper.budgets.hard.budget_lease import CostReservation
from price_keeper.budgets.hard_label_selector import Candidate, HardLabelSelector, RequestContent
from price_keeper.budgets.label_policy import Mode
from price_keeper.config.config_sections import LabelConfig
from price_keeper.config.label_names import LabelNames
from price_keeper.domain import Caller, CostCeiling, ResolvedLabel
from price_keeper.errors import Busy, InvalidRequest, QuotaExceeded, Refusal, UpstreamUnavailable
from price_keeper.exchange import Header, Request
from price_keeper.ledger.ledger_entries import ChargedCounters
from price_keeper.model_ids import find_profile_region, is_system_profile_arn
from price_keeper.operations import BodyForm, find_operations
from price_keeper.parse_call import ParsedCall, locate_model
from price_keeper.tasks import run_large_work
from price_keeper.telemetry.request_stats import OperationStats, RequestStats
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.upstream.profile_models import ProfileModels
from price_keeper.usage.inference_profiles import NO_APP_LABELS, UNREAD_APP_LABELS, AppLabels, ResolvedAppLabel
from price_keeper.usage.meter import OperationPricing
from price_keeper.usage.meter_factory import MeterFactory

LARGE_BODY_BYTES: Final = 256 * 1024  # a larger body takes milliseconds to parse, so a thread does it
LABEL_HEADER: Final = b"x-price-keeper-label"
UNREAD_RETRY_SECONDS = 3.0
# Bodies of these operations are in the format of one model family.
FORMAT_SPECIFIC_OPERATIONS: Final = (
    find_operations(BodyForm.INVOKE) | find_operations(BodyForm.CHAT) | find_operations(BodyForm.RESPONSES)
)
_MODE_HEADERS: Final = {mode: (b"x-price-keeper-mode", mode.value.encode()) for mode in Mode}
EXCEEDED_HEADER: Final = _MODE_HEADERS[Mode.EXCEEDED]
_QUOTA_HEADER: Final = b"x-price-keeper-quota-pct"
_MAX_DECISION_HEADERS: Final = 1000
# Nearly all calls get one of about a hundred headers of each mode.
_decision_headers: dict[tuple[Mode, int | None], tuple[Header, ...]] = {}

# Finds the targets that can serve a label; each path is the operation's path for the target's model.
FindTargets = Callable[[ResolvedLabel, ParsedCall], list[UpstreamTarget]]
ResponseHeaders: TypeAlias = "list[Header]"  # headers that the product adds to an answer; each stage extends the list

P = ParamSpec("P")
T = TypeVar("T")


class Selection(NamedTuple):
    """What serves the call, and on which terms. `body` is what is sent, and `call` locates the model's name in it.
    Pricing and counters are None for a call that costs nothing. `meters` belongs to the configuration that the call was
    selected by."""

    meters: MeterFactory
    resolved: ResolvedLabel
    call: ParsedCall
    body: bytes
    targets: list[UpstreamTarget]
    stats: OperationStats
    pricing: OperationPricing | None = None
    charged: ChargedCounters | None = None
    ceiling: CostCeiling | None = None
    reservation: CostReservation | None = None


class Destination(NamedTuple):
    """What all calls of one route that one label serves have in common."""

    resolved: ResolvedLabel
    pricing: OperationPricing
    targets: list[UpstreamTarget]
    response_headers: tuple[Header, ...]
    stats: OperationStats


class CallRoute:
    """A parsed request with its label and pricing, as `selector` resolved them. Routes of configured labels are cached
    by their request target; each caches its destinations by the serving label."""

    __slots__ = ("call", "counted_as", "destinations", "pricing", "resolved", "selector")

    def __init__(
        self, selector: LabelSelector, call: ParsedCall, resolved: ResolvedLabel, pricing: OperationPricing | None
    ) -> None:
        self.selector = selector
        self.call = call
        self.counted_as = call.operation.name  # in metrics; a member of an Enum builds its name each time it is asked
        self.resolved = resolved
        self.pricing = pricing
        self.destinations: dict[str, Destination] = {}


class _SelectorReplaced(Exception):
    """The configuration was reloaded during a selection; the successor selects again."""


class LabelSelector:
    """Selects the label that serves a call. See the module's docstring."""

    def __init__(
        self,
        labels: LabelResolver,
        budgets: BudgetRegistry,
        meters: MeterFactory,
        find_targets: FindTargets,
        check_recordable: Callable[[], None],
        hard_label_selector: HardLabelSelector,
        request_stats: RequestStats,
        profile_models: ProfileModels,
    ) -> None:
        """`check_recordable` raises if the cost of a call could not be recorded."""
        self._labels = labels
        self._budgets = budgets
        self.meters = meters
        self._find_targets = find_targets
        self._check_recordable = check_recordable
        self._hard_label_selector = hard_label_selector
        self._request_stats = request_stats
        self._profile_models = profile_models
        self._successor: LabelSelector | None = None

    def redirect_to(self, successor: LabelSelector) -> None:
        """A reloaded configuration is applied: calls that still wait here are selected by its selector."""
        self._successor = successor

    def resolve_configured(self, model: str) -> ResolvedLabel | None:
        return self._labels.resolve_configured(model)

    def select_cached(
        self, caller: Caller, route: CallRoute, request: Request, response_headers: ResponseHeaders
    ) -> Selection | None:
        """Like `select`, without waiting. Returns None if only `select` can answer: for a call that costs nothing,
        under a hard budget, and while the budget is unknown or stale. Raises a Refusal."""
        call, resolved, pricing = route.call, route.resolved, route.pricing
        if pricing is None:
            return None
        caller_day = self._budgets.cached(caller)
        if caller_day is None or caller_day.budget.settings.enforcement == "hard":
            return None
        self._check_recordable()
        try:
            decision = _decide(caller_day, resolved, pricing, call)
        except Refusal as refusal:
            response_headers += _build_refusal_headers(resolved, refusal)
            raise
        destination = route.destinations.get(decision.label)
        if destination is None:
            destination = self._build_destination(caller_day, call, request, resolved, pricing, decision)
            if type(destination.resolved) is not ResolvedAppLabel:  # another app may have a label of the same name
                route.destinations[decision.label] = destination
        resolved, pricing, targets, label_headers, stats = destination
        response_headers += label_headers
        response_headers += build_decision_headers(decision)
        charged = caller_day.get_charged_counters(pricing.counted_label)
        return Selection(self.meters, resolved, call, request.body, targets, stats, pricing, charged)

    def _build_destination(
        self,
        caller_day: CallerDay,
        call: ParsedCall,
        request: Request,
        resolved: ResolvedLabel,
        pricing: OperationPricing,
        decision: Decision,
    ) -> Destination:
        resolved, pricing = self._resolve_serving(caller_day, call, request, resolved, pricing, decision)
        stats = self._request_stats.get_stats(call.operation.name, pricing.counted_label)
        return Destination(resolved, pricing, self._find_targets(resolved, call), _build_label_headers(resolved), stats)

    async def list_labels(self, caller: Caller) -> list[str]:
        """The configured labels and the app's own, by name."""
        return self._labels.list_names(await self._budgets.app_labels.get(caller))

    async def resolve(self, caller: Caller, call: ParsedCall) -> ResolvedLabel:
        """The label that the caller's model name stands for, by the configuration in force when this returns. Raises
        InvalidRequest, Busy and UpstreamUnavailable."""
        resolved = self._labels.resolve_configured(call.model) if call.model else ResolvedLabel("", "", "")
        if resolved is not None:
            return resolved
        app_labels, region = await self._budgets.app_labels.get(caller), find_profile_region(call.model)
        profile_model: str | None = None
        if region is not None and app_labels is not UNREAD_APP_LABELS and app_labels.resolve(call.model) is None:
            profile_model = await self._find_profile_model(caller, call.model, region)
        if self._successor is not None:  # the name may be a configured label now
            return await self._successor.resolve(caller, call)
        return self._labels.resolve(call.model, app_labels, profile_model)

    async def _find_profile_model(self, caller: Caller, arn: str, region: str) -> str | None:
        try:
            return await self._profile_models.find(arn, region, caller)
        except UpstreamUnavailable:
            if self._labels.allows_unlabelled:
                return None
            raise

    async def select(
        self,
        caller: Caller,
        call: ParsedCall,
        request: Request,
        resolved: ResolvedLabel,
        pricing: OperationPricing | None,
        response_headers: ResponseHeaders,
    ) -> Selection:
        """Select the label that serves the call; reads the store if necessary, and reserves the cost under a hard
        budget. Extends `response_headers`, also if it raises a Refusal."""
        if pricing is None:
            response_headers += _build_label_headers(resolved)
            stats = self._request_stats.get_stats(call.operation.name, resolved.label)
            return Selection(self.meters, resolved, call, request.body, self._find_targets(resolved, call), stats)
        self._check_recordable()
        caller_day = self._budgets.cached(caller) or await self._budgets.load(caller)
        if self._successor is not None:
            return await self._successor._select_again(caller, call, request, response_headers)
        try:
            if caller_day.budget.settings.enforcement == "hard":
                return await self._select_hard(caller_day, call, request, resolved, pricing, response_headers)
            decision = _decide(caller_day, resolved, pricing, call)
        except _SelectorReplaced:
            assert self._successor is not None
            return await self._successor._select_again(caller, call, request, response_headers)
        except Refusal as refusal:
            response_headers += _build_refusal_headers(resolved, refusal)
            raise
        resolved, pricing, targets, label_headers, stats = self._build_destination(
            caller_day, call, request, resolved, pricing, decision
        )
        response_headers += (*label_headers, *build_decision_headers(decision))
        charged = caller_day.get_charged_counters(pricing.counted_label)
        return Selection(self.meters, resolved, call, request.body, targets, stats, pricing, charged)

    async def _select_again(
        self, caller: Caller, call: ParsedCall, request: Request, response_headers: ResponseHeaders
    ) -> Selection:
        """Resolve and select a call again that was resolved before a reload. Budgets know one set of labels, so one
        decision never mixes two."""
        resolved = await self.resolve(caller, call)
        pricing = self.meters.pricing_for(resolved, call.operation, request.method)
        return await self.select(caller, call, request, resolved, pricing, response_headers)

    def _resolve_serving(
        self,
        caller_day: CallerDay,
        call: ParsedCall,
        request: Request,
        resolved: ResolvedLabel,
        pricing: OperationPricing,
        decision: Decision,
    ) -> tuple[ResolvedLabel, OperationPricing]:
        """Label and pricing of the decision: those requested, unless another label serves."""
        if decision.label in (resolved.label, pricing.counted_label):
            return resolved, pricing
        resolved = self._labels.substitute(resolved, decision.label, caller_day.budget.app_labels)
        return resolved, self.meters.pricing_for(resolved, call.operation, request.method) or pricing

    async def _select_hard(
        self,
        caller_day: CallerDay,
        call: ParsedCall,
        request: Request,
        resolved: ResolvedLabel,
        pricing: OperationPricing,
        response_headers: ResponseHeaders,
    ) -> Selection:
        def build_candidate(decision: Decision) -> Candidate:
            serving, serving_pricing = self._resolve_serving(caller_day, call, request, resolved, pricing, decision)
            return Candidate(serving, serving_pricing, self._find_targets(serving, call))

        request.reserve_copies(1)  # the body with an output limit written into it, or as it is sent to CountTokens
        content = RequestContent(call.operation, request.headers, request.body)

        def decide(insufficient: Collection[str]) -> Decision:
            if self._successor is not None:  # an earlier reservation has been cancelled by now
                raise _SelectorReplaced
            return _decide_hard(caller_day, resolved, pricing, call, insufficient)

        decision, (resolved, pricing, targets), ceiling, reservation = await self._hard_label_selector.reserve(
            caller_day.budget, content, decide, build_candidate
        )
        response_headers += (*_build_label_headers(resolved), *build_decision_headers(decision))
        body = request.body
        lease_counter = (
            None
            if reservation is None
            else self._hard_label_selector.build_lease_counter(reservation, caller_day.budget.settings.shards)
        )
        charged = caller_day.get_charged_counters(pricing.counted_label, lease_counter)
        if ceiling is not None and ceiling.body is not body:  # an output limit was written into it
            body = ceiling.body
            try:
                call = await run_in_thread_if_large(body, locate_model, call, body)
            except BaseException:
                if reservation is not None:
                    reservation.on_never_sent()
                raise
        stats = self._request_stats.get_stats(call.operation.name, pricing.counted_label)
        return Selection(self.meters, resolved, call, body, [*targets], stats, pricing, charged, ceiling, reservation)


def _decide(caller_day: CallerDay, resolved: ResolvedLabel, pricing: OperationPricing, call: ParsedCall) -> Decision:
    budget, is_format_specific = caller_day.budget, call.operation in FORMAT_SPECIFIC_OPERATIONS
    if pricing.counted_label != resolved.label:
        return budget.decide_without_fallback(pricing.counted_label)
    if type(resolved) is ResolvedAppLabel:
        return budget.decide_app_label(resolved.label, is_format_specific)
    return budget.decide(resolved.label, is_format_specific)


def _decide_hard(
    caller_day: CallerDay,
    resolved: ResolvedLabel,
    pricing: OperationPricing,
    call: ParsedCall,
    insufficient: Collection[str],
) -> Decision:
    budget = caller_day.budget
    if pricing.counted_label != resolved.label:
        return budget.decide_hard_without_fallback(pricing.counted_label, insufficient)
    return budget.decide_hard(resolved.label, call.operation in FORMAT_SPECIFIC_OPERATIONS, insufficient)


def _build_refusal_headers(resolved: ResolvedLabel, refusal: Refusal) -> ResponseHeaders:
    return [*_build_label_headers(resolved)[:1], *([EXCEEDED_HEADER] if isinstance(refusal, QuotaExceeded) else [])]


def _build_label_headers(resolved: ResolvedLabel) -> tuple[Header, ...]:
    if not resolved.requested:
        return ()
    return (
        (b"x-price-keeper-requested", resolved.requested.encode()),
        (LABEL_HEADER, resolved.label.encode()),
        (b"x-price-keeper-model", resolved.model.encode()),
    )


async def run_in_thread_if_large(body: bytes, work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Run `work` in a thread if the body is large, so that it does not block the event loop."""
    if len(body) < LARGE_BODY_BYTES:
        return work(*arguments, **keywords)
    return await run_large_work(work, *arguments, **keywords)


def build_decision_headers(decision: Decision) -> tuple[Header, ...]:
    _, mode, percent, shadow_label = decision
    headers = _decision_headers.get((mode, percent)) or _build_mode_headers(mode, percent)
    if shadow_label is not None:
        return (*headers, (b"x-price-keeper-shadow-label", shadow_label.encode() or b"none"))
    return headers


def _build_mode_headers(mode: Mode, percent: int | None) -> tuple[Header, ...]:
    headers: tuple[Header, ...] = (
        (_MODE_HEADERS[mode],) if percent is None else (_MODE_HEADERS[mode], (_QUOTA_HEADER, b"%d" % percent))
    )
    if len(_decision_headers) < _MAX_DECISION_HEADERS:
        _decision_headers[mode, percent] = headers
    return headers


class LabelResolver:
    """Finds the label that a model name stands for."""

    def __init__(self, labels: Mapping[str, LabelConfig], *, allows_unlabelled: bool) -> None:
        self._labels = labels
        self._names = LabelNames(labels)
        self.allows_unlabelled = allows_unlabelled

    def resolve_configured(self, requested: str) -> ResolvedLabel | None:
        """A configured label by its name, an alias, or any form of its model's id; None if there is none. An app may
        have a label of its own for the ARN of a profile, so such an ARN counts only as the configuration writes it."""
        find = self._names.find_written if is_system_profile_arn(requested) else self._names.find
        return self._build(requested, find(requested))

    def resolve(
        self, requested: str, app_labels: AppLabels = NO_APP_LABELS, profile_model: str | None = None
    ) -> ResolvedLabel:
        """A configured label, or else one of the app's own, or else the configured label of the profile's model.
        `profile_model` is that of an application inference profile, if it is known. Raises InvalidRequest and Busy."""
        resolved = self.resolve_configured(requested) or app_labels.resolve(requested)
        if resolved is None and app_labels is not UNREAD_APP_LABELS:
            resolved = self._build(requested, self._names.find(profile_model or requested))
        if resolved is not None:
            return resolved
        if self.allows_unlabelled:
            return ResolvedLabel(requested, "", requested)
        if app_labels is UNREAD_APP_LABELS:
            message = f"{requested[:200]!r} may be a label of the app's own, which cannot be read now; retry later"
            raise Busy(message, retry_after=UNREAD_RETRY_SECONDS)
        allowed = f"{', '.join((*self._labels, *app_labels.by_name))}, and the models they stand for"
        raise InvalidRequest(f"there is no label for {requested[:200]!r}; there are {allowed}")

    def _build(self, requested: str, label: str | None) -> ResolvedLabel | None:
        return None if label is None else ResolvedLabel(requested, label, self._labels[label].model)

    def list_names(self, app_labels: AppLabels) -> list[str]:
        return [*self._labels, *(name for name in app_labels.by_name if name not in self._labels)]

    def substitute(self, resolved: ResolvedLabel, label: str, app_labels: AppLabels = NO_APP_LABELS) -> ResolvedLabel:
        if label in self._labels:
            return ResolvedLabel(resolved.requested, label, self._labels[label].model)
        profile = app_labels.by_name[label]
        return ResolvedAppLabel(resolved.requested, label, profile.label_config.model, profile)
