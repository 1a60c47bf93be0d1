"""Start the workers of one data port, restart those that die, and end when all have ended. START HERE.

The supervisor has no event loop and no second thread, so it can fork safely, and workers share the memory of modules
that it has loaded. It handles no calls and opens no store or journal, so it survives what kills a worker. Each worker
sends one report through a pipe: that it has started, or why it could not. Signals arrive through a self-pipe
(`SignalQueue`).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn, TypeAlias

from price_keeper.errors import ConfigError, PriceKeeperError
from price_keeper.workers import reload_signal
from price_keeper.workers.worker_slot import WorkerSlot

STOP_SECONDS = 45.0  # for the drain, the last flush and the return of leases; a worker that takes longer hangs
FIRST_RESTART_SECONDS = 1.0
MAX_RESTART_SECONDS = 30.0
HEALTHY_SECONDS = 60.0  # after running so long, a death has a new cause and the backoff starts over
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)

_MAX_REPORT_BYTES = 64 * 1024  # the capacity of a pipe, so that a worker never blocks on its report

WorkerReport: TypeAlias = "dict[str, Any]"
ReportStarted: TypeAlias = "Callable[[dict[str, str]], object]"
# Reads the configuration again and hands it over to the workers; returns whether there is a new one.
ReloadConfig: TypeAlias = "Callable[[], bool]"
# Serves in that slot until it is stopped; calls the function once, when it has started.
RunWorker: TypeAlias = "Callable[[WorkerSlot, ReportStarted], None]"

_log = logging.getLogger("price_keeper.workers")


class Supervisor:
    """Forks `slot.count` workers and keeps them running.

    `slot` is the first worker's. When all have started, `on_started` is called with the first worker's report.
    `reload_config` is called on SIGHUP; workers that start later use the configuration that it read.
    """

    def __init__(
        self,
        slot: WorkerSlot,
        run_worker: RunWorker,
        on_started: ReportStarted,
        reload_config: ReloadConfig = lambda: False,
    ) -> None:
        self._slot = slot
        self._run_worker = run_worker
        self._on_started = on_started
        self._reload_config = reload_config
        self._workers = [WorkerProcess(number) for number in range(slot.count)]
        self._has_started = False
        self._stop_by: float | None = None
        self._failure: PriceKeeperError | None = None
        self._is_clean = True

    def run(self) -> int:
        """Supervise until SIGTERM or SIGINT, then return the exit code. If a worker fails during startup, stops the
        others and raises its PriceKeeperError."""
        gc.collect()
        gc.freeze()  # a collection in a worker would write to shared pages, and so copy them
        self._lifeline = os.pipe()
        self._signals = SignalQueue()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals.readable, selectors.EVENT_READ, None)
        try:
            if reload_signal.take_reload_request():
                self._handle_signal(signal.SIGHUP)
            for worker in self._workers:
                self._start(worker)
            while not self._has_ended:
                self._run_once()
        finally:
            self._kill()
            self._signals.close()
            self._selector.close()
            for end in self._lifeline:
                os.close(end)
        if self._failure is not None:
            raise self._failure
        return 0 if self._is_clean else 1

    @property
    def _has_ended(self) -> bool:
        return self._stop_by is not None and not any(worker.pid for worker in self._workers)

    def _run_once(self) -> None:
        for key, _ in self._selector.select(self._compute_select_timeout()):
            if key.data is not None:
                self._read_report(key.data)
        for number in self._signals.take_pending():
            self._handle_signal(number)
        for worker in self._workers:
            if worker.reap():
                self._handle_exit(worker)
        now = time.monotonic()
        if self._stop_by is not None and now >= self._stop_by:
            self._kill_hanging()
        for worker in self._workers:
            if worker.restart_at is not None and now >= worker.restart_at:
                self._start(worker)

    def _compute_select_timeout(self) -> float | None:
        deadlines = [worker.restart_at for worker in self._workers if worker.restart_at is not None]
        deadlines += [] if self._stop_by is None else [self._stop_by]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    # Workers.

    def _start(self, worker: WorkerProcess) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        sys.stdout.flush()
        with self._signals.block():
            try:
                pid = os.fork()
            except OSError as failure:
                os.close(read)
                os.close(write)
                self._handle_fork_failure(worker, failure)
                return
            if not pid:
                self._run_child(worker.number, read, write)
        os.close(write)
        worker.mark_started(pid, read, time.monotonic())
        self._selector.register(read, selectors.EVENT_READ, worker)

    def _handle_fork_failure(self, worker: WorkerProcess, failure: OSError) -> None:
        if not self._has_started:
            self._fail(PriceKeeperError(f"cannot start a worker: {failure.strerror}"))
            return
        backoff = worker.schedule_restart(time.monotonic())
        _log.error("worker %d cannot be forked (%s); next attempt in %g s", worker.number, failure.strerror, backoff)

    def _run_child(self, number: int, read: int, pipe: int) -> NoReturn:
        """Runs in the forked process, and exits it instead of returning into the supervisor's code."""
        others, self._workers = self._workers, []  # a worker must never signal the others
        code = 1
        try:
            self._selector.close()
            for descriptor in (read, self._lifeline[1], *(other.pipe for other in others if other.pipe >= 0)):
                os.close(descriptor)  # the lifeline ends only when every copy of its write end is closed
            self._signals.close()
            code = self._serve_in_child(number, pipe)
            sys.stdout.flush()
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _serve_in_child(self, number: int, pipe: int) -> int:
        slot, report_pipe = replace(self._slot, number=number, lifeline=self._lifeline[0]), ReportPipe(pipe)
        try:
            self._run_worker(slot, lambda details: report_pipe.send(build_start_report(details)))
        except (PriceKeeperError, OSError) as failure:
            if not report_pipe.send(build_failure_report(failure)):  # the report that it started was sent before
                _log.error("worker %d ends: %s; unless all are stopping, it is started again", number, failure)
            return 1
        return 0

    def _read_report(self, worker: WorkerProcess) -> None:
        if not worker.read_pipe():
            return
        self._selector.unregister(worker.pipe)
        os.close(worker.pipe)
        worker.pipe = -1
        if worker.needs_reload and worker.is_up:
            self._signal(worker, signal.SIGHUP)
        if not self._has_started and self._stop_by is None and all(each.is_up for each in self._workers):
            self._has_started = True
            first = self._workers[0].report
            assert first is not None
            self._on_started(first["started"])

    def _handle_exit(self, worker: WorkerProcess) -> None:
        while worker.pipe >= 0:  # its report may still be in the pipe
            self._read_report(worker)
        report = worker.report or {}
        had_started, failure = "started" in report, parse_failure(report)
        how = (
            f"it was killed by signal {-worker.exit_status}"
            if worker.exit_status < 0
            else f"it ended with {worker.exit_status}"
        )
        if self._stop_by is not None:
            # A worker that had not started yet has nothing to drain, so dying of SIGTERM is a clean end.
            self._is_clean &= worker.exit_status == 0 or (not had_started and worker.exit_status == -signal.SIGTERM)
            return
        if not self._has_started:
            self._fail(failure or PriceKeeperError(f"worker {worker.number} did not start: {how}"))
            return
        backoff = worker.schedule_restart(time.monotonic())
        why = str(failure or how).replace("\n", "; ")
        _log.error("worker %d died (%s); it is started again in %g s", worker.number, why, backoff)

    # Ending.

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._reload()
        elif number != signal.SIGCHLD:
            self._stop()

    def _reload(self) -> None:
        if self._stop_by is not None:
            _log.warning("SIGHUP ignored: the process is stopping")
        elif self._reload_config():
            for worker in self._workers:
                if worker.is_up:
                    self._signal(worker, signal.SIGHUP)
                else:  # it may not handle signals yet
                    worker.needs_reload = True

    def _fail(self, failure: PriceKeeperError) -> None:
        self._failure = self._failure or failure
        self._stop()

    def _stop(self) -> None:
        if self._stop_by is None:
            self._stop_by = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            worker.restart_at = None
            self._signal(worker, signal.SIGTERM)

    def _kill_hanging(self) -> None:
        hanging = ", ".join(f"worker {worker.number}" for worker in self._workers if worker.pid)
        _log.error("workers did not end within %g s and are killed: %s", STOP_SECONDS, hanging)
        self._is_clean = False
        self._stop_by = time.monotonic() + STOP_SECONDS
        self._kill()

    def _kill(self) -> None:
        for worker in self._workers:
            self._signal(worker, signal.SIGKILL)

    def _signal(self, worker: WorkerProcess, number: signal.Signals) -> None:
        if worker.pid:  # until `reap`, the kernel does not reuse the process id
            with suppress(ProcessLookupError):
                os.kill(worker.pid, number)


@dataclass(slots=True)
class WorkerProcess:
    """The supervisor's view of one worker: its process, its report and its restart backoff."""

    number: int
    pid: int = 0  # of the running process, or 0
    pipe: int = -1  # read end for the report; -1 once that has been read
    report: WorkerReport | None = None
    exit_status: int = 0  # of the last process that ended
    needs_reload: bool = False  # a reload happened while it was starting
    restart_at: float | None = None  # monotonic time of the next start
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
        """Reads what is available. Returns whether the report is complete, or the pipe ended without one."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self.pipe, 64 * 1024)
            if not data:
                return True
        self._buffer += data
        self.report = parse_report(self._buffer)
        return self.report is not None

    def reap(self) -> bool:
        """Whether the process has ended since the last call; if so, records its exit status."""
        if not self.pid:
            return False
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.pid, self.exit_status = 0, os.waitstatus_to_exitcode(status)
        return bool(pid)

    def schedule_restart(self, now: float) -> float:
        """Schedules the next start, and returns the backoff in seconds."""
        if now - self._started_at >= HEALTHY_SECONDS:
            self._backoff = FIRST_RESTART_SECONDS
        backoff, self._backoff = self._backoff, min(2 * self._backoff, MAX_RESTART_SECONDS)
        self.restart_at = now + backoff
        return backoff


def build_start_report(details: dict[str, str]) -> WorkerReport:
    return {"started": details}


def build_failure_report(failure: PriceKeeperError | OSError) -> WorkerReport:
    problems = failure.problems if isinstance(failure, ConfigError) else ()
    return {"failed": str(failure), "problems": list(problems)}


class ReportPipe:
    """The worker's end of the pipe. Closed after the first report, because the descriptor may then be reused."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def send(self, report: WorkerReport) -> bool:
        """Sends the report if it is the first, and returns whether it was. A dead supervisor is ignored."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return False
        data = json.dumps(report).encode()
        if len(data) > _MAX_REPORT_BYTES:
            data = json.dumps({"failed": "the report of its failure is too long to pass on", "problems": []}).encode()
        with suppress(BrokenPipeError):
            os.write(descriptor, data)
        os.close(descriptor)
        return True


def parse_report(data: bytes) -> WorkerReport | None:
    """The report; None while it is incomplete."""
    try:
        return dict(json.loads(data))
    except ValueError:
        return None


def parse_failure(report: WorkerReport) -> PriceKeeperError | None:
    """The error that the worker reported, as an exception of this process; None if it reported none."""
    if "failed" not in report:
        return None
    return ConfigError(report["problems"]) if report["problems"] else PriceKeeperError(report["failed"])


class SignalQueue:
    """Signals as a readable descriptor for `select`, so that none is handled in the middle of other code."""

    def __init__(self) -> None:
        self.readable, self._writable = os.pipe()
        for descriptor in (self.readable, self._writable):
            os.set_blocking(descriptor, False)
        self._pending: dict[int, None] = {}
        signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        for number in HANDLED_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._pending.setdefault(number)

    def take_pending(self) -> list[int]:
        """The signals that arrived since the last call, each once."""
        with suppress(BlockingIOError):
            while os.read(self.readable, 512):
                pass
        pending, self._pending = self._pending, {}
        return list(pending)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Block the signals within the block; they arrive after it. In a child that is forked within it, they arrive
        after the child has called `close`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)

    def close(self) -> None:
        """Restore the default handlers. Only SIGHUP stays ignored: the supervisor forwards it to a worker that has
        started, and it must not end one that is starting."""
        signal.set_wakeup_fd(-1)
        handlers: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_IGN}
        for number in HANDLED_SIGNALS:
            signal.signal(number, handlers.get(number, signal.SIG_DFL))
        os.close(self.readable)
        os.close(self._writable)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
