"""SIGHUP: has the configuration read and checked again, and its labels and prices taken on, or none of it.

Parts that follow from labels and prices make ready what they will need, each in its time; then all of them change in
one turn of the loop, so nobody ever sees half of a configuration.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias

from price_keeper import hangups
from price_keeper import telemetry as metrics
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.config.renewal import compare_catalogs, join_few, list_restart_keys, apply_reloadable
from price_keeper.control.health import Checks
from price_keeper.errors import ConfigError
from price_keeper.selection.standings import Standings
from price_keeper.tasks import Tasks
from price_keeper.telemetry import Telemetry

# Raises ConfigError; None if nothing is new. Runs in a thread: the larger the file, the longer it takes.
Read: TypeAlias = "Callable[[], Config | None]"
TakeOn: TypeAlias = "Callable[[], None]"
Prepared: TypeAlias = "Callable[[Config], Awaitable[TakeOn]]"

REFUSED: Final = "the configuration that was read last is refused, and the one before holds"

SWITCH_SECONDS: Final = 0.0005

log = logging.getLogger("price_keeper.reloading")


class _Found(NamedTuple):
    config: Config  # to be in force
    changes: str
    fixed: list[str]


class Reloading:
    """Heeds SIGHUP from when it is made; what comes before `started` is done then."""

    def __init__(self, config: Config, read: Read | None, clock: Clock, *, is_refused: bool = False) -> None:
        """`read` is None where there is nothing to read again. `is_refused`: what was read last, before this process
        began, is not what it begins with."""
        self.config = config
        self._read = read
        self._clock = clock
        self._tasks: Tasks | None = None
        self._prepared: list[Prepared] = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.ask)
        self._is_asked = hangups.taken()
        self._is_at_it = self._is_over = False
        self._last_good = clock.now()
        self._is_refused = is_refused
        self._results = {"taken": 0, "refused": 0}

    def add_to(self, telemetry: Telemetry) -> None:
        telemetry.add(metrics.RELOADS, lambda: [({"result": each}, count) for each, count in self._results.items()])
        telemetry.add(metrics.CONFIG_REFUSED, lambda: float(self._is_refused))
        telemetry.add(metrics.CONFIG_TAKEN, lambda: self._last_good)

    def add(self, prepared: Prepared) -> None:
        """In the order in which they are to take it on."""
        self._prepared.append(prepared)

    def checks(self) -> Checks:
        """For readiness: the process goes on with what it has, and says so."""

        async def refused() -> str:
            return REFUSED

        return {"configuration": refused} if self._is_refused else {}

    def started(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._begin()

    def stop(self) -> None:
        """What it has is good enough for its last calls."""
        self._is_over = True

    def ask(self) -> None:
        if self._is_over:
            log.warning("SIGHUP: the process is stopping, so it takes on nothing more")
        else:
            self._is_asked = True
            self._begin()

    def _begin(self) -> None:
        """One at a time; who asks meanwhile may have another file in mind, so it is read once more after it."""
        if self._is_asked and self._tasks is not None and not self._is_at_it and not self._is_over:
            self._is_at_it, self._is_asked = True, False
            self._tasks.once(self._reload())

    async def _reload(self) -> None:
        try:
            await self._tried()
        finally:
            self._is_at_it = False
            self._begin()

    async def _tried(self) -> None:
        if self._read is None:
            log.warning("SIGHUP: there is no file to read again, so nothing changes")
            return
        try:
            with _loop_first():
                found = await asyncio.to_thread(_found, self._read, self.config)
                if found is None:
                    return
                ready = [await prepared(found.config) for prepared in self._prepared]
        except ConfigError as failure:
            self._refuse(failure.problems)
            return
        except Exception as failure:  # of whatever kind: what it has must stay in force
            if self._is_over:
                return
            self._refuse([f"it cannot be taken on: {type(failure).__name__}: {failure}"])
            return
        if self._is_over:
            return
        self.config = found.config
        for take_on in ready:
            take_on()
        self._is_refused, self._last_good = False, self._clock.now()
        self._results["taken"] += 1
        log.warning("SIGHUP: labels and prices are taken on: %s", found.changes)
        tell_fixed(found.fixed)

    def _refuse(self, problems: Sequence[str]) -> None:
        self._is_refused = True
        self._results["refused"] += 1
        tell_refused(problems)


def _found(read: Read, running: Config) -> _Found | None:
    found = read()
    if found is None:
        return None
    whole = apply_reloadable(running, found)
    return _Found(whole, str(compare_catalogs(running, whole)), list_restart_keys(running, found))


@contextmanager
def _loop_first() -> Iterator[None]:
    """A thread that works, and never waits, lets the loop go on after a tenth of the usual time: to read the largest
    file takes seconds, in which each turn of the loop would come five milliseconds late."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def tell_refused(problems: Sequence[str]) -> None:
    for problem in problems:
        log.error("SIGHUP: the configuration is refused, and the one before holds: %s", problem)


def tell_fixed(keys: list[str]) -> None:
    if keys:
        log.warning("SIGHUP: only a restart takes on what is another now in: %s", join_few(keys))


def of_standings(standings: Standings) -> Prepared:
    """Whoever names a label in a chain that is none any more is told of: its budget goes by the rest of the chain."""

    async def prepared(config: Config) -> TakeOn:
        return lambda: _take_on(standings, config)

    return prepared


def _take_on(standings: Standings, config: Config) -> None:
    gone = standings.labels.keys() - config.labels.keys()
    standings.take_on(config.labels)
    for label, named in standings.naming(gone).items():
        told = "SIGHUP: %s is no label any more, and is passed over in the model_ordering of %s"
        log.warning(told, label, join_few(standing.scope.key for standing in named))
