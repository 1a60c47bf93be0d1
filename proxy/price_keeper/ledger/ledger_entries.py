"""The values that the ledger keeps: charged counters, intents and receipts of calls, and sums of receipts. Pure.

A `Counter` names one counter in the store. `ChargedCounters` are those that a call is charged to, fixed when it starts.
An `Intent` is written before a call is sent, with an estimate; a `Receipt` says what the call used and cost. The
encodings are the journal's format, and must not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

import orjson

from price_keeper.price_dimensions import UsageCounts as UsageCounts

_MAX_PENDING: Final = 200


class LineKind(StrEnum):
    """The first value of a journal line."""

    HEAD = "H"  # the segment's own ULID, and that of the segment that it carries on
    CARRIED = "C"  # an intent of the segment before, whose call is still in flight
    READY = "E"  # the end of the carried intents: from here on this segment records these calls
    INTENT = "I"
    RECORD = "R"
    NOTHING = "N"  # the call ended and cost nothing
    EXTENT = "L"  # the number of lines before this one, and their digest; estimates and the seal follow
    SEAL = "S"


_INTENT_KIND, _RECORD_KIND = LineKind.INTENT.value, LineKind.RECORD.value

JOURNAL_FORMAT: Final = 1


def encode_head(ulid: str, before: str) -> bytes:
    return orjson.dumps([LineKind.HEAD.value, ulid, before, JOURNAL_FORMAT])


def encode_ready(before: str, carried: int) -> bytes:
    """Repeats which segment this one carries on, and adds the number of its calls, so that one corrupt line loses
    neither."""
    return orjson.dumps([LineKind.READY.value, before, carried])


_LEASE_PREFIX: Final = "HOLD#"


class Counter(NamedTuple):
    """A counter in the store: what a scope used of a label in a period.

    A budget lease has a counter too, so that its spend is counted with the rest.
    """

    scope: str
    label: str
    period_or_lease: str  # the key of the period; for a lease its holder and the key of the budget's period
    shards: int  # the number of items that the counter is spread over

    @classmethod
    def from_values(cls, values: Iterable[Any]) -> Counter:
        """Raises TypeError: a line with a good checksum may still be no line of this product."""
        counter = cls(*values)
        if [*map(type, counter)] != [str, str, str, int]:
            raise TypeError("expected a counter")
        return counter

    @classmethod
    def for_lease(cls, scope: str, label: str, holder: str, period: str, shards: int) -> Counter:
        return cls(scope, label, f"{_LEASE_PREFIX}{holder}#{period}", shards)

    @property
    def is_lease(self) -> bool:
        return self.period_or_lease.startswith(_LEASE_PREFIX)

    @property
    def holder_and_period(self) -> tuple[str, str]:
        """The holder of the budget lease and the period of the budget. Defined only if `is_lease`."""
        holder, _, period = self.period_or_lease.removeprefix(_LEASE_PREFIX).partition("#")
        return holder, period

    @property
    def budget_period(self) -> str:
        """The period of the budget, also for the counter of a lease."""
        return self.holder_and_period[1] if self.is_lease else self.period_or_lease


class SpendListener(Protocol):
    """Notified of spend the moment this process knows it, long before the store has it."""

    def on_call_started(self, expected_pico: int) -> None: ...

    def on_call_ended(self, expected_pico: int, pico: int) -> None: ...


class CompletionListener(Protocol):
    """Notified once of the end of a call, when that is written; None: the call cost nothing."""

    def on_completed(self, receipt: Receipt | None) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class ChargedCounters:
    """The counters that calls are charged to, encoded as in the line of each call. They are fixed when a call
    starts."""

    counters: tuple[Counter, ...]
    encoded: orjson.Fragment
    spend_listeners: tuple[SpendListener, ...] = ()

    @classmethod
    def from_counters(
        cls, counters: Iterable[Counter], spend_listeners: tuple[SpendListener, ...] = ()
    ) -> ChargedCounters:
        counters = tuple(counters)
        return cls(counters, orjson.Fragment(orjson.dumps([(*counter,) for counter in counters])), spend_listeners)

    @classmethod
    def from_values(cls, values: Iterable[Iterable[Any]]) -> ChargedCounters:
        return cls.from_counters(map(Counter.from_values, values))


@dataclass(slots=True)
class Intent:
    """A call that is about to be sent, and what counts if its end is never recorded: an estimate, or under a hard
    budget the call's ceiling."""

    charged: ChargedCounters
    started_ms: int
    input_tokens: int
    output_tokens: int
    pico: int
    guardrail_units: int = 0  # written only if not zero
    expected_pico: int | None = None  # pico-dollars, by the recent cost of such calls; not written
    completion_listeners: tuple[CompletionListener, ...] = ()  # not written

    @property
    def estimated_counts(self) -> UsageCounts:
        units = self.guardrail_units
        return UsageCounts(1, 1, self.input_tokens, self.output_tokens, guardrail_units=units, pico=self.pico)

    def encode(self, number: int, kind: str = _INTENT_KIND) -> bytes:
        counters, tokens = self.charged.encoded, self.input_tokens
        if self.guardrail_units:
            more = (self.output_tokens, self.pico, self.guardrail_units, counters)
            return orjson.dumps((kind, number, self.started_ms, tokens, *more))
        return orjson.dumps((kind, number, self.started_ms, tokens, self.output_tokens, self.pico, counters))

    def encode_carried(self, number: int) -> bytes:
        return self.encode(number, LineKind.CARRIED.value)

    @classmethod
    def from_values(cls, values: list[Any]) -> Intent:
        _, _, *numbers, charged = values
        return cls(ChargedCounters.from_values(charged), *numbers)


@dataclass(slots=True)
class Receipt:
    """What a call used and cost. `about` is for readers of the journal: prices, flags, Bedrock's request id."""

    counts: UsageCounts
    about: Mapping[str, str] = field(default_factory=dict)

    def encode(self, number: int) -> bytes:
        return orjson.dumps((_RECORD_KIND, number, self.counts.to_values(), self.about))

    @classmethod
    def from_values(cls, values: list[Any]) -> Receipt:
        _, _, counts, about = values
        return cls(UsageCounts(*counts), about)


def check_counts(counts: UsageCounts) -> None:
    """Raises ValueError: a line with a good checksum may still be no line of this product."""
    if min(counts) < 0:
        raise ValueError("expected counts")


class UsageTally:
    """Sums by counter. Entries are added up in batches, which costs less than doing it in each call."""

    def __init__(self) -> None:
        self._sums: dict[ChargedCounters, UsageCounts] = {}  # by the counters that the calls are charged to
        self._pending: list[tuple[ChargedCounters, UsageCounts]] = []  # entries that are not in the sums yet
        self.pico = 0
        self.requests = 0

    def add(self, charged: ChargedCounters, counts: UsageCounts) -> None:
        self._pending.append((charged, counts))
        self.pico += counts.pico
        self.requests += 1
        if len(self._pending) > _MAX_PENDING:
            self._fold_pending()

    def total(self) -> UsageCounts:
        """The sum over all calls; each counts once, though several counters may be charged with it."""
        self._fold_pending()
        return UsageCounts._make(map(sum, zip(UsageCounts(), *self._sums.values(), strict=True)))

    def by_label(self) -> dict[str, UsageCounts]:
        """Like `total`, by label: all counters of a call have the same label."""
        self._fold_pending()
        sums: dict[str, UsageCounts] = {}
        for charged, counts in self._sums.items():
            label = charged.counters[0].label if charged.counters else ""
            sums[label] = sums[label].plus(counts) if label in sums else counts
        return sums

    def sums(self) -> dict[Counter, UsageCounts]:
        """The sums by counter."""
        self._fold_pending()
        sums: dict[Counter, UsageCounts] = {}
        for charged, counts in self._sums.items():
            for counter in charged.counters:
                sums[counter] = sums[counter].plus(counts) if counter in sums else counts
        return sums

    def _fold_pending(self) -> None:
        by_charged: dict[ChargedCounters, list[UsageCounts]] = {}
        for charged, counts in self._pending:
            by_charged.setdefault(charged, []).append(counts)
        for charged, many in by_charged.items():
            if charged in self._sums:
                many.append(self._sums[charged])
            self._sums[charged] = UsageCounts._make(map(sum, zip(*many, strict=True)))
        self._pending.clear()
