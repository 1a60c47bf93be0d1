"""What a journal says, as values: who pays, what was about to be sent, what it came to, and the sums of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import add
from typing import Any, NamedTuple

import orjson

from proxy.metering.bodies import NOT_CHARGED
from proxy.metering.usage import Usage

PICO_PER_MICRO = 10**6
PICO_PER_USD = PICO_PER_MICRO * 10**6


class Kind(StrEnum):
    """The first value of a line."""

    HEAD = "H"  # which segment this is, and which one it carries on
    CARRIED = "C"  # an intent of the segment before, whose call is still under way
    READY = "E"  # the end of what is carried: from here on this segment is the one that counts
    INTENT = "I"
    RECORD = "R"
    NOTHING = "N"  # the call came to nothing that costs
    SEAL = "S"


FORMAT = 1
READY = b'["E"]'


def head(ulid: str, before: str) -> bytes:
    return orjson.dumps([Kind.HEAD.value, ulid, before, FORMAT])


class Counter(NamedTuple):
    """One of the counters in the store: what a scope used of a label in a period."""

    scope: str
    label: str
    period: str
    shards: int  # over how many items it is spread


class Counts(NamedTuple):
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

    def plus(self, other: Counts) -> Counts:
        return Counts._make(map(int.__add__, self, other))


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """Who pays for calls that start in these periods, as it goes into the line of each; frozen when a call starts."""

    counters: tuple[Counter, ...]
    fragment: bytes

    @classmethod
    def of(cls, counters: Iterable[Counter]) -> Account:
        counters = tuple(counters)
        return cls(counters, orjson.dumps([(*each,) for each in counters]))

    @classmethod
    def from_values(cls, values: Iterable[Iterable[Any]]) -> Account:
        return cls.of(Counter(*each) for each in values)


@dataclass(slots=True)
class Intent:
    """A call that is about to be sent, and what it counts as if nobody ever learns better."""

    account: Account
    started_ms: int
    input_tokens: int
    output_tokens: int
    pico: int

    @property
    def guess(self) -> Counts:
        return Counts(1, 1, self.input_tokens, self.output_tokens, pico=self.pico)

    def content(self, number: int, kind: bytes = b"I") -> bytes:
        return b'["%b",%d,%d,%d,%d,%d,%b]' % (
            kind,
            number,
            self.started_ms,
            self.input_tokens,
            self.output_tokens,
            self.pico,
            self.account.fragment,
        )

    @classmethod
    def from_values(cls, values: list[Any]) -> Intent:
        _, _, *numbers, account = values
        return cls(Account.from_values(account), *numbers)


@dataclass(slots=True)
class Receipt:
    """What a call used and cost. `about` is for whoever reads the journal: prices, flags, Bedrock's own id of it."""

    counts: Counts
    about: Mapping[str, str] = field(default_factory=dict)

    def content(self, number: int) -> bytes:
        return orjson.dumps([Kind.RECORD.value, number, (*self.counts,), self.about])

    @classmethod
    def from_values(cls, values: list[Any]) -> Receipt:
        _, _, counts, about = values
        return cls(Counts(*counts), about)


def counts_of(usage: Usage, pico: int, *, is_estimated: bool = False) -> Counts:
    return Counts(
        1,
        int(is_estimated),
        usage.input,
        usage.output,
        usage.cache_read,
        usage.cache_write_5m,
        usage.cache_write_1h,
        sum(count for name, count in usage.units.items() if name not in NOT_CHARGED) if usage.units else 0,
        pico,
    )


class Tally:
    """Sums by counter, gathered by account, since a call's account names all counters that it touches."""

    def __init__(self) -> None:
        self._by_account: dict[Account, list[int]] = {}  # changed in place, as this is done for every call
        self.pico = 0
        self.requests = 0

    def add(self, account: Account, counts: Counts) -> None:
        so_far = self._by_account.get(account)
        if so_far is None:
            self._by_account[account] = list(counts)
        else:
            so_far[:] = map(add, so_far, counts)
        self.pico += counts.pico
        self.requests += 1

    def sums(self) -> dict[Counter, Counts]:
        sums: dict[Counter, Counts] = {}
        for account, so_far in self._by_account.items():
            counts = Counts._make(so_far)
            for counter in account.counters:
                sums[counter] = sums[counter].plus(counts) if counter in sums else counts
        return sums
