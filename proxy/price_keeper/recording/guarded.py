"""The meter of a call of a model that names a guardrail: its units are counted and paid with the call's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from price_keeper.forwarding.forwarder import UpstreamTarget
from price_keeper.metering.guardrail_traces import GuardrailUsageReader
from price_keeper.metering.guardrails import price_guardrail
from price_keeper.metering.pricing import Pricer, Cost
from price_keeper.metering.reading import UsageReader
from price_keeper.metering.usage import Usage, sum_tokens
from price_keeper.recording.entries import Account, Ended
from price_keeper.recording.journal import Journal
from price_keeper.recording.meter import CONTENT_TYPE, Meter, OperationPricing


def with_units(price: Pricer, prices: Mapping[str, int]) -> Pricer:
    """The price of tokens, and of a guardrail's units beside them: so never that of tokens alone."""
    return replace(price, of=_both(price.price, prices), plain=None)


def _both(of_tokens: Callable[[Usage], Cost], prices: Mapping[str, int]) -> Callable[[Usage], Cost]:
    def both(usage: Usage) -> Cost:
        tokens, units = of_tokens(usage), price_guardrail(prices, usage.units)
        return Cost(tokens.pico + units.pico, tokens.flags | units.flags)

    return both


class GuardedMeter(Meter):
    __slots__ = ("_asked_units",)

    def __init__(
        self,
        asked_units: int,
        journal: Journal,
        pricing: OperationPricing,
        account: Account,
        first: UpstreamTarget,
        guess: Usage,
        now: float,
        ends: tuple[Ended, ...] = (),
        most: int | None = None,
    ) -> None:
        """`asked_units` are those that its request is taken for; the rest is what any meter gets."""
        super().__init__(journal, pricing, account, first, guess, now, ends, most)
        self._asked_units = asked_units

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        super().on_head(status, headers)
        if self._reader is not None:
            self._reader = GuardrailUsageReader(self._reader, headers.get(CONTENT_TYPE, b""), self._asked_units)

    def _is_credible(self, usage: Usage, reader: UsageReader) -> bool:
        if not sum_tokens(usage) and isinstance(reader, GuardrailUsageReader) and reader.is_blocked():
            return True
        return super()._is_credible(usage, reader)

    def _seen(self, reader: UsageReader) -> Usage:
        usage = super()._seen(reader)
        if not isinstance(reader, GuardrailUsageReader):
            return usage
        # All that came of a trace before the cut may be what it tells of the request.
        told, guessed = (usage._replace(units=units) for units in reader.reported_and_estimated_units(usage.output))
        return max(guessed, told, key=lambda each: self._price.price(each).pico)
