"""What is spent of one quota, as far as it is certain: what others have in the store, and all that is our own. Pure.

    known  =  others + own
    taken  =  known + what the calls under way are expected to cost

A sum that is read from the store, of the shards or a total of them, holds what others flushed and some of our own: none
that was never sent, perhaps all that was. So of what is read, all of ours that was ever sent is taken off:

    others  =  what is read - sent

Where nothing of ours is under way or of unknown outcome while the shards are read, what was sent is in them, and this
is exact. Else it is a lower bound, and the highest one holds: what was spent is never less later. No clock has a part
in this, so none that is wrong can make it too high.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

NEVER: Final = float("inf")


class Spent:
    """`alarm` is what has to be known to be spent before somebody has to look again, and is told of that by `ring`."""

    __slots__ = ("_acknowledged", "_ring", "_sent", "alarm", "exact_at", "in_flight", "known", "own")

    def __init__(self, unflushed: int = 0, in_doubt: int = 0, ring: Callable[[], None] = lambda: None) -> None:
        """`unflushed` is what of ours was recorded before and is not acknowledged yet; what is `in_doubt` of it is, or
        may be, in the store all the same."""
        self._ring = ring
        self.known = unflushed
        self.own = unflushed
        self._sent = in_doubt  # of our own, and perhaps in the store; all of the rest is certainly not
        self._acknowledged = 0  # of that, what certainly is
        self.in_flight = 0
        self.alarm: float = NEVER
        self.exact_at: float = -NEVER  # when the last exact read began, by the monotonic clock

    @property
    def taken(self) -> int:
        return self.known + self.in_flight

    @property
    def is_certain(self) -> bool:
        """Nothing of ours is under way to the store, or of unknown outcome."""
        return self._sent == self._acknowledged

    @property
    def parts(self) -> tuple[int, int]:
        """What is known: so much of it is in the store, and so much of ours is still in the journal."""
        pending = self.own - self._acknowledged
        return self.known - pending, pending

    def recall(self, stored: int, waiting: int, *, is_ours: bool) -> None:
        """`parts` as they were noted, until the store can be asked. What waited then is in the store by now, or still
        in the journal and our own. What another process noted may hold any of our own."""
        self._others_are_at_least(stored + max(0, waiting - self.own) if is_ours else stored + waiting - self.own)

    # What this process does.

    def began(self, expected: int) -> None:
        self.in_flight += expected

    def ended(self, expected: int, pico: int) -> None:
        self.in_flight -= expected
        self.own += pico
        self._grow(pico)

    def sending(self, pico: int) -> None:
        """From now on it may be in the store. What was recorded before this quota was known shows by now at the latest
        that it is our own."""
        self._sent += pico
        if self._sent > self.own:
            more, self.own = self._sent - self.own, self._sent
            self._grow(more)

    def not_taken(self, pico: int) -> None:
        """What was being sent is certainly not in the store, and nothing brings it there but sending it again."""
        self._sent -= pico

    def acknowledged(self, pico: int) -> None:
        """It is in the store, and in the journal no more."""
        self._acknowledged += pico

    def _grow(self, pico: int) -> None:
        self.known += pico
        if self.known >= self.alarm:
            self.alarm = NEVER
            self._ring()

    # What the store says.

    def read(self, pico: int) -> None:
        """A sum that is no newer than this moment; some of what was sent may be in it."""
        self._others_are_at_least(pico - self._sent)

    def read_exactly(self, pico: int, began: float) -> None:
        """The shards, while all was certain: what was sent is in them."""
        self.known = self.own + pico - self._sent
        self.exact_at = began

    def _others_are_at_least(self, pico: int) -> None:
        self.known = max(self.known, self.own + pico)
