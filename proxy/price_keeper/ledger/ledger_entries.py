"""The values that the ledger keeps: which counters are charged, the intent of a call, its receipt, and sums of receipts.
Pure.

A `Counter` names one counter in the store. `ChargedCounters` are those that a call is charged to, fixed when it
starts. An `Intent` is written before a call is sent, with an estimate; a `Receipt` says what the call used and cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

import orjson

from price_keeper.domain import PICO_PER_MICRO as PICO_PER_MICRO
from price_keeper.domain import PICO_PER_USD as PICO_PER_USD

_MAX_PENDING: Final = 200


class LineKind(StrEnum):
    """The first value of a line."""

    HEAD = "H"  # which segment this is, and which one it carries on
    CARRIED = "C"  # an intent of the segment before, whose call is still under way
    READY = "E"  # the end of what is carried: from here on this segment is the one that counts
    INTENT = "I"
    RECORD = "R"
    NOTHING = "N"  # the call came to nothing that costs
    EXTENT = "L"  # how many lines there are before this one, and their digest; estimates and the seal follow
    SEAL = "S"


_INTENT_KIND, _RECORD_KIND = LineKind.INTENT.value, LineKind.RECORD.value

JOURNAL_FORMAT: Final = 1


def encode_head(ulid: str, before: str) -> bytes:
    return orjson.dumps([LineKind.HEAD.value, ulid, before, JOURNAL_FORMAT])


def encode_ready(before: str, carried: int) -> bytes:
    """Says again which segment this one carries on, and how many calls of it: so one spoilt line loses neither."""
    return orjson.dumps([LineKind.READY.value, before, carried])


_LEASE_PREFIX: Final = "HOLD#"


class Counter(NamedTuple):
    """One of the counters in the store: what a scope used of a label in a period.

    A hold is one as well, so that what is spent of it is counted with the rest: its period names the holder too.
    """

    scope: str
    label: str
    period: str
    shards: int  # over how many items it is spread

    @classmethod
    def from_values(cls, values: Iterable[Any]) -> Counter:
        """Raises TypeError: a line that is whole may still be none of ours."""
        counter = cls(*values)
        if [*map(type, counter)] != [str, str, str, int]:
            raise TypeError("no counter where one should be")
        return counter

    @classmethod
    def for_lease(cls, scope: str, label: str, holder: str, period: str, shards: int) -> Counter:
        return cls(scope, label, f"{_LEASE_PREFIX}{holder}#{period}", shards)

    @property
    def is_lease(self) -> bool:
        return self.period.startswith(_LEASE_PREFIX)

    @property
    def holder_and_period(self) -> tuple[str, str]:
        """Of a hold."""
        holder, _, period = self.period.removeprefix(_LEASE_PREFIX).partition("#")
        return holder, period

    @property
    def budget_period(self) -> str:
        return self.holder_and_period[1] if self.is_lease else self.period


class UsageCounts(NamedTuple):
    """What is counted. Everything but `pico` is what the store calls it."""

    requests: int = 0
    estimated_requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    guardrail_units: int = 0
    pico: int = 0

    def plus(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts._make(map(int.__add__, self, other))

    def less(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts._make(map(int.__sub__, self, other))


class SpendListener(Protocol):
    """Hears of what is spent the moment it is known here, long before the store does."""

    def on_call_started(self, expected_pico: int) -> None: ...

    def on_call_ended(self, expected_pico: int, pico: int) -> None: ...


class CompletionListener(Protocol):
    """Hears once what became of one call, when that is written down; None: it costs nothing."""

    def on_completed(self, receipt: Receipt | None) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class ChargedCounters:
    """Who pays for calls that start in these periods, as it goes into the line of each; frozen when a call starts."""

    counters: tuple[Counter, ...]
    encoded: orjson.Fragment
    spend_listeners: tuple[SpendListener, ...] = ()

    @classmethod
    def from_counters(
        cls, counters: Iterable[Counter], spend_listeners: tuple[SpendListener, ...] = ()
    ) -> ChargedCounters:
        counters = tuple(counters)
        return cls(counters, orjson.Fragment(orjson.dumps([(*each,) for each in counters])), spend_listeners)

    @classmethod
    def from_values(cls, values: Iterable[Iterable[Any]]) -> ChargedCounters:
        return cls.from_counters(map(Counter.from_values, values))


@dataclass(slots=True)
class Intent:
    """A call that is about to be sent, and what it counts as if nobody ever learns better."""

    charged: ChargedCounters
    started_ms: int
    input_tokens: int
    output_tokens: int
    pico: int
    guardrail_units: int = 0  # written only where there are some
    expected_pico: int | None = None  # pico-dollars, by what such calls came to of late; not written
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
    """What a call used and cost. `about` is for whoever reads the journal: prices, flags, Bedrock's own id of it."""

    counts: UsageCounts
    about: Mapping[str, str] = field(default_factory=dict)

    def encode(self, number: int) -> bytes:
        return orjson.dumps((_RECORD_KIND, number, (*self.counts,), self.about))

    @classmethod
    def from_values(cls, values: list[Any]) -> Receipt:
        _, _, counts, about = values
        return cls(UsageCounts(*counts), about)


class UsageTally:
    """Sums by counter. They are made now and then, which costs less than to make them in each call."""

    def __init__(self) -> None:
        self._sums: dict[ChargedCounters, UsageCounts] = {}  # by account, which names all counters that its calls touch
        self._pending: list[tuple[ChargedCounters, UsageCounts]] = []  # what is not in them yet
        self.pico = 0
        self.requests = 0

    def add(self, charged: ChargedCounters, counts: UsageCounts) -> None:
        self._pending.append((charged, counts))
        self.pico += counts[-1]
        self.requests += 1
        if len(self._pending) > _MAX_PENDING:
            self._fold_pending()

    def total(self) -> UsageCounts:
        """Each call once, though several counters may be charged with it."""
        self._fold_pending()
        return UsageCounts._make(map(sum, zip(UsageCounts(), *self._sums.values(), strict=True)))

    def by_label(self) -> dict[str, UsageCounts]:
        """As `total`, apart for each label: all counters of an account are of one."""
        self._fold_pending()
        sums: dict[str, UsageCounts] = {}
        for account, counts in self._sums.items():
            label = account.counters[0].label if account.counters else ""
            sums[label] = sums[label].plus(counts) if label in sums else counts
        return sums

    def sums(self) -> dict[Counter, UsageCounts]:
        self._fold_pending()
        sums: dict[Counter, UsageCounts] = {}
        for account, counts in self._sums.items():
            for counter in account.counters:
                sums[counter] = sums[counter].plus(counts) if counter in sums else counts
        return sums

    def _fold_pending(self) -> None:
        by_account: dict[ChargedCounters, list[UsageCounts]] = {}
        for account, counts in self._pending:
            by_account.setdefault(account, []).append(counts)
        for account, many in by_account.items():
            if account in self._sums:
                many.append(self._sums[account])
            self._sums[account] = UsageCounts._make(map(sum, zip(*many, strict=True)))
        self._pending.clear()
