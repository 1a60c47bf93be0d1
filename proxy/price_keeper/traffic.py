"""What became of the data port's requests: how they were answered, and how long that took.

A `Lane` is all calls of one operation that one label serves. Labels are those of the configuration, and one more for
all others, so nobody can make there be more lanes than operations times labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from price_keeper.errors import Refusal

# Of any length to the compiler, which would otherwise make each of them anew wherever it is used.
Bounds: TypeAlias = "tuple[float, ...]"

# Seconds. Answers take from milliseconds, as of embeddings, to minutes, as of long texts that are not streamed.
ANSWER_BOUNDS: Final[Bounds] = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
                                163.84, 327.68, 655.36)  # fmt: skip
# Finer where streams begin.
FIRST_BYTE_BOUNDS: Final[Bounds] = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                                    30.0, 60.0, 120.0)  # fmt: skip
# Ours is a tenth of a millisecond, unless somebody had to be asked.
ADDED_BOUNDS: Final[Bounds] = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
                               2.5)  # fmt: skip

MOST_PENDING: Final = 256  # calls; to put them into their buckets holds up others for a tenth of a millisecond

OTHER: Final = "other"  # label: an app's own, or a model that no label knows
STREAMED: Final = ("converse_stream", "invoke_stream", "chat_completions")
NONE: Final = "none"  # what was never found out, or does not apply
# Cut: it broke off after its head had gone out.
STATUSES: Final[tuple[str, ...]] = ("cut", "1xx", "2xx", "3xx", "4xx", "5xx")


# Labels by their names, with those that were taken on and given up again since the start of the process.
MOST_TOLD = 1000


class Distribution(NamedTuple):
    """`counts` has one more than there are bounds: what lies beyond the last one."""

    bounds: Bounds
    counts: tuple[int, ...]
    total: float


class Lane:
    """Of each call that Bedrock answered. What was refused here has no times; and the first byte of what is not
    streamed comes with the rest, so it is not looked at.

    Calls are put into their buckets many at once, which takes two thirds of the time that it would take in each call.
    """

    __slots__ = ("_added", "_added_total", "_answers", "_durations", "_durations_total", "_first_bytes",
                 "_first_bytes_total", "_pending", "is_streamed", "label", "operation")  # fmt: skip

    def __init__(self, operation: str, label: str) -> None:
        self.operation = operation
        self.label = label
        self.is_streamed = operation in STREAMED
        self._answers = [0] * len(STATUSES)
        self._durations = [0] * (len(ANSWER_BOUNDS) + 1)
        self._first_bytes = [0] * (len(FIRST_BYTE_BOUNDS) + 1)
        self._added = [0] * (len(ADDED_BOUNDS) + 1)
        self._durations_total = self._first_bytes_total = self._added_total = 0.0
        self._pending: list[tuple[int, float, float, float, float, float]] = []

    def answered(self, status: int, began: float, sent: float, first: float, last: float, now: float) -> None:
        """`status` is 0 if it broke off. Times are by the monotonic clock: when the request was here, when it was sent,
        when the first and the last byte of its answer came, and when that one was handed on."""
        pending = self._pending
        pending.append((status, began, sent, first, last, now))
        if len(pending) >= MOST_PENDING:
            self._sort_in()

    def answered_here(self, status: int) -> None:
        """Without Bedrock."""
        self._answers[status // 100] += 1

    def _sort_in(self) -> None:
        pending, self._pending = self._pending, []
        for status, began, sent, first, last, now in pending:
            self._answers[status // 100 if status < 600 else 5] += 1
            took, ours = now - began, sent - began + (now - last)
            self._durations[bisect_left(ANSWER_BOUNDS, took)] += 1
            self._durations_total += took
            if self.is_streamed:
                waited = first - began
                self._first_bytes[bisect_left(FIRST_BYTE_BOUNDS, waited)] += 1
                self._first_bytes_total += waited
            self._added[bisect_left(ADDED_BOUNDS, ours)] += 1
            self._added_total += ours

    # What can be told.

    @property
    def answers(self) -> tuple[int, ...]:
        """By status."""
        self._sort_in()
        return tuple(self._answers)

    @property
    def is_measured(self) -> bool:
        self._sort_in()
        return any(self._added)

    @property
    def durations(self) -> Distribution:
        self._sort_in()
        return Distribution(ANSWER_BOUNDS, tuple(self._durations), self._durations_total)

    @property
    def first_bytes(self) -> Distribution:
        self._sort_in()
        return Distribution(FIRST_BYTE_BOUNDS, tuple(self._first_bytes), self._first_bytes_total)

    @property
    def added(self) -> Distribution:
        self._sort_in()
        return Distribution(ADDED_BOUNDS, tuple(self._added), self._added_total)


class Traffic:
    def __init__(self, labels: Collection[str] = ()) -> None:
        """`labels` are those that are told by their names."""
        self._labels = frozenset(labels)
        self._lanes: dict[tuple[str, str], Lane] = {}
        self.refused = dict.fromkeys((each.counted_as for each in _every(Refusal)), 0)

    def tell_apart(self, labels: Iterable[str]) -> None:
        """These too from now on. Nothing that was counted is forgotten."""
        new = [label for label in labels if label not in self._labels]
        self._labels |= frozenset(new[: max(0, MOST_TOLD - len(self._labels))])

    def lane(self, operation: str, label: str) -> Lane:
        """`label` is empty where there is none."""
        key = (operation.lower(), label if label in self._labels else OTHER if label else NONE)
        found = self._lanes.get(key)
        if found is None:
            found = self._lanes[key] = Lane(*key)
        return found

    def refuses(self, refusal: Refusal, lane: Lane | None = None) -> None:
        """Without a lane it was not even known what was asked for."""
        kind = refusal.counted_as
        self.refused[kind] = self.refused.get(kind, 0) + 1
        (lane or self.lane(NONE, "")).answered_here(refusal.status)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._lanes.values())

    @property
    def measured(self) -> tuple[Lane, ...]:
        """Those in which Bedrock has answered."""
        return tuple(lane for lane in self.lanes if lane.is_measured)

    def added_by_operation(self) -> Iterator[tuple[str, Distribution]]:
        """Which label serves makes no difference to it."""
        sums: dict[str, Distribution] = {}
        for lane in self.measured:
            added, before = lane.added, sums.get(lane.operation)
            if before is not None:
                counts = tuple(map(int.__add__, before.counts, added.counts))
                added = Distribution(ADDED_BOUNDS, counts, before.total + added.total)
            sums[lane.operation] = added
        yield from sums.items()


def _every(kind: type[Refusal]) -> Iterator[type[Refusal]]:
    for each in kind.__subclasses__():
        yield each
        yield from _every(each)
