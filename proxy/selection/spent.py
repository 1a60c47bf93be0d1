"""What is spent of one quota: what the store says, what of ours it cannot know yet, what is under way. Pure.

    known  =  base + acknowledged since the base's time + recorded, but not acknowledged
    taken  =  known + what the calls under way are expected to cost

The base is either exact, a read of all shards while no flush of ours was under way, or a total that somebody stamped
with the time at which it was read. With a total, whatever of ours was acknowledged a little before its stamp or later
counts beside it: so while clocks differ by no more than that, the sum may be too high for a while, and never too low.

All times are by this process's monotonic clock, so that setting its wall clock moves nothing that is known already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

MARGIN_SECONDS: Final = 5.0  # by which the clocks of a fleet may differ
MOST_APART = 512  # acknowledgements; beyond it the oldest count as one, as of the later
NEVER: Final = float("inf")


class Spent:
    """`alarm` is what has to be known to be spent before somebody has to look again, and is told of that by `ring`."""

    __slots__ = ("_acknowledged", "_as_of", "_base", "_pending", "_ring", "alarm", "in_flight", "known", "own")

    def __init__(self, unflushed: int = 0, ring: Callable[[], None] = lambda: None) -> None:
        """`unflushed` is what of ours was recorded before, and is not acknowledged yet."""
        self._ring = ring
        self._base = 0
        self._as_of = -NEVER  # of the base; an older one tells nothing new
        self._acknowledged: deque[tuple[float, int]] = deque()  # when, and how much, since a margin before that
        self.known = unflushed
        self._pending = unflushed  # of what is known: not acknowledged yet
        self.in_flight = 0
        self.own = 0  # by the calls of this process
        self.alarm: float = NEVER

    @property
    def taken(self) -> int:
        return self.known + self.in_flight

    @property
    def parts(self) -> tuple[int, int]:
        """What is known: so much of it is in the store, and so much of ours is not certainly there."""
        return self.known - self._pending, self._pending

    def recall(self, stored: int, waiting: int) -> None:
        """What `parts` were when somebody else looked, until we do. What waited then is in the store by now, or in the
        journal still and counts as that."""
        self._rebase(stored + max(0, waiting - self._pending), -NEVER, -NEVER)

    # What this process does.

    def began(self, expected: int) -> None:
        self.in_flight += expected

    def ended(self, expected: int, pico: int) -> None:
        self.in_flight -= expected
        self.known += pico
        self.own += pico
        self._pending += pico
        if self.known >= self.alarm:
            self.alarm = NEVER
            self._ring()

    def acknowledged(self, pico: int, now: float) -> None:
        """It is in the store. What was never counted here is none of ours to take away later."""
        pico = min(pico, self._pending)
        self._pending -= pico
        self._acknowledged.append((now, pico))
        if len(self._acknowledged) > MOST_APART:
            _, earlier = self._acknowledged.popleft()
            at, later = self._acknowledged.popleft()
            self._acknowledged.appendleft((at, earlier + later))

    # What the store says.

    def read_total(self, pico: int, stamped: float, now: float) -> bool:
        """Whether it is of use; a stamp in the future is somebody's wrong clock."""
        if stamped > now + MARGIN_SECONDS:
            return False
        if stamped > self._as_of:
            self._rebase(pico, stamped, stamped - MARGIN_SECONDS)
        return True

    def read_unsure(self, pico: int, began: float) -> None:
        """All that was in the store then, though a flush of ours may have been under way."""
        self._rebase(pico, began, began - MARGIN_SECONDS)

    def read_exactly(self, pico: int, began: float) -> None:
        """No flush of ours was under way between `began` and the answer, so what was acknowledged is in it."""
        self._rebase(pico, began + MARGIN_SECONDS, NEVER)

    def _rebase(self, pico: int, as_of: float, counted_since: float) -> None:
        """All that was acknowledged before `counted_since` is in the new base."""
        self.known += pico - self._base
        self._base, self._as_of = pico, as_of
        while self._acknowledged and self._acknowledged[0][0] < counted_since:
            self.known -= self._acknowledged.popleft()[1]
