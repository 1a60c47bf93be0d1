"""Starts the workers of one data port, starts again those that die, and ends when all have ended.

It has no event loop, and no thread but this one, so that it can fork: what it has in memory its workers share. Nothing
of what it does can fail because of a call, a store or a disk, so it stays when a worker does not.
"""

from __future__ import annotations

import gc
import logging
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, TypeAlias

from price_keeper import hangups
from price_keeper.errors import PriceKeeperError
from price_keeper.workers import reports
from price_keeper.workers.place import WorkerSlot
from price_keeper.workers.signals import SignalQueue
from price_keeper.workers.worker import Worker

STOP_SECONDS = 45.0  # for a drain, the last flush, and what is given back; then something hangs

Tell: TypeAlias = "Callable[[dict[str, str]], object]"
# Reads the configuration again, and passes on what came of it; whether it did.
Reread: TypeAlias = "Callable[[], bool]"
# Serves in that place until it is stopped, and tells once when it has started.
Work: TypeAlias = "Callable[[WorkerSlot, Tell], None]"

_log = logging.getLogger("price_keeper.workers")


class Supervisor:
    """`place` is the first worker's; `on_started` hears what that one told, when all have started. `reread` is what
    SIGHUP asks for; workers that are started after it have what it read."""

    def __init__(self, slot: WorkerSlot, work: Work, on_started: Tell, reread: Reread = lambda: False) -> None:
        self._slot = slot
        self._work = work
        self._on_started = on_started
        self._reread = reread
        self._workers = [Worker(number) for number in range(slot.count)]
        self._has_started = False
        self._stop_by: float | None = None
        self._failure: PriceKeeperError | None = None
        self._is_clean = True

    def run(self) -> int:
        """The exit code. Raises PriceKeeperError where a worker could not start, when none is left."""
        gc.collect()
        gc.freeze()  # so that no collection in a worker copies what is shared
        self._lifeline = os.pipe()
        self._signals = SignalQueue()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals.readable, selectors.EVENT_READ, None)
        try:
            if hangups.take_reload_request():
                self._heed(signal.SIGHUP)
            for worker in self._workers:
                self._start(worker)
            while not self._is_over:
                self._turn()
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
    def _is_over(self) -> bool:
        return self._stop_by is not None and not any(worker.pid for worker in self._workers)

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            if key.data is not None:
                self._hear(key.data)
        for number in self._signals.take_pending():
            self._heed(number)
        for worker in self._workers:
            if worker.has_ended():
                self._bury(worker)
        now = time.monotonic()
        if self._stop_by is not None and now >= self._stop_by:
            self._give_up()
        for worker in self._workers:
            if worker.due is not None and now >= worker.due:
                self._start(worker)

    def _patience(self) -> float | None:
        moments = [worker.due for worker in self._workers if worker.due is not None]
        moments += [] if self._stop_by is None else [self._stop_by]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    # Workers.

    def _start(self, worker: Worker) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        sys.stdout.flush()
        with self._signals.block():
            try:
                pid = os.fork()
            except OSError as failure:
                os.close(read)
                os.close(write)
                self._not_forked(worker, failure)
                return
            if not pid:
                self._become(worker.number, read, write)
        os.close(write)
        worker.born(pid, read, time.monotonic())
        self._selector.register(read, selectors.EVENT_READ, worker)

    def _not_forked(self, worker: Worker, failure: OSError) -> None:
        if not self._has_started:
            self._fail(PriceKeeperError(f"cannot start a worker: {failure.strerror}"))
            return
        pause = worker.rest(time.monotonic())
        _log.error("worker %d cannot be started: %s; tried again in %g s", worker.number, failure.strerror, pause)

    def _become(self, number: int, read: int, pipe: int) -> NoReturn:
        """In the new process, which never returns to what the supervisor was about."""
        others, self._workers = self._workers, []  # none of them is its own to signal
        code = 1
        try:
            self._selector.close()
            for each in (read, self._lifeline[1], *(other.pipe for other in others if other.pipe >= 0)):
                os.close(each)  # the lifeline would else never end
            self._signals.close()
            code = self._worked(number, pipe)
            sys.stdout.flush()
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _worked(self, number: int, pipe: int) -> int:
        slot, report_pipe = replace(self._slot, number=number, lifeline=self._lifeline[0]), reports.ReportPipe(pipe)
        try:
            self._work(slot, lambda told: report_pipe.send(reports.build_start_report(told)))
        except (PriceKeeperError, OSError) as failure:
            if not report_pipe.send(reports.build_failure_report(failure)):  # it has told that it started
                _log.error("worker %d ends: %s", number, failure)
            return 1
        return 0

    def _hear(self, worker: Worker) -> None:
        if not worker.hear():
            return
        self._selector.unregister(worker.pipe)
        os.close(worker.pipe)
        worker.pipe = -1
        if worker.is_behind and worker.is_up:
            self._signal(worker, signal.SIGHUP)
        if not self._has_started and self._stop_by is None and all(each.is_up for each in self._workers):
            self._has_started = True
            first = self._workers[0].report
            assert first is not None
            self._on_started(first["started"])

    def _bury(self, worker: Worker) -> None:
        while worker.pipe >= 0:  # what it said last
            self._hear(worker)
        report = worker.report or {}
        was_started, failure = "started" in report, reports.parse_failure(report)
        how = f"it was killed by signal {-worker.status}" if worker.status < 0 else f"it ended with {worker.status}"
        if self._stop_by is not None:
            # One that had not started yet has nothing to bring to an end.
            self._is_clean &= worker.status == 0 or (not was_started and worker.status == -signal.SIGTERM)
            return
        if not self._has_started:
            self._fail(failure or PriceKeeperError(f"worker {worker.number} did not start: {how}"))
            return
        pause = worker.rest(time.monotonic())
        why = str(failure or how).replace("\n", "; ")
        _log.error("worker %d is gone: %s; started again in %g s", worker.number, why, pause)

    # Ending.

    def _heed(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._pass_on()
        elif number != signal.SIGCHLD:
            self._stop()

    def _pass_on(self) -> None:
        if self._stop_by is not None:
            _log.warning("SIGHUP: the process is stopping, so it takes on nothing more")
        elif self._reread():
            for worker in self._workers:
                if worker.is_up:
                    self._signal(worker, signal.SIGHUP)
                else:  # it may not heed signals yet
                    worker.is_behind = True

    def _fail(self, failure: PriceKeeperError) -> None:
        self._failure = self._failure or failure
        self._stop()

    def _stop(self) -> None:
        if self._stop_by is None:
            self._stop_by = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            worker.due = None
            self._signal(worker, signal.SIGTERM)

    def _give_up(self) -> None:
        hanging = [worker.number for worker in self._workers if worker.pid]
        _log.error("workers that do not end are killed: %s", ", ".join(map(str, hanging)))
        self._is_clean = False
        self._stop_by = time.monotonic() + STOP_SECONDS
        self._kill()

    def _kill(self) -> None:
        for worker in self._workers:
            self._signal(worker, signal.SIGKILL)

    def _signal(self, worker: Worker, number: signal.Signals) -> None:
        if worker.pid:  # it is ours until it is waited for
            with suppress(ProcessLookupError):
                os.kill(worker.pid, number)
