"""Recovers the journal of a process that has ended: reads its segments, counts open calls as estimated, and seals them.

`recover` may be killed at any point and repeated; it comes to the same result. Call it under the journal's lock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from price_keeper.errors import JournalUnusable
from price_keeper.ledger import lease_file
from price_keeper.ledger.journal import SealedSegment, SegmentExtent, SegmentSeal
from price_keeper.ledger.journal_lock import is_disk_full
from price_keeper.ledger.ledger_entries import (
    JOURNAL_FORMAT,
    ChargedCounters,
    Counter,
    Intent,
    LineKind,
    Receipt,
    UsageTally,
)
from price_keeper.ledger.segment import SEGMENT_SUFFIX, JournalLines, decode_lines
from price_keeper.ledger.ulid import is_ulid

_log = logging.getLogger("price_keeper.recording")


_TRAILER_KINDS = (LineKind.EXTENT, LineKind.SEAL)


def _check_integers(numbers: Iterable[Any]) -> None:
    """A line that is whole may still be none of ours."""
    if any(type(number) is not int for number in numbers):
        raise TypeError("no number where one should be")


@dataclass(slots=True)
class InternedValues:
    """What many calls and many seals name alike is held once: there may be a million of them."""

    charged_counters: dict[tuple[Counter, ...], ChargedCounters] = field(default_factory=dict)
    counters: dict[Counter, Counter] = field(default_factory=dict)

    def parse_intent(self, values: list[Any]) -> Intent:
        intent = Intent.from_values(values)
        _check_integers(values[1:-1])
        intent.charged = self.charged_counters.setdefault(intent.charged.counters, intent.charged)
        return intent


@dataclass(slots=True)
class RecoveredSegment:
    """A segment as it lies there. `open` are the calls of which it does not say what became; those that were `carried`
    into it are looked for in the `earlier` one where it has lost them itself."""

    path: Path
    ulid: str
    earlier: RecoveredSegment | None
    interned: InternedValues
    previous_ulid: str | None = None  # until a line tells
    carried: dict[int, Intent] = field(default_factory=dict)
    lost_calls: int = 0  # of those that were carried
    is_ready: bool = False
    needs_earlier: bool = False  # some of what it comes to can be read in the earlier one only
    seal: SegmentSeal | None = None
    corrupt_lines: int = 0
    has_gaps: bool = False
    end: int = 0
    open: dict[int, Intent] = field(default_factory=dict)
    tally: UsageTally = field(default_factory=UsageTally)
    extent: SegmentExtent | None = None
    estimated: list[int] = field(default_factory=list)  # behind the extent, as the seal counts them
    has_carried_calls: bool = False
    carried_forward: set[int] = field(default_factory=set)

    def read_lines(self, lines: JournalLines) -> None:
        """Behind its extent a segment has nothing but estimates and its seal. Estimates without a seal were never
        counted, and are made again."""
        digest, count = sha256(), 0
        for values, text, end in zip(lines.values, lines.texts, lines.ends, strict=True):
            try:
                self._read_trailer(values) if self.extent or values[0] in _TRAILER_KINDS else self.read_line(values)
            except (LookupError, TypeError, ValueError):
                self.corrupt_lines += 1
                self.has_gaps = True
            if self.extent is None and self.seal is None:
                digest.update(text)
                count, self.end = count + 1, end
        self.extent = self.extent or SegmentExtent(count, digest.hexdigest())
        if self.seal is None:
            self.estimated = []

    def _read_trailer(self, values: list[Any]) -> None:
        match values[0]:
            case LineKind.EXTENT:
                self.extent = SegmentExtent.from_values(values)
            case LineKind.SEAL:
                self.end_carried()
                self.seal = SegmentSeal.from_values(values, self.interned.counters)
            case LineKind.RECORD:
                _check_integers(values[1:2])
                self.estimated.append(values[1])

    def read_line(self, values: list[Any]) -> None:
        match values[0]:
            case LineKind.HEAD:
                self.previous_ulid = values[2]
                if values[3] != JOURNAL_FORMAT:
                    raise JournalUnusable(f"{self.path} is a journal of another version, {values[3]}")
            case LineKind.CARRIED:
                self.carried[values[1]] = self.interned.parse_intent(values)
            case LineKind.READY:
                before, carried_count = values[1:] or (
                    self.previous_ulid,
                    None,
                )  # it once said no more than that it is the end
                _check_integers(() if carried_count is None else (carried_count,))
                if not self.is_ready:
                    self.previous_ulid = before
                self.end_carried(carried_count)
            case _:
                self.end_carried()
                self._read_call_line(values)

    def end_carried(self, carried_count: int | None = None) -> None:
        """Here ends what is carried, as many as the line says that tells so, or unknown if that line is spoilt."""
        if self.is_ready:
            return
        self.is_ready = True
        if carried_count is None or carried_count > len(self.carried):
            self._restore_carried(carried_count)
        self.lost_calls = max(0, (carried_count or 0) - len(self.carried))
        self.has_carried_calls = bool(carried_count or self.carried)
        self.open = dict(self.carried)

    def _restore_carried(self, carried_count: int | None) -> None:
        if self.earlier is None or self.earlier.ulid != self.previous_ulid:
            return
        missing = [number for number in self.earlier.open if number not in self.carried]
        # There are more of them only if the end of some is spoilt: those count where they began.
        for number in missing if carried_count is None else missing[: carried_count - len(self.carried)]:
            self.carried[number] = self.earlier.open[number]
            self.needs_earlier = True

    def hand_calls_to(self, later: RecoveredSegment) -> None:
        """What one behind it carries. Of one that is not the next, as that has lost what it carried, only what is told
        alike to the last figure: another process counts its calls anew."""
        if self.seal is not None:  # all that it has to say; the rest only fills the memory
            self.open, self.carried, self.tally = {}, {}, UsageTally()
            return
        is_next = later.previous_ulid == self.ulid
        for number, intent in later.carried.items():
            if is_next or self.open.get(number) == intent:
                self.open.pop(number, None)
                self.carried_forward.add(number)

    def _read_call_line(self, values: list[Any]) -> None:
        match values[0]:
            case LineKind.INTENT:
                self.open[values[1]] = self.interned.parse_intent(values)
            case LineKind.RECORD:
                self._settle(values[1], Receipt.from_values(values))
            case LineKind.NOTHING:
                self.open.pop(values[1], None)

    def _settle(self, number: int, receipt: Receipt) -> None:
        _check_integers(receipt.counts)
        intent = self.open.pop(number, None)
        if intent is not None:
            self.tally.add(intent.charged, receipt.counts)

    @property
    def is_unfinished_start(self) -> bool:
        """Only then is the one before it still there without a seal, and says all that this one would have said."""
        earlier = self.earlier
        return (
            not self.is_ready
            and earlier is not None
            and earlier.seal is None
            and self.previous_ulid in (None, earlier.ulid)
        )


@dataclass(slots=True)
class RecoveredJournal:
    """What is to be flushed, the oldest first, and how much of it was found how."""

    sealed: list[SealedSegment] = field(default_factory=list)
    corrupt_lines: int = 0
    estimated_calls: int = 0
    lost_calls: int = 0
    newest_ulid: str = ""  # of the segments there were

    def add_losses(self, other: RecoveredJournal) -> None:
        """How much was found elsewhere."""
        self.corrupt_lines += other.corrupt_lines
        self.estimated_calls += other.estimated_calls
        self.lost_calls += other.lost_calls


def recover(folder: Path) -> RecoveredJournal:
    """Under the journal's lock. Doing it again, after being killed in the middle, comes to the same. Raises OSError and
    JournalUnusable."""
    recovered = RecoveredJournal()
    interned = InternedValues()
    all_found: list[RecoveredSegment] = []
    for path in sorted(path for path in folder.glob(f"*{SEGMENT_SUFFIX}") if is_ulid(path.stem)):
        found = read_segment(path, all_found[-1] if all_found else None, interned)
        recovered.newest_ulid = found.ulid
        recovered.corrupt_lines += found.corrupt_lines
        if not found.is_ready:
            path.unlink()
            continue
        for earlier in all_found:
            earlier.hand_calls_to(found)
        all_found.append(found)
    if any(found.has_gaps or found.lost_calls for found in all_found):
        lease_file.retain_all(folder)  # first of all, as nothing tells of it once the rest is in the store
    for found in all_found:
        _finish_segment(found, recovered)
    _discard_empty(recovered)
    _log_losses(folder, recovered)
    return recovered


def read_segment(
    path: Path, earlier: RecoveredSegment | None = None, interned: InternedValues | None = None
) -> RecoveredSegment:
    """`earlier` is the one before it in the folder, as it was read."""
    lines = decode_lines(path.read_bytes())
    found = RecoveredSegment(path, path.stem, earlier, interned or InternedValues(), corrupt_lines=lines.corrupt_lines)
    found.has_gaps = lines.has_gaps
    found.read_lines(lines)
    if not found.is_unfinished_start:
        found.end_carried()
    found.earlier = None
    return found


def _finish_segment(found: RecoveredSegment, recovered: RecoveredJournal) -> None:
    if found.seal is not None:
        recovered.sealed.append(_build_sealed(found, found.seal, is_recovered=True))
        return
    recovered.lost_calls += found.lost_calls
    recovered.estimated_calls += len(found.open)
    is_empty = not (found.open or found.tally.requests)
    recovered.sealed.append(
        _build_sealed(found, SegmentSeal.from_tally(found.ulid, found.tally)) if is_empty else _estimate_and_seal(found)
    )


def _build_sealed(found: RecoveredSegment, seal: SegmentSeal, *, is_recovered: bool = False) -> SealedSegment:
    return SealedSegment(
        seal,
        found.path,
        extent=found.extent,
        previous_ulid=found.previous_ulid or "",
        has_carried_calls=found.has_carried_calls,
        estimated=tuple(found.estimated),
        carried_forward=tuple(sorted(found.carried_forward)),
        is_recovered=is_recovered,
    )


def _discard_empty(recovered: RecoveredJournal) -> None:
    """At last, as the one behind may have been mended with what stands in it. One that has others before it goes in its
    turn, since it tells which of their calls were carried on, should a seal of theirs be missing."""
    while recovered.sealed and recovered.sealed[0].has_seal and not _must_be_sent(recovered.sealed[0]):
        recovered.sealed.pop(0).discard()


def _must_be_sent(sealed: SealedSegment) -> bool:
    """Whether the store has to be told of it."""
    return bool(sealed.seal.requests) or (sealed.extent is not None and sealed.extent.has_calls)


def _estimate_and_seal(found: RecoveredSegment) -> SealedSegment:
    os.truncate(found.path, found.end)
    estimate_lines = []
    for number, intent in found.open.items():
        receipt = Receipt(intent.estimated_counts, {"why": "unknown"})
        estimate_lines.append(receipt.encode(number))
        found.tally.add(intent.charged, receipt.counts)
    found.estimated = [*found.open]
    sealed = _build_sealed(found, SegmentSeal.from_tally(found.ulid, found.tally), is_recovered=True)
    sealed.estimate_lines, sealed.has_seal = tuple(estimate_lines), False
    try:
        sealed.write_seal()
    except OSError as failure:
        # What it comes to can be worked out again, unless that takes another file, which may go before it.
        if found.needs_earlier or not is_disk_full(failure):
            raise
        _log.warning("segment %s cannot be sealed: %s", found.ulid, failure.strerror)
    return sealed


def _log_losses(folder: Path, recovered: RecoveredJournal) -> None:
    if recovered.corrupt_lines or recovered.estimated_calls:
        _log.warning(
            "the journal in %s: %d calls whose end is unknown count as estimated; %d lines were torn",
            folder,
            recovered.estimated_calls,
            recovered.corrupt_lines,
        )
    if recovered.lost_calls:
        _log.error(
            "the journal in %s: %d calls stood in torn lines only, and do not count", folder, recovered.lost_calls
        )
