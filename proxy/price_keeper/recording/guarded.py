"""The meter of a call of a model that names a guardrail: its units are counted and paid with the call's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from price_keeper.recording.entries import ChargedCounters, CompletionListener
from price_keeper.recording.journal import Journal
from price_keeper.recording.meter import CONTENT_TYPE, Meter, OperationPricing
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.guardrail_usage import GuardrailUsageReader, price_guardrail
from price_keeper.usage.price_table import Cost, Pricer
from price_keeper.usage.token_usage import Usage, sum_tokens
from price_keeper.usage.usage_reader import UsageReader


def add_guardrail_prices(pricer: Pricer, prices: Mapping[str, int]) -> Pricer:
    """The price of tokens, and of a guardrail's units beside them: so never that of tokens alone."""
    return replace(pricer, price=_price_tokens_and_units(pricer.price, prices), price_plain=None)


def _price_tokens_and_units(
    price_tokens: Callable[[Usage], Cost], prices: Mapping[str, int]
) -> Callable[[Usage], Cost]:
    def price_both(usage: Usage) -> Cost:
        tokens, units = price_tokens(usage), price_guardrail(prices, usage.units)
        return Cost(tokens.pico + units.pico, tokens.flags | units.flags)

    return price_both


class GuardedMeter(Meter):
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
        """`asked_units` are those that its request is taken for; the rest is what any meter gets."""
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
        # All that came of a trace before the cut may be what it tells of the request.
        reported, estimated = (
            usage._replace(units=units) for units in reader.reported_and_estimated_units(usage.output)
        )
        return max(estimated, reported, key=lambda each: self._pricer.price(each).pico)
