"""Deliver alerts from the outbox to the webhook: retry with backoff until the receiver accepts or rejects each one.

Delivery is at least once. At most MAX_IN_FLIGHT alerts have a task; the others wait on disk. An alert that was
not accepted within GIVE_UP_SECONDS is abandoned and logged.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from price_keeper.alerts.alert import Alert
from price_keeper.alerts.alert_outbox import AlertOutbox
from price_keeper.alerts.webhook import WebhookResponse, WebhookSender
from price_keeper.clock import Clock
from price_keeper.tasks import Tasks
from price_keeper.telemetry.incident import Incident

FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 300.0
GIVE_UP_SECONDS = 3 * 86_400.0
MAX_IN_FLIGHT = 1000
MAX_CONCURRENT_REQUESTS = 4  # requests to the receiver

_log = logging.getLogger("price_keeper.alerts")


class AlertDeliveries:
    """The deliveries of this process: its outbox, its tasks, and the counts of delivered, failed and abandoned ones."""

    def __init__(
        self,
        outbox: AlertOutbox,
        webhook: WebhookSender,
        clock: Clock,
        tasks: Tasks,
        *,
        chance: Callable[[], float] = random.random,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self._outbox = outbox
        self._webhook = webhook
        self._clock = clock
        self._tasks = tasks
        self._chance = chance
        self._max_in_flight = max_in_flight
        self._in_flight: set[str] = set()
        self._incident = Incident(_log, clock.monotonic)
        self._request_slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self.delivered = self.failed = self.abandoned = 0

    @property
    def pending(self) -> int:
        return len(self._outbox.names | self._in_flight)

    async def persist(self, alert: Alert) -> None:
        """Writes the alert to disk before it is raised. If that fails, the alert is still delivered, from memory."""
        try:
            await self._outbox.persist(alert)
        except OSError as failure:
            _log.error(
                "an alert cannot be written to disk (%s); it is delivered, but lost if the process dies: %s",
                failure.strerror,
                alert,
            )

    def discard(self, alert: Alert) -> None:
        """Removes an alert that another process delivers."""
        self._outbox.remove(alert)

    def accept(self, alert: Alert) -> None:
        """Starts to deliver the alert. If too many are in flight, or the process stops, the alert stays on disk."""
        if len(self._in_flight) < self._max_in_flight and self._try_start(alert):
            self._in_flight.add(alert.file_stem)
        elif alert.file_stem not in self._outbox.names:
            self.abandoned += 1
            _log.error(
                "an alert is dropped without notification (too many wait, and it is not on disk): %s",
                alert,
            )

    def add_orphans(self, names: set[str]) -> None:
        self._outbox.names |= names

    def is_undelivered(self, alert: Alert) -> bool:
        """Whether it is on disk and has no delivery in flight."""
        return alert.file_stem in self._outbox.names and alert.file_stem not in self._in_flight

    async def read_undelivered(self) -> list[Alert]:
        """The oldest undelivered alerts, as many as may be in flight."""
        room = self._max_in_flight - len(self._in_flight)
        names = sorted(self._outbox.names - self._in_flight)[:room]
        read_alerts = [await self._outbox.read(name) for name in names]
        return [alert for alert in read_alerts if alert is not None]

    def _try_start(self, alert: Alert) -> bool:
        try:
            self._tasks.start(f"webhook {alert.id}", lambda: self._deliver(alert))
        except RuntimeError:  # the background tasks are stopping
            return False
        return True

    async def _deliver(self, alert: Alert) -> None:
        """Makes at least one attempt, however old the alert is, because no process may have run until now."""
        age = max(self._clock.now() - alert.raised_at, 0)  # the wall clock may have been set back
        deadline = self._clock.monotonic() + GIVE_UP_SECONDS - age
        pause = FIRST_RETRY_SECONDS
        while True:
            async with self._request_slots:
                response = await self._webhook.send(alert.id, alert.body())
            if response.is_accepted or response.is_rejected or self._clock.monotonic() >= deadline:
                self._finish(alert, response)
                return
            self._note_failure(alert, response)
            await self._clock.sleep(pause * (0.5 + self._chance() / 2))
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _finish(self, alert: Alert, response: WebhookResponse) -> None:
        self._in_flight.discard(alert.file_stem)
        self._outbox.remove(alert)
        if response.is_accepted:
            self.delivered += 1
            self._incident.end("webhook %s accepts alerts again", self._webhook.host_and_port)
        else:
            self.abandoned += 1
            _log.error(
                "an alert is abandoned without notification; webhook %s: %s; %s",
                self._webhook.host_and_port,
                response,
                alert,
            )

    def _note_failure(self, alert: Alert, response: WebhookResponse) -> None:
        self.failed += 1
        self._incident.report(
            "alert %s will be retried; webhook %s: %s", alert.id, self._webhook.host_and_port, response
        )
