"""The last lines of a segment: how far it goes, and what it comes to, in the parts in which it goes to the store.

All that a flush writes is fixed here, so that a flush repeated by another process, at another time, or with another
configuration writes the same, and a part that was written before is known by its marker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from price_keeper.ledger.ledger_entries import Counter, LineKind, UsageCounts, UsageTally
from price_keeper.stores.contract import MAX_TRANSACTION_WRITES

# A part is one transaction: its marker, and for each sum a counter and perhaps an entry in the list of active ones.
SUMS_PER_PART = (MAX_TRANSACTION_WRITES - 1) // 2

_MAX_JSON_INTEGER = 2**63 - 1
_CHUNK_BYTES = 1024 * 1024
_EMPTY_SEGMENT_LINES = 2  # its head, and that nothing is carried into it

SegmentPart = tuple[tuple[Counter, UsageCounts], ...]


@dataclass(frozen=True, slots=True)
class SegmentExtent:
    """How many lines a segment has before its estimates and its seal, and their digest. A copy that was made earlier
    has fewer lines, a copy that has grown has more; both begin alike."""

    lines: int
    digest: str

    @classmethod
    def measure_file(cls, path: Path, size: int) -> SegmentExtent:
        """Of one that has nothing but whole lines in its first `size` bytes. Raises OSError."""
        digest, lines = sha256(), 0
        with path.open("rb") as file:
            while size and (chunk := file.read(min(size, _CHUNK_BYTES))):
                digest.update(chunk)
                lines += chunk.count(b"\n")
                size -= len(chunk)
        return cls(lines, digest.hexdigest())

    @property
    def has_calls(self) -> bool:
        """So that a copy of it may have something to count, though this one comes to nothing."""
        return self.lines > _EMPTY_SEGMENT_LINES

    def encode(self) -> bytes:
        return orjson.dumps([LineKind.EXTENT.value, self.lines, self.digest])

    @classmethod
    def from_values(cls, values: list[Any]) -> SegmentExtent:
        _, lines, digest = values
        if type(lines) is not int or type(digest) is not str:
            raise TypeError("no extent of a segment")
        return cls(lines, digest)


@dataclass(frozen=True, slots=True)
class SegmentSeal:
    """`pico` and `requests` count each call once, though several scopes may be charged with it."""

    ulid: str
    pico: int
    requests: int
    parts: tuple[SegmentPart, ...]

    @classmethod
    def from_tally(cls, ulid: str, tally: UsageTally) -> SegmentSeal:
        return cls(ulid, tally.pico, tally.requests, tuple(_split_into_parts(tally)))

    def encode(self) -> bytes:
        parts = [[[*counter, *map(_encode_integer, counts)] for counter, counts in part] for part in self.parts]
        return orjson.dumps([LineKind.SEAL.value, self.ulid, _encode_integer(self.pico), self.requests, parts])

    @classmethod
    def from_values(cls, values: list[Any], interned: dict[Counter, Counter]) -> SegmentSeal:
        """Counters that are `known` are shared, for many seals may name the same ones."""
        _, ulid, pico, requests, parts = values
        if type(ulid) is not str or type(requests) is not int:
            raise TypeError("no seal of ours")
        return cls(
            ulid, int(pico), requests, tuple(tuple(_parse_sum(each, interned) for each in part) for part in parts)
        )


def _parse_sum(values: list[Any], interned: dict[Counter, Counter]) -> tuple[Counter, UsageCounts]:
    width = len(Counter._fields)
    counter = Counter.from_values(values[:width])
    return interned.setdefault(counter, counter), UsageCounts(*map(int, values[width:]))


def _encode_integer(number: int) -> int | str:
    """Sums of many calls may be more than 64 bits hold, and no JSON of ours has numbers beyond them."""
    return number if number <= _MAX_JSON_INTEGER else str(number)


def _merge_shard_counts(tally: UsageTally) -> dict[Counter, UsageCounts]:
    """An org may have come to be spread over more shards while calls were under way: the greater number holds."""
    sums: dict[tuple[str, str, str], tuple[int, UsageCounts]] = {}
    for counter, counts in tally.sums().items():
        shards, so_far = sums.get(counter[:3], (0, UsageCounts()))
        sums[counter[:3]] = max(counter.shards, shards), so_far.plus(counts)
    return {Counter(*name, shards): counts for name, (shards, counts) in sums.items()}


def _split_into_parts(tally: UsageTally) -> Iterator[SegmentPart]:
    """A scope's sums stay together as far as they fit, so that a scope in contention holds up few others. What was
    spent of a counter and of a hold on it always does: who compares the two must find both or neither."""
    part: list[tuple[Counter, UsageCounts]] = []
    ordered = sorted(_merge_shard_counts(tally).items(), key=lambda each: _sort_key(each[0]))
    for _, group in groupby(ordered, key=lambda each: each[0].scope):
        sums = list(group)
        if part and len(part) + len(sums) > SUMS_PER_PART:
            yield tuple(part)
            part = []
        for _, together in groupby(sums, key=lambda each: _sort_key(each[0])[:3]):
            together_sums = list(together)
            if part and len(part) + len(together_sums) > SUMS_PER_PART:
                yield tuple(part)
                part = []
            part += together_sums
    if part:
        yield tuple(part)


def _sort_key(counter: Counter) -> tuple[str, str, str, str, int]:
    """A hold's is beside that of the counter that it is spent with."""
    scope, label, period, shards = counter
    return scope, label, counter.budget_period, period, shards
