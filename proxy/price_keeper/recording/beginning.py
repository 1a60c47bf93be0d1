"""A journal begun where another process may have left one: also on a disk that this one has filled up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from price_keeper.errors import JournalFull, JournalUnusable, StoreError
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.journal_lock import is_disk_full
from price_keeper.ledger.recovery import RecoveredJournal
from price_keeper.ledger.segment_sender import SegmentSender


async def begin_journal(
    folder: Path, recovered: RecoveredJournal, sender: SegmentSender, begin: Callable[[], Journal]
) -> Journal:
    """Without room on the disk what was left over goes to the store first, since each file that goes makes some.

    It may go without its seal then, the oldest first: what it comes to follows from its lines and those of the next
    one, which stay as they are until it is gone, as nobody else writes to them. Raises JournalUnusable.
    """
    while True:
        try:
            return await _seal_and_begin(folder, recovered, begin)
        except JournalFull as failure:
            if not recovered.sealed:
                raise
            await _send_first(recovered, sender, failure)


async def _seal_and_begin(folder: Path, recovered: RecoveredJournal, begin: Callable[[], Journal]) -> Journal:
    try:
        for sealed in recovered.sealed:
            if not sealed.has_seal:
                await asyncio.to_thread(sealed.write_seal)
    except OSError as failure:
        kind = JournalFull if is_disk_full(failure) else JournalUnusable
        raise kind(f"cannot seal what is left in the journal in {folder}: {failure.strerror}") from None
    return begin()


async def _send_first(recovered: RecoveredJournal, sender: SegmentSender, cause: JournalFull) -> None:
    first = recovered.sealed[0]
    try:
        await sender.send(first)
    except (StoreError, OSError) as failure:
        raise JournalFull(f"{cause}; and what is left there cannot be flushed to make room: {failure}") from None
    recovered.sealed.pop(0)
