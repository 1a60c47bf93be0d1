"""Sends sealed segments to the store, each exactly once.

A repeated send finds the markers of the first one and changes nothing. If a copy of a segment was replayed earlier, the
store has counted its first lines, with the calls open there as estimated; `LineRanges` computes what is left to count.
Processes with the same lines get the same result, so any of them may finish what another one began. A segment that
cannot be sent without risk stays in the journal, listed in `rejected`, until an operator looks at it.
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
from price_keeper.ledger.counter_writes import CounterListing, SegmentMarker
from price_keeper.ledger.journal import SealedSegment, SegmentPart, SegmentSeal
from price_keeper.ledger.ledger_entries import Counter, LineKind, UsageCounts, UsageTally
from price_keeper.ledger.recovery import InternedValues, RecoveredSegment
from price_keeper.ledger.segment import decode_lines
from price_keeper.ledger.ulid import is_ulid, read_created_at
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Query, Store, Write

_COMPLETION_KINDS = (LineKind.RECORD, LineKind.NOTHING)
MARKER_MARGIN_SECONDS = 86_400  # by which a marker must outlive its segment, to allow for wrong clocks
_log = logging.getLogger("price_keeper.recording")


class SegmentMismatch(PriceKeeperError):
    """The store has counted something else under this segment's name; the message says what."""


class LineRanges:
    """The lines of a segment, read in the ranges in which they were counted. Reads the file, so create it in a thread.
    `counted` are calls carried into the segment that count already. Raises OSError and SegmentMismatch."""

    def __init__(self, sealed: SealedSegment, counted: Iterable[int]) -> None:
        lines = decode_lines(sealed.path.read_bytes())
        self.line_count = sealed.measure().lines
        self.position = 0  # lines read so far
        self.late_calls = 0  # calls whose end was found after they had been counted as estimated
        self.requests = self.pico = 0  # of the lines read so far
        self.counted_calls = set(counted)  # of the calls that are open at this position
        self._lines = [*zip(lines.values, lines.texts, strict=True)][: self.line_count]
        self._estimated, self._carried_forward = sealed.estimated, {*sealed.carried_forward}
        self._digest = sha256()
        self._segment = RecoveredSegment(sealed.path, sealed.seal.ulid, None, InternedValues())
        if lines.has_gaps or len(self._lines) < self.line_count:
            raise SegmentMismatch("some of its lines are torn, and a copy of it was counted")

    def read_marked(self, marker: SegmentMarker) -> SegmentSeal:
        """The sums of the lines up to this marker's, as the process that wrote the marker has counted them."""
        seal = self._read_up_to(marker.lines, marker.estimated)
        self._carried_forward.update(marker.carried)
        if marker.lines <= marker.start:
            raise SegmentMismatch("its marker covers no lines")
        if self._digest.hexdigest() != marker.digest:
            raise SegmentMismatch(f"its first {marker.lines} lines are not those that were counted under its name")
        if (marker.parts, marker.estimated) != self._build_marker(seal, marker.start)[2:4]:
            raise SegmentMismatch(f"its first {marker.lines} lines have other sums than those that were counted")
        return seal

    def read_rest(self) -> tuple[SegmentMarker, SegmentSeal]:
        """Marker and sums of all remaining lines."""
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
        if segment.unrecoverable_calls:
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
        """Each line was good when it was first read, or counts for nothing."""
        try:
            if values[0] in _COMPLETION_KINDS and values[1] in self.counted_calls:
                self.late_calls += self._segment.open.pop(values[1], None) is not None
            else:
                self._segment.read_line(values)
        except (LookupError, TypeError, ValueError):
            raise SegmentMismatch("one of its lines is not a journal line, and a copy of it was counted") from None


class FlushListener(Protocol):
    """Notified of this process's own spend: when it may be in the store from now on, when it certainly is not, and when
    it is acknowledged. Acknowledged spend is in the store and no longer in the journal; the order matters, as a process
    that starts would otherwise count it as unflushed beside its snapshot."""

    def on_sending(self, counter: Counter, pico: int) -> None: ...

    def on_not_stored(self, counter: Counter, pico: int) -> None: ...

    def on_acknowledged(self, counter: Counter, pico: int) -> None: ...


class SegmentSender:
    """Sends segments and keeps the statistics of it. With `force` it also sends segments so old that their markers may
    have expired."""

    def __init__(self, store: Store, clock: Clock, *, force: bool = False) -> None:
        self._flush_listeners: list[FlushListener] = []
        self._on_flushed: list[Callable[[Iterable[tuple[Counter, UsageCounts]]], None]] = []
        self._store = store
        self._clock = clock
        self._force = force
        self._listing = CounterListing()
        self._on_written: list[Callable[[Counter], None]] = []
        self.sent_segments = self.requests = self.pico = self.repeated_parts = 0
        self.late_calls = 0  # calls whose end was found after a copy of their segment counted them as estimated
        self.outdated_folders: set[Path] = set()  # journals of which a later state has been counted
        # By journal: the segment sent last, and which of the calls that it leaves open count already.
        self._last_sent: dict[Path, tuple[str, frozenset[int]]] = {}
        self.rejected: list[SealedSegment] = []  # spend of segments that stay in the journal for an operator

    def subscribe(self, listener: FlushListener) -> None:
        self._flush_listeners.append(listener)

    def subscribe_flushed(self, on_flushed: Callable[[Iterable[tuple[Counter, UsageCounts]]], None]) -> None:
        """Call `on_flushed` with the sums of each own segment, when the flush listeners are notified that they are
        acknowledged."""
        self._on_flushed.append(on_flushed)

    def subscribe_written(self, on_written: Callable[[Counter], None]) -> None:
        """Call `on_written` with each counter that was added to, also for adopted segments."""
        self._on_written.append(on_written)

    @property
    def rejected_ulids(self) -> list[str]:
        """The names of the rejected segments."""
        return [sealed.seal.ulid for sealed in self.rejected]

    async def send(self, sealed: SealedSegment) -> None:
        """Send a segment; when this returns it is in the store, or rejected. Raises StoreError if the outcome is
        unknown, so send it again; and JournalFull for a segment without seal that has to be rejected."""
        seal = sealed.seal
        if sealed.is_recovered and not self._force and self._is_too_old(seal.ulid):
            self._reject(sealed, "it is so old that it might count twice")
            return
        was_in_doubt, listeners = sealed.is_in_doubt, () if sealed.is_adopted else tuple(self._flush_listeners)
        if not was_in_doubt:
            for listener in listeners:
                _notify(listener.on_sending, sealed.unsent_sums())
        sealed.was_tried = True
        try:
            counted = await self._read_counted_calls(sealed)
            is_sent = not counted and await self._send_whole(sealed)
            if not is_sent:
                was_in_doubt = True  # a copy of it may be in the store in part
                counted = await self._send_line_ranges(sealed, counted)
        # ValueError: a value that can be no key of the store
        except (StoreError, SegmentMismatch, ValueError) as failure:
            if not was_in_doubt and not (isinstance(failure, StoreError) and failure.maybe_applied):
                sealed.was_tried = False
                for listener in listeners:
                    _notify(listener.on_not_stored, sealed.unsent_sums())
            if not isinstance(failure, InvalidStoreRequest | SegmentMismatch | ValueError):
                raise
            self._reject(sealed, str(failure))
            return
        sealed.parts_sent = len(seal.parts)
        self.sent_segments += 1
        self._last_sent[sealed.path.parent] = (seal.ulid, counted)
        await asyncio.to_thread(sealed.discard)
        for listener in listeners:
            _notify(listener.on_acknowledged, sealed.sums())
        if not sealed.is_adopted:
            for on_flushed in self._on_flushed:
                on_flushed(sealed.sums())

    async def _read_counted_calls(self, sealed: SealedSegment) -> frozenset[int]:
        """Calls that the segment carries on and that count already: as estimated, if a copy of the segment before was
        counted while they were in flight."""
        if not sealed.has_carried_calls:
            return frozenset()
        ulid, counted = self._last_sent.get(sealed.path.parent, ("", frozenset()))
        if ulid != sealed.previous_ulid and is_ulid(sealed.previous_ulid):
            counted = counter_writes.read_estimated_calls((await self._read_markers(sealed.previous_ulid)).values())
        return counted

    async def _read_markers(self, ulid: str) -> Mapping[str, Item]:
        """The markers of a segment, by sort key."""
        query = Query(schema.segment_marker_key(ulid, 0).table, schema.segment_markers_partition(ulid), consistent=True)
        return {row.key.sk: row.item for row in (await self._store.query(query)).rows}

    async def _send_whole(self, sealed: SealedSegment) -> bool:
        """Send all parts, as for nearly all segments. False: a copy of this segment with other lines was counted."""
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
        """Send the lines that are not counted yet, after those that other processes have counted or begun to count.
        Returns the open calls that count already. Raises SegmentMismatch."""
        ulid, markers = sealed.seal.ulid, await self._read_markers(sealed.seal.ulid)
        ranges = await asyncio.to_thread(LineRanges, sealed, counted)
        while (item := markers.get(schema.segment_marker_key(ulid, 0, ranges.position).sk)) is not None:
            marker = SegmentMarker.from_item(item, ranges.position)
            if marker is None:  # written by an earlier version, for all lines
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
                return await self._send_line_ranges(sealed, counted)  # another process counted a copy in between
        self._add_range_totals(sealed, ranges)
        return frozenset(ranges.counted_calls)

    async def _send_parts(self, ulid: str, marker: SegmentMarker, parts: Iterable[SegmentPart], first: int = 0) -> bool:
        """False: the first part is in the store already, perhaps with other lines. Raises SegmentMismatch if a later
        part has other lines."""
        for number, part in enumerate(parts, first):
            stored = await self._send_part(ulid, marker, number, part)
            if stored is None or (marker.is_confirmed_by(stored) if stored else number):
                continue
            if number:
                raise SegmentMismatch("its parts were counted with other lines each")
            return False
        return True

    def _accept_later_copy(self, sealed: SealedSegment, marker: SegmentMarker, markers: Mapping[str, Item]) -> None:
        """Accept that a later copy with more lines counted this segment. Raises SegmentMismatch."""
        ulid = sealed.seal.ulid
        if sealed.next_path is not None:
            raise SegmentMismatch(f"{marker.lines} lines were counted under its name, and this process wrote fewer")
        for number in range(marker.parts):
            if schema.segment_marker_key(ulid, number, marker.start).sk not in markers:
                raise SegmentMismatch("a later copy of it is only partly counted; replay that copy first")
        self.outdated_folders.add(sealed.path.parent)
        self.requests += sealed.seal.requests
        self.pico += sealed.seal.pico

    def _add_range_totals(self, sealed: SealedSegment, ranges: LineRanges) -> None:
        self.requests += ranges.requests
        self.pico += ranges.pico
        self.late_calls += ranges.late_calls
        if ranges.late_calls:
            _log.warning(
                "segment %s: %d calls stay counted as estimated, because a copy of it was replayed while they were in "
                "flight; their actual usage is not counted again",
                sealed.seal.ulid,
                ranges.late_calls,
            )

    def _is_too_old(self, ulid: str) -> bool:
        return self._clock.now() - read_created_at(ulid) > counter_writes.MARKER_TTL_SECONDS - MARKER_MARGIN_SECONDS

    def _reject(self, sealed: SealedSegment, reason: str) -> None:
        """Leave the segment to an operator, so that it does not delay others. Without a seal it raises JournalFull
        instead, as nothing would record which of its calls were carried on."""
        ulid = sealed.seal.ulid
        if not sealed.is_seal_written:
            raise JournalFull(f"the disk has no room to seal segment {ulid}, and it cannot be flushed either: {reason}")
        self.rejected.append(sealed)
        _log.error(
            "segment %s is not flushed, and stays in the journal: %s; its spend is NOT counted, except what was "
            "flushed before; look at it with `price-keeper doctor`, and see `price-keeper replay`",
            ulid,
            reason,
        )

    async def _send_part(self, ulid: str, marker: SegmentMarker, number: int, part: SegmentPart) -> Item | None:
        """The marker that is stored already, if this part was sent before; else None."""
        now = self._clock.now()
        counters = [counter for counter, _ in part]
        entries: list[Write] = [*self._listing.build_entries(counters, now)]
        writes = counter_writes.build_writes(ulid, marker, number, part, now)
        if self._is_too_old(ulid):
            # The entries do not fit into one transaction with the totals, and are harmless if nothing follows them.
            if entries:
                await self._store.transact(entries)
            entries = [*counter_writes.build_total_additions(part, now)]
        try:
            await self._store.transact([*writes, *entries])
        except TransactionFailed as failure:
            if failure.reasons[0].code is not ReasonCode.CONDITION_FAILED:
                raise
            self.repeated_parts += 1
            self._notify_written(counters)  # perhaps by this process, which did not get the answer
            # an engine that does not return the item leaves the comparison to the caller
            return failure.reasons[0].item or {}
        self._listing.confirm(counters, now)
        self._notify_written(counters)
        return None

    def _notify_written(self, counters: Iterable[Counter]) -> None:
        for counter in counters:
            if not counter.is_lease:
                for on_written in self._on_written:
                    on_written(counter)


def _notify(listener: Callable[[Counter, int], None], sums: Iterable[tuple[Counter, UsageCounts]]) -> None:
    for counter, counts in sums:
        if not counter.is_lease:
            listener(counter, counts.pico)
