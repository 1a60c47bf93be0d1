"""What a process that is no more left in a journal: read, brought to its end, and sealed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from price_keeper.errors import JournalUnusable
from price_keeper.hard import holds
from price_keeper.recording.entries import JOURNAL_FORMAT, ChargedCounters, Counter, Intent, LineKind, Receipt, UsageTally
from price_keeper.recording.folder import is_disk_full
from price_keeper.recording.journal import SealedSegment
from price_keeper.recording.lines import JournalLines, decode_lines
from price_keeper.recording.seal import SegmentExtent, SegmentSeal
from price_keeper.recording.segment import SEGMENT_SUFFIX
from price_keeper.recording.ulid import is_ulid

_log = logging.getLogger("price_keeper.recording")


_LAST = (LineKind.EXTENT, LineKind.SEAL)


def _check(numbers: Iterable[Any]) -> None:
    """A line that is whole may still be none of ours."""
    if any(type(number) is not int for number in numbers):
        raise TypeError("no number where one should be")


@dataclass(slots=True)
class Known:
    """What many calls and many seals name alike is held once: there may be a million of them."""

    charged_counters: dict[tuple[Counter, ...], ChargedCounters] = field(default_factory=dict)
    counters: dict[Counter, Counter] = field(default_factory=dict)

    def intent(self, values: list[Any]) -> Intent:
        intent = Intent.from_values(values)
        _check(values[1:-1])
        intent.charged = self.charged_counters.setdefault(intent.charged.counters, intent.charged)
        return intent


@dataclass(slots=True)
class Found:
    """A segment as it lies there. `open` are the calls of which it does not say what became; those that were `carried`
    into it are looked for in the `earlier` one where it has lost them itself."""

    path: Path
    ulid: str
    earlier: Found | None
    known: Known
    previous_ulid: str | None = None  # until a line tells
    carried: dict[int, Intent] = field(default_factory=dict)
    lost: int = 0  # of those that were carried
    is_ready: bool = False
    is_mended: bool = False  # some of what it comes to can be read in the earlier one only
    seal: SegmentSeal | None = None
    spoilt: int = 0
    has_gaps: bool = False
    end: int = 0
    open: dict[int, Intent] = field(default_factory=dict)
    tally: UsageTally = field(default_factory=UsageTally)
    extent: SegmentExtent | None = None
    estimated: list[int] = field(default_factory=list)  # behind the extent, as the seal counts them
    has_carried_calls: bool = False
    carried_forward: set[int] = field(default_factory=set)

    def take_all(self, lines: JournalLines) -> None:
        """Behind its extent a segment has nothing but estimates and its seal. Estimates without a seal were never
        counted, and are made again."""
        digest, count = sha256(), 0
        for values, text, end in zip(lines.values, lines.texts, lines.ends, strict=True):
            try:
                self._take_last(values) if self.extent or values[0] in _LAST else self.take(values)
            except (LookupError, TypeError, ValueError):
                self.spoilt += 1
                self.has_gaps = True
            if self.extent is None and self.seal is None:
                digest.update(text)
                count, self.end = count + 1, end
        self.extent = self.extent or SegmentExtent(count, digest.hexdigest())
        if self.seal is None:
            self.estimated = []

    def _take_last(self, values: list[Any]) -> None:
        match values[0]:
            case LineKind.EXTENT:
                self.extent = SegmentExtent.from_values(values)
            case LineKind.SEAL:
                self.begin()
                self.seal = SegmentSeal.from_values(values, self.known.counters)
            case LineKind.RECORD:
                _check(values[1:2])
                self.estimated.append(values[1])

    def take(self, values: list[Any]) -> None:
        match values[0]:
            case LineKind.HEAD:
                self.previous_ulid = values[2]
                if values[3] != JOURNAL_FORMAT:
                    raise JournalUnusable(f"{self.path} is a journal of another version, {values[3]}")
            case LineKind.CARRIED:
                self.carried[values[1]] = self.known.intent(values)
            case LineKind.READY:
                before, told = values[1:] or (self.previous_ulid, None)  # it once said no more than that it is the end
                _check(() if told is None else (told,))
                if not self.is_ready:
                    self.previous_ulid = before
                self.begin(told)
            case _:
                self.begin()
                self._take_of_ready(values)

    def begin(self, told: int | None = None) -> None:
        """Here ends what is carried, as many as the line says that tells so, or unknown if that line is spoilt."""
        if self.is_ready:
            return
        self.is_ready = True
        if told is None or told > len(self.carried):
            self._look_for_carried(told)
        self.lost = max(0, (told or 0) - len(self.carried))
        self.has_carried_calls = bool(told or self.carried)
        self.open = dict(self.carried)

    def _look_for_carried(self, told: int | None) -> None:
        if self.earlier is None or self.earlier.ulid != self.previous_ulid:
            return
        missing = [number for number in self.earlier.open if number not in self.carried]
        # There are more of them only if the end of some is spoilt: those count where they began.
        for number in missing if told is None else missing[: told - len(self.carried)]:
            self.carried[number] = self.earlier.open[number]
            self.is_mended = True

    def leave_to(self, later: Found) -> None:
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

    def _take_of_ready(self, values: list[Any]) -> None:
        match values[0]:
            case LineKind.INTENT:
                self.open[values[1]] = self.known.intent(values)
            case LineKind.RECORD:
                self._settle(values[1], Receipt.from_values(values))
            case LineKind.NOTHING:
                self.open.pop(values[1], None)

    def _settle(self, number: int, receipt: Receipt) -> None:
        _check(receipt.counts)
        intent = self.open.pop(number, None)
        if intent is not None:
            self.tally.add(intent.charged, receipt.counts)

    @property
    def is_being_begun(self) -> bool:
        """Only then is the one before it still there without a seal, and says all that this one would have said."""
        earlier = self.earlier
        return (
            not self.is_ready and earlier is not None and earlier.seal is None and self.previous_ulid in (None, earlier.ulid)
        )


@dataclass(slots=True)
class Leftovers:
    """What is to be flushed, the oldest first, and how much of it was found how."""

    sealed: list[SealedSegment] = field(default_factory=list)
    spoilt: int = 0
    estimated: int = 0
    lost: int = 0
    newest: str = ""  # of the segments there were

    def add(self, other: Leftovers) -> None:
        """How much was found elsewhere."""
        self.spoilt += other.spoilt
        self.estimated += other.estimated
        self.lost += other.lost


def recover(folder: Path) -> Leftovers:
    """Under the journal's lock. Doing it again, after being killed in the middle, comes to the same. Raises OSError and
    JournalUnusable."""
    left = Leftovers()
    known = Known()
    all_found: list[Found] = []
    for path in sorted(path for path in folder.glob(f"*{SEGMENT_SUFFIX}") if is_ulid(path.stem)):
        found = read(path, all_found[-1] if all_found else None, known)
        left.newest = found.ulid
        left.spoilt += found.spoilt
        if not found.is_ready:
            path.unlink()
            continue
        for earlier in all_found:
            earlier.leave_to(found)
        all_found.append(found)
    if any(found.has_gaps or found.lost for found in all_found):
        holds.retain_all(folder)  # first of all, as nothing tells of it once the rest is in the store
    for found in all_found:
        _end(found, left)
    _drop_empty(left)
    _tell(folder, left)
    return left


def read(path: Path, earlier: Found | None = None, known: Known | None = None) -> Found:
    """`earlier` is the one before it in the folder, as it was read."""
    lines = decode_lines(path.read_bytes())
    found = Found(path, path.stem, earlier, known or Known(), spoilt=lines.corrupt_lines)
    found.has_gaps = lines.has_gaps
    found.take_all(lines)
    if not found.is_being_begun:
        found.begin()
    found.earlier = None
    return found


def _end(found: Found, left: Leftovers) -> None:
    if found.seal is not None:
        left.sealed.append(_sealed(found, found.seal, is_left_over=True))
        return
    left.lost += found.lost
    left.estimated += len(found.open)
    is_empty = not (found.open or found.tally.requests)
    left.sealed.append(_sealed(found, SegmentSeal.from_tally(found.ulid, found.tally)) if is_empty else _brought_to_its_end(found))


def _sealed(found: Found, seal: SegmentSeal, *, is_left_over: bool = False) -> SealedSegment:
    return SealedSegment(
        seal,
        found.path,
        extent=found.extent,
        previous_ulid=found.previous_ulid or "",
        has_carried_calls=found.has_carried_calls,
        estimated=tuple(found.estimated),
        carried_forward=tuple(sorted(found.carried_forward)),
        is_recovered=is_left_over,
    )


def _drop_empty(left: Leftovers) -> None:
    """At last, as the one behind may have been mended with what stands in it. One that has others before it goes in its
    turn, since it tells which of their calls were carried on, should a seal of theirs be missing."""
    while left.sealed and left.sealed[0].has_seal and not _matters(left.sealed[0]):
        left.sealed.pop(0).discard()


def _matters(sealed: SealedSegment) -> bool:
    """Whether the store has to be told of it."""
    return bool(sealed.seal.requests) or (sealed.extent is not None and sealed.extent.has_calls)


def _brought_to_its_end(found: Found) -> SealedSegment:
    os.truncate(found.path, found.end)
    estimates = []
    for number, intent in found.open.items():
        receipt = Receipt(intent.estimated_counts, {"why": "unknown"})
        estimates.append(receipt.encode(number))
        found.tally.add(intent.charged, receipt.counts)
    found.estimated = [*found.open]
    sealed = _sealed(found, SegmentSeal.from_tally(found.ulid, found.tally), is_left_over=True)
    sealed.estimate_lines, sealed.has_seal = tuple(estimates), False
    try:
        sealed.write_seal()
    except OSError as failure:
        # What it comes to can be worked out again, unless that takes another file, which may go before it.
        if found.is_mended or not is_disk_full(failure):
            raise
        _log.warning("segment %s cannot be sealed: %s", found.ulid, failure.strerror)
    return sealed


def _tell(folder: Path, left: Leftovers) -> None:
    if left.spoilt or left.estimated:
        _log.warning(
            "the journal in %s: %d calls whose end is unknown count as estimated; %d lines were torn",
            folder,
            left.estimated,
            left.spoilt,
        )
    if left.lost:
        _log.error("the journal in %s: %d calls stood in torn lines only, and do not count", folder, left.lost)
