"""One worker as its supervisor knows it: its process, what that told, and when it is to be started again."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from price_keeper.workers.reports import WorkerReport, parse_report

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0  # after which a death is a new trouble


@dataclass(slots=True)
class Worker:
    number: int
    pid: int = 0  # of the process that runs, or 0
    pipe: int = -1  # its report comes from there, until it has
    report: WorkerReport | None = None
    status: int = 0  # of the process that ran last
    is_behind: bool = False  # something was passed on to the others while it started
    due: float | None = None  # when it is to be started again
    _heard: bytes = b""
    _pause: float = FIRST_PAUSE_SECONDS
    _began: float = 0.0

    @property
    def is_up(self) -> bool:
        return bool(self.pid) and self.report is not None and "started" in self.report

    def born(self, pid: int, pipe: int, now: float) -> None:
        self.pid, self.pipe, self.report, self.due = pid, pipe, None, None
        self._heard, self._began, self.is_behind = b"", now, False

    def hear(self) -> bool:
        """Reads what is there; whether the report is complete, or there will be none."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self.pipe, 64 * 1024)
            if not data:
                return True
        self._heard += data
        self.report = parse_report(self._heard)
        return self.report is not None

    def has_ended(self) -> bool:
        """Whether the process has, just now."""
        if not self.pid:
            return False
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.pid, self.status = 0, os.waitstatus_to_exitcode(status)
        return bool(pid)

    def rest(self, now: float) -> float:
        """How long it rests before it is started again."""
        if now - self._began >= STEADY_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self.due = now + pause
        return pause
