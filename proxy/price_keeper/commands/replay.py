"""`price-keeper replay`: brings what a process left in its journal to the store, wherever that journal was found."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from price_keeper.app import open_store
from price_keeper.clock import Clock, SystemClock
from price_keeper.commands.places import load_config_at
from price_keeper.commands.progress import Progress
from price_keeper.commands.shared import print_json
from price_keeper.config import Config
from price_keeper.errors import JournalUnusable, JournalOwnerUnknown
from price_keeper.hard.holds import release_former_leases
from price_keeper.recording.adoption import find_worker_folders
from price_keeper.recording.entries import PICO_PER_USD
from price_keeper.recording.folder import has_owner_ended, lock_folder
from price_keeper.recording.leftovers import RecoveredJournal, recover
from price_keeper.recording.sender import SegmentSender
from price_keeper.reporting import money
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks


def replay(args: Namespace) -> int:
    config = load_config_at(args.config)
    work = _replayed(
        config,
        args.folder,
        SystemClock(),
        force=args.force,
        as_json=args.json,
        is_owner_dead=args.owner_is_dead,
    )
    return asyncio.run(work)


async def _replayed(
    config: Config, folder: Path, clock: Clock, *, force: bool, as_json: bool = False, is_owner_dead: bool = False
) -> int:
    with ExitStack() as held:
        progress = held.enter_context(Progress(clock.monotonic))
        held.enter_context(lock_folder(folder, make=False))
        folders = [folder, *find_worker_folders(folder)]
        for each in folders[1:]:
            held.enter_context(lock_folder(each, make=False))
        for each in folders:
            if not has_owner_ended(each) and not is_owner_dead:
                raise JournalOwnerUnknown(
                    f"the journal in {each} was written on another machine, or is a copy: from here nobody can tell "
                    "whether the process that writes it still runs"
                )
        progress.update(f"reading the journal in {folder}")
        left = [await asyncio.to_thread(_recovered, each) for each in folders]
        async with Tasks(clock) as tasks, open_store(config.store, clock, tasks) as store:
            sender, back, whole = SegmentSender(store, clock, force=force), 0, sum(len(found.sealed) for found in left)
            for each, found in zip(folders, left, strict=True):
                back += await _brought(each, found, sender, store, clock, _telling(progress, sender, whole))
    told = _Told(sender, sum(found.estimated_calls for found in left), back, sorted(map(str, sender.outdated_folders)))
    if as_json:
        print_json(told.record())
    else:
        print("\n".join(told.lines()))
    return 1 if sender.rejected_ulids else 0


def _telling(progress: Progress, sender: SegmentSender, whole: int) -> Callable[[], None]:
    def tell() -> None:
        done = sender.sent_segments + len(sender.rejected)
        progress.update(f"{done} of {whole} segments, {sender.requests:,} calls are in the store")

    return tell


async def _brought(
    folder: Path, left: RecoveredJournal, sender: SegmentSender, store: Store, clock: Clock, tell: Callable[[], None]
) -> int:
    """What came back of hard budgets, in pico-dollars. Nothing, where more was spent than this journal says."""
    refused = len(sender.rejected)
    for sealed in left.sealed:
        tell()
        await sender.send(sealed)
    is_all = len(sender.rejected) == refused and folder not in sender.outdated_folders
    return await release_former_leases(store, clock, folder) if is_all else 0


def _recovered(folder: Path) -> RecoveredJournal:
    """Each segment gets its seal, and goes when it is in the store: so the disk must take writes."""
    try:
        return recover(folder)
    except OSError as failure:
        raise JournalUnusable(f"cannot bring the journal in {folder} to its end: {failure.strerror}") from None


@dataclass(frozen=True, slots=True)
class _Told:
    sender: SegmentSender
    estimated: int
    back: int  # of hard budgets, in pico-dollars
    outdated: list[str]  # journals

    def lines(self) -> Iterator[str]:
        sender = self.sender
        usd = sender.pico / PICO_PER_USD
        yield f"{sender.requests} calls of {usd:f} USD are in the store; {self.estimated} of them are estimated"
        if sender.repeated_parts:
            yield f"{sender.repeated_parts} parts had been in the store before, and were not counted again"
        if sender.late_calls:
            yield f"{sender.late_calls} calls stay estimated: a copy of the journal was replayed while they were under way"
        for folder in self.outdated:
            yield f"{folder} is an old copy: a later one is in the store, and what is held of hard budgets stays held"
        if sender.rejected_ulids:
            yield f"left where they are, as the log says: {', '.join(sender.rejected_ulids)}"
        if self.back:
            yield f"{self.back / PICO_PER_USD:f} USD of hard budgets were held and not spent; they are given back"

    def record(self) -> dict[str, Any]:
        return {
            "requests": self.sender.requests,
            "estimated_requests": self.estimated,
            "cost_usd_micros": money.exact_micros(self.sender.pico),
            "repeated_parts": self.sender.repeated_parts,
            "recorded_after_estimate": self.sender.late_calls,
            "outdated": self.outdated,
            "left": self.sender.rejected_ulids,
            "given_back_usd_micros": money.exact_micros(self.back),
        }
