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


class SpendTracker:
    """`alarm` is what has to be known to be spent before somebody has to look again, and is told of that by `ring`."""

    __slots__ = (
        "_acknowledged_own",
        "_on_threshold",
        "_sent_own",
        "exact_at",
        "in_flight",
        "own_spent",
        "spent",
        "threshold",
    )

    def __init__(self, unflushed: int = 0, in_doubt: int = 0, on_threshold: Callable[[], None] = lambda: None) -> None:
        """`unflushed` is what of ours was recorded before and is not acknowledged yet; what is `in_doubt` of it is, or
        may be, in the store all the same."""
        self._on_threshold = on_threshold
        self.spent = unflushed
        self.own_spent = unflushed
        self._sent_own = in_doubt  # of our own, and perhaps in the store; all of the rest is certainly not
        self._acknowledged_own = 0  # of that, what certainly is
        self.in_flight = 0
        self.threshold: float = NEVER
        self.exact_at: float = -NEVER  # when the last exact read began, by the monotonic clock

    @property
    def committed(self) -> int:
        return self.spent + self.in_flight

    @property
    def is_flush_certain(self) -> bool:
        """Nothing of ours is under way to the store, or of unknown outcome."""
        return self._sent_own == self._acknowledged_own

    @property
    def stored_and_pending(self) -> tuple[int, int]:
        """What is known: so much of it is in the store, and so much of ours is still in the journal."""
        pending = self.own_spent - self._acknowledged_own
        return self.spent - pending, pending

    def restore(self, stored: int, pending: int, *, is_own: bool) -> None:
        """`parts` as they were noted, until the store can be asked. What waited then is in the store by now, or still
        in the journal and our own. What another process noted may hold any of our own."""
        self._raise_others_to(
            stored + max(0, pending - self.own_spent) if is_own else stored + pending - self.own_spent
        )

    # What this process does.

    def on_call_started(self, expected_pico: int) -> None:
        self.in_flight += expected_pico

    def on_call_ended(self, expected_pico: int, pico: int) -> None:
        self.in_flight -= expected_pico
        self.own_spent += pico
        self._add_spent(pico)

    def add_sent(self, pico: int) -> None:
        """From now on it may be in the store. What was recorded before this quota was known shows by now at the latest
        that it is our own."""
        self._sent_own += pico
        if self._sent_own > self.own_spent:
            unseen, self.own_spent = self._sent_own - self.own_spent, self._sent_own
            self._add_spent(unseen)

    def remove_sent(self, pico: int) -> None:
        """What was being sent is certainly not in the store, and nothing brings it there but sending it again."""
        self._sent_own -= pico

    def add_acknowledged(self, pico: int) -> None:
        """It is in the store, and in the journal no more."""
        self._acknowledged_own += pico

    def _add_spent(self, pico: int) -> None:
        self.spent += pico
        if self.spent >= self.threshold:
            self.threshold = NEVER
            self._on_threshold()

    # What the store says.

    def apply_lower_bound(self, pico: int) -> None:
        """A sum that is no newer than this moment; some of what was sent may be in it."""
        self._raise_others_to(pico - self._sent_own)

    def apply_exact_sum(self, pico: int, read_began_at: float) -> None:
        """The shards, while all was certain: what was sent is in them."""
        self.spent = self.own_spent + pico - self._sent_own
        self.exact_at = read_began_at

    def _raise_others_to(self, pico: int) -> None:
        self.spent = max(self.spent, self.own_spent + pico)
