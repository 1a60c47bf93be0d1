"""The status page's events over real sockets: what changed comes by itself, however many listen it is found out once,
and listeners do not affect each other."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from price_keeper.control.page import page_endpoints, status_board
from price_keeper.control.page.page_state import MAX_ADMIN_PAGES, MAX_PAGES_PER_CLIENT, SUBSCRIBE_RETRY_SECONDS
from price_keeper.control.page.status_board import STORE_AWAY_TEXT
from price_keeper.errors import StoreUnavailable
from price_keeper.stores.contract import Store

from tests.flow.test_run import SERVED
from tests.flow.test_status_page import OVERRIDE, SHOP, spend
from tests.support.commands import ROOT, sidecar
from tests.support.control_harness import ADMIN_KEY, API, ORG, SETTINGS, ControlHarness
from tests.support.engines import Engines
from tests.support.status_page import PAGE, SECONDS, TICK, Browser, open_events, put, status_page

IN_FULL = f"?org={ORG}&app=shop"


class Leaving:
    """A store that can be away."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_away = False
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        if self.is_away:
            raise StoreUnavailable("away")
        return getattr(self._store, name)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ControlHarness]:
    async with Engines({}).open("sqlite", tmp_path) as store, status_page(tmp_path, Leaving(store)) as running:  # type: ignore[arg-type]
        await put(running, "shop")
        yield running


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_events_start_with_everything_then_changes(api: ControlHarness) -> None:
    async with open_events(api, IN_FULL) as (answer, events):
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
        assert answer.headers["Cache-Control"] == "no-store"
        _, first = await events.next()
        assert {"at", "health", "trouble", "list", "scope", "course", "happened"} == first.keys()
        await spend(api, "one", "premium", 2)
        event = await events.until("scope")
        assert event["scope"]["labels"][0]["spent_usd_micros"] == "6000000"
        assert "health" not in event
        await api.ask("PUT", f"{SHOP}/override", OVERRIDE)
        await api.ask("GET", f"{SHOP}/model-selection?force_check=true")
        while (await events.until("scope"))["scope"]["override"] is None:
            pass


async def test_heartbeat_without_changes_has_no_data(api: ControlHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def same(*_: Any) -> dict[str, Any]:
        return {"scope": 1}

    monkeypatch.setattr(page_endpoints, "_read_board", same)
    async with open_events(api) as (answer, events):
        assert (await events.next())[1]["scope"] == 1
        async with asyncio.timeout(SECONDS):
            while await answer.content.readline() != b": still here\n":
                pass


async def test_head_request_does_not_subscribe(api: ControlHarness) -> None:
    answer = await api.ask("HEAD", "/status/events")
    assert (answer.status, answer.raw, answer.headers["Content-Type"]) == (200, b"", "text/event-stream")
    assert len(api.parts.page.subscriptions) == 0


async def test_all_listeners_share_one_read(api: ControlHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    making = status_board._build_board

    async def counted(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        return await making(*arguments)

    monkeypatch.setattr(status_board, "_build_board", counted)
    async with AsyncExitStack() as open_now:
        streams = [await open_now.enter_async_context(open_events(api, IN_FULL)) for _ in range(MAX_ADMIN_PAGES)]
        assert all(answer.status == 200 for answer, _ in streams)
        await asyncio.gather(*(events.next() for _, events in streams))
        made, asked, began = 0, api.store.asked, time.monotonic()  # type: ignore[attr-defined]
        await asyncio.sleep(50 * TICK)
        ticks = (time.monotonic() - began) / TICK
        assert 1 < made <= ticks + 1
        # Of one page: a page of the registry, the settings of its orgs, their apps, names, and what happened.
        assert api.store.asked - asked <= 6 * (ticks + 1)  # type: ignore[attr-defined]


async def test_excess_listeners_are_refused_and_slots_released(api: ControlHarness) -> None:
    app = api.auth_headers((ORG, "shop"))
    async with AsyncExitStack() as open_now:
        for who, most in ((api.auth_headers("admin"), MAX_ADMIN_PAGES), (app, MAX_PAGES_PER_CLIENT)):
            for _ in range(most):
                answer, events = await open_now.enter_async_context(open_events(api, **who))
                await events.next()
            async with open_events(api, **who) as (refused, _):
                document = await refused.json()
                assert (refused.status, document["error"]) == (503, "unavailable")
                assert refused.headers["Retry-After"] == f"{SUBSCRIBE_RETRY_SECONDS:.0f}"
            assert (await api.ask("GET", "/status/board", who=None, headers=who)).status == 200
        assert len(api.parts.page.subscriptions) == MAX_ADMIN_PAGES + MAX_PAGES_PER_CLIENT
        assert answer.status == 200
    await until(lambda: len(api.parts.page.subscriptions) == 0)
    async with open_events(api) as (again, _):
        assert again.status == 200


async def test_store_outage_is_shown_and_stream_continues(api: ControlHarness) -> None:
    async with open_events(api, IN_FULL) as (_, events):
        assert (await events.next())[1]["trouble"] is None
        api.store.is_away = True  # type: ignore[attr-defined]
        assert (await events.until("trouble"))["trouble"] == STORE_AWAY_TEXT
        api.store.is_away = False  # type: ignore[attr-defined]
        assert (await events.until("trouble"))["trouble"] is None


async def test_ended_session_ends_its_stream(api: ControlHarness) -> None:
    browser = Browser(api)
    await browser.sign_in_as(ORG, "shop")
    assert browser.cookie is not None
    async with open_events(api, IN_FULL, Cookie=browser.cookie, **PAGE) as (_, events):
        await events.next()
        await browser.ask("DELETE", "/status/session")
        while (event := await events.next())[0] != "end":
            assert event[0] == "message"
        with pytest.raises(StopAsyncIteration):
            await events.next()


async def test_shutdown_ends_streams(api: ControlHarness) -> None:
    async with open_events(api) as (_, events):
        await events.next()
        api.control.stop()
        assert (await events.next())[0] == "end"
        with pytest.raises(StopAsyncIteration):
            await events.next()
    assert (await api.ask("GET", "/status/events")).status == 503


def test_open_page_does_not_delay_drain(tmp_path: Path) -> None:
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=tmp_path) as running:
        key = (tmp_path / "data" / "admin-key").read_text()
        asked = urllib.request.Request(f"{running.control}/status/events", headers={"X-API-Key": key})
        with urllib.request.urlopen(asked, timeout=SECONDS) as stream:
            assert stream.readline() == b"retry: 3000\n"
            while not stream.readline().startswith(b"data: "):
                pass
            assert running.stop(signal.SIGTERM) == 0
            assert b"event: end" in stream.read()  # it got the event, and was not cut off when the port stopped waiting
        assert running.errors == ""
        assert json.dumps(running.startup_output).count("/status") == 1


def test_spend_without_listeners_is_in_history(tmp_path: Path) -> None:
    """By the totals that the process brings up to date in any case."""
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    settings = SERVED | {"PRICE_KEEPER_API_KEY": ADMIN_KEY, "PRICE_KEEPER__AGGREGATOR__INTERVAL_SECS": "0.1"}
    with sidecar("serve", folder=tmp_path, **settings) as running:

        def ask(path: str, body: Any = None, method: str | None = None) -> Any:
            headers = {"X-API-Key": ADMIN_KEY, "Content-Type": "application/json"}
            data = None if body is None else json.dumps(body).encode()
            asked = urllib.request.Request(running.control + path, data, headers, method=method)
            with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
                return json.load(answer)

        ask(API, SETTINGS | {"model_ordering": ["premium"], "quotas": {"premium": 10_000_000}}, "PUT")
        ask(SHOP, {"app_name": "shop"}, "PUT")
        usage = {"request_id": "one", "label": "premium", "input_tokens": 1000, "output_tokens": 0}
        ask(f"{SHOP}/usage", usage)
        time.sleep(2.1)  # times have whole seconds
        reported = ask(f"/status/board{IN_FULL}")
        points = reported["course"].get("premium") or ask(f"/status/board{IN_FULL}")["course"]["premium"]
        assert points[0][1] == 3000
        assert points[-1][0] - points[0][0] >= 1
