"""Whose money is where: a file beside the journal with the names of all hard budgets that a run of a process took from.

A name is on the disk before the first taking. So whoever brings the journal of a run that is no more to the store finds
there what to close: what was taken and not spent goes back, once, whoever else does the same at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import orjson

from price_keeper.clock import Clock
from price_keeper.errors import ReasonCode, TransactionFailed
from price_keeper.hard import rows
from price_keeper.hard.rows import BudgetLeaseRow, HardBudgetKey
from price_keeper.recording.lines import line, lines_in
from price_keeper.recording.segment import OPENED, sync_folder
from price_keeper.recording.ulid import is_ulid
from price_keeper.stores.again import retry_on_conflict
from price_keeper.stores.contract import Store

PREFIX = "holds-"
NEW_PREFIX = "new-"
KEPT_PREFIX = "kept-holds-"  # of a journal that lost lines: nobody knows what was spent, so nothing goes back
AT_A_TIME = 16  # holds that are given back

_log = logging.getLogger("price_keeper.hard")


class Holds:
    """Of this run of the process, which its holder's name stands for."""

    def __init__(self, folder: Path, holder: str) -> None:
        self.holder = holder
        self._folder = folder
        self._path = folder / f"{PREFIX}{holder}"
        self._size = 0
        self._named: dict[HardBudgetKey, None] = {}
        self._writing = asyncio.Lock()
        self._is_unsound = False

    async def name(self, name: HardBudgetKey) -> None:
        """It is on the disk then. Raises OSError."""
        async with self._writing:
            if name not in self._named:
                await asyncio.to_thread(self._write, name)
                self._named[name] = None

    def _write(self, name: HardBudgetKey) -> None:
        """A file that could not be synced makes way for another: what a later sync of it says proves nothing."""
        if self._is_unsound:
            other = _instead_of(self._path)
            other.unlink(missing_ok=True)
            self._write_to(other, b"".join(map(_line, (*self._named, name))), 0)
            other.rename(self._path)
            sync_folder(self._folder)
        else:
            self._write_to(self._path, _line(name), self._size)
            if not self._named:
                sync_folder(self._folder)
        self._is_unsound = False

    def _write_to(self, path: Path, data: bytes, at: int) -> None:
        file = os.open(path, OPENED, 0o600)
        try:
            self._put(file, data, at)  # over what an earlier try may have left there
            self._is_unsound = True  # until all of it is known to be on the disk
            os.fsync(file)
        finally:
            os.close(file)
        self._size = at + len(data)

    def _put(self, file: int, data: bytes, at: int) -> None:
        while data:
            written = os.pwrite(file, data, at)
            at, data = at + written, data[written:]

    async def give_back(self, store: Store, clock: Clock) -> int:
        """At the end, when all that this run spent is in the store and it can spend no more. Raises StoreError."""
        return await _given_back(store, clock, self._path)


def _line(name: HardBudgetKey) -> bytes:
    return line(orjson.dumps([*name]))


def _instead_of(path: Path) -> Path:
    """What comes in the place of a file that could not be synced."""
    return path.with_name(f"{NEW_PREFIX}{path.name}")


async def give_back_former(store: Store, clock: Clock, folder: Path, but: str = "") -> int:
    """What runs that are no more did not spend, in pico-dollars: to be called when all that their journals say is in
    the store. `but` is the run that goes on. Doing it again does no harm. Raises StoreError and OSError."""
    await asyncio.to_thread(_drop_over, folder, clock.now())
    return sum([await _given_back(store, clock, path) for path in _files(folder) if path.name != f"{PREFIX}{but}"])


def _drop_over(folder: Path, now: float) -> None:
    for path in folder.glob(f"{KEPT_PREFIX}*"):
        if all(name.is_long_past(now) for name in _names(path)):
            path.unlink(missing_ok=True)


def keep_all(folder: Path) -> None:
    """Something is missing from the journals of former runs. Raises OSError."""
    files = list(_files(folder))
    for path in files:
        path.rename(folder / path.name.replace(PREFIX, KEPT_PREFIX, 1))
    if files:
        sync_folder(folder)
        _log.error("the journal in %s has lost lines, so what is held of hard budgets is not given back", folder)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob(f"{PREFIX}*")) if is_ulid(path.name.removeprefix(PREFIX)))


async def _given_back(store: Store, clock: Clock, path: Path) -> int:
    """Several at a time, since the end of a process waits for it. The file goes when all have come back."""
    holder, gate = path.name.removeprefix(PREFIX), asyncio.Semaphore(AT_A_TIME)

    async def closed(name: HardBudgetKey) -> int:
        async with gate:
            return await _closed(store, clock, name, holder)

    names = [name for name in await asyncio.to_thread(_names, path) if not name.is_long_past(clock.now())]
    back = sum(await asyncio.gather(*map(closed, names)))
    for each in (_instead_of(path), path):
        await asyncio.to_thread(each.unlink, missing_ok=True)
    return back


def _names(path: Path) -> list[HardBudgetKey]:
    """What cannot be read is passed over, and its money stays where it is."""
    try:
        lines = lines_in(path.read_bytes())
    except FileNotFoundError:
        return []
    found: dict[HardBudgetKey, None] = {}
    spoilt = lines.spoilt
    for values in lines.values:
        try:
            name = HardBudgetKey(*values)
            name.expires_at, name.bucket_key  # noqa: B018  # raise for what can be none of ours
            found[name] = None
        except (AttributeError, TypeError, ValueError):
            spoilt += 1
    if spoilt:
        _log.warning("%s: %d lines were torn; what is held there is not given back", path, spoilt)
    return list(found)


async def _closed(store: Store, clock: Clock, name: HardBudgetKey, holder: str) -> int:
    """How much of it came back by us."""
    has_bucket = True

    async def once() -> int:
        nonlocal has_bucket
        item = await store.get(name.build_lease_key(holder), consistent=True)
        hold = BudgetLeaseRow.from_item(item)
        if hold.is_closed and hold.leased == hold.used:
            return 0
        writes = rows.build_close(name, holder, item, has_bucket=has_bucket)
        try:
            await store.transact(writes)
        except TransactionFailed as failure:
            if failure.reasons[-1].code is ReasonCode.CONDITION_FAILED and len(writes) > 1:
                has_bucket = failure.reasons[-1].item is not None
            raise
        return hold.leased - hold.used

    return await retry_on_conflict(clock, once)
