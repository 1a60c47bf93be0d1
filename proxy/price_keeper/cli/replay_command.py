"""`price-keeper replay`: send the journal that a dead process left behind to the store.

The replay is idempotent: segments that are in the store already are not counted again. A journal whose process may
still run is refused. Leases of hard budgets are released if the journal was sent completely.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from price_keeper.app import open_store
from price_keeper.cli.output import Progress, print_json
from price_keeper.cli.store_selection import load_config_at
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import Config
from price_keeper.domain import PICO_PER_USD
from price_keeper.errors import JournalOwnerUnknown, JournalUnusable
from price_keeper.ledger.journal_lock import has_owner_ended, lock_folder
from price_keeper.ledger.lease_file import release_former_leases
from price_keeper.ledger.orphaned_journals import find_worker_folders
from price_keeper.ledger.recovery import RecoveredJournal, recover
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.reports import money
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks


def run_replay(args: Namespace) -> int:
    config = load_config_at(args.config)
    coroutine = _replay(
        config,
        args.folder,
        SystemClock(),
        force=args.force,
        as_json=args.json,
        is_owner_dead=args.owner_is_dead,
    )
    return asyncio.run(coroutine)


async def _replay(
    config: Config, folder: Path, clock: Clock, *, force: bool, as_json: bool = False, is_owner_dead: bool = False
) -> int:
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(clock.monotonic))
        stack.enter_context(lock_folder(folder, create=False))
        folders = [folder, *find_worker_folders(folder)]
        for each in folders[1:]:
            stack.enter_context(lock_folder(each, create=False))
        for each in folders:
            if not has_owner_ended(each) and not is_owner_dead:
                raise JournalOwnerUnknown(
                    f"the journal in {each} was written on another machine, or is a copy: from here nobody can tell "
                    "whether the process that writes it still runs"
                )
        progress.update(f"reading the journal in {folder}")
        recovered = [await asyncio.to_thread(_recover_journal, each) for each in folders]
        async with Tasks(clock) as tasks, open_store(config.store, clock, tasks) as store:
            sender, released_pico, segment_count = (
                SegmentSender(store, clock, force=force),
                0,
                sum(len(journal.sealed) for journal in recovered),
            )
            for each, journal in zip(folders, recovered, strict=True):
                released_pico += await _send_journal(
                    each, journal, sender, store, clock, _create_progress_callback(progress, sender, segment_count)
                )
    summary = _ReplaySummary(
        sender,
        sum(journal.estimated_calls for journal in recovered),
        released_pico,
        sorted(map(str, sender.outdated_folders)),
    )
    if as_json:
        print_json(summary.to_record())
    else:
        print("\n".join(summary.iterate_lines()))
    return 1 if sender.rejected_ulids else 0


def _create_progress_callback(progress: Progress, sender: SegmentSender, segment_count: int) -> Callable[[], None]:
    def update_progress() -> None:
        done = sender.sent_segments + len(sender.rejected)
        progress.update(f"{done} of {segment_count} segments, {sender.requests:,} calls are in the store")

    return update_progress


async def _send_journal(
    folder: Path,
    recovered: RecoveredJournal,
    sender: SegmentSender,
    store: Store,
    clock: Clock,
    on_progress: Callable[[], None],
) -> int:
    """Send the journal and release its budget leases. Returns the released amount in pico-dollars.

    Nothing is released where more was spent than this journal records.
    """
    refused_before = len(sender.rejected)
    for sealed in recovered.sealed:
        on_progress()
        await sender.send(sealed)
    is_complete = len(sender.rejected) == refused_before and folder not in sender.outdated_folders
    return await release_former_leases(store, clock, folder) if is_complete else 0


def _recover_journal(folder: Path) -> RecoveredJournal:
    """Seal the segments. The disk must be writable: each segment is deleted once it is in the store."""
    try:
        return recover(folder)
    except OSError as failure:
        raise JournalUnusable(f"cannot bring the journal in {folder} to its end: {failure.strerror}") from None


@dataclass(frozen=True, slots=True)
class _ReplaySummary:
    sender: SegmentSender
    estimated: int
    released_pico: int  # of hard budgets, in pico-dollars
    outdated: list[str]  # journals

    def iterate_lines(self) -> Iterator[str]:
        sender = self.sender
        usd = sender.pico / PICO_PER_USD
        yield f"{sender.requests} calls of {usd:f} USD are in the store; {self.estimated} of them are estimated"
        if sender.repeated_parts:
            yield f"{sender.repeated_parts} parts were in the store already and were not counted again"
        if sender.late_calls:
            yield f"{sender.late_calls} calls stay estimated: a copy of the journal was replayed before they had ended"
        for folder in self.outdated:
            yield f"{folder} is an old copy: a later one is in the store, so budget leases are not released"
        if sender.rejected_ulids:
            yield f"segments that were not sent, for the reasons in the log: {', '.join(sender.rejected_ulids)}"
        if self.released_pico:
            released_usd = self.released_pico / PICO_PER_USD
            yield f"{released_usd:f} USD of hard budgets were leased and not spent; they are released"

    def to_record(self) -> dict[str, Any]:
        return {
            "requests": self.sender.requests,
            "estimated_requests": self.estimated,
            **money.build_text_record("cost_usd_micros", self.sender.pico),
            "repeated_parts": self.sender.repeated_parts,
            "recorded_after_estimate": self.sender.late_calls,
            "outdated": self.outdated,
            "left": self.sender.rejected_ulids,
            **money.build_text_record("given_back_usd_micros", self.released_pico),
        }
