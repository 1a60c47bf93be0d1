"""What a process remembers of sessions that are over, so that their tokens cost the store nothing more."""

from __future__ import annotations

from collections.abc import Hashable

from price_keeper.clock import Clock
from price_keeper.errors import TokenRejected

REMEMBERED = 10_000  # tokens and sessions
FOR_GOOD = float("inf")


class Spent:
    """Refresh tokens that will never be good again, or not in this moment, by their hash; and sessions that ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[Hashable, tuple[float, str]] = {}

    def demand_hope(self, token_hash: str) -> None:
        """Raises NoGuess as the store would have it."""
        until, why = self._known.get(token_hash, (0.0, ""))
        if self._clock.monotonic() < until:
            raise TokenRejected(why)

    def refused(self, token_hash: str, why: str, seconds: float = FOR_GOOD) -> TokenRejected:
        """Remembers that, and is what to raise."""
        self._remember(token_hash, why, self._clock.monotonic() + seconds)
        return TokenRejected(why)

    def ended(self, client: str, sid: str) -> None:
        self._remember((client, sid), "", FOR_GOOD)

    def has_ended(self, client: str, sid: str) -> bool:
        return (client, sid) in self._known

    def _remember(self, what: Hashable, why: str, until: float) -> None:
        if len(self._known) >= REMEMBERED and what not in self._known:
            for oldest in list(self._known)[: REMEMBERED // 2]:
                del self._known[oldest]
        self._known[what] = (until, why)
