"""`price-keeper replay`: brings what a process left in its journal to the store, wherever that journal was found."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

from proxy.app import opened_store
from proxy.clock import Clock, SystemClock
from proxy.commands.shared import Commands, add_config_option
from proxy.config import Config, load
from proxy.errors import JournalUnusable
from proxy.hard.holds import give_back_former
from proxy.recording.adoption import folders_of_workers
from proxy.recording.entries import PICO_PER_USD
from proxy.recording.folder import locked
from proxy.recording.leftovers import Leftovers, recover
from proxy.recording.sender import Sender
from proxy.stores.contract import Store
from proxy.tasks import Tasks


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("replay", help="bring a journal found on a dead node to the store")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the journal's folder; those of workers in it too")
    parser.add_argument("--force", action="store_true", help="also what is so old that its markers are gone")
    add_config_option(parser)
    parser.set_defaults(run=_replay)


def _replay(chosen: Namespace) -> int:
    config = load(chosen.config, os.environ)
    return asyncio.run(_replayed(config, chosen.folder, SystemClock(), force=chosen.force))


async def _replayed(config: Config, folder: Path, clock: Clock, *, force: bool) -> int:
    with ExitStack() as held:
        held.enter_context(locked(folder, make=False))
        folders = [folder, *folders_of_workers(folder)]
        for each in folders[1:]:
            held.enter_context(locked(each, make=False))
        left = [await asyncio.to_thread(_recovered, each) for each in folders]
        async with Tasks(clock) as tasks, opened_store(config.store, clock, tasks) as store:
            sender, back = Sender(store, clock, force=force), 0
            for each, found in zip(folders, left, strict=True):
                back += await _brought(each, found, sender, store, clock)
    _tell(sender, sum(found.estimated for found in left))
    if back:
        print(f"{back / PICO_PER_USD:f} USD of hard budgets were held and not spent; they are given back")
    return 1 if sender.refused else 0


async def _brought(folder: Path, left: Leftovers, sender: Sender, store: Store, clock: Clock) -> int:
    """What came back of hard budgets, in pico-dollars."""
    refused = len(sender.left)
    for sealed in left.sealed:
        await sender.send(sealed)
    return await give_back_former(store, clock, folder) if len(sender.left) == refused else 0


def _recovered(folder: Path) -> Leftovers:
    """Each segment gets its seal, and goes when it is in the store: so the disk must take writes."""
    try:
        return recover(folder)
    except OSError as failure:
        raise JournalUnusable(f"cannot bring the journal in {folder} to its end: {failure.strerror}") from None


def _tell(sender: Sender, estimated: int) -> None:
    usd = sender.pico / PICO_PER_USD
    print(f"{sender.requests} calls of {usd:f} USD are in the store; {estimated} of them are estimated")
    if sender.repeats:
        print(f"{sender.repeats} parts had been in the store before, and were not counted again")
    if sender.refused:
        print(f"left where they are, as the log says: {', '.join(sender.refused)}")
