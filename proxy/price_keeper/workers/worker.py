"""One worker as its supervisor knows it: its process, what that told, and when it is to be started again."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from price_keeper.workers.reports import WorkerReport, parse_report

FIRST_RESTART_SECONDS = 1.0
MAX_RESTART_SECONDS = 30.0
HEALTHY_SECONDS = 60.0  # after which a death is a new trouble


@dataclass(slots=True)
class WorkerProcess:
    number: int
    pid: int = 0  # of the process that runs, or 0
    pipe: int = -1  # its report comes from there, until it has
    report: WorkerReport | None = None
    exit_status: int = 0  # of the process that ran last
    needs_reload: bool = False  # something was passed on to the others while it started
    restart_at: float | None = None  # when it is to be started again
    _buffer: bytes = b""
    _backoff: float = FIRST_RESTART_SECONDS
    _started_at: float = 0.0

    @property
    def is_up(self) -> bool:
        return bool(self.pid) and self.report is not None and "started" in self.report

    def mark_started(self, pid: int, pipe: int, now: float) -> None:
        self.pid, self.pipe, self.report, self.restart_at = pid, pipe, None, None
        self._buffer, self._started_at, self.needs_reload = b"", now, False

    def read_pipe(self) -> bool:
        """Reads what is there; whether the report is complete, or there will be none."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self.pipe, 64 * 1024)
            if not data:
                return True
        self._buffer += data
        self.report = parse_report(self._buffer)
        return self.report is not None

    def reap(self) -> bool:
        """Whether the process has, just now."""
        if not self.pid:
            return False
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.pid, self.exit_status = 0, os.waitstatus_to_exitcode(status)
        return bool(pid)

    def schedule_restart(self, now: float) -> float:
        """How long it rests before it is started again."""
        if now - self._started_at >= HEALTHY_SECONDS:
            self._backoff = FIRST_RESTART_SECONDS
        backoff, self._backoff = self._backoff, min(2 * self._backoff, MAX_RESTART_SECONDS)
        self.restart_at = now + backoff
        return backoff
