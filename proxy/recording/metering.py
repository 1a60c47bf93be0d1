"""Gives each call its meter: who pays, at which price, and what it is taken to use until that is known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from proxy.clock import Clock
from proxy.config import Config
from proxy.config.prices import ASYNC_JOB_LABEL, GUARDRAIL_LABEL
from proxy.errors import InvalidRequest
from proxy.exchange import Header
from proxy.forwarding.forwarder import Tap, Target
from proxy.forwarding.model_path import Operation
from proxy.metering.price_updates import Tariffs
from proxy.metering.pricing import DEFAULT_TIER, Priced, Tariff, cost, guardrail_cost, guardrail_prices
from proxy.metering.reading import BYTES_A_TOKEN
from proxy.metering.usage import Usage
from proxy.model import Caller
from proxy.recording.accounts import Accounts
from proxy.recording.expected import Expected
from proxy.recording.meter import Meter, Price, PriceAt
from proxy.recording.recorder import Recorder
from proxy.selection.labels import Choice

MOST_EXPECTED = 1000  # labels; models without one come as callers name them

# What Bedrock does for nothing.
FREE = frozenset({Operation.COUNT_TOKENS, Operation.ASYNC_INVOKE})
_GUARDRAILS = frozenset({Operation.APPLY_GUARDRAIL, Operation.CHECK_GUARDRAILS})
_BYTES_A_UNIT = 1000
_UNKNOWN_POLICY = "unknown"  # costs as much as the dearest
_UNLABELLED = "unlabelled."
_NO_LABEL = re.compile(r"[^A-Za-z0-9._-]")
_DOTS = re.compile(r"\.{2,}")


class Metered(Tap, Protocol):
    """A tap on an answer, which is told at last that the call has come to its end."""

    @property
    def price_source(self) -> str:
        """Empty where nothing is paid."""

    def close(self) -> None: ...


class Free:
    """Of a call that costs nothing."""

    price_source = ""

    def sent_to(self, target: Target) -> None: ...

    def not_carried_out(self) -> None: ...

    def head(self, status: int, headers: list[Header]) -> None: ...

    def data(self, data: bytes) -> None: ...

    def end(self, is_whole: bool) -> None: ...

    def close(self) -> None: ...


class Metering:
    def __init__(self, config: Config, recorder: Recorder, accounts: Accounts, tariffs: Tariffs, clock: Clock) -> None:
        self._labels = config.labels
        self._guardrails = guardrail_prices(config.guardrails) if config.guardrails is not None else None
        self._recorder = recorder
        self._accounts = accounts
        self._tariffs = tariffs
        self._clock = clock
        self._expected: dict[str, Expected] = {}
        self._prices: dict[tuple[str, str, str], tuple[Tariff, Price]] = {}

    async def meter(
        self,
        caller: Caller,
        choice: Choice,
        operation: Operation,
        method: bytes,
        targets: Sequence[Target],
        body_bytes: int,
    ) -> Metered:
        """Its intent is in the journal then. Raises CannotRecord and InvalidRequest."""
        label = choice.label
        if operation in FREE or method != b"POST":
            return Free()
        self._recorder.admit()
        counted_as, price_at, guess = self._terms(label, choice.model, operation, body_bytes)
        account = self._accounts.known(caller, counted_as) or await self._accounts.learned(caller, counted_as)
        format = self._labels[label].format if label in self._labels else ""
        return Meter(
            self._recorder.journal,
            self._expected_of(counted_as),
            account,
            operation,
            format,
            price_at,
            targets[0],
            guess,
            self._clock.now(),
        )

    def _terms(self, label: str, model: str, operation: Operation, body_bytes: int) -> tuple[str, PriceAt, Usage]:
        if operation in _GUARDRAILS:
            guess = Usage(units={_UNKNOWN_POLICY: body_bytes // _BYTES_A_UNIT + 1})
            return GUARDRAIL_LABEL, _always(self._unit_price()), guess
        if operation is Operation.ASYNC_INVOKES:
            return ASYNC_JOB_LABEL, _always(self._job_price(label)), Usage()
        counted_as = label or model_label(model)
        guess = Usage(body_bytes // BYTES_A_TOKEN + 1, self._expected_of(counted_as).output)
        return counted_as, partial(self._token_price, label), guess

    def _unit_price(self) -> Price:
        if self._guardrails is None:
            raise InvalidRequest("guardrails have no prices here: guardrails.prices_usd_per_1000_units in config.yaml")
        prices = self._guardrails
        return Price(lambda usage: guardrail_cost(prices, usage.units), "config", unit=max(prices.values()))

    def _job_price(self, label: str) -> Price:
        pico = self._labels[label].pico_per_async_job if label in self._labels else None
        if pico is None:
            raise InvalidRequest(f"asynchronous jobs of {label!r} have no price here: price_usd_per_async_job")
        return Price(lambda _: Priced(pico), "config", job=pico)

    def _token_price(self, label: str, target: Target) -> Price:
        tariff = self._tariffs.for_label(label, target.region, target.model)
        key = (label, target.region, target.model if label else "")
        known = self._prices.get(key)
        if known is None or known[0] is not tariff:
            told, plain = f"{tariff.source} {tariff.version}", tariff.tiers[DEFAULT_TIER]
            known = self._prices[key] = tariff, Price(partial(cost, tariff), told, plain.input, plain.output)
        return known[1]

    def _expected_of(self, label: str) -> Expected:
        found = self._expected.get(label)
        if found is None:
            if len(self._expected) >= MOST_EXPECTED:
                self._expected.clear()
            found = self._expected[label] = Expected()
        return found


def _always(price: Price) -> PriceAt:
    return lambda _: price


def model_label(model: str) -> str:
    """Under what the spend of a model without a label is counted: the end of its id, as far as that can be a label."""
    name = _NO_LABEL.sub("-", model.rpartition("/")[2]).strip(".-")
    return (_UNLABELLED + _DOTS.sub(".", name))[:64]
