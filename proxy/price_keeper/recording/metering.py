"""Gives each call its meter: who pays, at which price, and what it is taken to use until that is known."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.config.prices import ASYNC_JOB_LABEL, GUARDRAIL_LABEL
from price_keeper.errors import InvalidRequest
from price_keeper.forwarding.forwarder import CallObserver, UpstreamTarget
from price_keeper.forwarding.model_path import Operation
from price_keeper.hard.worst import CostCeiling
from price_keeper.metering.guardrails import estimate_units, price_guardrail, build_guardrail_prices
from price_keeper.metering.price_updates import PriceTables
from price_keeper.metering.pricing import Pricer, Cost
from price_keeper.metering.profiles import ResolvedProfile, InferenceProfile
from price_keeper.metering.reading import BYTES_PER_TOKEN
from price_keeper.metering.usage import Usage, make_plain_usage
from price_keeper.model import Caller, ResolvedLabel
from price_keeper.recording.entries import Account, Ended
from price_keeper.recording.expected import UsageForecast
from price_keeper.recording.guarded import GuardedMeter, add_guardrail_prices
from price_keeper.recording.jobs import JobMeter, PaidJobs
from price_keeper.recording.journal import Journal
from price_keeper.recording.meter import Meter, PricerForTarget, OperationPricing

MOST_INPUT: Final = 1_000_000  # tokens that a call is taken to have: larger bodies hold images or films
MAX_FORECASTS: Final = 1000  # labels; models without one come as callers name them

# What Bedrock does for nothing.
_MADE: Callable[..., Meter] = Meter

FREE: Final = frozenset({Operation.COUNT_TOKENS, Operation.ASYNC_INVOKE})
_GUARDRAILS: Final = frozenset({Operation.APPLY_GUARDRAIL, Operation.CHECK_GUARDRAILS})
_BYTES_A_UNIT: Final = 1000
_UNKNOWN_POLICY: Final = "unknown"  # costs as much as the dearest
_UNLABELLED: Final = "unlabelled."
_NO_LABEL: Final = re.compile(r"[^A-Za-z0-9]+")
_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9]+(?:[.:-][A-Za-z0-9]+)*")
_LONGEST_PLAIN: Final = 64 - len(_UNLABELLED)
_DIGEST: Final = 12  # of hexadecimal digits


class Metered(CallObserver, Protocol):
    """A tap on an answer, which is told at last that the call has come to its end."""

    @property
    def price_source(self) -> str:
        """Empty where nothing is paid."""

    def close(self) -> None: ...


class Free:
    """Of a call that costs nothing."""

    price_source = ""

    def on_sent(self, target: UpstreamTarget) -> None: ...

    def on_not_executed(self) -> None: ...

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self, is_whole: bool) -> None: ...

    def close(self) -> None: ...


FREE_OF_CHARGE: Final = Free()


class Metering:
    def __init__(
        self, config: Config, journal: Journal, tariffs: PriceTables, clock: Clock, before: Metering | None = None
    ) -> None:
        """`before` is that of the configuration whose place this one takes: what was learned from answers stays."""
        self._labels = config.labels
        self._guardrails = build_guardrail_prices(config.guardrails) if config.guardrails is not None else None
        self._journal = journal
        self._tariffs = tariffs
        self._clock = clock
        self._forecasts: dict[str, UsageForecast] = {}
        self._kept_terms: dict[tuple[str, Operation], OperationPricing] = {}
        self._terms_of_own: WeakKeyDictionary[InferenceProfile, dict[Operation, OperationPricing]] = WeakKeyDictionary()
        self._jobs = PaidJobs()
        if before is not None:
            self._jobs, self._terms_of_own = before._jobs, before._terms_of_own
            kept = ((name, self._inherit_forecast(before, name, each)) for name, each in before._forecasts.items())
            self._forecasts = {name: each for name, each in kept if each is not None}

    def _inherit_forecast(self, before: Metering, name: str, forecast: UsageForecast) -> UsageForecast | None:
        """What is still true where calls that are counted under this name go to the same model as they did."""
        one, other = before._labels.get(name), self._labels.get(name)
        if one == other:
            return forecast
        return forecast.without_cost() if one is not None and other is not None and one.model == other.model else None

    def terms(self, choice: ResolvedLabel, operation: Operation, method: bytes) -> OperationPricing | None:
        """None for what costs nothing. Where each call would need the same ones again, they are kept. Raises
        InvalidRequest."""
        if operation in FREE or method != b"POST":
            return None
        if type(choice) is ResolvedProfile:
            return self._own_terms(choice.profile, operation)
        key = (choice.label or choice.model, operation)
        kept = self._kept_terms.get(key)
        if kept is None:
            kept = self._made_terms(choice.label, choice.model, operation)
            if len(self._kept_terms) >= MAX_FORECASTS:
                self._kept_terms.clear()
            self._kept_terms[key] = kept
        return kept

    def meter(
        self,
        terms: OperationPricing,
        account: Account,
        caller: Caller,
        targets: Sequence[UpstreamTarget],
        body_bytes: int,
        guardrail_units: int = 0,
        ends: tuple[Ended, ...] = (),
        worst: CostCeiling | None = None,
    ) -> Meter:
        """Its intent is in the journal then. Raises CannotRecord and InvalidRequest. `guardrail_units` are those that a
        call which names a guardrail is taken to have asked for, and `ends` hear what becomes of it; `worst` is what
        it counts as under a hard budget as long as nobody knows better."""
        guess, made = terms.estimate_usage(body_bytes), _MADE
        if guardrail_units:
            terms = replace(terms, price_at=self._with_units(terms.pricer_for))
            guess = guess._replace(units=estimate_units(guardrail_units, guess.output))
            made = partial(GuardedMeter, guardrail_units)
        elif terms.operation is Operation.ASYNC_INVOKES:
            made = partial(JobMeter, self._jobs, caller)
        now = self._clock.now()
        if worst is None:
            return made(self._journal, terms, account, targets[0], guess, now, ends)
        if worst.input_tokens:
            guess = guess._replace(input=worst.input_tokens, output=worst.output_tokens)
        return made(self._journal, terms, account, targets[0], guess, now, ends, worst.pico)

    def _made_terms(self, label: str, model: str, operation: Operation) -> OperationPricing:
        if operation in _GUARDRAILS:
            return OperationPricing(GUARDRAIL_LABEL, operation, "", _always(self._unit_price()), _units, UsageForecast())
        if operation is Operation.ASYNC_INVOKES:
            price = self._job_price(label)
            return OperationPricing(ASYNC_JOB_LABEL, operation, "", _always(price), lambda _: Usage(), UsageForecast())
        counted_as = label or model_label(model)
        format = self._labels[label].format if label in self._labels else ""
        forecast, price_at = self._forecast_for(counted_as), partial(self._token_price, label)
        return OperationPricing(counted_as, operation, format, price_at, partial(_tokens, forecast), forecast)

    def _own_terms(self, profile: InferenceProfile, operation: Operation) -> OperationPricing:
        """Kept for as long as the profile itself is: another app's label of the same name has terms of its own."""
        kept = self._terms_of_own.setdefault(profile, {})
        terms = kept.get(operation)
        if terms is None:
            if operation is Operation.ASYNC_INVOKES:
                self._job_price(profile.name)  # which it has not, so this raises
            forecast = next(iter(kept.values())).forecast if kept else UsageForecast()
            price_at, guess = _always(profile.price_table.pricer), partial(_tokens, forecast)
            terms = OperationPricing(profile.name, operation, profile.label.format, price_at, guess, forecast)
            kept[operation] = terms
        return terms

    def _unit_prices(self) -> Mapping[str, int]:
        if self._guardrails is None:
            raise InvalidRequest("guardrails have no prices here: guardrails.prices_usd_per_1000_units in config.yaml")
        return self._guardrails

    def _with_units(self, price_at: PricerForTarget) -> PricerForTarget:
        prices = self._unit_prices()
        return lambda target: add_guardrail_prices(price_at(target), prices)

    def _unit_price(self) -> Pricer:
        prices = self._unit_prices()
        return Pricer(lambda usage: price_guardrail(prices, usage.units), "config")

    def _job_price(self, label: str) -> Pricer:
        pico = self._labels[label].pico_per_async_job if label in self._labels else None
        if pico is None:
            raise InvalidRequest(f"asynchronous jobs of {label!r} have no price here: price_usd_per_async_job")
        return Pricer(lambda _: Cost(pico), "config")

    def _token_price(self, label: str, target: UpstreamTarget) -> Pricer:
        return self._tariffs.for_label(label, target.region, target.model).pricer

    def _forecast_for(self, label: str) -> UsageForecast:
        forecast = self._forecasts.get(label)
        if forecast is None:
            if len(self._forecasts) >= MAX_FORECASTS:
                self._forecasts.clear()
            forecast = self._forecasts[label] = UsageForecast()
        return forecast


def _units(body_bytes: int) -> Usage:
    return Usage(units={_UNKNOWN_POLICY: body_bytes // _BYTES_A_UNIT + 1})


def _tokens(forecast: UsageForecast, body_bytes: int) -> Usage:
    return make_plain_usage(min(body_bytes // BYTES_PER_TOKEN + 1, MOST_INPUT), forecast.output_tokens, 0)


def _always(price: Pricer) -> PricerForTarget:
    return lambda _: price


def model_label(model: str) -> str:
    """Under what the spend of a model without a label is counted: its id, which is only spelt with other characters, or
    of a longer or unusual one, such as an ARN, what can be kept and a digest. No two models have the same."""
    if len(model) <= _LONGEST_PLAIN and _PLAIN_ID.fullmatch(model):
        return _UNLABELLED + model.replace(":", "_")
    digest = sha256(model.encode()).hexdigest()[:_DIGEST]
    kept = _NO_LABEL.sub("-", model.rpartition("/")[2])[: _LONGEST_PLAIN - _DIGEST - 2].strip("-")
    return f"{_UNLABELLED}{kept}__{digest}"  # two in a row are in no plain id
