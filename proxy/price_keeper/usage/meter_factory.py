"""Opens the meter of each call, with the price and the assumed usage that follow from its label and operation.

START HERE: `MeterFactory`. `pricing_for` returns the `OperationPricing` that all calls of one label and operation
share, or None for an operation that costs nothing. `open_meter` returns when the intent of the call is in the journal.
A factory belongs to one configuration; the next one inherits what was learned from responses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from price_keeper.bounded_dict import BoundedDict
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.config.config_sections import ASYNC_JOB_LABEL, GUARDRAIL_LABEL
from price_keeper.domain import Caller, CostCeiling, ResolvedLabel
from price_keeper.errors import InvalidRequest
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import ChargedCounters, CompletionListener
from price_keeper.operations import Charge, Operation, find_operations
from price_keeper.upstream.forwarder import CallObserver, UpstreamTarget
from price_keeper.usage.guardrail_usage import build_guardrail_prices, estimate_units, price_guardrail
from price_keeper.usage.inference_profiles import AppLabel, ResolvedAppLabel
from price_keeper.usage.meter import (
    GuardedMeter,
    JobMeter,
    Meter,
    OperationPricing,
    PaidJobs,
    PricerForTarget,
    RoutedMeter,
    UsageForecast,
    add_guardrail_prices,
)
from price_keeper.usage.price_table import Cost, Pricer, build_label_price_table, price_units
from price_keeper.usage.price_updates import PriceTables
from price_keeper.usage.prompt_router import add_fee, is_prompt_router
from price_keeper.usage.stream_usage import BYTES_PER_TOKEN
from price_keeper.usage.token_usage import Usage, make_plain_usage
from price_keeper.usage.unit_usage import NO_UNITS, RequestedUnits

MAX_ASSUMED_INPUT_TOKENS: Final = 1_000_000  # of a call; larger bodies hold images or films
MAX_FORECASTS: Final = 1000  # labels; the names of models without a label come from callers

# Typed as a callable, because `open_meter` uses it in turn with a `partial` of a subclass.
_PLAIN_METER: Callable[..., Meter] = Meter

_FREE_OPERATIONS: Final = find_operations(charge=Charge.NOTHING)
_GUARDRAIL_OPERATIONS: Final = find_operations(charge=Charge.GUARDRAIL_UNITS)
_BYTES_PER_UNIT: Final = 1000
_UNKNOWN_POLICY: Final = "unknown"  # costs as much as the dearest policy
_UNLABELLED: Final = "unlabelled."
_NOT_IN_LABELS: Final = re.compile(r"[^A-Za-z0-9]+")
_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9]+(?:[.:-][A-Za-z0-9]+)*")
_MAX_PLAIN_LENGTH: Final = 64 - len(_UNLABELLED)
_DIGEST_LENGTH: Final = 12  # hexadecimal digits


class CallMeter(CallObserver, Protocol):
    """Observes a response; `close` is called at the end of the call."""

    @property
    def price_source(self) -> str:
        """Where the prices come from; empty if nothing is charged."""

    def close(self) -> None: ...


class FreeMeter:
    """The meter of a call that costs nothing."""

    price_source = ""

    def on_sent(self, target: UpstreamTarget) -> None: ...

    def on_not_executed(self) -> None: ...

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self, is_whole: bool) -> None: ...

    def close(self) -> None: ...


FREE_METER: Final = FreeMeter()


class MeterFactory:
    """Opens meters for one configuration."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        price_tables: PriceTables,
        clock: Clock,
        predecessor: MeterFactory | None = None,
    ) -> None:
        """`predecessor` is the factory of the previous configuration; what it learned from responses is inherited."""
        self._labels = config.labels
        self._guardrail_prices = build_guardrail_prices(config.guardrails) if config.guardrails is not None else None
        self._journal = journal
        self._price_tables = price_tables
        self._clock = clock
        self._forecasts = BoundedDict[str, UsageForecast](MAX_FORECASTS)
        self._pricing_cache = BoundedDict[tuple[str, Operation], OperationPricing](MAX_FORECASTS)
        self._profile_pricing_cache: WeakKeyDictionary[AppLabel, dict[Operation, OperationPricing]] = (
            WeakKeyDictionary()
        )
        self._paid_jobs = PaidJobs()
        if predecessor is not None:
            self._paid_jobs, self._profile_pricing_cache = predecessor._paid_jobs, predecessor._profile_pricing_cache
            for name, forecast in predecessor._forecasts.items():
                inherited = self._inherit_forecast(predecessor, name, forecast)
                if inherited is not None:
                    self._forecasts[name] = inherited

    def _inherit_forecast(self, predecessor: MeterFactory, name: str, forecast: UsageForecast) -> UsageForecast | None:
        """Return what still holds of a forecast: all if the label is the same, its length if the model is."""
        one, other = predecessor._labels.get(name), self._labels.get(name)
        if one == other:
            return forecast
        return forecast.without_cost() if one is not None and other is not None and one.model == other.model else None

    def pricing_for(self, choice: ResolvedLabel, operation: Operation, method: bytes) -> OperationPricing | None:
        """Return the shared pricing of a label and operation, cached; None if it costs nothing. Raises InvalidRequest
        if it has no price."""
        if operation in _FREE_OPERATIONS or method != b"POST":
            return None
        if type(choice) is ResolvedAppLabel:
            return self._profile_pricing(choice.profile, operation)
        key = (choice.label or choice.model, operation)
        pricing = self._pricing_cache.get(key)
        if pricing is None:
            pricing = self._pricing_cache[key] = self._build_pricing(choice.label, choice.model, operation)
        return pricing

    def open_meter(
        self,
        pricing: OperationPricing,
        charged: ChargedCounters,
        caller: Caller,
        targets: Sequence[UpstreamTarget],
        body_bytes: int,
        guardrail_units: int = 0,
        completion_listeners: tuple[CompletionListener, ...] = (),
        ceiling: CostCeiling | None = None,
        requested: RequestedUnits = NO_UNITS,
    ) -> Meter:
        """Open the meter of a call; its intent is in the journal then. Raises RecordingUnavailable and InvalidRequest.

        `guardrail_units` is the estimate for a request that names a guardrail. `completion_listeners` are notified of
        the outcome. `ceiling` is what the call counts as under a hard budget until its cost is known. `requested` is
        what it asks for of what is sold by the piece.
        """
        assumed_usage, make_meter = pricing.estimate_usage(body_bytes), _PLAIN_METER
        if requested is not NO_UNITS:
            pricing = replace(pricing, requested=requested)
            assumed_usage = assumed_usage._replace(quantities=requested.quantities)
        if guardrail_units:
            pricing = replace(pricing, pricer_for=self._add_guardrail_prices(pricing.pricer_for))
            assumed_usage = assumed_usage._replace(units=estimate_units(guardrail_units, assumed_usage.output))
            make_meter = partial(GuardedMeter, guardrail_units)
        elif pricing.find_invoked is not None:
            assumed_usage = add_fee(assumed_usage, pricing.sold_units)
            make_meter = partial(RoutedMeter, pricing.find_invoked)
        elif pricing.operation is Operation.ASYNC_INVOKES:
            make_meter = partial(JobMeter, self._paid_jobs, caller)
        now = self._clock.now()
        if ceiling is None:
            return make_meter(self._journal, pricing, charged, targets[0], assumed_usage, now, completion_listeners)
        if ceiling.input_tokens:
            assumed_usage = assumed_usage._replace(input=ceiling.input_tokens, output=ceiling.output_tokens)
        return make_meter(
            self._journal, pricing, charged, targets[0], assumed_usage, now, completion_listeners, ceiling.pico
        )

    def _build_pricing(self, label: str, model: str, operation: Operation) -> OperationPricing:
        if operation in _GUARDRAIL_OPERATIONS:
            return OperationPricing(
                GUARDRAIL_LABEL,
                operation,
                "",
                _return_always(self._build_guardrail_pricer()),
                _assume_units,
                UsageForecast(),
            )
        if operation is Operation.ASYNC_INVOKES:
            pricer = self._build_job_pricer(label)
            return OperationPricing(
                ASYNC_JOB_LABEL,
                operation,
                "",
                _return_always(pricer),
                lambda _: Usage(),
                UsageForecast(),
                self._find_sold_units(label),
            )
        counted_as = label or build_model_label(model)
        format = self._labels[label].format if label in self._labels else ""
        forecast, price_at = self._forecast_for(counted_as), partial(self._find_token_pricer, label)
        return OperationPricing(
            counted_as,
            operation,
            format,
            price_at,
            partial(_assume_tokens, forecast),
            forecast,
            self._find_sold_units(label),
            find_invoked=self._find_invoked_pricer if is_prompt_router(model) else None,
            are_tokens_free=label in self._labels
            and not any(build_label_price_table(self._labels[label]).highest_prices),
        )

    def _profile_pricing(self, profile: AppLabel, operation: Operation) -> OperationPricing:
        """Return a profile's pricing, cached for as long as the profile exists. The name does not identify it, because
        another app's label of the same name has its own prices."""
        by_operation = self._profile_pricing_cache.setdefault(profile, {})
        pricing = by_operation.get(operation)
        if pricing is None:
            if operation is Operation.ASYNC_INVOKES:
                self._build_job_pricer(profile.name)  # always raises, as a profile has no price for jobs
            forecast = next(iter(by_operation.values())).forecast if by_operation else UsageForecast()
            price_at, estimate_usage = _return_always(profile.price_table.pricer), partial(_assume_tokens, forecast)
            pricing = OperationPricing(
                profile.name, operation, profile.label_config.format, price_at, estimate_usage, forecast
            )
            by_operation[operation] = pricing
        return pricing

    def _require_guardrail_prices(self) -> Mapping[str, int]:
        if self._guardrail_prices is None:
            raise InvalidRequest("guardrails have no prices here: guardrails.prices_usd_per_1000_units in config.yaml")
        return self._guardrail_prices

    def _add_guardrail_prices(self, price_at: PricerForTarget) -> PricerForTarget:
        prices = self._require_guardrail_prices()
        return lambda target: add_guardrail_prices(price_at(target), prices)

    def _build_guardrail_pricer(self) -> Pricer:
        prices = self._require_guardrail_prices()
        return Pricer(lambda usage: price_guardrail(prices, usage.units), "config")

    def _build_job_pricer(self, label: str) -> Pricer:
        config = self._labels.get(label)
        if config is None or (config.pico_per_async_job is None and not config.prices_usd_per_unit):
            raise InvalidRequest(f"asynchronous jobs of {label!r} have no price here: price_usd_per_async_job")
        return Pricer(partial(price_job, config.pico_per_unit, config.pico_per_async_job), "config")

    def _find_invoked_pricer(self, region: str, model: str) -> Pricer | None:
        price_table = self._price_tables.find_for_model(region, model)
        return None if price_table is None else price_table.pricer

    def _find_sold_units(self, label: str) -> tuple[str, ...]:
        return tuple(self._labels[label].prices_usd_per_unit) if label in self._labels else ()

    def _find_token_pricer(self, label: str, target: UpstreamTarget) -> Pricer:
        return self._price_tables.for_label(label, target.region, target.model).pricer

    def _forecast_for(self, label: str) -> UsageForecast:
        forecast = self._forecasts.get(label)
        if forecast is None:
            forecast = self._forecasts[label] = UsageForecast()
        return forecast


def price_job(unit_prices: Mapping[str, int], job_price: int | None, usage: Usage) -> Cost:
    """The price of a job: of what its request asks for if that is known, else of any job. Raises InvalidRequest."""
    if unit_prices and usage.quantities:
        return price_units(unit_prices, usage.quantities)
    if job_price is None:
        raise InvalidRequest("this job has no price here: it does not say how long its video is")
    return Cost(job_price)


def _assume_units(body_bytes: int) -> Usage:
    return Usage(units={_UNKNOWN_POLICY: body_bytes // _BYTES_PER_UNIT + 1})


def _assume_tokens(forecast: UsageForecast, body_bytes: int) -> Usage:
    return make_plain_usage(min(body_bytes // BYTES_PER_TOKEN + 1, MAX_ASSUMED_INPUT_TOKENS), forecast.output_tokens, 0)


def _return_always(pricer: Pricer) -> PricerForTarget:
    return lambda _: pricer


def build_model_label(model: str) -> str:
    """Return the name under which the spend of a model without a label is counted. No two models share one.

    It is the id with other punctuation or, for a long or unusual id such as an ARN, its readable part and a digest.
    """
    if len(model) <= _MAX_PLAIN_LENGTH and _PLAIN_ID.fullmatch(model):
        return _UNLABELLED + model.replace(":", "_")
    digest = sha256(model.encode()).hexdigest()[:_DIGEST_LENGTH]
    readable = _NOT_IN_LABELS.sub("-", model.rpartition("/")[2])[: _MAX_PLAIN_LENGTH - _DIGEST_LENGTH - 2].strip("-")
    return f"{_UNLABELLED}{readable}__{digest}"  # no plain id has two underscores in a row
