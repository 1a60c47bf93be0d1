"""A standing that is forgotten while somebody waits for it: the call is paid for all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from price_keeper.domain import Caller

from tests.support.control_harness import API, ORG, open_control_harness
from tests.support.engines import Engines


@pytest.mark.parametrize("moment", ["when it was met", "when it was looked at"])
async def test_whoever_waits_for_a_standing_that_is_forgotten_finds_a_payer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As when an org that was taken to have the defaults turns out to have a calendar of its own."""
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path) as api:
        await api.put_org()
        await api.put_app()
        standings, caller = api.parts.budgets, Caller(ORG, "shop", "client")

        class Forgetful(asyncio.Event):
            def __init__(self, over: asyncio.Event) -> None:
                self.over = over

            async def wait(self) -> bool:  # type: ignore[override]
                await self.over.wait()
                standings._forget_org(ORG)
                return True

        refresh = standings.refresher.refresh
        with monkeypatch.context() as patch:
            if moment == "when it was met":
                standings._loading[ORG, "shop"] = Forgetful(standings._start_loading(caller))
            else:
                patch.setattr(standings.refresher, "refresh", lambda state: Forgetful(refresh(state)))
            payer = await standings.load(caller)
        assert payer.start <= api.clock.now() < payer.end
        selected = await api.ask("GET", f"{API}/apps/shop/model-selection?force_check=true")
        assert selected.status == 200, selected.body
