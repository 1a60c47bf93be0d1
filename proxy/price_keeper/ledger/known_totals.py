"""What this process knows of counters without reading their shards: the total in the store, and own usage beside it.

A total is some seconds old and holds an unknown part of what this process added. As for budgets (decision 29):

    others  >=  total - all own usage that may have been in the store when it was read
    known    =  others + own usage

so `known` is never too high, holds all own usage that was recorded or acknowledged, and needs no clock. Only counters
with own usage are kept: a reader of any number of others gets them from what it reads, and evicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from price_keeper.ledger.aggregator import AS_OF_ATTRIBUTE, build_total_key, read_counter_rows
from price_keeper.ledger.counter_writes import COST_ATTRIBUTE, to_pico
from price_keeper.ledger.flusher import Flusher
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.price_dimensions import COUNT_FIELDS, UsageCounts
from price_keeper.stores.contract import Store

MAX_COUNTERS: Final = 20_000  # with own usage; the oldest are evicted, and only their totals are known then

_Name: TypeAlias = tuple[str, str, str]  # scope, label, period
_NONE: Final = UsageCounts()


class KnownTotal(NamedTuple):
    counts: UsageCounts
    as_of: float | None  # when the total in the store was made; None if there is none


class _OwnUsage:
    """Own usage of one counter that is not in the journal, and what others are known to have used."""

    __slots__ = ("acknowledged", "as_of", "is_read", "others", "submitting")

    def __init__(self) -> None:
        self.acknowledged = self.submitting = self.others = _NONE
        self.as_of: float | None = None
        self.is_read = False

    def compute(self, unflushed: UsageCounts) -> KnownTotal:
        return KnownTotal(self.others.plus(self.acknowledged).plus(unflushed), self.as_of)


class _Submission:
    """A submission in flight: own usage once it is acknowledged; usage of others if its outcome is unknown."""

    def __init__(self, entries: Sequence[tuple[_OwnUsage, UsageCounts]]) -> None:
        self._entries = entries

    def confirm(self) -> None:
        for own, counts in self._entries:
            own.submitting, own.acknowledged = own.submitting.less(counts), own.acknowledged.plus(counts)

    def cancel(self) -> None:
        for own, counts in self._entries:
            own.submitting = own.submitting.less(counts)


class KnownTotals:
    """Reads totals, and remembers what this process added. A reader that wants what it adds next to be in the result
    reads first."""

    def __init__(self, flusher: Flusher) -> None:
        self._flusher = flusher
        self._own: dict[_Name, _OwnUsage] = {}

    def on_flushed(self, sums: Iterable[tuple[Counter, UsageCounts]]) -> None:
        """Called when these sums are acknowledged and no longer in the journal."""
        for counter, counts in sums:
            if not counter.is_lease:
                own = self._get_own(counter)
                own.acknowledged = own.acknowledged.plus(counts)

    def begin_submission(self, sums: Mapping[Counter, UsageCounts]) -> _Submission:
        entries = [(self._get_own(counter), counts) for counter, counts in sums.items()]
        for own, counts in entries:
            own.submitting = own.submitting.plus(counts)
        return _Submission(entries)

    async def read(
        self, store: Store, counters: Iterable[Counter], *, keeps: bool = False
    ) -> dict[Counter, KnownTotal]:
        """Read the totals of these counters, all at once, and return what is known then. `keeps`: own usage will be
        added to them next. Raises StoreError."""
        wanted = list(dict.fromkeys(counters))
        items = await read_counter_rows(store, [build_total_key(counter) for counter in wanted])
        possibly_stored, unflushed = self._flusher.possibly_stored_counts(), self._flusher.unflushed_counts()
        known = {}
        for counter, item in zip(wanted, items, strict=True):
            has_own = keeps or counter[:3] in self._own or counter in unflushed
            own = self._get_own(counter) if has_own else _OwnUsage()
            own.is_read = True
            total = read_total(item)
            if total.as_of is not None:
                sent = own.acknowledged.plus(own.submitting).plus(_find(possibly_stored, counter))
                own.others = _take_highest(own.others, total.counts.less(sent))
                own.as_of = max(own.as_of or 0.0, total.as_of)
            known[counter] = own.compute(_find(unflushed, counter))
        return known

    def has_read(self, counter: Counter) -> bool:
        return (own := self._own.get(counter[:3])) is not None and own.is_read

    def get_all(self, counters: Iterable[Counter]) -> dict[Counter, KnownTotal]:
        """What is known now of counters with own usage, without waiting; nothing of others."""
        unflushed = self._flusher.unflushed_counts()
        return {
            counter: self._own.get(counter[:3], _OwnUsage()).compute(_find(unflushed, counter)) for counter in counters
        }

    def list_unflushed(self) -> list[Counter]:
        """The counters with usage in the journal, which may be missing in the store's list of active counters."""
        return [counter for counter in self._flusher.unflushed_counts() if not counter.is_lease]

    def _get_own(self, counter: Counter) -> _OwnUsage:
        """The entry of the counter, which becomes the newest one."""
        own = self._own.pop(counter[:3], None) or _OwnUsage()
        if len(self._own) >= MAX_COUNTERS:
            del self._own[next(iter(self._own))]
        self._own[counter[:3]] = own
        return own


def read_total(item: Mapping[str, Any] | None) -> KnownTotal:
    """A total as it is in the store."""
    return (
        KnownTotal(_NONE, None) if item is None else KnownTotal(parse_counts(item), float(item.get(AS_OF_ATTRIBUTE, 0)))
    )


def parse_counts(item: Mapping[str, Any]) -> UsageCounts:
    """Of a shard, a total, or a sum of shards."""
    counts = {name: int(item.get(name, 0)) for name in COUNT_FIELDS}
    return UsageCounts(**counts, pico=to_pico(item.get(COST_ATTRIBUTE, 0)))


def _find(counts: Mapping[Counter, UsageCounts], counter: Counter) -> UsageCounts:
    return counts.get(counter, _NONE)


def _take_highest(one: UsageCounts, other: UsageCounts) -> UsageCounts:
    return UsageCounts._make(map(max, one, other))
