"""A budget state that is evicted while a call waits for it: the call is charged all the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from price_keeper.domain import Caller

from tests.support.control_harness import API, ORG, open_control_harness
from tests.support.engines import Engines


@pytest.mark.parametrize("moment", ["when it was met", "when it was looked at"])
async def test_budget_state_evicted_while_awaited_still_charges_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As when an org that was taken to have the defaults turns out to have a calendar of its own."""
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path) as api:
        await api.put_org()
        await api.put_app()
        registry, caller = api.parts.budgets, Caller(ORG, "shop", "client")

        def forget_after(wait: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
            async def wait_and_forget(key: Any) -> None:
                await wait(key)
                registry._forget_org(ORG)

            return wait_and_forget

        waits_on: Any = registry._loads if moment == "when it was met" else registry.refresher
        with monkeypatch.context() as patch:
            patch.setattr(waits_on, "wait", forget_after(waits_on.wait))
            caller_day = await registry.load(caller)
        assert caller_day.start <= api.clock.now() < caller_day.end
        selected = await api.ask("GET", f"{API}/apps/shop/model-selection?force_check=true")
        assert selected.status == 200, selected.body
