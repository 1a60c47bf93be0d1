"""Whether a process is ready while the store cannot say which tokens are revoked, by what on_store_down says."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.control.health import Readiness
from proxy.control.probes import probes
from proxy.errors import Busy, StoreUnavailable
from proxy.telemetry import Telemetry
from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.sessions import ORG, Instance, instances

AWAY = StoreUnavailable("it is away")


async def asked(instance: Instance) -> tuple[int, Any]:
    """The answer of /ready, with that check alone."""
    readiness, nobody = Readiness(), None
    readiness.started({"revocation": instance.revocation.check})
    (route,) = [each for each in probes(readiness, Telemetry()) if each.path == "/ready"]
    answer = await route.handle(nobody, nobody)  # type: ignore[arg-type]
    assert answer.value.keys() == {"status", "checks"}
    assert answer.value["status"] == ("ready" if answer.status == 200 else "not ready")
    return answer.status, answer.value["checks"]["revocation"]


async def is_welcome(instance: Instance) -> bool:
    try:
        return await instance.is_welcome(instance.tokens.mint(ORG, "web", 3600).token)
    except Busy:
        return False


async def test_in_the_grace_it_is_ready_and_says_so_and_after_it_not() -> None:
    store, clock = MemoryStore(), ManualClock()
    async with instances(store, clock, 1) as (here,):
        assert await asked(here) == (200, "ok")
        here.line.trouble = AWAY
        assert await is_welcome(here)
        status, told = await asked(here)
        assert (status, "signatures alone count for up to 600 s" in told) == (200, True)
        await clock.advance(599)
        status, told = await asked(here)
        assert (status, told.startswith("the store has not said for 599 s")) == (200, True)
        assert await is_welcome(here)
        await clock.advance(2)
        status, told = await asked(here)
        assert (status, "so none is accepted" in told) == (503, True)
        assert not await is_welcome(here)
        here.line.trouble = None
        await clock.advance(10)
        assert await asked(here) == (200, "ok")
        assert await is_welcome(here)


@pytest.mark.parametrize(("on_store_down", "grace_seconds"), [("refuse", 600.0), ("serve", 0.0)])
async def test_without_a_grace_it_is_not_ready_at_once(on_store_down: str, grace_seconds: float) -> None:
    store, clock = MemoryStore(), ManualClock()
    async with instances(store, clock, 1, on_store_down=on_store_down, grace_seconds=grace_seconds) as (here,):
        here.line.trouble = AWAY
        assert not await is_welcome(here)
        status, told = await asked(here)
        assert (status, "so none is accepted" in told) == (503, True)
        here.line.trouble = None
        await clock.advance(10)
        assert await asked(here) == (200, "ok")
