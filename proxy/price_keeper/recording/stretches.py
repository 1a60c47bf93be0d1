"""The lines of a segment in stretches, each counted together: what a copy that was counted before leaves to count.

    lines that a copy had, and the calls they leave open as estimated -> lines that came after, without those calls

All who have the lines of a stretch work out the same for it, so anybody may finish what another one began.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from price_keeper.errors import PriceKeeperError
from price_keeper.ledger.counter_writes import SegmentMarker
from price_keeper.ledger.journal import SealedSegment, SegmentSeal
from price_keeper.ledger.ledger_entries import LineKind, UsageTally
from price_keeper.ledger.recovery import InternedValues, RecoveredSegment
from price_keeper.ledger.segment import decode_lines

_COMPLETION_KINDS = (LineKind.RECORD, LineKind.NOTHING)


class SegmentMismatch(PriceKeeperError):
    """The store has counted something else under this segment's name; the message says what."""


class LineRanges:
    """Reads the file, so make it in a thread. `counted` are calls carried into it that count already. Raises OSError
    and SegmentMismatch."""

    def __init__(self, sealed: SealedSegment, counted: Iterable[int]) -> None:
        lines = decode_lines(sealed.path.read_bytes())
        self.line_count = sealed.measure().lines
        self.position = 0  # the lines so far
        self.late_calls = 0  # calls whose end was found when they counted already
        self.requests = self.pico = 0  # of what was worked out so far
        self.counted_calls = set(counted)  # of the calls that are open there
        self._lines = [*zip(lines.values, lines.texts, strict=True)][: self.line_count]
        self._estimated, self._carried_forward = sealed.estimated, {*sealed.carried_forward}
        self._digest = sha256()
        self._segment = RecoveredSegment(sealed.path, sealed.seal.ulid, None, InternedValues())
        if lines.has_gaps or len(self._lines) < self.line_count:
            raise SegmentMismatch("lines of it are torn, and a copy of it was counted")

    def read_marked(self, marker: SegmentMarker) -> SegmentSeal:
        """What the lines up to this marker's come to, as whoever put it there has counted them."""
        seal = self._read_up_to(marker.lines, marker.estimated)
        self._carried_forward.update(marker.carried)
        if marker.lines <= marker.start:
            raise SegmentMismatch("its marker makes no sense")
        if self._digest.hexdigest() != marker.digest:
            raise SegmentMismatch(f"its first {marker.lines} lines are not those that were counted under its name")
        if (marker.parts, marker.estimated) != self._build_marker(seal, marker.start)[2:4]:
            raise SegmentMismatch(f"its first {marker.lines} lines come to something else than what was counted")
        return seal

    def read_rest(self) -> tuple[SegmentMarker, SegmentSeal]:
        """Of all lines that are left."""
        start = self.position
        seal = self._read_up_to(
            self.line_count, [number for number in self._estimated if number not in self._carried_forward]
        )
        return self._build_marker(seal, start), seal

    def _build_marker(self, seal: SegmentSeal, start: int) -> SegmentMarker:
        estimated, carried = tuple(sorted(self.counted_calls)), tuple(sorted(self._carried_forward))
        return SegmentMarker(
            self.position, self._digest.hexdigest(), max(1, len(seal.parts)), estimated, carried, start
        )

    def _read_up_to(self, end: int, estimated: Iterable[int]) -> SegmentSeal:
        segment, tally = self._segment, UsageTally()
        segment.tally = tally
        for values, text in self._lines[self.position : end]:
            self._digest.update(text)
            self._read_line(values)
        segment.end_carried()
        if segment.lost_calls:
            raise SegmentMismatch("calls that were carried into it are lost, and a copy of it was counted")
        for number in estimated:
            if number in self.counted_calls:
                continue
            if number not in segment.open:
                raise SegmentMismatch(f"call {number} is counted as estimated, and not open in it")
            intent = segment.open[number]
            tally.add(intent.charged, intent.estimated_counts)
            self.counted_calls.add(number)
        self.counted_calls &= segment.open.keys()
        self.position = end
        self.requests, self.pico = self.requests + tally.requests, self.pico + tally.pico
        return SegmentSeal.from_tally(segment.ulid, tally)

    def _read_line(self, values: list[Any]) -> None:
        """Lines were good when they were first read, or count for nothing."""
        try:
            if values[0] in _COMPLETION_KINDS and values[1] in self.counted_calls:
                self.late_calls += self._segment.open.pop(values[1], None) is not None
            else:
                self._segment.read_line(values)
        except (LookupError, TypeError, ValueError):
            raise SegmentMismatch("a line of it is none of a journal's, and a copy of it was counted") from None
