"""What a process remembers of sessions that are over, so that their tokens cost the store nothing more."""

from __future__ import annotations

from collections.abc import Hashable

from price_keeper.clock import Clock
from price_keeper.errors import TokenRejected

MAX_CACHED_REFUSALS = 10_000  # tokens and sessions
FOREVER = float("inf")


class RefusalCache:
    """Refresh tokens that will never be good again, or not in this moment, by their hash; and sessions that ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[Hashable, tuple[float, str]] = {}

    def raise_if_refused(self, token_hash: str) -> None:
        """Raises NoGuess as the store would have it."""
        until, why = self._entries.get(token_hash, (0.0, ""))
        if self._clock.monotonic() < until:
            raise TokenRejected(why)

    def remember_refusal(self, token_hash: str, why: str, seconds: float = FOREVER) -> TokenRejected:
        """Remembers that, and is what to raise."""
        self._remember(token_hash, why, self._clock.monotonic() + seconds)
        return TokenRejected(why)

    def remember_ended(self, client: str, sid: str) -> None:
        self._remember((client, sid), "", FOREVER)

    def has_ended(self, client: str, sid: str) -> bool:
        return (client, sid) in self._entries

    def _remember(self, key: Hashable, why: str, until: float) -> None:
        if len(self._entries) >= MAX_CACHED_REFUSALS and key not in self._entries:
            for oldest in list(self._entries)[: MAX_CACHED_REFUSALS // 2]:
                del self._entries[oldest]
        self._entries[key] = (until, why)
