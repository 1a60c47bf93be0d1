"""What an answer of a label will come to, from those before it. Pure."""

from __future__ import annotations

from typing import Final

FIRST_TOKENS: Final = 500  # before anything is known
_SHARE: Final = 16  # of what was learned before, each answer replaces one part


class Expected:
    """`pico` is None before anything is known."""

    __slots__ = ("_mean", "output", "pico")

    def __init__(self) -> None:
        self._mean = float(FIRST_TOKENS)
        self.output = FIRST_TOKENS + 1
        self.pico: int | None = None

    def learn(self, tokens: int, pico: int) -> None:
        self._mean += (tokens - self._mean) / _SHARE
        self.output = int(self._mean) + 1
        self.pico = pico if self.pico is None else self.pico + (pico - self.pico) // _SHARE

    def at_other_prices(self) -> Expected:
        """As long as before; what that costs is not known yet."""
        found = Expected()
        found._mean, found.output = self._mean, self.output
        return found
