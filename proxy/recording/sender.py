"""Brings sealed segments to the store, each once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from proxy.clock import Clock
from proxy.errors import JournalFull, ReasonCode, Rejected, StoreError, TransactionFailed
from proxy.recording import flush
from proxy.recording.entries import Counter, Counts
from proxy.recording.journal import Sealed
from proxy.recording.seal import Part
from proxy.recording.ulid import made_at
from proxy.stores.contract import Store, Write

MARGIN_SECONDS = 86_400  # by which a marker must outlive its segment, whatever the clocks say

_log = logging.getLogger("proxy.recording")


class Books(Protocol):
    """Notified of what of ours may be in the store, and of what certainly is or is not."""

    def sending(self, counter: Counter, pico: int) -> None: ...

    def not_taken(self, counter: Counter, pico: int) -> None: ...

    def acknowledged(self, counter: Counter, pico: int) -> None: ...


class Sender:
    """`force` sends also what is so old that its marker may be gone."""

    def __init__(self, store: Store, clock: Clock, *, force: bool = False) -> None:
        self.books: Books | None = None
        self._store = store
        self._clock = clock
        self._force = force
        self._day = ""
        self._listed: set[Counter] = set()  # on this day
        self.sent = self.requests = self.pico = self.repeats = 0
        self.left: list[Sealed] = []  # what stays where it is, for a person to look at: it was spent all the same

    @property
    def refused(self) -> list[str]:
        """The names of what is left."""
        return [sealed.seal.ulid for sealed in self.left]

    async def send(self, sealed: Sealed) -> None:
        """It is in the store then, or never will be. Raises StoreError: then nobody knows, so send it again; and
        JournalFull for one without its seal that never will be."""
        seal = sealed.seal
        if sealed.is_left_over and not self._force and self._is_too_old(seal.ulid):
            self._leave(sealed, "it is so old that it might count twice")
            return
        was_in_doubt, books = sealed.is_in_doubt, None if sealed.is_foreign else self.books
        if books is not None and not was_in_doubt:
            _tell(books.sending, sealed.unsent())
        sealed.is_tried = True
        try:
            for number, part in tuple(enumerate(seal.parts))[sealed.parts_sent :]:
                await self._send_part(seal.ulid, number, part)
                sealed.parts_sent += 1
                if books is not None:
                    _tell(books.acknowledged, part)
        except (StoreError, ValueError) as failure:  # the latter where a key can be none of the store's
            if not was_in_doubt and not (isinstance(failure, StoreError) and failure.maybe_applied):
                sealed.is_tried = False
                if books is not None:
                    _tell(books.not_taken, sealed.unsent())
            if not isinstance(failure, Rejected | ValueError):
                raise
            self._leave(sealed, str(failure))
            return
        self.sent += 1
        self.requests += seal.requests
        self.pico += seal.pico
        await asyncio.to_thread(sealed.discard)

    def _is_too_old(self, ulid: str) -> bool:
        return self._clock.now() - made_at(ulid) > flush.KEEP_MARKERS_SECONDS - MARGIN_SECONDS

    def _leave(self, sealed: Sealed, why: str) -> None:
        """It must not hold up what can be counted, unless nobody could tell then which of its calls were carried on."""
        ulid = sealed.seal.ulid
        if not sealed.is_frozen:
            raise JournalFull(f"the disk has no room to seal segment {ulid}, and it cannot be flushed either: {why}")
        self.left.append(sealed)
        _log.error("segment %s is not flushed, and stays in the journal: %s", ulid, why)

    async def _send_part(self, ulid: str, number: int, part: Part) -> None:
        now = self._clock.now()
        self._turn_to(flush.utc_day_of(now))
        entries: list[Write] = [*flush.active_entries(part, self._day, self._listed, now)]
        writes = flush.writes(ulid, number, part, now)
        if self._is_too_old(ulid):
            # They do not fit into one transaction with the totals, and do no harm where nothing follows them.
            if entries:
                await self._store.transact(entries)
            entries = [*flush.additions_to_totals(part, now)]
        try:
            await self._store.transact([*writes, *entries])
        except TransactionFailed as failure:
            if failure.reasons[0].code is not ReasonCode.CONDITION_FAILED:
                raise
            self.repeats += 1  # it is in the store already: only the news of it was lost
            return
        self._listed.update(counter for counter, _ in part)

    def _turn_to(self, day: str) -> None:
        if day != self._day:
            self._day = day
            self._listed.clear()


def _tell(listener: Callable[[Counter, int], None], sums: Iterable[tuple[Counter, Counts]]) -> None:
    for counter, counts in sums:
        if not counter.is_hold:
            listener(counter, counts.pico)
