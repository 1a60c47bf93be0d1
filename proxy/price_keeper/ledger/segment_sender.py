"""Sends sealed segments to the store, each exactly once.

A repeated send finds the markers of the first one and changes nothing. If a copy of a segment was replayed earlier, the
store has counted its first lines, with the calls open there as estimated; `LineRanges` works out what is left to count.
All who have the same lines come to the same result, so anybody may finish what another process began. A segment that
cannot be sent without risk stays in the journal, listed in `rejected`, for a person to look at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from price_keeper.clock import Clock
from price_keeper.errors import (
    InvalidStoreRequest,
    JournalFull,
    PriceKeeperError,
    ReasonCode,
    StoreError,
    TransactionFailed,
)
from price_keeper.ledger import counter_writes
from price_keeper.ledger.counter_writes import SegmentMarker
from price_keeper.ledger.journal import SealedSegment, SegmentPart, SegmentSeal
from price_keeper.ledger.ledger_entries import Counter, LineKind, UsageCounts, UsageTally
from price_keeper.ledger.recovery import InternedValues, RecoveredSegment
from price_keeper.ledger.segment import decode_lines
from price_keeper.ledger.ulid import is_ulid, read_created_at
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Query, Store, Write

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


MARKER_MARGIN_SECONDS = 86_400  # by which a marker must outlive its segment, whatever the clocks say

_log = logging.getLogger("price_keeper.recording")


class FlushListener(Protocol):
    """Notified of what of ours may be in the store, and of what certainly is not. What is acknowledged is in the store,
    and no more in the journal: a process that begins would else count it as unflushed beside what was noted of it."""

    def on_sending(self, counter: Counter, pico: int) -> None: ...

    def on_not_stored(self, counter: Counter, pico: int) -> None: ...

    def on_acknowledged(self, counter: Counter, pico: int) -> None: ...


class SegmentSender:
    """`force` sends also what is so old that its marker may be gone."""

    def __init__(self, store: Store, clock: Clock, *, force: bool = False) -> None:
        self.flush_listener: FlushListener | None = None
        self._store = store
        self._clock = clock
        self._force = force
        self._day = ""
        self._listed_counters: set[Counter] = set()  # on this day
        self.sent_segments = self.requests = self.pico = self.repeated_parts = 0
        self.late_calls = (
            0  # calls whose end was found when they had been counted as estimated, in a copy of their segment
        )
        self.outdated_folders: set[Path] = set()  # journals of which somebody has counted a later state
        # By journal: the segment that went last, and which calls that it leaves open are counted already.
        self._last_sent: dict[Path, tuple[str, frozenset[int]]] = {}
        self.rejected: list[
            SealedSegment
        ] = []  # what stays where it is, for a person to look at: it was spent all the same

    @property
    def rejected_ulids(self) -> list[str]:
        """The names of what is left."""
        return [sealed.seal.ulid for sealed in self.rejected]

    async def send(self, sealed: SealedSegment) -> None:
        """It is in the store then, or never will be. Raises StoreError: then nobody knows, so send it again; and
        JournalFull for one without its seal that never will be."""
        seal = sealed.seal
        if sealed.is_recovered and not self._force and self._is_too_old(seal.ulid):
            self._reject(sealed, "it is so old that it might count twice")
            return
        was_in_doubt, listener = sealed.is_in_doubt, None if sealed.is_adopted else self.flush_listener
        if listener is not None and not was_in_doubt:
            _notify(listener.on_sending, sealed.unsent_sums())
        sealed.was_tried = True
        try:
            counted = await self._read_counted_calls(sealed)
            is_sent = not counted and await self._send_whole(sealed)
            if not is_sent:
                was_in_doubt = True  # a copy of it may be in the store in part
                counted = await self._send_line_ranges(sealed, counted)
        except (StoreError, SegmentMismatch, ValueError) as failure:  # the last where a key can be none of the store's
            if not was_in_doubt and not (isinstance(failure, StoreError) and failure.maybe_applied):
                sealed.was_tried = False
                if listener is not None:
                    _notify(listener.on_not_stored, sealed.unsent_sums())
            if not isinstance(failure, InvalidStoreRequest | SegmentMismatch | ValueError):
                raise
            self._reject(sealed, str(failure))
            return
        sealed.parts_sent = len(seal.parts)
        self.sent_segments += 1
        self._last_sent[sealed.path.parent] = (seal.ulid, counted)
        await asyncio.to_thread(sealed.discard)
        if listener is not None:
            _notify(listener.on_acknowledged, sealed.sums())

    async def _read_counted_calls(self, sealed: SealedSegment) -> frozenset[int]:
        """Calls that it carries on and that count already: as estimated, where a copy of the segment before was counted
        while they were under way."""
        if not sealed.has_carried_calls:
            return frozenset()
        ulid, counted = self._last_sent.get(sealed.path.parent, ("", frozenset()))
        if ulid != sealed.previous_ulid and is_ulid(sealed.previous_ulid):
            counted = counter_writes.read_estimated_calls((await self._read_markers(sealed.previous_ulid)).values())
        return counted

    async def _read_markers(self, ulid: str) -> Mapping[str, Item]:
        """By their sort keys."""
        query = Query(schema.segment_marker_key(ulid, 0).table, schema.segment_markers_partition(ulid), consistent=True)
        return {row.key.sk: row.item for row in (await self._store.query(query)).rows}

    async def _send_whole(self, sealed: SealedSegment) -> bool:
        """As nearly all go. False: a copy of this segment was counted, which had other lines."""
        seal, extent = sealed.seal, sealed.extent
        if extent is None:
            extent = await asyncio.to_thread(sealed.measure)
        estimated = tuple(sorted(sealed.estimated))
        parts = seal.parts or (((),) if extent.has_calls else ())
        marker = SegmentMarker(extent.lines, extent.digest, len(parts), estimated, sealed.carried_forward)
        for number, part in tuple(enumerate(parts))[sealed.parts_sent :]:
            stored = await self._send_part(seal.ulid, marker, number, part)
            if stored is not None and not (stored and marker.is_confirmed_by(stored)):
                return False
            if seal.parts:
                sealed.parts_sent += 1
        self.requests += seal.requests
        self.pico += seal.pico
        return True

    async def _send_line_ranges(self, sealed: SealedSegment, counted: frozenset[int]) -> frozenset[int]:
        """What nobody has counted of it yet, behind what others began to count. The calls that it leaves open and that
        count already. Raises SegmentMismatch."""
        ulid, markers = sealed.seal.ulid, await self._read_markers(sealed.seal.ulid)
        ranges = await asyncio.to_thread(LineRanges, sealed, counted)
        while (item := markers.get(schema.segment_marker_key(ulid, 0, ranges.position).sk)) is not None:
            marker = SegmentMarker.from_item(item, ranges.position)
            if marker is None:  # by a former version, for all lines that there are
                rest, _ = await asyncio.to_thread(ranges.read_rest)
                await self._send_parts(ulid, rest, sealed.seal.parts[1:], 1)
                return frozenset()
            if marker.lines > ranges.line_count:
                self._accept_later_copy(sealed, marker, markers)
                return frozenset(marker.estimated)
            parts = (await asyncio.to_thread(ranges.read_marked, marker)).parts
            await self._send_parts(ulid, marker, parts[1:], 1)
        if ranges.position < ranges.line_count:
            rest, seal = await asyncio.to_thread(ranges.read_rest)
            if not await self._send_parts(ulid, rest, seal.parts or ((),)):
                return await self._send_line_ranges(sealed, counted)  # another copy was faster
        self._add_range_totals(sealed, ranges)
        return frozenset(ranges.counted_calls)

    async def _send_parts(self, ulid: str, marker: SegmentMarker, parts: Iterable[SegmentPart], first: int = 0) -> bool:
        """False: the first one is there, and perhaps counts other lines. Raises SegmentMismatch if a later one does."""
        for number, part in enumerate(parts, first):
            stored = await self._send_part(ulid, marker, number, part)
            if stored is None or (marker.is_confirmed_by(stored) if stored else number):
                continue
            if number:
                raise SegmentMismatch("its parts were counted with other lines each")
            return False
        return True

    def _accept_later_copy(self, sealed: SealedSegment, marker: SegmentMarker, markers: Mapping[str, Item]) -> None:
        """By a later copy, which has more lines than this one. Raises SegmentMismatch."""
        ulid = sealed.seal.ulid
        if sealed.next_path is not None:
            raise SegmentMismatch(f"{marker.lines} lines were counted under its name, and this process wrote fewer")
        for number in range(marker.parts):
            if schema.segment_marker_key(ulid, number, marker.start).sk not in markers:
                raise SegmentMismatch("a later copy of it is half counted; bring that to the store first")
        self.outdated_folders.add(sealed.path.parent)
        self.requests += sealed.seal.requests
        self.pico += sealed.seal.pico

    def _add_range_totals(self, sealed: SealedSegment, ranges: LineRanges) -> None:
        self.requests += ranges.requests
        self.pico += ranges.pico
        self.late_calls += ranges.late_calls
        if ranges.late_calls:
            _log.warning(
                "segment %s: %d calls stay counted as estimated; a copy of it was replayed while they were under way, "
                "and what they came to is not counted again",
                sealed.seal.ulid,
                ranges.late_calls,
            )

    def _is_too_old(self, ulid: str) -> bool:
        return self._clock.now() - read_created_at(ulid) > counter_writes.MARKER_TTL_SECONDS - MARKER_MARGIN_SECONDS

    def _reject(self, sealed: SealedSegment, reason: str) -> None:
        """It must not hold up what can be counted, unless nobody could tell then which of its calls were carried on."""
        ulid = sealed.seal.ulid
        if not sealed.has_seal:
            raise JournalFull(f"the disk has no room to seal segment {ulid}, and it cannot be flushed either: {reason}")
        self.rejected.append(sealed)
        _log.error("segment %s is not flushed, and stays in the journal: %s", ulid, reason)

    async def _send_part(self, ulid: str, marker: SegmentMarker, number: int, part: SegmentPart) -> Item | None:
        """The marker that stands there, if this part is in the store already."""
        now = self._clock.now()
        self._begin_day(counter_writes.format_utc_day(now))
        entries: list[Write] = [*counter_writes.build_active_entries(part, self._day, self._listed_counters, now)]
        writes = counter_writes.build_writes(ulid, marker, number, part, now)
        if self._is_too_old(ulid):
            # They do not fit into one transaction with the totals, and do no harm where nothing follows them.
            if entries:
                await self._store.transact(entries)
            entries = [*counter_writes.build_total_additions(part, now)]
        try:
            await self._store.transact([*writes, *entries])
        except TransactionFailed as failure:
            if failure.reasons[0].code is not ReasonCode.CONDITION_FAILED:
                raise
            self.repeated_parts += 1
            return failure.reasons[0].item or {}  # an engine that does not tell leaves it to the next look
        self._listed_counters.update(counter for counter, _ in part)
        return None

    def _begin_day(self, day: str) -> None:
        if day != self._day:
            self._day = day
            self._listed_counters.clear()


def _notify(listener: Callable[[Counter, int], None], sums: Iterable[tuple[Counter, UsageCounts]]) -> None:
    for counter, counts in sums:
        if not counter.is_lease:
            listener(counter, counts.pico)
