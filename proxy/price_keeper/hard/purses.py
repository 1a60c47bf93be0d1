"""A purse for each hard budget that is called for, and the work that they all need in the background."""

from __future__ import annotations

import logging
import random
from contextlib import suppress

from price_keeper.clock import Clock
from price_keeper.errors import StoreError
from price_keeper.hard.hold import Closed
from price_keeper.hard.holds import Holds
from price_keeper.hard.purse import Purse
from price_keeper.hard.rows import Name
from price_keeper.hard.shared import SpentSoFar
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks

TICK_SECONDS = 1.0
JITTER = 0.2
RECONCILE_SECONDS = 60.0

_log = logging.getLogger("price_keeper.hard")


class Purses:
    """`holds` are those of this run; `spent` reads what a budget's shards say."""

    def __init__(self, store: Store, clock: Clock, tasks: Tasks, holds: Holds, spent: SpentSoFar) -> None:
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._holds = holds
        self._spent = spent
        self._purses: dict[Name, Purse] = {}
        self._due: dict[Name, float] = {}  # to be reconciled, by the monotonic clock
        self._new: set[Name] = set()  # of other settings than before: there may have been no quota for a while

    @property
    def holder(self) -> str:
        """The name that accounts of calls give to what is spent here."""
        return self._holds.holder

    def of(self, name: Name, quota: int, version: int) -> Purse:
        """By the newest settings that anybody named."""
        found = self._purses.get(name)
        if found is None:
            found = self._purses[name] = Purse(
                self._store, self._clock, self._tasks, name, self._holds, self._spent, quota, version
            )
            self._due_after(name, random.uniform(0, RECONCILE_SECONDS))
        elif version > found.version:
            found.heard(quota, version)
            self._new.add(name)
            self._due[name] = self._clock.monotonic()
        return found

    @property
    def held_pico(self) -> int:
        """Taken from buckets, and not spent as far as is known here."""
        return sum(purse.free + purse.in_flight for purse in self._purses.values())

    @property
    def top_ups(self) -> int:
        return sum(purse.top_ups for purse in self._purses.values())

    @property
    def refusals(self) -> int:
        return sum(purse.refusals for purse in self._purses.values())

    def start(self) -> None:
        self._tasks.run_every("hard budgets", TICK_SECONDS, self.tick, jitter=JITTER)

    async def tick(self) -> None:
        """What nobody needs goes back, what was spent without a hold is looked for, and what is over is forgotten."""
        for name, purse in tuple(self._purses.items()):
            if name.is_long_over(self._clock.now()) and not purse.in_flight:
                del self._purses[name], self._due[name]
                self._new.discard(name)
                continue
            with suppress(StoreError, Closed):  # whoever needs money is told
                await purse.tick()
            await self._reconcile_in_time(name, purse)

    async def _reconcile_in_time(self, name: Name, purse: Purse) -> None:
        if self._clock.monotonic() < self._due[name]:
            return
        self._due_after(name, RECONCILE_SECONDS * random.uniform(1 - JITTER, 1 + JITTER))
        try:
            await purse.reconcile(is_forced=name in self._new)
            self._new.discard(name)
        except StoreError as failure:
            _log.warning("what is spent of the hard budget %s is not known: %s", " ".join(name), failure)

    def _due_after(self, name: Name, seconds: float) -> None:
        self._due[name] = self._clock.monotonic() + seconds

    def spent_elsewhere(self, name: Name) -> None:
        """Something was counted that nobody held: the next tick looks for it."""
        if name in self._due:
            self._due[name] = self._clock.monotonic()
