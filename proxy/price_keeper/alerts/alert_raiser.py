"""Raise each alert once in the fleet: the process that writes its marker first raises it.

An alert is on disk before its marker is in the store, and the marker names the alert. So after a crash the next
process can tell from the two whether the alert is its own and undelivered, another process's, or not raised yet.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import TypeVar
from uuid import uuid4

from price_keeper.alerts.alert import MARKER_OWNER, Alert
from price_keeper.alerts.alert_delivery import AlertDeliveries
from price_keeper.clock import Clock
from price_keeper.domain import Scope
from price_keeper.errors import ConditionFailed, StoreError
from price_keeper.org_calendar import PeriodSpan
from price_keeper.stores import schema
from price_keeper.stores.contract import Key, Put, Store, missing_or_expired
from price_keeper.tasks import Tasks
from price_keeper.telemetry.incident import Incident

SETTLE_SECONDS = 60.0  # between attempts to settle unfinished alerts
MAX_SETTLED = 10_000  # alerts remembered as settled, so that the store is not asked about them again
MAX_IN_DOUBT = 1000  # alerts remembered whose claim has no known result

V = TypeVar("V")

_log = logging.getLogger("price_keeper.alerts")


class ClaimResult(Enum):
    """Whether an alert's marker is now this alert's (WON), was already (WON_BEFORE), or is another alert's (LOST)."""

    WON = "won"
    WON_BEFORE = "won before"
    LOST = "lost"


async def claim_alert(store: Store, alert: Alert, now: float) -> ClaimResult:
    """Write the alert's marker unless another alert's marker is there. Of several alerts for the same threshold exactly
    one wins, and claiming again for it returns WON_BEFORE. Raises StoreError."""
    try:
        await store.put(Put(alert.marker_key, alert.marker, missing_or_expired(now)))
    except ConditionFailed as failure:
        is_ours = failure.item is not None and failure.item.get(MARKER_OWNER) == alert.id
        return ClaimResult.WON_BEFORE if is_ours else ClaimResult.LOST
    return ClaimResult.WON


class AlertRaiser:
    """Raises each alert once in the fleet, then logs, counts and delivers it. Without `deliveries` alerts are only
    logged and counted. `raised` counts by threshold."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        deliveries: AlertDeliveries | None = None,
        *,
        new_id: Callable[[], str] = lambda: str(uuid4()),
    ) -> None:
        self._store = store
        self._clock = clock
        self._deliveries = deliveries
        self._new_id = new_id
        self._claiming: set[Key] = set()
        self._settled: dict[Key, None] = {}
        self._in_doubt: dict[Key, Alert] = {}  # alerts whose marker may or may not have been written
        self._incident = Incident(_log, clock.monotonic)
        self.raised: Counter[int] = Counter()

    @property
    def deliveries(self) -> AlertDeliveries | None:
        return self._deliveries

    def add_orphans(self, names: set[str]) -> None:
        """Adds alerts from the journals of workers that no longer exist; their files are now in this outbox."""
        if self._deliveries is not None:
            self._deliveries.add_orphans(names)

    def start(self, tasks: Tasks) -> None:
        tasks.start("unfinished alerts", self._run)

    async def raise_alert(
        self, scope: Scope, label: str, span: PeriodSpan, pct: int, spent_pico: int, quota_pico: int
    ) -> bool:
        """Raises the alert unless it has been raised, and returns whether this process raised it. Idempotent, and free
        once the alert is known to be raised. If the store is unreachable, this process retries in the background and on
        each further call."""
        key = schema.alert_marker_key(scope, label, span.key, pct)
        if key in self._settled or key in self._claiming:
            return False
        now = int(self._clock.now())
        alert = self._in_doubt.get(key) or Alert(
            self._new_id(), scope, label, span.key, span.end, pct, spent_pico, quota_pico, now
        )
        _put_bounded(self._in_doubt, key, alert, MAX_IN_DOUBT)
        try:
            return await self._settle(alert) is not ClaimResult.LOST
        except StoreError as failure:
            self._note_store_failure(failure)
            return False

    async def settle_unfinished(self) -> None:
        """Tries once to settle each alert that is in doubt, or on disk without a delivery in flight."""
        try:
            for alert in await self._list_unfinished():
                if alert.marker_key not in self._claiming and self._is_unfinished(alert):
                    await self._settle(alert)
        except StoreError as failure:
            self._note_store_failure(failure)

    async def _run(self) -> None:
        while True:
            await self.settle_unfinished()
            await self._clock.sleep(SETTLE_SECONDS)

    async def _list_unfinished(self) -> list[Alert]:
        on_disk = await self._deliveries.read_undelivered() if self._deliveries is not None else []
        return [*self._in_doubt.values(), *on_disk]

    def _is_unfinished(self, alert: Alert) -> bool:
        """Whether it still needs settling; another task may have done so since the list was made."""
        return self._in_doubt.get(alert.marker_key) == alert or (
            self._deliveries is not None and self._deliveries.is_undelivered(alert)
        )

    async def _settle(self, alert: Alert) -> ClaimResult:
        """Claims the alert, then raises, counts and delivers it. `_claiming` keeps other tasks from the same claim.
        After the store's response nothing is awaited, so these steps happen together unless the process dies."""
        key = alert.marker_key
        self._claiming.add(key)
        try:
            result = await self._claim(alert)
        finally:
            self._claiming.discard(key)
        self._incident.end("alerts can be raised again")
        is_own = self._in_doubt.get(key) == alert  # created by this process, which has not raised it yet
        if is_own:
            del self._in_doubt[key]
        _put_bounded(self._settled, key, None, MAX_SETTLED)
        if result is ClaimResult.WON or (is_own and result is ClaimResult.WON_BEFORE):
            self.raised[alert.threshold_pct] += 1
            _log.warning("threshold reached: %s", alert)
        elif result is ClaimResult.WON_BEFORE:
            _log.info("threshold reached before, to be delivered now: %s", alert)
        self._hand_to_delivery(alert, result)
        return result

    async def _claim(self, alert: Alert) -> ClaimResult:
        if alert.is_marker_expired(self._clock.now()):
            return ClaimResult.LOST  # its marker may have expired, so it is unknown whether it was raised
        if self._deliveries is not None:
            await self._deliveries.persist(alert)
        return await claim_alert(self._store, alert, self._clock.now())

    def _hand_to_delivery(self, alert: Alert, result: ClaimResult) -> None:
        if self._deliveries is None:
            return
        if result is ClaimResult.LOST:
            self._deliveries.discard(alert)
        else:
            self._deliveries.accept(alert)

    def _note_store_failure(self, failure: StoreError) -> None:
        self._incident.report(
            "alerts cannot be raised: store error (%s); they are kept, and raised when the store answers; retried "
            "every %g s",
            failure,
            SETTLE_SECONDS,
        )


def _put_bounded(memory: dict[Key, V], key: Key, value: V, max_entries: int) -> None:
    memory[key] = value
    while len(memory) > max_entries:
        del memory[next(iter(memory))]
