"""The lines of a segment in stretches, each counted together: what a copy that was counted before leaves to count.

    lines that a copy had, and the calls they leave open as estimated -> lines that came after, without those calls

All who have the lines of a stretch work out the same for it, so anybody may finish what another one began.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from price_keeper.errors import PriceKeeperError
from price_keeper.recording.entries import LineKind, UsageTally
from price_keeper.recording.flush import SegmentMarker
from price_keeper.recording.journal import SealedSegment
from price_keeper.recording.leftovers import RecoveredSegment, InternedValues
from price_keeper.recording.lines import decode_lines
from price_keeper.recording.seal import SegmentSeal

_ENDS = (LineKind.RECORD, LineKind.NOTHING)


class SegmentMismatch(PriceKeeperError):
    """The store has counted something else under this segment's name; the message says what."""


class Stretches:
    """Reads the file, so make it in a thread. `counted` are calls carried into it that count already. Raises OSError
    and SegmentMismatch."""

    def __init__(self, sealed: SealedSegment, counted: Iterable[int]) -> None:
        lines = decode_lines(sealed.path.read_bytes())
        self.size = sealed.measure().lines
        self.at = 0  # the lines so far
        self.late = 0  # calls whose end was found when they counted already
        self.requests = self.pico = 0  # of what was worked out so far
        self.counted = set(counted)  # of the calls that are open there
        self._lines = [*zip(lines.values, lines.texts, strict=True)][: self.size]
        self._own, self._carried = sealed.estimated, {*sealed.carried_forward}
        self._digest = sha256()
        self._found = RecoveredSegment(sealed.path, sealed.seal.ulid, None, InternedValues())
        if lines.has_gaps or len(self._lines) < self.size:
            raise SegmentMismatch("lines of it are torn, and a copy of it was counted")

    def of(self, mark: SegmentMarker) -> SegmentSeal:
        """What the lines up to this marker's come to, as whoever put it there has counted them."""
        seal = self._up_to(mark.lines, mark.estimated)
        self._carried.update(mark.carried)
        if mark.lines <= mark.start:
            raise SegmentMismatch("its marker makes no sense")
        if self._digest.hexdigest() != mark.digest:
            raise SegmentMismatch(f"its first {mark.lines} lines are not those that were counted under its name")
        if (mark.parts, mark.estimated) != self._mark(seal, mark.start)[2:4]:
            raise SegmentMismatch(f"its first {mark.lines} lines come to something else than what was counted")
        return seal

    def rest(self) -> tuple[SegmentMarker, SegmentSeal]:
        """Of all lines that are left."""
        start = self.at
        seal = self._up_to(self.size, [number for number in self._own if number not in self._carried])
        return self._mark(seal, start), seal

    def _mark(self, seal: SegmentSeal, start: int) -> SegmentMarker:
        estimated, carried = tuple(sorted(self.counted)), tuple(sorted(self._carried))
        return SegmentMarker(self.at, self._digest.hexdigest(), max(1, len(seal.parts)), estimated, carried, start)

    def _up_to(self, end: int, estimated: Iterable[int]) -> SegmentSeal:
        found, tally = self._found, UsageTally()
        found.tally = tally
        for values, text in self._lines[self.at : end]:
            self._digest.update(text)
            self._take(values)
        found.end_carried()
        if found.lost_calls:
            raise SegmentMismatch("calls that were carried into it are lost, and a copy of it was counted")
        for number in estimated:
            if number in self.counted:
                continue
            if number not in found.open:
                raise SegmentMismatch(f"call {number} is counted as estimated, and not open in it")
            intent = found.open[number]
            tally.add(intent.charged, intent.estimated_counts)
            self.counted.add(number)
        self.counted &= found.open.keys()
        self.at = end
        self.requests, self.pico = self.requests + tally.requests, self.pico + tally.pico
        return SegmentSeal.from_tally(found.ulid, tally)

    def _take(self, values: list[Any]) -> None:
        """Lines were good when they were first read, or count for nothing."""
        try:
            if values[0] in _ENDS and values[1] in self.counted:
                self.late += self._found.open.pop(values[1], None) is not None
            else:
                self._found.read_line(values)
        except (LookupError, TypeError, ValueError):
            raise SegmentMismatch("a line of it is none of a journal's, and a copy of it was counted") from None
