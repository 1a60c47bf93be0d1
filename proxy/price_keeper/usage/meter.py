"""Meters one call: writes its intent to the journal before it is sent, observes the response, and writes its receipt
before the last byte goes to the caller.

START HERE: `Meter`. It never alters the response, and it always comes to a receipt: exact if the response states a
plausible usage, else estimated: a guess of the tokens, or under a hard budget the call's ceiling. `GuardedMeter` also
counts the units of a guardrail that the call names. `RoutedMeter` is for prompt routers. `JobMeter` charges an
asynchronous job once, however often its start is repeated. `UsageForecast` learns how long a label's responses are; it
fills in what a call is assumed to use until that is known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import orjson
from cachetools import LRUCache

from price_keeper.domain import PICO_PER_USD, Caller
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import (
    ChargedCounters,
    CompletionListener,
    Intent,
    Receipt,
    UsageCounts,
)
from price_keeper.operations import Charge, Operation, find_operations
from price_keeper.price_dimensions import NO_NEW_COUNTS, UNITS_BY_NAME
from price_keeper.telemetry.logs import build_bedrock_extra
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.guardrail_usage import GuardrailUsageReader, price_guardrail
from price_keeper.usage.model_families import UNBILLED_GUARDRAIL_COUNTS
from price_keeper.usage.price_table import Cost, Pricer
from price_keeper.usage.prompt_router import InvokedModelReader, add_fee, price_invoked
from price_keeper.usage.token_usage import Usage, sum_tokens
from price_keeper.usage.unit_usage import NO_QUANTITIES, NO_UNITS, RequestedUnits, UnitUsageReader
from price_keeper.usage.usage_reader import UsageReader, build_reader

INITIAL_OUTPUT_TOKENS: Final = 500  # the forecast before any response
_SMOOTHING_DIVISOR: Final = 16  # each response replaces this part of the mean

MAX_CALL_PICO: Final = 10**15  # of one call: a thousand dollars, which no model comes near
_OPERATIONS_WITH_TOKENS: Final = find_operations(charge=Charge.TOKENS)
CONTENT_TYPE, REQUEST_ID = b"content-type", b"x-amzn-requestid"

MAX_JOBS_PER_CALLER: Final = 256  # that are remembered; repeats come within minutes
MAX_CALLERS_WITH_JOBS: Final = 1000
MAX_JOB_ANSWER_BYTES = 64 * 1024  # of a response that holds only an ARN

_log = logging.getLogger("price_keeper.recording")

_make_tuple = tuple.__new__  # makes a named tuple in half the time of calling its class


def build_counts(usage: Usage, pico: int, *, is_estimated: bool = False) -> UsageCounts:
    input, output, cache_read, written_5m, written_1h, _, _, by_policy, quantities = usage
    units = sum(count for name, count in by_policy.items() if name not in UNBILLED_GUARDRAIL_COUNTS) if by_policy else 0
    counts = UsageCounts(1, int(is_estimated), input, output, cache_read, written_5m, written_1h, units, pico)
    return counts.plus(_count_quantities(quantities)) if quantities else counts


def _count_quantities(quantities: Mapping[str, int]) -> UsageCounts:
    counted: dict[str, int] = {}
    for name, quantity in quantities.items():
        counter = UNITS_BY_NAME[name].counter
        counted[counter] = counted.get(counter, 0) + quantity
    return UsageCounts(**counted)


def make_plain_counts(input: int, output: int, pico: int) -> UsageCounts:
    """Counts of a call that used only plain input and output, the usual case. Takes half the time of `build_counts`."""
    return _make_tuple(UsageCounts, (1, 0, input, output, 0, 0, 0, 0, pico, *NO_NEW_COUNTS))


class UsageForecast:
    """Running means of the output tokens and cost of a label's calls. `pico` is None before the first response."""

    __slots__ = ("_mean_tokens", "output_tokens", "pico")

    def __init__(self) -> None:
        self._mean_tokens = float(INITIAL_OUTPUT_TOKENS)
        self.output_tokens = INITIAL_OUTPUT_TOKENS + 1
        self.pico: int | None = None

    def observe(self, tokens: int, pico: int) -> None:
        self._mean_tokens += (tokens - self._mean_tokens) / _SMOOTHING_DIVISOR
        self.output_tokens = int(self._mean_tokens) + 1
        self.pico = pico if self.pico is None else self.pico + (pico - self.pico) // _SMOOTHING_DIVISOR

    def without_cost(self) -> UsageForecast:
        """Return a forecast with the same length, whose cost is not known yet."""
        forecast = UsageForecast()
        forecast._mean_tokens, forecast.output_tokens = self._mean_tokens, self.output_tokens
        return forecast


PricerForTarget = Callable[[UpstreamTarget], Pricer]
FindInvokedPricer = Callable[[str, str], Pricer | None]  # from a region and the id of the model that a router invoked


@dataclass(frozen=True, slots=True)
class OperationPricing:
    """What all calls of one label and operation have in common.

    `pricer_for` returns the prices at each target that a call is sent to. `estimate_usage` maps the size of the body to
    the usage that is assumed until the actual one is known.
    """

    counted_label: str
    operation: Operation
    format: str
    pricer_for: PricerForTarget
    estimate_usage: Callable[[int], Usage]
    forecast: UsageForecast
    sold_units: tuple[str, ...] = ()  # price dimensions of what the label sells by the piece
    requested: RequestedUnits = NO_UNITS  # of one call, by `open_meter`
    find_invoked: FindInvokedPricer | None = None  # of a prompt router
    are_tokens_free: bool = False  # of a label that sells pieces alone

    def estimate_tokens(self, body_bytes: int) -> int:
        """Return the number of tokens that a call is assumed to use."""
        usage = self.estimate_usage(body_bytes)
        return usage[0] + usage[1]


@lru_cache(1000)  # by version of the prices; there are a few versions a day
def _price_source_of(description: str) -> str:
    return description.partition(" ")[0]


class Meter:
    """Observes one call's response and settles its cost."""

    __slots__ = (
        "_assumed_usage",
        "_ceiling_pico",
        "_charged",
        "_is_sent",
        "_is_settled",
        "_journal",
        "_number",
        "_pricer",
        "_pricing",
        "_reader",
        "_request_id",
        "_status",
        "_target",
    )  # fmt: skip

    def __init__(
        self,
        journal: Journal,
        pricing: OperationPricing,
        charged: ChargedCounters,
        first_target: UpstreamTarget,
        assumed_usage: Usage,
        now: float,
        completion_listeners: tuple[CompletionListener, ...] = (),
        ceiling_pico: int | None = None,
    ) -> None:
        """Write the call's intent. Raises RecordingUnavailable; the call must not be sent then.

        `assumed_usage` counts if the response states no usage. `ceiling_pico` is its cost then, if that is the call's
        ceiling under a hard budget instead of the price of the assumed usage.
        """
        self._journal = journal
        self._pricing = pricing
        self._charged = charged
        self._target = first_target
        self._pricer = pricer = pricing.pricer_for(first_target)
        self._assumed_usage = assumed_usage
        self._reader: UsageReader | None = None
        self._request_id = ""
        self._status = 0
        self._is_sent = self._is_settled = False
        input, output, _, _, _, _, _, by_policy, _ = assumed_usage
        if pricer.price_plain is not None:
            pico, units = pricer.price_plain(input, output), 0
        else:
            pico, units = pricer.price(assumed_usage).pico, sum(by_policy.values())
        if pico > MAX_CALL_PICO:
            pico = MAX_CALL_PICO
        self._ceiling_pico = ceiling_pico
        if ceiling_pico is not None:
            pico = ceiling_pico
        intent = Intent(
            charged, int(now * 1000), input, output, pico, units, pricing.forecast.pico, completion_listeners
        )
        self._number = journal.write_intent(intent)

    @property
    def price_source(self) -> str:
        return _price_source_of(self._pricer.description)

    def on_sent(self, target: UpstreamTarget) -> None:
        if target is not self._target:
            self._pricer = self._pricing.pricer_for(target)
        self._is_sent = True

    def on_not_executed(self) -> None:
        """The target has certainly not executed the call."""
        self._is_sent = False

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status
        self._request_id = headers.get(REQUEST_ID, b"").decode("latin-1")
        content_type = headers.get(CONTENT_TYPE, b"")
        self._reader = build_reader(self._pricing.operation, self._pricing.format, content_type, headers)
        requested = self._pricing.requested
        if requested is not NO_UNITS and status < 300:
            self._reader = UnitUsageReader(self._reader, requested)

    def on_data(self, data: bytes) -> None:
        if self._reader is not None:
            self._reader.feed(data)

    def on_end(self, is_whole: bool) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        try:
            self._journal.record(self._number, self._build_receipt(is_whole))
        except Exception as fault:
            # The response must reach its caller. Unknown usage never counts as zero, nor does usage that a journal line
            # cannot hold. The exception's text may quote the response, so it is not logged.
            cause = f"the usage of a response could not be read because of an error of ours ({type(fault).__name__})"
            receipt = self._log_estimate(logging.ERROR, cause, self._build_estimated_receipt(None, "fault"))
            self._journal.record(self._number, receipt)

    def close(self) -> None:
        """Settle the call if it is not settled. To be called at the very end, however the call ended."""
        if self._is_settled:
            return
        if self._reader is not None:
            self.on_end(False)
        else:
            self._is_settled = True
            self._journal.record(
                self._number, self._build_estimated_receipt(None, "no answer") if self._is_sent else None
            )

    def _build_receipt(self, is_whole: bool) -> Receipt | None:
        reader = self._reader
        if reader is None:
            return self._build_estimated_receipt(None, "no answer")
        usage = reader.usage()  # complete even if the response was cut after it
        if usage is not None and ((usage[0] and usage[1]) or self._status >= 300 or self._is_credible(usage, reader)):
            return self._build_exact_receipt(usage)
        if self._status >= 300:
            return None  # an error that states no usage has used nothing
        if reader.has_failed and not reader.estimate_output() and sum_tokens(reader.partial_usage()) <= 0:
            return None  # the same for an error that is the first event of a stream
        if usage is not None:
            return self._build_implausible_receipt(usage, reader)
        if is_whole:
            return self._build_estimated_receipt(reader, "silent")
        cause = "a response was cut or broken before it stated its usage"
        return self._log_estimate(logging.WARNING, cause, self._build_estimated_receipt(reader, "cut"))

    def _is_credible(self, usage: Usage, reader: UsageReader) -> bool:
        """Whether a usage is complete. A model reads some input; zero output is right only if nothing was said."""
        if self._pricing.operation not in _OPERATIONS_WITH_TOKENS:
            return True
        input, output, cache_read, written_5m, written_1h, _, _, _, quantities = usage
        if self._pricing.requested.quantities and any(quantities.values()):
            return True
        return bool(input or cache_read or written_5m or written_1h) and bool(output or not reader.has_output())

    def _build_implausible_receipt(self, usage: Usage, reader: UsageReader | None) -> Receipt:
        cause = f"a response states an implausibly small usage ({usage})"
        return self._log_estimate(logging.WARNING, cause, self._build_estimated_receipt(reader, "implausible"))

    def _may_be_free(self, usage: Usage) -> bool:
        """Whether a cost of zero is right: for an error, for units of free policies, or if everything is free."""
        assumed_usage = self._assumed_usage
        if any(usage.units.values()):
            if not sum_tokens(usage):
                return True
            assumed_usage = assumed_usage._replace(units=usage.units)  # the units that were used are known to be free
        return self._status >= 300 or not self._pricer.price(assumed_usage).pico

    def _build_exact_receipt(self, usage: Usage) -> Receipt:
        pricer = self._pricer
        input, output, cache_read, written_5m, written_1h, tier, latency, units, quantities = usage
        about = {"request": self._request_id, "price": pricer.description}
        if pricer.price_plain is not None and not (
            cache_read or written_5m or written_1h or tier or latency or units or quantities
        ):
            pico = pricer.price_plain(input, output)  # the usual case
            counts = make_plain_counts(input, output, pico)
        else:
            cost = pricer.price(usage)
            pico, counts = cost.pico, self._count(usage, cost.pico)
            about |= _describe_unusual(usage, cost)
        if not 0 < pico <= MAX_CALL_PICO:
            if pico > 0:
                cause = f"a response would cost more than a thousand dollars ({usage})"
                return self._log_estimate(logging.ERROR, cause, self._build_estimated_receipt(None, "absurd"))
            if not self._may_be_free(usage):
                return self._build_implausible_receipt(usage, None)
        if output:
            self._pricing.forecast.observe(output, pico)
        return Receipt(counts, about)

    def _build_estimated_receipt(self, reader: UsageReader | None, why: str) -> Receipt:
        if self._ceiling_pico is not None:
            about = {"request": self._request_id, "price": self._pricer.description, "why": why}
            return Receipt(self._count(self._assumed_usage, self._ceiling_pico, is_estimated=True), about)
        usage = self._assumed_usage if reader is None else self._merge_partial_usage(reader)
        cost = self._pricer.price(usage)
        if cost.pico > MAX_CALL_PICO:
            if reader is not None:
                return self._build_estimated_receipt(None, "absurd")
            cost = cost._replace(pico=MAX_CALL_PICO)
        about = {
            "request": self._request_id,
            "price": self._pricer.description,
            **_describe_unusual(usage, cost),
            "why": why,
        }
        return Receipt(self._count(usage, cost.pico, is_estimated=True), about)

    def _count(self, usage: Usage, pico: int, *, is_estimated: bool = False) -> UsageCounts:
        """Pieces are counted only where they have a price: older versions cannot read journal lines with pieces."""
        if usage.quantities and not self._pricing.sold_units:
            usage = usage._replace(quantities=NO_QUANTITIES)
        return build_counts(usage, pico, is_estimated=is_estimated)

    def _log_estimate(self, level: int, cause: str, receipt: Receipt) -> Receipt:
        """Log why the call is charged an estimate, and return its receipt."""
        message = "%s, so the call is estimated: %.6f USD of %s, label %s, prices %s, Bedrock request %s"
        scope = max((counter.scope for counter in self._charged.counters), key=len, default="")  # the app, if any
        usd, label, prices = receipt.counts.pico / PICO_PER_USD, self._pricing.counted_label, self._pricer.description
        extra = build_bedrock_extra(self._request_id)
        _log.log(level, message, cause, usd, scope, label, prices, self._request_id, extra=extra)
        return receipt

    def _merge_partial_usage(self, reader: UsageReader) -> Usage:
        partial_usage, estimated_output = reader.partial_usage(), reader.estimate_output()
        output = self._assumed_usage.output if estimated_output is None else estimated_output
        if partial_usage is None:
            return self._assumed_usage._replace(output=output)
        if sum_tokens(partial_usage) == partial_usage.output:
            partial_usage = partial_usage._replace(input=self._assumed_usage.input)  # no model runs without input
        return partial_usage._replace(output=max(partial_usage.output, output))


def _describe_unusual(usage: Usage, cost: Cost) -> dict[str, str]:
    details = {"tier": usage.tier, "latency": usage.latency, "flags": " ".join(sorted(cost.flags))}
    return {name: text for name, text in details.items() if text}


def add_guardrail_prices(pricer: Pricer, prices: Mapping[str, int]) -> Pricer:
    """Add the price of a guardrail's units to a pricer. The result has no price for tokens alone."""
    return replace(pricer, price=_price_tokens_and_units(pricer.price, prices), price_plain=None)


def _price_tokens_and_units(
    price_tokens: Callable[[Usage], Cost], prices: Mapping[str, int]
) -> Callable[[Usage], Cost]:
    def price_both(usage: Usage) -> Cost:
        tokens, units = price_tokens(usage), price_guardrail(prices, usage.units)
        return Cost(tokens.pico + units.pico, tokens.flags | units.flags)

    return price_both


class GuardedMeter(Meter):
    """Meters a call that names a guardrail."""

    __slots__ = ("_request_units",)

    def __init__(
        self,
        request_units: int,
        journal: Journal,
        pricing: OperationPricing,
        charged: ChargedCounters,
        first_target: UpstreamTarget,
        assumed_usage: Usage,
        now: float,
        completion_listeners: tuple[CompletionListener, ...] = (),
        ceiling_pico: int | None = None,
    ) -> None:
        """`request_units` is the estimate of its request's units; the other parameters are those of `Meter`."""
        super().__init__(
            journal, pricing, charged, first_target, assumed_usage, now, completion_listeners, ceiling_pico
        )
        self._request_units = request_units

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        super().on_head(status, headers)
        if self._reader is not None:
            self._reader = GuardrailUsageReader(self._reader, headers.get(CONTENT_TYPE, b""), self._request_units)

    def _is_credible(self, usage: Usage, reader: UsageReader) -> bool:
        if not sum_tokens(usage) and isinstance(reader, GuardrailUsageReader) and reader.is_blocked():
            return True
        return super()._is_credible(usage, reader)

    def _merge_partial_usage(self, reader: UsageReader) -> Usage:
        usage = super()._merge_partial_usage(reader)
        if not isinstance(reader, GuardrailUsageReader):
            return usage
        # A trace that was cut may state only the units of the request.
        reported, estimated = (
            usage._replace(units=units) for units in reader.reported_and_estimated_units(usage.output)
        )
        return max(estimated, reported, key=lambda candidate: self._pricer.price(candidate).pico)


class RoutedMeter(Meter):
    """Meters a call of a prompt router at the prices of the model that it invoked, with the router's fee."""

    __slots__ = ("_find_pricer", "_invoked", "_region")

    def __init__(
        self,
        find_pricer: FindInvokedPricer,
        journal: Journal,
        pricing: OperationPricing,
        charged: ChargedCounters,
        first_target: UpstreamTarget,
        assumed_usage: Usage,
        now: float,
        completion_listeners: tuple[CompletionListener, ...] = (),
        ceiling_pico: int | None = None,
    ) -> None:
        super().__init__(
            journal, pricing, charged, first_target, assumed_usage, now, completion_listeners, ceiling_pico
        )
        self._find_pricer = find_pricer
        self._invoked: InvokedModelReader | None = None
        self._region = first_target.region

    def on_sent(self, target: UpstreamTarget) -> None:
        super().on_sent(target)
        self._region = target.region

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        super().on_head(status, headers)
        self._invoked = InvokedModelReader(headers.get(CONTENT_TYPE, b""))

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        if self._invoked is not None:
            self._invoked.feed(data)

    def _build_receipt(self, is_whole: bool) -> Receipt | None:
        model = "" if self._invoked is None else self._invoked.model()
        self._pricer = price_invoked(self._pricer, self._find_pricer(self._region, model) if model else None)
        return super()._build_receipt(is_whole)

    def _build_exact_receipt(self, usage: Usage) -> Receipt:
        return super()._build_exact_receipt(add_fee(usage, self._pricing.sold_units))

    def _merge_partial_usage(self, reader: UsageReader) -> Usage:
        return add_fee(super()._merge_partial_usage(reader), self._pricing.sold_units)


class PaidJobs:
    """Recently paid jobs. Bounded per caller, so that one caller cannot evict another's."""

    def __init__(self) -> None:
        self._arns_by_caller = LRUCache[Caller, LRUCache[str, bool]](MAX_CALLERS_WITH_JOBS)

    def add_if_new(self, caller: Caller, arn: str) -> bool:
        """Add a job. True if it is new; a repeat of it is not."""
        arns = self._arns_by_caller.setdefault(caller, LRUCache(MAX_JOBS_PER_CALLER))
        is_new = arn not in arns
        arns[arn] = True
        return is_new


class JobMeter(Meter):
    """Meters the start of an asynchronous job."""

    __slots__ = ("_answer", "_caller", "_paid_jobs")

    def __init__(
        self,
        paid_jobs: PaidJobs,
        caller: Caller,
        journal: Journal,
        pricing: OperationPricing,
        charged: ChargedCounters,
        first_target: UpstreamTarget,
        assumed_usage: Usage,
        now: float,
        completion_listeners: tuple[CompletionListener, ...] = (),
        ceiling_pico: int | None = None,
    ) -> None:
        super().__init__(
            journal, pricing, charged, first_target, assumed_usage, now, completion_listeners, ceiling_pico
        )
        self._paid_jobs = paid_jobs
        self._caller = caller
        self._answer = b""

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        if len(self._answer) <= MAX_JOB_ANSWER_BYTES:
            self._answer += data

    def _build_receipt(self, is_whole: bool) -> Receipt | None:
        if self._status >= 300:
            return None
        arn = _read_job_arn(self._answer)
        return super()._build_receipt(is_whole) if not arn or self._paid_jobs.add_if_new(self._caller, arn) else None


def _read_job_arn(answer: bytes) -> str:
    """Read the job's ARN; empty if the response has none. Such a job is charged, as it may be a new one."""
    try:
        arn = orjson.loads(answer)["invocationArn"]
    except (LookupError, TypeError, ValueError):
        return ""
    return arn if isinstance(arn, str) else ""
