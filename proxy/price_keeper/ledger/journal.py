"""The write-ahead journal: spend is on this machine's disk before it is in the store. START HERE for the ledger.

The journal is a sequence of segments; lines are appended to the last one:

    head, carried intents, READY, then intents and receipts, at last the extent and the seal

The intent of a call is written before it is sent, its receipt before the last byte of its answer goes to the caller. So
a killed process loses nothing that was answered. Sealing first carries the calls in flight into the next segment;
exactly one segment records that a call is open, and no call is both estimated and recorded.

An example, without checksums and counters: call 1 ends before segment A is sealed, and the process is killed while call
2 is open. `recover` writes the last three lines of B, and A and B are sent to the store, each once.

    A   ["H", A, "", 1]  ["E", "", 0]          head; nothing is carried into the first segment
        ["I", 1, ...]  ["I", 2, ...]           intents, with what counts if no end is recorded: 900 each
        ["R", 1, ...]                          the receipt of call 1: 700
        ["L", 5, digest]  ["S", A, 700, 1]     extent: five lines; seal: call 1 alone, 700
    B   ["H", B, A, 1]  ["C", 2, ...]          carried: from here on B records call 2, and A does not
        ["E", A, 1]                            READY: one call was carried on from A
        ["L", 3, digest]                       the extent of what was there: three lines
        ["R", 2, ...]  ["S", B, 900, 1]        the estimate of call 2, by its intent; seal: 900

If a copy of B's three lines is replayed first, its marker says: 3 lines, and call 2 is estimated. So whoever later
sends more lines of B counts only what follows them, without call 2.

The seal fixes everything that a flush writes, split into parts of one transaction each. A process that repeats the
flush, at any time and with any configuration, writes the same, and its marker shows which parts were written before.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import orjson

from price_keeper.errors import JournalFull, JournalUnusable, RecordingUnavailable
from price_keeper.ledger.journal_lock import is_disk_full
from price_keeper.ledger.ledger_entries import (
    Counter,
    Intent,
    LineKind,
    Receipt,
    UsageTally,
    check_counts,
    encode_head,
    encode_ready,
)
from price_keeper.ledger.segment import Segment, sync_file, sync_folder
from price_keeper.ledger.ulid import UlidFactory, read_created_at
from price_keeper.price_dimensions import UsageCounts
from price_keeper.stores.contract import MAX_TRANSACTION_WRITES
from price_keeper.telemetry.incident import Incident
from price_keeper.telemetry.request_stats import MAX_LABELS, OTHER_LABEL

# A part is one transaction: its marker, and for each sum a counter and perhaps an entry in the list of active counters.
SUMS_PER_PART = (MAX_TRANSACTION_WRITES - 1) // 2

_MAX_JSON_INTEGER = 2**63 - 1
_CHUNK_BYTES = 1024 * 1024
_EMPTY_SEGMENT_LINES = 2  # the head, and READY without carried intents
# a larger segment is sealed, even while the store is away, as reading one takes that much memory
SEGMENT_BYTES = 64 * 1024 * 1024
MAX_SEGMENT_AGE_SECONDS = 86_400
RESYNC_SECONDS = 5  # the shortest life of a segment that cannot be synced, before another file is tried

SegmentPart = tuple[tuple[Counter, UsageCounts], ...]
_log = logging.getLogger("price_keeper.recording")


@dataclass(frozen=True, slots=True)
class SegmentExtent:
    """The number of a segment's lines before its estimates and its seal, and their digest. An earlier copy of a segment
    has fewer lines and a copy that has grown has more; both begin with the same lines."""

    lines: int
    digest: str

    @classmethod
    def measure_file(cls, path: Path, size: int) -> SegmentExtent:
        """Measure the first `size` bytes of a file, which must be whole lines. Raises OSError."""
        digest, lines = sha256(), 0
        with path.open("rb") as file:
            while size and (chunk := file.read(min(size, _CHUNK_BYTES))):
                digest.update(chunk)
                lines += chunk.count(b"\n")
                size -= len(chunk)
        return cls(lines, digest.hexdigest())

    @property
    def has_calls(self) -> bool:
        """A segment with calls may have a copy with something to count, even if its own sums are empty."""
        return self.lines > _EMPTY_SEGMENT_LINES

    def encode(self) -> bytes:
        return orjson.dumps([LineKind.EXTENT.value, self.lines, self.digest])

    @classmethod
    def from_values(cls, values: list[Any]) -> SegmentExtent:
        _, lines, digest = values
        if type(lines) is not int or type(digest) is not str:
            raise TypeError("not the extent of a segment")
        return cls(lines, digest)


@dataclass(frozen=True, slots=True)
class SegmentSeal:
    """The sums of a segment, in parts. `pico` and `requests` count each call once, though several scopes may be charged
    with it."""

    ulid: str
    pico: int
    requests: int
    parts: tuple[SegmentPart, ...]

    @classmethod
    def from_tally(cls, ulid: str, tally: UsageTally) -> SegmentSeal:
        return cls(ulid, tally.pico, tally.requests, tuple(_split_into_parts(tally)))

    def encode(self) -> bytes:
        parts = [
            [[*counter, *map(_encode_integer, counts.to_values())] for counter, counts in part] for part in self.parts
        ]
        return orjson.dumps([LineKind.SEAL.value, self.ulid, _encode_integer(self.pico), self.requests, parts])

    @classmethod
    def from_values(cls, values: list[Any], interned: dict[Counter, Counter]) -> SegmentSeal:
        """Equal counters share one object through `interned`, as many seals may name the same ones."""
        _, ulid, pico, requests, parts = values
        if type(ulid) is not str or type(requests) is not int:
            raise TypeError("not the seal of a segment")
        return cls(
            ulid, int(pico), requests, tuple(tuple(_parse_sum(each, interned) for each in part) for part in parts)
        )


def _parse_sum(values: list[Any], interned: dict[Counter, Counter]) -> tuple[Counter, UsageCounts]:
    width = len(Counter._fields)
    counter = Counter.from_values(values[:width])
    counts = UsageCounts(*map(int, values[width:]))
    check_counts(counts)
    return interned.setdefault(counter, counter), counts


def _encode_integer(number: int) -> int | str:
    """A sum of many calls may need more than 64 bits, which this product's JSON does not allow in numbers."""
    return number if number <= _MAX_JSON_INTEGER else str(number)


def _merge_shard_counts(tally: UsageTally) -> dict[Counter, UsageCounts]:
    """The shard count of an org may have been raised while calls were in flight: the highest one holds."""
    sums: dict[tuple[str, str, str], tuple[int, UsageCounts]] = {}
    for counter, counts in tally.sums().items():
        shards, so_far = sums.get(counter[:3], (0, UsageCounts()))
        sums[counter[:3]] = max(counter.shards, shards), so_far.plus(counts)
    return {Counter(*name, shards): counts for name, (shards, counts) in sums.items()}


def _split_into_parts(tally: UsageTally) -> Iterator[SegmentPart]:
    """The sums of a scope stay together as far as they fit, so that contention on one scope delays few others. The
    spend of a counter and of a lease on it always stay together: a reader that compares the two must find both or
    neither."""
    part: list[tuple[Counter, UsageCounts]] = []
    ordered = sorted(_merge_shard_counts(tally).items(), key=lambda entry: _sort_key(entry[0]))
    for _, group in groupby(ordered, key=lambda entry: entry[0].scope):
        sums = list(group)
        if part and len(part) + len(sums) > SUMS_PER_PART:
            yield tuple(part)
            part = []
        for _, together in groupby(sums, key=lambda entry: _sort_key(entry[0])[:3]):
            together_sums = list(together)
            if part and len(part) + len(together_sums) > SUMS_PER_PART:
                yield tuple(part)
                part = []
            part += together_sums
    if part:
        yield tuple(part)


def _sort_key(counter: Counter) -> tuple[str, str, str, str, int]:
    """Sorts the counter of a lease beside the counter that is charged with it."""
    scope, label, period, shards = counter
    return scope, label, counter.budget_period, period, shards


@dataclass(slots=True)
class SealedSegment:
    """A segment that takes no more calls. Its file stays until its sums are in the store."""

    seal: SegmentSeal
    path: Path
    size: int = 0  # of its lines in bytes; needed until the extent is known
    extent: SegmentExtent | None = None
    previous_ulid: str = ""  # the segment whose open calls this one carries on
    has_carried_calls: bool = False  # it has carried calls of that segment
    estimated: tuple[int, ...] = ()  # numbers of the calls that its seal counts as estimated
    # numbers of the calls that later segments count, where lines of this one may be lost
    carried_forward: tuple[int, ...] = ()
    next_path: Path | None = None  # the segment that carries on its open calls
    estimate_lines: tuple[bytes, ...] = ()  # receipts to be written before the seal
    is_seal_written: bool = True  # in the file
    is_recovered: bool = False  # written by an earlier process, which may have sent it long ago
    is_adopted: bool = False  # of another process, adopted when budgets already used this process's own counts
    was_tried: bool = False  # a send was not answered, or its answer does not exclude that it was applied
    parts_sent: int = 0

    @property
    def is_in_doubt(self) -> bool:
        """Some of it may be in the store without an acknowledgement."""
        return self.was_tried or self.is_recovered

    def write_seal(self) -> None:
        """Call this in a thread before anything is sent: the seal is on the disk when it returns. Raises OSError."""
        if self.is_seal_written:
            return
        if self.next_path is not None:
            sync_file(self.next_path)  # the calls that it carries on must be on disk first
            sync_folder(self.path.parent)
        extent = self.measure()
        ended = Segment(self.path.parent, self.seal.ulid, is_mapped=False)  # a few last lines need no preallocated room
        try:
            ended.append_all((extent.encode(), *self.estimate_lines, self.seal.encode()))
            ended.sync()
        finally:
            ended.close()
        self.is_seal_written, self.estimate_lines = True, ()

    def measure(self) -> SegmentExtent:
        """The extent. The first call reads the file and belongs into a thread. Raises OSError."""
        if self.extent is None:
            self.extent = SegmentExtent.measure_file(self.path, self.size)
        return self.extent

    def sums(self) -> Iterator[tuple[Counter, UsageCounts]]:
        return chain.from_iterable(self.seal.parts)

    def unsent_sums(self) -> Iterator[tuple[Counter, UsageCounts]]:
        return chain.from_iterable(self.seal.parts[self.parts_sent :])

    def possibly_stored_sums(self) -> Iterator[tuple[Counter, UsageCounts]]:
        """The sums that are, or may be, in the store."""
        return chain.from_iterable(self.seal.parts if self.is_in_doubt else self.seal.parts[: self.parts_sent])

    def discard(self) -> None:
        """Delete the file, when its sums are in the store."""
        self.path.unlink(missing_ok=True)


class Journal:
    """The journal of this process: writes intents and receipts, and seals segments."""

    def __init__(self, folder: Path, ulids: UlidFactory, labels: Collection[str] = ()) -> None:
        """`labels` are those with metrics of their own; the others are counted as OTHER_LABEL."""
        self.folder = folder
        self._ulids = ulids
        self._last_number = 0
        self._open: dict[int, Intent] = {}
        self._unwritten: dict[int, Receipt | None] = {}  # receipts that the disk has refused so far
        self.tally = UsageTally()  # recorded since the last seal
        self._sealed_by_label = dict.fromkeys((*labels, OTHER_LABEL), UsageCounts())  # recorded before it
        self._line_trouble = self._seal_trouble = self._sync_trouble = ""
        self._incident = Incident(_log, ulids.now, logging.ERROR)
        self._unsyncable_ulid = ""  # the segment whose last sync failed
        self._previous_ulid, self._has_carried_calls = "", False  # of the current segment
        try:
            self._segment = self._begin_segment("")
            sync_folder(folder)
            self._durable_ulid = self._segment.ulid  # the last segment whose name is certainly on disk
        except OSError as failure:
            kind = JournalFull if is_disk_full(failure) else JournalUnusable
            raise kind(f"cannot write to the journal in {folder}: {failure.strerror}") from None

    @property
    def open_calls(self) -> int:
        return len(self._open)

    @property
    def recorded(self) -> UsageCounts:
        """The sums since this process started."""
        return UsageCounts._make(map(sum, zip(*self.recorded_by_label.values(), strict=True)))

    @property
    def recorded_by_label(self) -> dict[str, UsageCounts]:
        """Like `recorded`, by label."""
        totals = dict(self._sealed_by_label)
        for label, counts in self.tally.by_label().items():
            reported_label = label if label in totals else OTHER_LABEL
            totals[reported_label] = totals[reported_label].plus(counts)
        return totals

    def track_labels(self, labels: Iterable[str]) -> None:
        """Count these labels separately from now on. What was counted as OTHER_LABEL before stays there, since counters
        must not decrease."""
        counted = self.tally.by_label()
        for label in labels:
            if label not in self._sealed_by_label and len(self._sealed_by_label) < MAX_LABELS:
                counted_so_far = counted.get(label, UsageCounts())
                self._sealed_by_label[OTHER_LABEL] = self._sealed_by_label[OTHER_LABEL].plus(counted_so_far)
                self._sealed_by_label[label] = UsageCounts().less(counted_so_far)

    @property
    def trouble(self) -> str:
        """Why the disk refuses lines, a new segment, or a sync; empty if nothing is wrong."""
        return self._line_trouble or self._seal_trouble or self._sync_trouble

    @property
    def is_full(self) -> bool:
        """The segment has to be sealed: it is too large, or a sync of it failed. After a failed sync its pages may be
        lost, whatever later syncs report."""
        segment = self._segment
        if segment.size > SEGMENT_BYTES:
            return True
        return (
            segment.ulid == self._unsyncable_ulid and self._ulids.now() - read_created_at(segment.ulid) > RESYNC_SECONDS
        )

    @property
    def is_stale(self) -> bool:
        """Whether the open segment must be replaced for its age: one that is older by its name is sent after a restart
        only if an operator asks for it."""
        return self._ulids.now() - read_created_at(self._segment.ulid) > MAX_SEGMENT_AGE_SECONDS

    def write_intent(self, intent: Intent) -> int:
        """Write the intent of a call and return its number, for `record`. Raises RecordingUnavailable: then the call
        must not be sent."""
        self._last_number = number = self._last_number + 1
        try:
            self._segment.append(intent.encode(number))
        except OSError as failure:
            self._line_trouble = self._note_failure(failure)
            raise RecordingUnavailable(f"what this call costs cannot be recorded: {failure.strerror}") from None
        self._open[number] = intent
        for listener in intent.charged.spend_listeners:
            listener.on_call_started(_expected_pico(intent))
        return number

    def record(self, number: int, receipt: Receipt | None) -> None:
        """Record the end of a call; `receipt` is None if the call cost nothing. Recording the same number twice
        does nothing. A receipt that the disk refuses is kept and written later."""
        if number in self._unwritten:
            return
        intent = self._open.get(number)
        if intent is None:
            return
        try:
            self._settle(number, intent, receipt)
        except OSError as failure:
            self._line_trouble = self._note_failure(failure)
            self._unwritten[number] = receipt

    def retry_unwritten(self) -> None:
        """Write the receipts again that the disk has refused."""
        for number, receipt in tuple(self._unwritten.items()):
            try:
                self._settle(number, self._open[number], receipt)
            except OSError as failure:
                self._line_trouble = self._note_failure(failure)
                return
            del self._unwritten[number]

    @property
    def is_synced(self) -> bool:
        return self._segment.is_synced

    def sync(self) -> None:
        """Sync the current segment to disk; call it regularly, in a thread. Raises OSError."""
        segment = self._segment
        if segment.is_synced:
            return
        try:
            if segment.ulid != self._durable_ulid:  # a file whose folder entry is not synced is lost in a power cut
                sync_folder(self.folder)
                self._durable_ulid = segment.ulid
            segment.sync()
        except OSError as failure:
            self._sync_trouble, self._unsyncable_ulid = self._note_failure(failure, "synced"), segment.ulid
            raise
        if segment.ulid != self._unsyncable_ulid:
            self._sync_trouble = ""
            self._note_recovery()

    def seal(self) -> SealedSegment | None:
        """End this segment and begin the next; None if there is nothing to flush. Raises OSError.

        No thread may sync the journal at the same time.
        """
        if not (self.tally.requests or self.is_full or self.is_stale):
            return None
        ended = self._segment
        try:
            next_segment = self._begin_segment(ended.ulid)
        except OSError as failure:
            self._seal_trouble = self._note_failure(failure)
            raise
        sealed = SealedSegment(
            SegmentSeal.from_tally(ended.ulid, self.tally),
            ended.path,
            ended.size,
            previous_ulid=self._previous_ulid,
            has_carried_calls=self._has_carried_calls,
            next_path=next_segment.path,
            is_seal_written=False,
        )
        self._previous_ulid, self._has_carried_calls = ended.ulid, bool(self._open)
        self._sealed_by_label = self.recorded_by_label
        self._segment, self.tally, self._seal_trouble = next_segment, UsageTally(), ""
        self._note_recovery()
        ended.close()
        return sealed

    def close(self) -> None:
        """Sync and close. Calls that are still open are counted as estimated by the next process. A failed sync does
        not prevent the exit: the next process finds what was written."""
        with suppress(OSError):  # `sync` has logged it
            self.sync()
        self._segment.close()

    def _begin_segment(self, previous_ulid: str) -> Segment:
        """Begin a segment that carries all calls in flight. Its first lines are one write, so they are in the file
        completely or not at all."""
        carried = [intent.encode_carried(number) for number, intent in self._open.items()]
        segment = Segment(self.folder, self._ulids.new())
        try:
            segment.append_all(
                (encode_head(segment.ulid, previous_ulid), *carried, encode_ready(previous_ulid, len(carried)))
            )
        except OSError:
            segment.discard()
            raise
        return segment

    def _settle(self, number: int, intent: Intent, receipt: Receipt | None) -> None:
        """Write the end of a call, then apply it. Raises OSError if it cannot be written; then nothing has changed."""
        self._segment.append(b'["N",%d]' % number if receipt is None else receipt.encode(number))
        if self._line_trouble:
            self._line_trouble = ""
            self._note_recovery()
        del self._open[number]
        for listener in intent.charged.spend_listeners:
            listener.on_call_ended(_expected_pico(intent), 0 if receipt is None else receipt.counts.pico)
        if receipt is not None:
            self.tally.add(intent.charged, receipt.counts)
        for completion_listener in intent.completion_listeners:
            completion_listener.on_completed(receipt)

    def _note_failure(self, failure: OSError, action: str = "written") -> str:
        """Returns the reason."""
        self._incident.report(
            "the journal in %s cannot be %s: %s; a call whose intent cannot be written is refused with 503",
            self.folder,
            action,
            failure.strerror,
        )
        return str(failure.strerror)

    def _note_recovery(self) -> None:
        if not self.trouble:
            self._incident.end("the journal in %s can be written again", self.folder)


def _expected_pico(intent: Intent) -> int:
    return intent.pico if intent.expected_pico is None else intent.expected_pico
