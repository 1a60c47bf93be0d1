"""The files of undelivered alerts. A file exists from before the alert's marker is written until delivery ends.

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
    """A folder with one file per alert. `names` has the names of the files; sorted, the oldest comes first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: set[str] = set()

    async def open(self) -> None:
        """Lists the alerts that earlier processes left. An unreadable folder is logged, and does not prevent the
        start."""
        try:
            self.names |= await asyncio.to_thread(self._list_names)
        except OSError as failure:
            _log.error(
                "undelivered alerts in %s cannot be listed (%s); they stay there until a restart",
                self._folder,
                failure.strerror,
            )

    async def persist(self, alert: Alert) -> None:
        """Writes the alert's file durably (fsync) and atomically. Idempotent. Raises OSError."""
        if alert.file_stem not in self.names:
            await asyncio.to_thread(self._write, alert)
            self.names.add(alert.file_stem)

    async def read(self, name: str) -> Alert | None:
        """The alert in a file. If the file is missing or invalid, returns None and drops its name."""
        try:
            alert = Alert.from_content(await asyncio.to_thread((self._folder / f"{name}{ALERT_SUFFIX}").read_bytes))
            if alert.file_stem != name:
                raise ValueError("its content does not match its name")
            return alert
        except FileNotFoundError:
            pass  # delivered in the meantime
        except (OSError, ValueError) as failure:
            _log.error(
                "alert file %s%s cannot be read (%s); its alert is not delivered, and the file is kept",
                name,
                ALERT_SUFFIX,
                failure,
            )
        self.names.discard(name)
        return None

    def remove(self, alert: Alert) -> None:
        """Deletes the alert's file. A file that cannot be deleted is processed again after the next start."""
        self.names.discard(alert.file_stem)
        try:
            (self._folder / f"{alert.file_stem}{ALERT_SUFFIX}").unlink(missing_ok=True)
        except OSError as failure:
            _log.error(
                "alert file %s%s in %s cannot be deleted (%s); it stays, and is processed again after the next start",
                alert.file_stem,
                ALERT_SUFFIX,
                self._folder,
                failure.strerror,
            )

    def _list_names(self) -> set[str]:
        if not self._folder.exists():
            return set()
        for unfinished in self._folder.glob(f"*{UNFINISHED_SUFFIX}"):
            unfinished.unlink(missing_ok=True)  # an alert is raised only after its file is complete
        return {path.name.removesuffix(ALERT_SUFFIX) for path in self._folder.glob(f"*{ALERT_SUFFIX}")}

    def _write(self, alert: Alert) -> None:
        self._folder.mkdir(exist_ok=True, mode=0o700)
        descriptor, unfinished = mkstemp(UNFINISHED_SUFFIX, dir=self._folder)  # mode 0600
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
