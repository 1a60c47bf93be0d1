"""From the outbox to the receiver: again and again, until it takes an alert or will never do so.

Each alert that is on its way has a task of its own. Those that do not fit in memory wait on the disk, and are taken up
when there is room.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from price_keeper.alerts.alert import Alert
from price_keeper.alerts.outbox import Outbox
from price_keeper.alerts.webhook import Answer, Webhook
from price_keeper.clock import Clock
from price_keeper.tasks import Tasks

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 300.0
TRY_SECONDS = 3 * 86_400.0
MOST_ON_THE_WAY = 1000
MOST_AT_ONCE = 4  # requests to the receiver

_log = logging.getLogger("price_keeper.alerts")


class Deliveries:
    def __init__(
        self,
        outbox: Outbox,
        webhook: Webhook,
        clock: Clock,
        tasks: Tasks,
        *,
        chance: Callable[[], float] = random.random,
        most_on_the_way: int = MOST_ON_THE_WAY,
    ) -> None:
        self._outbox = outbox
        self._webhook = webhook
        self._clock = clock
        self._tasks = tasks
        self._chance = chance
        self._most_on_the_way = most_on_the_way
        self._on_the_way: set[str] = set()
        self._door = asyncio.Semaphore(MOST_AT_ONCE)
        self.delivered = self.failed = self.given_up = 0

    @property
    def waiting(self) -> int:
        return len(self._outbox.names | self._on_the_way)

    async def keep(self, alert: Alert) -> None:
        """Before anybody is told. An alert that the disk does not take is better told than withheld."""
        try:
            await self._outbox.keep(alert)
        except OSError as failure:
            _log.error("alert %s is not on the disk, and is lost if the process dies: %s", alert.id, failure.strerror)

    def drop(self, alert: Alert) -> None:
        """It is not ours to deliver."""
        self._outbox.drop(alert)

    def take(self, alert: Alert) -> None:
        """It is ours. What does not fit, or comes while the process stops, stays on the disk."""
        if len(self._on_the_way) < self._most_on_the_way and self._is_started(alert):
            self._on_the_way.add(alert.name)
        elif alert.name not in self._outbox.names:
            self.given_up += 1
            _log.error("alert %s is not delivered: too many wait, and it is not on the disk", alert.id)

    def found(self, names: set[str]) -> None:
        self._outbox.names |= names

    def is_left(self, alert: Alert) -> bool:
        """Whether it is on the disk and nobody delivers it."""
        return alert.name in self._outbox.names and alert.name not in self._on_the_way

    async def left(self) -> list[Alert]:
        """The oldest that are left, as many as there is room for."""
        room = self._most_on_the_way - len(self._on_the_way)
        names = sorted(self._outbox.names - self._on_the_way)[:room]
        read = [await self._outbox.read(name) for name in names]
        return [alert for alert in read if alert is not None]

    def _is_started(self, alert: Alert) -> bool:
        try:
            self._tasks.start(f"webhook {alert.id}", lambda: self._deliver(alert))
        except RuntimeError:  # the background tasks are stopping
            return False
        return True

    async def _deliver(self, alert: Alert) -> None:
        """At least one attempt, however old the alert is: perhaps nobody was there to make one."""
        age = max(self._clock.now() - alert.raised_at, 0)  # the wall clock may have been set back
        end = self._clock.monotonic() + TRY_SECONDS - age
        pause, is_first = FIRST_PAUSE_SECONDS, True
        while True:
            async with self._door:
                answer = await self._webhook.send(alert.id, alert.body())
            if answer.is_taken or answer.is_final or self._clock.monotonic() >= end:
                self._settled(alert, answer)
                return
            self._failed(alert, answer, is_first)
            await self._clock.sleep(pause * (0.5 + self._chance() / 2))
            pause, is_first = min(2 * pause, LONGEST_PAUSE_SECONDS), False

    def _settled(self, alert: Alert, answer: Answer) -> None:
        self._on_the_way.discard(alert.name)
        self._outbox.drop(alert)
        if answer.is_taken:
            self.delivered += 1
        else:
            self.given_up += 1
            _log.error("alert %s is not delivered to %s: %s", alert.id, self._webhook.place, answer)

    def _failed(self, alert: Alert, answer: Answer, is_first: bool) -> None:
        self.failed += 1
        if is_first:
            _log.warning("alert %s is to be sent to %s again: %s", alert.id, self._webhook.place, answer)
