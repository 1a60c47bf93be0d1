"""What a process says of its readiness: by what its checks find, how often they are made, what strangers learn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from price_keeper.control import readiness_checks
from price_keeper.control.probe_endpoints import build_probe_routes
from price_keeper.control.readiness_checks import Readiness
from price_keeper.errors import (
    Busy,
    InvalidStoreRequest,
    RecordingUnavailable,
    StoreAccessDenied,
    StoreError,
    StoreMisconfigured,
    StoreThrottled,
    StoreUnavailable,
)
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.clock import ManualClock, settle
from tests.support.memory_store import MemoryStore
from tests.support.token_service_instances import ORG, TokenServiceInstance, open_instances

AWAY = StoreUnavailable("it is away")


async def asked(instance: TokenServiceInstance) -> tuple[int, Any]:
    """The answer of /ready, with that check alone."""
    readiness, nobody = Readiness(ManualClock()), None
    readiness.start({"revocation": instance.revocation.check})
    (route,) = [each for each in build_probe_routes(readiness, MetricsRegistry()) if each.path == "/ready"]
    answer = await route.handler(nobody, nobody)  # type: ignore[arg-type]
    assert answer.body.keys() == {"status", "checks"}
    assert answer.body["status"] == ("ready" if answer.status == 200 else "not ready")
    return answer.status, answer.body["checks"]["revocation"]


async def is_welcome(instance: TokenServiceInstance) -> bool:
    try:
        return await instance.accepts(instance.tokens.mint_access(ORG, "web", 3600).token)
    except Busy:
        return False


async def test_store_outage_is_ready_during_grace_and_not_after() -> None:
    store, clock = MemoryStore(), ManualClock()
    async with open_instances(store, clock, 1) as (here,):
        assert await asked(here) == (200, "ok")
        here.link.failure = AWAY
        assert await is_welcome(here)
        status, text = await asked(here)
        assert (status, "signatures alone count for up to 600 s" in text) == (200, True)
        await clock.advance(599)
        status, text = await asked(here)
        assert (status, text.startswith("the store has not said for 599 s")) == (200, True)
        assert await is_welcome(here)
        await clock.advance(2)
        status, text = await asked(here)
        assert (status, "so none is accepted" in text) == (503, True)
        assert not await is_welcome(here)
        here.link.failure = None
        await clock.advance(10)
        assert await asked(here) == (200, "ok")
        assert await is_welcome(here)


@pytest.mark.parametrize(("on_store_down", "grace_seconds"), [("refuse", 600.0), ("serve", 0.0)])
async def test_store_outage_without_grace_is_not_ready(on_store_down: str, grace_seconds: float) -> None:
    store, clock = MemoryStore(), ManualClock()
    async with open_instances(store, clock, 1, on_store_down=on_store_down, grace_seconds=grace_seconds) as (here,):
        here.link.failure = AWAY
        assert not await is_welcome(here)
        status, text = await asked(here)
        assert (status, "so none is accepted" in text) == (503, True)
        here.link.failure = None
        await clock.advance(10)
        assert await asked(here) == (200, "ok")


# How often it looks, and what it tells.


class Slow:
    """A check that answers when a test lets it."""

    def __init__(self) -> None:
        self.asked = 0
        self.gate = asyncio.Event()
        self.failure: Exception | None = None

    async def __call__(self) -> None:
        self.asked += 1
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure


def started(clock: ManualClock, **checks: Slow) -> Readiness:
    readiness = Readiness(clock)
    readiness.start(checks)
    return readiness


async def test_concurrent_probes_share_one_check_for_a_second() -> None:
    clock, store = ManualClock(), Slow()
    readiness = started(clock, store=store)
    asking = [asyncio.create_task(readiness.report()) for _ in range(100)]
    await settle()
    asking[0].cancel()  # the others wait for the same look
    store.gate.set()
    reports = await asyncio.gather(*asking[1:])
    assert {each["status"] for each in reports} == {"ready"}
    await clock.advance(0.9)
    assert (await readiness.report())["status"] == "ready"
    assert store.asked == 1
    store.failure = AWAY
    await clock.advance(0.2)
    assert (await readiness.report())["status"] == "not ready"
    assert store.asked == 2


async def test_stopping_is_reported_at_once() -> None:
    store = Slow()
    store.gate.set()
    readiness = started(ManualClock(), store=store)
    assert (await readiness.report())["status"] == "ready"
    readiness.stop()
    assert await readiness.report() == {"status": "not ready", "checks": {"store": "ok", "process": "stopping"}}


async def test_checks_run_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness_checks, "CHECK_TIMEOUT_SECONDS", 0.2)
    checks = {name: Slow() for name in ("store", "journal", "revocation")}
    readiness = started(ManualClock(), **checks)
    asking = asyncio.create_task(readiness.report())
    await settle()
    assert [check.asked for check in checks.values()] == [1, 1, 1]
    checks["journal"].gate.set()
    found = (await asking)["checks"]
    assert list(found.items()) == [
        ("store", "no answer in 0.2 seconds"),
        ("journal", "ok"),
        ("revocation", "no answer in 0.2 seconds"),
    ]


SECRET = "/srv/keeper/store.db: no such table: config"


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (StoreUnavailable(SECRET), "the store is away; the log says why"),
        (StoreAccessDenied(SECRET), "the store refuses our credentials; the log says why"),
        (StoreThrottled(SECRET), "the store asks to slow down; the log says why"),
        (StoreMisconfigured(SECRET), "the store is not as it should be; the log says why"),
        (InvalidStoreRequest(SECRET), "the store cannot be used; the log says why"),
        (StoreError(SECRET), "the store cannot be used; the log says why"),
        (ValueError(SECRET), "this cannot be checked; the log says why"),
    ],
)
async def test_probe_shows_kind_of_failure_and_log_shows_rest_once(
    failure: Exception, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock, store = ManualClock(), Slow()
    store.gate.set()
    store.failure = failure
    readiness = started(clock, store=store)
    for _ in range(3):
        assert (await readiness.report())["checks"] == {"store": expected}
        await clock.advance(1)
    assert [record.getMessage().count(SECRET) for record in caplog.records] == [1]
    store.failure = None
    assert (await readiness.report())["checks"] == {"store": "ok"}
    await clock.advance(1)
    store.failure = failure
    await readiness.report()
    assert [SECRET in each.getMessage() for each in caplog.records] == [True, False, True]
    assert caplog.records[1].getMessage() == "ready again: store"


async def test_refusal_text_of_callers_is_shown_in_report(caplog: pytest.LogCaptureFixture) -> None:
    journal = Slow()
    journal.gate.set()
    journal.failure = RecordingUnavailable("the journal cannot be written: No space left on device")
    readiness = started(ManualClock(), journal=journal)
    assert (await readiness.report())["checks"] == {"journal": str(journal.failure)}
    assert not caplog.records
