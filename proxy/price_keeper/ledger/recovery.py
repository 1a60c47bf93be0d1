"""Recovers the journal of a process that has ended: reads its segments, counts open calls as estimated, and seals them.

`recover` is idempotent: it may be killed at any point and repeated. Call it under the journal's lock.
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
    check_counts,
)
from price_keeper.ledger.segment import SEGMENT_SUFFIX, JournalLines, decode_lines
from price_keeper.ledger.ulid import is_ulid

_log = logging.getLogger("price_keeper.recording")


_TRAILER_KINDS = (LineKind.EXTENT, LineKind.SEAL)


def _check_integers(numbers: Iterable[Any]) -> None:
    """A line with a good checksum may still be no line of this product."""
    if any(type(number) is not int for number in numbers):
        raise TypeError("expected integers")


@dataclass(slots=True)
class InternedValues:
    """Equal values of many calls and seals share one object, as there may be a million of them."""

    charged_counters: dict[tuple[Counter, ...], ChargedCounters] = field(default_factory=dict)
    counters: dict[Counter, Counter] = field(default_factory=dict)

    def parse_intent(self, values: list[Any]) -> Intent:
        intent = Intent.from_values(values)
        _check_integers(values[1:-1])
        intent.charged = self.charged_counters.setdefault(intent.charged.counters, intent.charged)
        return intent


@dataclass(slots=True)
class RecoveredSegment:
    """A segment as it was found. `open` are the calls whose end it does not record. Calls that were carried into it,
    and whose lines it has lost, are restored from the `earlier` segment."""

    path: Path
    ulid: str
    earlier: RecoveredSegment | None
    interned: InternedValues
    previous_ulid: str | None = None  # None until a line names it
    carried: dict[int, Intent] = field(default_factory=dict)
    unrecoverable_calls: int = 0  # carried calls whose intents are corrupt, here and in the earlier segment
    is_ready: bool = False
    needs_earlier: bool = False  # some of its calls are recorded in the earlier segment only
    seal: SegmentSeal | None = None
    corrupt_lines: int = 0
    has_gaps: bool = False
    end: int = 0
    open: dict[int, Intent] = field(default_factory=dict)
    tally: UsageTally = field(default_factory=UsageTally)
    extent: SegmentExtent | None = None
    estimated: list[int] = field(default_factory=list)  # after the extent, as the seal counts them
    has_carried_calls: bool = False
    carried_forward: set[int] = field(default_factory=set)

    def read_lines(self, lines: JournalLines) -> None:
        """After its extent a segment has only estimates and its seal. Estimates without a seal were never counted, and
        are made again."""
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
                # In the oldest journals this line has no further values.
                before, carried_count = values[1:] or (self.previous_ulid, None)
                _check_integers(() if carried_count is None else (carried_count,))
                if not self.is_ready:
                    self.previous_ulid = before
                self.end_carried(carried_count)
            case _:
                self.end_carried()
                self._read_call_line(values)

    def end_carried(self, carried_count: int | None = None) -> None:
        """The carried calls end here. The count is that of the READY line, or None if that line is lost."""
        if self.is_ready:
            return
        self.is_ready = True
        if carried_count is None or carried_count > len(self.carried):
            self._restore_carried(carried_count)
        self.unrecoverable_calls = max(0, (carried_count or 0) - len(self.carried))
        self.has_carried_calls = bool(carried_count or self.carried)
        self.open = dict(self.carried)

    def _restore_carried(self, carried_count: int | None) -> None:
        if self.earlier is None or self.earlier.ulid != self.previous_ulid:
            return
        missing = [number for number in self.earlier.open if number not in self.carried]
        # There are more of them only if the end of some calls is lost; those count where they began.
        for number in missing if carried_count is None else missing[: carried_count - len(self.carried)]:
            self.carried[number] = self.earlier.open[number]
            self.needs_earlier = True

    def hand_calls_to(self, later: RecoveredSegment) -> None:
        """Remove the calls that a later segment carries. If that is not the next segment, because the next one has lost
        what it carried, only calls with an identical intent are removed: each process numbers its calls from 1."""
        if self.seal is not None:  # a sealed segment needs no more than its seal; the rest only takes memory
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
        check_counts(receipt.counts)
        intent = self.open.pop(number, None)
        if intent is not None:
            self.tally.add(intent.charged, receipt.counts)

    @property
    def is_unfinished_start(self) -> bool:
        """The segment was begun and never used. Only then does the one before it have no seal, and still record all
        calls."""
        earlier = self.earlier
        return (
            not self.is_ready
            and earlier is not None
            and earlier.seal is None
            and self.previous_ulid in (None, earlier.ulid)
        )


@dataclass(slots=True)
class RecoveredJournal:
    """The segments to be flushed, the oldest first, and what was lost or estimated."""

    sealed: list[SealedSegment] = field(default_factory=list)
    corrupt_lines: int = 0
    estimated_calls: int = 0  # counted, with the estimates of their intents
    unrecoverable_calls: int = 0  # not counted: their spend is missing
    newest_ulid: str = ""  # of all segments in the folder

    def add_losses(self, other: RecoveredJournal) -> None:
        """Add the losses of another journal."""
        self.corrupt_lines += other.corrupt_lines
        self.estimated_calls += other.estimated_calls
        self.unrecoverable_calls += other.unrecoverable_calls


def recover(folder: Path) -> RecoveredJournal:
    """Recover the journal in a folder, under its lock. Idempotent, also after a kill half way. Raises OSError and
    JournalUnusable."""
    recovered = RecoveredJournal()
    interned = InternedValues()
    segments: list[RecoveredSegment] = []
    for path in sorted(path for path in folder.glob(f"*{SEGMENT_SUFFIX}") if is_ulid(path.stem)):
        segment = read_segment(path, segments[-1] if segments else None, interned)
        recovered.newest_ulid = segment.ulid
        recovered.corrupt_lines += segment.corrupt_lines
        if not segment.is_ready:
            path.unlink()
            continue
        for earlier in segments:
            earlier.hand_calls_to(segment)
        segments.append(segment)
    if any(segment.has_gaps or segment.unrecoverable_calls for segment in segments):
        # before anything is sent, as nothing shows the loss once the rest is in the store
        lease_file.retain_all(folder)
    for segment in segments:
        _finish_segment(segment, recovered)
    _discard_empty(recovered)
    _log_losses(folder, recovered)
    return recovered


def read_segment(
    path: Path, earlier: RecoveredSegment | None = None, interned: InternedValues | None = None
) -> RecoveredSegment:
    """Read one segment. `earlier` is the one before it in the folder."""
    lines = decode_lines(path.read_bytes())
    found = RecoveredSegment(path, path.stem, earlier, interned or InternedValues(), corrupt_lines=lines.corrupt_lines)
    found.has_gaps = lines.has_gaps
    found.read_lines(lines)
    if not found.is_unfinished_start:
        found.end_carried()
    found.earlier = None
    return found


def _finish_segment(segment: RecoveredSegment, recovered: RecoveredJournal) -> None:
    if segment.seal is not None:
        recovered.sealed.append(_build_sealed(segment, segment.seal, is_recovered=True))
        return
    recovered.unrecoverable_calls += segment.unrecoverable_calls
    recovered.estimated_calls += len(segment.open)
    is_empty = not (segment.open or segment.tally.requests)
    recovered.sealed.append(
        _build_sealed(segment, SegmentSeal.from_tally(segment.ulid, segment.tally))
        if is_empty
        else _estimate_and_seal(segment)
    )


def _build_sealed(segment: RecoveredSegment, seal: SegmentSeal, *, is_recovered: bool = False) -> SealedSegment:
    return SealedSegment(
        seal,
        segment.path,
        extent=segment.extent,
        previous_ulid=segment.previous_ulid or "",
        has_carried_calls=segment.has_carried_calls,
        estimated=tuple(segment.estimated),
        carried_forward=tuple(sorted(segment.carried_forward)),
        is_recovered=is_recovered,
    )


def _discard_empty(recovered: RecoveredJournal) -> None:
    """Discard empty segments at the start of the list, last of all, as a later one may have been restored from their
    lines. An empty segment after others is sent in its turn: it records which of their calls were carried on, should
    one of their seals be missing."""
    while recovered.sealed and recovered.sealed[0].is_seal_written and not _must_be_sent(recovered.sealed[0]):
        recovered.sealed.pop(0).discard()


def _must_be_sent(sealed: SealedSegment) -> bool:
    """Whether the store has to have a marker of it."""
    return bool(sealed.seal.requests) or (sealed.extent is not None and sealed.extent.has_calls)


def _estimate_and_seal(segment: RecoveredSegment) -> SealedSegment:
    os.truncate(segment.path, segment.end)
    estimate_lines = []
    for number, intent in segment.open.items():
        receipt = Receipt(intent.estimated_counts, {"why": "unknown"})
        estimate_lines.append(receipt.encode(number))
        segment.tally.add(intent.charged, receipt.counts)
    segment.estimated = [*segment.open]
    sealed = _build_sealed(segment, SegmentSeal.from_tally(segment.ulid, segment.tally), is_recovered=True)
    sealed.estimate_lines, sealed.is_seal_written = tuple(estimate_lines), False
    try:
        sealed.write_seal()
    except OSError as failure:
        # The sums can be computed again, unless they need another file, which may be removed first.
        if segment.needs_earlier or not is_disk_full(failure):
            raise
        _log.warning(
            "segment %s cannot be sealed yet; recovered segments are sent to the store first, to make room: %s",
            segment.ulid,
            failure.strerror,
        )
    return sealed


def _log_losses(folder: Path, recovered: RecoveredJournal) -> None:
    if recovered.corrupt_lines or recovered.estimated_calls:
        _log.warning(
            "the journal in %s: %d calls were interrupted and are charged by estimate; %d lines are corrupt (a few "
            "after a crash are normal)",
            folder,
            recovered.estimated_calls,
            recovered.corrupt_lines,
        )
    if recovered.unrecoverable_calls:
        _log.error(
            "the journal in %s: %d calls in corrupt lines cannot be recovered; their spend is missing from all totals: "
            "compare with the AWS bill of that day",
            folder,
            recovered.unrecoverable_calls,
        )
