"""What an answer of a label will come to, from those before it. Pure."""

from __future__ import annotations

from typing import Final

INITIAL_OUTPUT_TOKENS: Final = 500  # before anything is known
_SMOOTHING_DIVISOR: Final = 16  # of what was learned before, each answer replaces one part


class UsageForecast:
    """`pico` is None before anything is known."""

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
        """As long as before; what that costs is not known yet."""
        forecast = UsageForecast()
        forecast._mean_tokens, forecast.output_tokens = self._mean_tokens, self.output_tokens
        return forecast
