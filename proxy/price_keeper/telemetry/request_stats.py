"""Count and time the requests of the data port, by operation and label.

Labels are those of the configuration plus "other" and "none", so the cardinality is bounded. Calls are put into
histogram buckets in batches, which takes less time than doing so for each call. Start with `RequestStats`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from price_keeper.errors import Refusal

# Typed as a tuple of any length: mypyc would otherwise build each constant again wherever it is used.
BucketBounds: TypeAlias = "tuple[float, ...]"

# Seconds. Responses take from milliseconds, as for embeddings, to minutes, as for long texts that are not streamed.
DURATION_BOUNDS: Final[BucketBounds] = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36,
)  # fmt: skip
# Finer in the range in which the first bytes of streams arrive.
FIRST_BYTE_BOUNDS: Final[BucketBounds] = (
    0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
# The proxy usually adds a tenth of a millisecond, and more if a call waits for the store.
ADDED_LATENCY_BOUNDS: Final[BucketBounds] = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip

MAX_PENDING_CALLS: Final = 256  # putting so many into buckets blocks the event loop for a tenth of a millisecond

OTHER_LABEL: Final = "other"  # an app label, or a model id without a label
STREAMED_OPERATIONS: Final = ("converse_stream", "invoke_stream", "chat_completions", "responses")
NONE: Final = "none"  # an operation or label that is unknown or does not apply
# "cut": the response was aborted after its head was sent.
STATUSES: Final[tuple[str, ...]] = ("cut", "1xx", "2xx", "3xx", "4xx", "5xx")

# Labels with samples of their own, including those that reloads added and removed since the start of the process.
MAX_LABELS = 1000


class Distribution(NamedTuple):
    """The values of a histogram. `counts` has one entry more than `bounds`, for values above the last bound."""

    bounds: BucketBounds
    counts: tuple[int, ...]
    total: float


class OperationStats:
    """The counts and times of one operation and label.

    Only calls that Bedrock answered have times; refused ones are only counted. The time to first byte is measured only
    for streamed operations, because otherwise the first byte arrives with the rest.
    """

    __slots__ = (
        "_added",
        "_added_total",
        "_durations",
        "_durations_total",
        "_first_bytes",
        "_first_bytes_total",
        "_pending",
        "_responses",
        "is_streamed",
        "label",
        "operation",
    )  # fmt: skip

    def __init__(self, operation: str, label: str) -> None:
        self.operation = operation
        self.label = label
        self.is_streamed = operation in STREAMED_OPERATIONS
        self._responses = [0] * len(STATUSES)
        self._durations = [0] * (len(DURATION_BOUNDS) + 1)
        self._first_bytes = [0] * (len(FIRST_BYTE_BOUNDS) + 1)
        self._added = [0] * (len(ADDED_LATENCY_BOUNDS) + 1)
        self._durations_total = self._first_bytes_total = self._added_total = 0.0
        self._pending: list[tuple[int, float, float, float, float, float]] = []

    def record_response(
        self, status: int, received_at: float, sent_at: float, first_byte_at: float, last_byte_at: float, now: float
    ) -> None:
        """Records a call that Bedrock answered. `status` is 0 if the response was aborted. Times are by the monotonic
        clock: when the request was complete, when it was sent upstream, when the first and the last byte of the
        response arrived, and (`now`) when the last byte was passed on."""
        pending = self._pending
        pending.append((status, received_at, sent_at, first_byte_at, last_byte_at, now))
        if len(pending) >= MAX_PENDING_CALLS:
            self._fill_buckets()

    def count_local_response(self, status: int) -> None:
        """Counts a response that the proxy gave without calling Bedrock."""
        self._responses[status // 100] += 1

    def _fill_buckets(self) -> None:
        pending, self._pending = self._pending, []
        for status, began, sent, first, last, now in pending:
            self._responses[status // 100 if status < 600 else 5] += 1
            duration, added = now - began, sent - began + (now - last)
            self._durations[bisect_left(DURATION_BOUNDS, duration)] += 1
            self._durations_total += duration
            if self.is_streamed:
                time_to_first_byte = first - began
                self._first_bytes[bisect_left(FIRST_BYTE_BOUNDS, time_to_first_byte)] += 1
                self._first_bytes_total += time_to_first_byte
            self._added[bisect_left(ADDED_LATENCY_BOUNDS, added)] += 1
            self._added_total += added

    # Read by the metrics.

    @property
    def responses_by_status(self) -> tuple[int, ...]:
        """Number of responses, in the order of STATUSES."""
        self._fill_buckets()
        return tuple(self._responses)

    @property
    def has_responses(self) -> bool:
        self._fill_buckets()
        return any(self._added)

    @property
    def durations(self) -> Distribution:
        self._fill_buckets()
        return Distribution(DURATION_BOUNDS, tuple(self._durations), self._durations_total)

    @property
    def times_to_first_byte(self) -> Distribution:
        self._fill_buckets()
        return Distribution(FIRST_BYTE_BOUNDS, tuple(self._first_bytes), self._first_bytes_total)

    @property
    def added_latencies(self) -> Distribution:
        self._fill_buckets()
        return Distribution(ADDED_LATENCY_BOUNDS, tuple(self._added), self._added_total)


class RequestStats:
    """The stats of all operations and labels, and the number of refusals by kind."""

    def __init__(self, labels: Collection[str] = ()) -> None:
        """`labels` get samples of their own; all others are counted as "other"."""
        self._labels = frozenset(labels)
        self._operations: dict[tuple[str, str], OperationStats] = {}
        self.refusals_by_kind = dict.fromkeys((kind.counted_as for kind in _iter_subclasses(Refusal)), 0)

    def track_labels(self, labels: Iterable[str]) -> None:
        """Gives these labels samples of their own too, up to MAX_LABELS. Existing counts are kept."""
        new = [label for label in labels if label not in self._labels]
        self._labels |= frozenset(new[: max(0, MAX_LABELS - len(self._labels))])

    def get_stats(self, operation: str, label: str) -> OperationStats:
        """The stats of an operation and label; `label` is empty if there is none."""
        key = (operation.lower(), label if label in self._labels else OTHER_LABEL if label else NONE)
        stats = self._operations.get(key)
        if stats is None:
            stats = self._operations[key] = OperationStats(*key)
        return stats

    def count_refusal(self, refusal: Refusal, stats: OperationStats | None = None) -> None:
        """Counts a refusal. `stats` is None if the request was refused before its operation was known."""
        kind = refusal.counted_as
        self.refusals_by_kind[kind] = self.refusals_by_kind.get(kind, 0) + 1
        (stats or self.get_stats(NONE, "")).count_local_response(refusal.status)

    @property
    def operations(self) -> tuple[OperationStats, ...]:
        return tuple(self._operations.values())

    @property
    def measured_operations(self) -> tuple[OperationStats, ...]:
        """The stats with at least one call that Bedrock answered."""
        return tuple(stats for stats in self.operations if stats.has_responses)

    def sum_added_latencies(self) -> Iterator[tuple[str, Distribution]]:
        """The added latency by operation, summed over labels, because the label has no influence on it."""
        sums: dict[str, Distribution] = {}
        for stats in self.measured_operations:
            added, previous = stats.added_latencies, sums.get(stats.operation)
            if previous is not None:
                counts = tuple(map(int.__add__, previous.counts, added.counts))
                added = Distribution(ADDED_LATENCY_BOUNDS, counts, previous.total + added.total)
            sums[stats.operation] = added
        yield from sums.items()


def _iter_subclasses(base: type[Refusal]) -> Iterator[type[Refusal]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _iter_subclasses(subclass)
