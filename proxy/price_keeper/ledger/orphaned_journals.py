"""Takes over the journals of workers that have ended: locks them, flushes them, and removes their folders.

The first worker has the journal's folder, the others have `worker-1` and so on in it. The first worker adopts what
workers of earlier runs left there, if this run has no worker of that number. Each step is idempotent, so a process may
die between any two:

    lock -> recover -> send the segments -> return budget leases -> move alerts -> remove the folder
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from price_keeper.alerts.alert_outbox import ALERT_SUFFIX, UNFINISHED_SUFFIX
from price_keeper.alerts.alert_setup import ALERTS_FOLDER
from price_keeper.clock import Clock
from price_keeper.errors import JournalInUse, JournalUnusable, StoreError
from price_keeper.ledger.journal_lock import LOCK_NAME, lock_folder
from price_keeper.ledger.lease_file import RETAINED_PREFIX, release_former_leases
from price_keeper.ledger.recovery import RecoveredJournal, recover
from price_keeper.ledger.segment import sync_folder
from price_keeper.stores.contract import Store

_NAME = re.compile(r"worker-([1-9][0-9]{0,8})")

_log = logging.getLogger("price_keeper.recording")


def locate_worker_folder(journal: Path, number: int) -> Path:
    return journal / f"worker-{number}" if number else journal


def find_worker_folders(journal: Path) -> list[Path]:
    """The existing folders of workers, except the first worker's, which is `journal` itself."""
    found = [(int(name[1]), path) for path in journal.glob("worker-*") if (name := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir() and not path.is_symlink()]


class OrphanedJournals:
    """Finds and finishes journals of ended workers. `workers` is the number of workers of this run: their folders are
    left alone, and so is a folder that a running process has locked."""

    def __init__(self, journal: Path, workers: int) -> None:
        self._journal = journal
        self._own = {locate_worker_folder(journal, number) for number in range(workers)}
        self._locks: dict[Path, ExitStack] = {}
        self._found: dict[Path, RecoveredJournal] = {}  # locked and recovered, but not yet taken by `take_found`
        self._unusable: set[Path] = set()  # an operator has to look at these
        self._logged: dict[Path, str] = {}
        self._on_alerts_moved: list[Callable[[set[str]], None]] = []

    def subscribe(self, on_alerts_moved: Callable[[set[str]], None]) -> None:
        """Call `on_alerts_moved` with the names of the alerts of each folder that is finished."""
        self._on_alerts_moved.append(on_alerts_moved)

    @property
    def folders(self) -> list[Path]:
        """The folders whose journals were taken."""
        return [folder for folder in self._locks if folder not in self._found]

    def find(self) -> None:
        """Lock and recover each journal whose worker has ended, for `take_found`. Blocks on the disk: call it in a
        thread."""
        for folder in find_worker_folders(self._journal):
            if folder not in self._own and folder not in self._locks and folder not in self._unusable:
                self._recover(folder)

    def take_found(self) -> list[RecoveredJournal]:
        """What was found since the last call, each journal once. The caller sends it to the store before it calls
        `finish_folder`."""
        found, self._found = self._found, {}
        return list(found.values())

    def _recover(self, folder: Path) -> None:
        """If this raises, the lock is released first, so the folder can be tried again."""
        try:
            with ExitStack() as lock:
                lock.enter_context(lock_folder(folder, create=False))
                self._found[folder] = recover(folder)
                self._locks[folder] = lock.pop_all()
        except JournalInUse:
            return  # its process runs, and may end soon
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError, JournalUnusable) as failure:
            self._unusable.add(folder)
            _log.error(
                "spend in the journal of a former worker is NOT counted: %s; repair that, then run: "
                "price-keeper replay %s",
                failure,
                folder,
            )

    async def finish_folder(self, folder: Path, store: Store, clock: Clock) -> None:
        """Return the leases, move the alerts, and remove the folder. Call it when all spend of its journal is in the
        store."""
        try:
            await release_former_leases(store, clock, folder)
            moved, is_removed = await asyncio.to_thread(self._clear_folder, folder)
        except (StoreError, OSError) as failure:
            if self._logged.get(folder) != str(failure):
                self._logged[folder] = str(failure)
                _log.warning(
                    "the journal in %s is in the store, but its folder cannot be removed yet; it is tried again: %s",
                    folder,
                    failure,
                )
            return
        for on_alerts_moved in self._on_alerts_moved:
            on_alerts_moved(moved)
        if not is_removed:
            self._unusable.add(folder)
            _log.warning(
                "spend of the former worker in %s is counted; remove its folder, which has other files", folder
            )
        self._locks.pop(folder).close()

    def close(self) -> None:
        while self._locks:
            self._locks.popitem()[1].close()

    def _clear_folder(self, folder: Path) -> tuple[set[str], bool]:
        """The names of the moved alerts, and whether the folder was removed. Raises OSError."""
        for kept in folder.glob(f"{RETAINED_PREFIX}*"):
            kept.rename(self._journal / kept.name)
        moved = self._move_alerts(folder / ALERTS_FOLDER)
        sync_folder(self._journal)
        is_empty = all(path.name == LOCK_NAME for path in folder.iterdir())
        if is_empty:
            (folder / LOCK_NAME).unlink(missing_ok=True)
            folder.rmdir()
        return moved, is_empty

    def _move_alerts(self, folder: Path) -> set[str]:
        if not folder.is_dir():
            return set()
        for unfinished in folder.glob(f"*{UNFINISHED_SUFFIX}"):
            unfinished.unlink(missing_ok=True)  # no alert was raised from it
        alerts, target = sorted(folder.glob(f"*{ALERT_SUFFIX}")), self._journal / ALERTS_FOLDER
        if alerts:
            target.mkdir(exist_ok=True, mode=0o700)
        for path in alerts:
            os.rename(path, target / path.name)
        if alerts:
            sync_folder(target)
        if not any(folder.iterdir()):
            folder.rmdir()
        return {path.name.removesuffix(ALERT_SUFFIX) for path in alerts}
