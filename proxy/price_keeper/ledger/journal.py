"""The write-ahead journal: spend is on this machine's disk before it is in the store. START HERE for the ledger.

The journal is a row of segments, of which the last one is written to:

    head, carried intents, READY, then intents and receipts, at last the extent and the seal

The intent of a call is written before it is sent, its receipt before the last byte of its answer goes to the caller. So
a killed process loses nothing that was answered. Sealing first carries the calls under way into the next segment;
exactly one segment says of a call that it is open, and no call is both estimated and recorded.

The seal fixes everything that a flush writes, split into parts of one transaction each. Whoever repeats the flush, at
whatever time and with whatever configuration, writes the same, and recognises by its marker a part that was written.
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
    UsageCounts,
    UsageTally,
    encode_head,
    encode_ready,
)
from price_keeper.ledger.log_throttle import LogThrottle
from price_keeper.ledger.segment import Segment, sync_file, sync_folder
from price_keeper.ledger.ulid import UlidFactory, read_created_at
from price_keeper.stores.contract import MAX_TRANSACTION_WRITES
from price_keeper.telemetry.request_stats import MAX_LABELS, OTHER_LABEL

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


SEGMENT_BYTES = 64 * 1024 * 1024  # it is sealed by then, whatever the store says: to read one takes so much memory
MAX_SEGMENT_AGE_SECONDS = 86_400
RESYNC_SECONDS = 5  # a disk that refuses every sync gets a new file no more often than this

_log = logging.getLogger("price_keeper.recording")


@dataclass(slots=True)
class SealedSegment:
    """A segment that has ended. It stays until what it comes to is in the store."""

    seal: SegmentSeal
    path: Path
    size: int = 0  # of its lines; needed until the extent is known
    extent: SegmentExtent | None = None
    previous_ulid: str = ""  # the segment that this one carries on
    has_carried_calls: bool = False  # calls of that one
    estimated: tuple[int, ...] = ()  # calls that its seal counts as estimated, by their numbers
    carried_forward: tuple[int, ...] = ()  # calls that later segments count, where lines of this one may be lost
    next_path: Path | None = None  # of the one that carries it on
    estimate_lines: tuple[bytes, ...] = ()  # receipts that go before the seal
    has_seal: bool = True  # the seal stands in it
    is_recovered: bool = False  # from a process that may have sent it, long ago
    is_adopted: bool = False  # found when others had begun to go by what this process keeps count of
    was_tried: bool = False  # an attempt to send it has no answer, or none that says for certain that it failed
    parts_sent: int = 0

    @property
    def is_in_doubt(self) -> bool:
        """Some of it may be in the store without an acknowledgement."""
        return self.was_tried or self.is_recovered

    def write_seal(self) -> None:
        """To be called, in a thread, before anything is sent: the seal is on the disk. Raises OSError."""
        if self.has_seal:
            return
        if self.next_path is not None:
            sync_file(self.next_path)  # the calls that it carries on, first
            sync_folder(self.path.parent)
        extent = self.measure()
        ended = Segment(self.path.parent, self.seal.ulid, is_mapped=False)  # it takes last lines, and no more room
        try:
            ended.append_all((extent.encode(), *self.estimate_lines, self.seal.encode()))
            ended.sync()
        finally:
            ended.close()
        self.has_seal, self.estimate_lines = True, ()

    def measure(self) -> SegmentExtent:
        """Reads the file the first time, so call it in a thread then. Raises OSError."""
        if self.extent is None:
            self.extent = SegmentExtent.measure_file(self.path, self.size)
        return self.extent

    def sums(self) -> Iterator[tuple[Counter, UsageCounts]]:
        return chain.from_iterable(self.seal.parts)

    def unsent_sums(self) -> Iterator[tuple[Counter, UsageCounts]]:
        return chain.from_iterable(self.seal.parts[self.parts_sent :])

    def possibly_stored_sums(self) -> Iterator[tuple[Counter, UsageCounts]]:
        """What may be in the store, or certainly is."""
        return chain.from_iterable(self.seal.parts if self.is_in_doubt else self.seal.parts[: self.parts_sent])

    def discard(self) -> None:
        """It is in the store."""
        self.path.unlink(missing_ok=True)


class Journal:
    def __init__(self, folder: Path, ulids: UlidFactory, labels: Collection[str] = ()) -> None:
        """`labels` are those whose share of what was recorded can be told."""
        self.folder = folder
        self._ulids = ulids
        self._last_number = 0
        self._open: dict[int, Intent] = {}
        self._unwritten: dict[int, Receipt | None] = {}  # what the disk would not take yet
        self.tally = UsageTally()  # of what was recorded since the last seal
        self._sealed_by_label = dict.fromkeys((*labels, OTHER_LABEL), UsageCounts())  # what was recorded before it
        self._line_trouble = self._seal_trouble = self._sync_trouble = ""
        self._throttle = LogThrottle(ulids.now)
        self._unsyncable_ulid = ""  # the segment that could not be synced
        self._previous_ulid, self._has_carried_calls = "", False  # what the segment that is written to carries on
        try:
            self._segment = self._begin_segment("")
            sync_folder(folder)
            self._durable_ulid = self._segment.ulid  # the last one of which that is certain
        except OSError as failure:
            kind = JournalFull if is_disk_full(failure) else JournalUnusable
            raise kind(f"cannot write to the journal in {folder}: {failure.strerror}") from None

    @property
    def open_calls(self) -> int:
        return len(self._open)

    @property
    def recorded(self) -> UsageCounts:
        """Since this process started."""
        return UsageCounts._make(map(sum, zip(*self.recorded_by_label.values(), strict=True)))

    @property
    def recorded_by_label(self) -> dict[str, UsageCounts]:
        found = dict(self._sealed_by_label)
        for label, counts in self.tally.by_label().items():
            known = label if label in found else OTHER_LABEL
            found[known] = found[known].plus(counts)
        return found

    def track_labels(self, labels: Iterable[str]) -> None:
        """These too from now on. What was recorded of one as some other label stays there, since no count goes back."""
        counted = self.tally.by_label()
        for label in labels:
            if label not in self._sealed_by_label and len(self._sealed_by_label) < MAX_LABELS:
                counted_so_far = counted.get(label, UsageCounts())
                self._sealed_by_label[OTHER_LABEL] = self._sealed_by_label[OTHER_LABEL].plus(counted_so_far)
                self._sealed_by_label[label] = UsageCounts().less(counted_so_far)

    @property
    def trouble(self) -> str:
        """Why the disk takes no lines, no new segment, or nothing for good; empty if all is well."""
        return self._line_trouble or self._seal_trouble or self._sync_trouble

    @property
    def is_full(self) -> bool:
        """Or of no use any more: pages that could not be synced are lost to later syncs, whatever those say."""
        segment = self._segment
        if segment.size > SEGMENT_BYTES:
            return True
        return (
            segment.ulid == self._unsyncable_ulid and self._ulids.now() - read_created_at(segment.ulid) > RESYNC_SECONDS
        )

    @property
    def is_stale(self) -> bool:
        """One that is old by its name waits for a person at the next start, so none is written to for long."""
        return self._ulids.now() - read_created_at(self._segment.ulid) > MAX_SEGMENT_AGE_SECONDS

    def write_intent(self, intent: Intent) -> int:
        """The number by which what becomes of the call is recorded. Raises CannotRecord: then it must not be sent."""
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
        """What became of the call; None if that costs nothing. Counts even when the disk will not take it now."""
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
        """Tries again what the disk refused."""
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
        """To be called in a thread, every now and then. Raises OSError."""
        segment = self._segment
        if segment.is_synced:
            return
        try:
            if segment.ulid != self._durable_ulid:  # what is on the disk under no name is not there after a power cut
                sync_folder(self.folder)
                self._durable_ulid = segment.ulid
            segment.sync()
        except OSError as failure:
            self._sync_trouble, self._unsyncable_ulid = self._note_failure(failure, "synced"), segment.ulid
            raise
        if segment.ulid != self._unsyncable_ulid:
            self._sync_trouble = ""

    def seal(self) -> SealedSegment | None:
        """Ends this segment and begins the next; None if there is nothing to flush. Raises OSError.

        No thread may sync the journal meanwhile.
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
            has_seal=False,
        )
        self._previous_ulid, self._has_carried_calls = ended.ulid, bool(self._open)
        self._sealed_by_label = self.recorded_by_label
        self._segment, self.tally, self._seal_trouble = next_segment, UsageTally(), ""
        ended.close()
        return sealed

    def close(self) -> None:
        """What is still open stays so, and is counted as estimated by whoever comes next. A disk that cannot sync keeps
        nobody from ending: what is written, the next process finds."""
        with suppress(OSError):  # `sync` has told of it
            self.sync()
        self._segment.close()

    def _begin_segment(self, previous_ulid: str) -> Segment:
        """A segment that says of every call under way that it is; in one write, so that it is there whole or not."""
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
        """Raises OSError if it cannot be written, and has not happened then."""
        self._segment.append(b'["N",%d]' % number if receipt is None else receipt.encode(number))
        self._line_trouble = ""
        del self._open[number]
        for listener in intent.charged.spend_listeners:
            listener.on_call_ended(_expected_pico(intent), 0 if receipt is None else receipt.counts[-1])
        if receipt is not None:
            self.tally.add(intent.charged, receipt.counts)
        for completion_listener in intent.completion_listeners:
            completion_listener.on_completed(receipt)

    def _note_failure(self, failure: OSError, action: str = "written") -> str:
        """What is the trouble. The log is told when it begins, unless it was just told."""
        if not self.trouble and self._throttle.allows(f"{action} {failure.strerror}"):
            _log.error("the journal in %s cannot be %s: %s", self.folder, action, failure.strerror)
        return str(failure.strerror)


def _expected_pico(intent: Intent) -> int:
    return intent.pico if intent.expected_pico is None else intent.expected_pico
