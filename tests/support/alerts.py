"""Alerts in a test's hands: a store in memory, a receiver that answers by a script, and processes that die anywhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
from price_keeper.alerts.alert_delivery import AlertDeliveries
from price_keeper.alerts.alert_outbox import AlertOutbox
from price_keeper.alerts.alert_raiser import AlertRaiser
from price_keeper.alerts.webhook import WebhookResponse
from price_keeper.domain import Scope
from price_keeper.errors import ConditionFailed, StoreUnavailable
from price_keeper.org_calendar import PeriodSpan
from price_keeper.stores.contract import Item, Key, Put
from price_keeper.stores.item_values import evaluate_condition
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock

DAY = PeriodSpan("DAY#20261118", 1_794_960_000, 1_795_046_400)
USD = 10**12
ACCEPTED = WebhookResponse(200)


def scope() -> Scope:
    return Scope(str(uuid4()), "my-app")


class ScriptedAlertStore:
    """Conditional puts in memory. A fault is "before" or "after", as an answer that is lost, for one put each."""

    def __init__(self) -> None:
        self.items: dict[Key, Item] = {}
        self.faults: list[str] = []
        self.puts = 0

    async def put(self, put: Put) -> None:
        self.puts += 1
        await asyncio.sleep(0)  # as any store lets others take their turns
        fault = self.faults.pop(0) if self.faults else None
        if fault == "before":
            raise StoreUnavailable("away")
        item = self.items.get(put.key)
        if put.condition is not None and not evaluate_condition(put.condition, item):
            raise ConditionFailed(item)
        self.items[put.key] = put.item
        if fault == "after":
            raise StoreUnavailable("the answer was lost", maybe_applied=True)


class ScriptedReceiver:
    """Stands for a webhook: gives the answers of its script, then takes everything."""

    host_and_port = "alerts.example.com:443"

    def __init__(self, *answers: WebhookResponse) -> None:
        self.answers = list(answers)
        self.received: list[dict[str, Any]] = []
        self.attempts = 0

    @property
    def ids(self) -> list[str]:
        return [each["id"] for each in self.received]

    async def send(self, name: str, body: bytes) -> WebhookResponse:
        self.attempts += 1
        answer = self.answers.pop(0) if self.answers else ACCEPTED
        if answer.is_accepted:
            document = orjson.loads(body)
            assert document["id"] == name
            self.received.append(document)
        return answer


class ProcessKilled(BaseException):
    """Nothing of the process continues."""


class CrashPoint:
    """Comes at the step with this number, counted from 0; `at` is then that step's name."""

    def __init__(self, step: int | None = None) -> None:
        self._steps_left = step
        self.at = ""

    def step(self, name: str) -> None:
        if self._steps_left == 0 and not self.at:
            self.at = name
        if self.at:
            raise ProcessKilled(self.at)
        if self._steps_left is not None:
            self._steps_left -= 1


class CrashingProcess:
    """A process whose every effect on the world outside may be its last."""

    def __init__(
        self,
        folder: Path,
        rows: ScriptedAlertStore,
        receiver: ScriptedReceiver,
        clock: ManualClock,
        tasks: Tasks,
        crash_point: CrashPoint | None = None,
        **how: Any,
    ) -> None:
        self.crash_point = crash_point or CrashPoint()
        self.outbox = _CrashingOutbox(folder, self.crash_point)
        sending: Any = _CrashingVerb(receiver, "send", self.crash_point)
        self.deliveries = AlertDeliveries(self.outbox, sending, clock, tasks, chance=lambda: 1.0, **how)
        store: Any = _CrashingVerb(rows, "put", self.crash_point)
        self.alerts = AlertRaiser(store, clock, self.deliveries)

    async def raise_alert(self, whom: Scope, pct: int = 80, span: PeriodSpan = DAY) -> bool:
        return await self.alerts.raise_alert(whom, "premium", span, pct, 8 * USD, 10 * USD)


class _CrashingVerb:
    """The verb of something outside, with a step before it and one after it."""

    def __init__(self, inner: Any, verb: str, death: CrashPoint) -> None:
        self._inner, self._verb, self._death = inner, verb, death

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        return self._with_steps(real) if name == self._verb else real

    def _with_steps(self, real: Callable[..., Any]) -> Callable[..., Any]:
        async def stepped(*arguments: Any) -> Any:
            self._death.step(f"before {self._verb}")
            answer = await real(*arguments)
            self._death.step(f"after {self._verb}")
            return answer

        return stepped


class _CrashingOutbox(AlertOutbox):
    def __init__(self, folder: Path, death: CrashPoint) -> None:
        super().__init__(folder)
        self._death = death

    def _write(self, alert: Any) -> None:
        self._death.step("before the file")
        self._folder.mkdir(exist_ok=True)
        (self._folder / f"{next(_numbers)}.tmp").write_bytes(alert.content()[:40])
        self._death.step("within the file")
        super()._write(alert)
        self._death.step("after the file")

    def remove(self, alert: Any) -> None:
        self._death.step("before drop")
        super().remove(alert)
        self._death.step("after drop")


_numbers = count()


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def write_leftover(folder: Path, name: str, content: bytes) -> None:
    folder.mkdir(parents=True)
    (folder / name).write_bytes(content)
