"""The files of alerts that are not delivered yet, from before their marker is written until they are delivered.

The folder lies within the journal's folder, whose lock keeps other processes away.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from tempfile import mkstemp

from price_keeper.alerts.alert import Alert

ALERT_SUFFIX = ".json"
UNFINISHED_SUFFIX = ".tmp"

_log = logging.getLogger("price_keeper.alerts")


class AlertOutbox:
    """`names` tells which alerts are on the disk, the oldest first when sorted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: set[str] = set()

    async def open(self) -> None:
        """Finds what the process before this one left. A folder that cannot be read keeps nobody from starting."""
        try:
            self.names |= await asyncio.to_thread(self._list_names)
        except OSError as failure:
            _log.error("alerts left in %s cannot be read: %s", self._folder, failure.strerror)

    async def persist(self, alert: Alert) -> None:
        """It is on the disk, whole, whatever happens from now on. Raises OSError."""
        if alert.file_stem not in self.names:
            await asyncio.to_thread(self._write, alert)
            self.names.add(alert.file_stem)

    async def read(self, name: str) -> Alert | None:
        """None, once and for all, if there is no such file or it is no alert."""
        try:
            alert = Alert.from_content(await asyncio.to_thread((self._folder / f"{name}{ALERT_SUFFIX}").read_bytes))
            if alert.file_stem != name:
                raise ValueError("it is another one than its name says")
            return alert
        except FileNotFoundError:
            pass  # it was delivered while others were read
        except (OSError, ValueError) as failure:
            _log.error("the alert in %s%s cannot be read and stays there: %s", name, ALERT_SUFFIX, failure)
        self.names.discard(name)
        return None

    def remove(self, alert: Alert) -> None:
        """A file that cannot be removed is looked at again after the next start."""
        self.names.discard(alert.file_stem)
        try:
            (self._folder / f"{alert.file_stem}{ALERT_SUFFIX}").unlink(missing_ok=True)
        except OSError as failure:
            _log.error("the alert in %s%s cannot be removed: %s", alert.file_stem, ALERT_SUFFIX, failure.strerror)

    def _list_names(self) -> set[str]:
        if not self._folder.exists():
            return set()
        for unfinished in self._folder.glob(f"*{UNFINISHED_SUFFIX}"):
            unfinished.unlink(missing_ok=True)  # nobody was told of it
        return {path.name.removesuffix(ALERT_SUFFIX) for path in self._folder.glob(f"*{ALERT_SUFFIX}")}

    def _write(self, alert: Alert) -> None:
        self._folder.mkdir(exist_ok=True, mode=0o700)
        descriptor, unfinished = mkstemp(UNFINISHED_SUFFIX, dir=self._folder)  # readable by its owner alone
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(alert.content())
                file.flush()
                os.fsync(descriptor)
            os.replace(unfinished, self._folder / f"{alert.file_stem}{ALERT_SUFFIX}")
        except OSError:
            Path(unfinished).unlink(missing_ok=True)
            raise
        folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
