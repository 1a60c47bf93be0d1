"""A file beside the journal that lists all hard budgets from which a run of a process leased money.

A budget is on disk before money is first leased from it. So a process that replays the journal of a dead run knows
which leases to close: what was leased and not spent is released once, even if several processes do it at the same time.

If a journal lost lines, its spend is not known completely, so the file is retained and nothing is released. File names
are part of the format on disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import orjson

from price_keeper.clock import Clock
from price_keeper.domain import PICO_PER_USD
from price_keeper.errors import ReasonCode, TransactionFailed
from price_keeper.ledger import lease_rows
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetKey
from price_keeper.ledger.segment import OPEN_FLAGS, decode_lines, encode_line, sync_folder
from price_keeper.ledger.ulid import is_ulid
from price_keeper.stores.conflict_retry import retry_on_conflict
from price_keeper.stores.contract import Store

LEASE_FILE_PREFIX = "holds-"
REPLACEMENT_PREFIX = "new-"
RETAINED_PREFIX = "kept-holds-"  # of a journal that lost lines: its spend is unknown, so nothing is released
CONCURRENT_RELEASES = 16
MAX_KEYS_SHOWN = 20  # in one log line

_log = logging.getLogger("price_keeper.hard")


class BudgetLeaseFile:
    """The lease file of this run, which the holder's name identifies."""

    def __init__(self, folder: Path, holder: str) -> None:
        self.holder = holder
        self._folder = folder
        self._path = folder / f"{LEASE_FILE_PREFIX}{holder}"
        self._size = 0
        self._keys: dict[HardBudgetKey, None] = {}
        self._writing = asyncio.Lock()
        self._has_unsynced_bytes = False

    async def add(self, key: HardBudgetKey) -> None:
        """Add a budget, on disk when this returns. Raises OSError."""
        async with self._writing:
            if key not in self._keys:
                await asyncio.to_thread(self._write, key)
                self._keys[key] = None

    def _write(self, key: HardBudgetKey) -> None:
        """A file whose sync failed is replaced by a new one, as a later successful sync of it proves nothing."""
        if self._has_unsynced_bytes:
            replacement = _build_replacement_path(self._path)
            replacement.unlink(missing_ok=True)
            self._write_to(replacement, b"".join(map(_encode_key, (*self._keys, key))), 0)
            replacement.rename(self._path)
            sync_folder(self._folder)
        else:
            self._write_to(self._path, _encode_key(key), self._size)
            if not self._keys:
                sync_folder(self._folder)
        self._has_unsynced_bytes = False

    def _write_to(self, path: Path, data: bytes, at: int) -> None:
        file = os.open(path, OPEN_FLAGS, 0o600)
        try:
            self._write_at(file, data, at)  # overwrites what an earlier failed attempt may have left
            self._has_unsynced_bytes = True  # until all of it is known to be on disk
            os.fsync(file)
        finally:
            os.close(file)
        self._size = at + len(data)

    def _write_at(self, file: int, data: bytes, at: int) -> None:
        while data:
            written = os.pwrite(file, data, at)
            at, data = at + written, data[written:]

    async def release(self, store: Store, clock: Clock) -> int:
        """Return all unspent leases of this run: at its end, when its spend is in the store and it can spend no more.
        Returns pico-dollars. Raises StoreError."""
        return await _release_leases(store, clock, self._path)


def _encode_key(key: HardBudgetKey) -> bytes:
    return encode_line(orjson.dumps([*key]))


def _build_replacement_path(path: Path) -> Path:
    """The path of the file that replaces one whose sync failed."""
    return path.with_name(f"{REPLACEMENT_PREFIX}{path.name}")


async def release_former_leases(store: Store, clock: Clock, folder: Path, current_holder: str = "") -> int:
    """Return the unspent leases of ended runs, in pico-dollars. Call it when all spend of their journals is in the
    store. `current_holder` is the run that continues. Idempotent. Raises StoreError and OSError."""
    await asyncio.to_thread(_delete_past_files, folder, clock.now())
    return sum(
        [
            await _release_leases(store, clock, path)
            for path in _list_lease_files(folder)
            if path.name != f"{LEASE_FILE_PREFIX}{current_holder}"
        ]
    )


def _delete_past_files(folder: Path, now: float) -> None:
    for path in folder.glob(f"{RETAINED_PREFIX}*"):
        if all(key.is_long_past(now) for key in _read_keys(path)):
            path.unlink(missing_ok=True)


def retain_all(folder: Path) -> None:
    """The journals of earlier runs have lost lines: keep their lease files, so that nothing is released. Raises
    OSError."""
    files = list(_list_lease_files(folder))
    keys = dict.fromkeys(key for path in files for key in _read_keys(path))
    for path in files:
        path.rename(folder / path.name.replace(LEASE_FILE_PREFIX, RETAINED_PREFIX, 1))
    if files:
        sync_folder(folder)
        _log.error(
            "the journal in %s has lost lines, so its spend is not known completely; what its runs had leased of %d "
            "hard budgets stays leased until their period is over (raise a quota if its calls are refused before): %s",
            folder,
            len(keys),
            _format_keys(keys),
        )


def _format_keys(keys: Iterable[HardBudgetKey]) -> str:
    return ", ".join(" ".join(key) for key in islice(keys, MAX_KEYS_SHOWN))


def _list_lease_files(folder: Path) -> Iterator[Path]:
    return (
        path
        for path in sorted(folder.glob(f"{LEASE_FILE_PREFIX}*"))
        if is_ulid(path.name.removeprefix(LEASE_FILE_PREFIX))
    )


async def _release_leases(store: Store, clock: Clock, path: Path) -> int:
    """Releases several leases concurrently, since the end of a process waits for it. The file is deleted when all are
    released."""
    holder, gate = path.name.removeprefix(LEASE_FILE_PREFIX), asyncio.Semaphore(CONCURRENT_RELEASES)

    async def close_one(key: HardBudgetKey) -> int:
        async with gate:
            return await _close_lease(store, clock, key, holder)

    keys = [key for key in await asyncio.to_thread(_read_keys, path) if not key.is_long_past(clock.now())]
    released = dict(zip(keys, await asyncio.gather(*map(close_one, keys)), strict=True))
    for obsolete in (_build_replacement_path(path), path):
        await asyncio.to_thread(obsolete.unlink, missing_ok=True)
    pico = sum(released.values())
    if pico:
        _log.info(
            "released %.6f USD of hard budgets that an ended run had leased (%s): %s",
            pico / PICO_PER_USD,
            path,
            _format_keys(key for key, each in released.items() if each),
        )
    return pico


def _read_keys(path: Path) -> list[HardBudgetKey]:
    """Lines that cannot be read are skipped, and their money stays leased."""
    try:
        lines = decode_lines(path.read_bytes())
    except FileNotFoundError:
        return []
    keys: dict[HardBudgetKey, None] = {}
    malformed = lines.corrupt_lines
    for values in lines.values:
        try:
            key = HardBudgetKey(*values)
            key.expires_at, key.bucket_key  # noqa: B018  # these raise for values that cannot be a key
            keys[key] = None
        except (AttributeError, TypeError, ValueError):
            malformed += 1
    if malformed:
        _log.warning(
            "%s: %d lines are torn; what their budget leases hold stays leased until the period ends", path, malformed
        )
    return list(keys)


async def _close_lease(store: Store, clock: Clock, key: HardBudgetKey, holder: str) -> int:
    """Close one lease; returns the pico-dollars that this call has returned."""
    has_bucket = True

    async def attempt() -> int:
        nonlocal has_bucket
        item = await store.get(key.build_lease_key(holder), consistent=True)
        lease = BudgetLeaseRow.from_item(item)
        if lease.is_closed and lease.leased == lease.used:
            return 0
        writes = lease_rows.build_close(key, holder, item, has_bucket=has_bucket)
        try:
            await store.transact(writes)
        except TransactionFailed as failure:
            if failure.reasons[-1].code is ReasonCode.CONDITION_FAILED and len(writes) > 1:
                has_bucket = failure.reasons[-1].item is not None
            raise
        return lease.leased - lease.used

    return await retry_on_conflict(clock, attempt)
