"""Requests and tokens a minute, of an app and of its org, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from price_keeper.domain import Scope
from price_keeper.errors import StoreUnavailable
from price_keeper.rates.token_bucket import parse_stored_bucket
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Put, Value

from tests.support.clock import StoppedClock
from tests.support.data_port import APP, ORG, DataPort, DataPortResponse, data_port

TURN = {"messages": [{"role": "user", "content": [{"text": "x" * 400}]}], "inferenceConfig": {"maxTokens": 10}}
OF_ORG, OF_APP = Scope(ORG), Scope(ORG, APP)


@asynccontextmanager
async def limited(
    folder: Path, app: dict[str, Value] | None = None, org: dict[str, Value] | None = None, **more: Any
) -> AsyncIterator[DataPort]:
    async with data_port(folder, **more) as port:
        await set_limits(port, app, org)
        yield port


async def set_limits(
    port: DataPort, app: dict[str, Value] | None, org: dict[str, Value] | None, version: int = 1
) -> None:
    for key, limits in ((schema.org_config_key(ORG), org), (schema.app_config_key(ORG, APP), app)):
        await port.store.put(Put(key, {"version": version} | ({} if limits is None else {"limits": limits})))


async def ask(port: DataPort, path: str = "/model/premium/converse", **body: Any) -> DataPortResponse:
    return await port.ask(path, {**TURN, **body})


async def statuses(port: DataPort, calls: int) -> list[int]:
    return [(await ask(port)).status for _ in range(calls)]


async def bucket(port: DataPort, scope: Scope) -> Item:
    item = await port.store.get(schema.rate_bucket_key(scope, "RATE"))
    assert item is not None
    return item


async def test_requests_per_minute_are_limited(tmp_path: Path) -> None:
    async with limited(tmp_path, app={"rpm": 6, "mode": "exact"}, clock=StoppedClock()) as port:
        assert await statuses(port, 7) == [200] * 6 + [429]
        refused = await ask(port)
        assert refused.headers["x-amzn-errortype"].startswith("ThrottlingException")
        assert refused.body["message"] == f"app {APP} of org {ORG} is limited to 6 requests a minute"
        assert refused.body["details"] == {"client_id": f"org-{ORG}-app-{APP}"}
        assert refused.headers["retry-after"] == "10"
        assert refused.headers["x-amz-retry-after"] == "10000"
        assert len(port.bedrock.ledger) == 6  # what is refused goes nowhere


async def test_calls_succeed_after_stated_wait(tmp_path: Path) -> None:
    clock = StoppedClock()
    async with data_port(tmp_path, clock=clock) as port:
        await set_limits(port, {"rpm": 6, "mode": "exact"}, None)
        assert await statuses(port, 7) == [200] * 6 + [429]
        wait = int((await ask(port)).headers["x-amz-retry-after"])
        clock.ahead += wait / 1000 - 0.1
        assert (await ask(port)).status == 429
        clock.ahead += 0.1
        assert await statuses(port, 2) == [200, 429]


@pytest.mark.parametrize("mode", ["exact", "lease"])
async def test_tokens_per_minute_count_actual_usage(tmp_path: Path, mode: str) -> None:
    async with limited(tmp_path, app={"tpm": 100_000, "mode": mode}) as port:
        answers = [await ask(port) for _ in range(5)]
        used = sum(answer.body["usage"]["totalTokens"] for answer in answers)
    # The port has given back what it held, and told what was used.
    async with limited(tmp_path, app={"tpm": 100_000, "mode": mode}) as port:
        state = parse_stored_bucket(await bucket(port, OF_APP))
        assert state.limits["tpm"].consumed == used * 1000
        assert state.limits["tpm"].tokens == (100_000 - used) * 1000


async def test_app_and_org_limits_apply_together_or_not_at_all(tmp_path: Path) -> None:
    exact: dict[str, Value] = {"rpm": 100, "mode": "exact"}
    async with limited(tmp_path, app=exact, org={"rpm": 3, "mode": "exact"}, clock=StoppedClock()) as port:
        assert await statuses(port, 5) == [200] * 3 + [429] * 2
        for scope in (OF_APP, OF_ORG):
            assert parse_stored_bucket(await bucket(port, scope)).limits["rpm"].consumed == 3000


async def test_call_above_remaining_tokens_is_admitted_at_half_full_bucket(tmp_path: Path) -> None:
    """Such as one with an image, whose bytes say little; its actual usage is counted."""
    async with limited(tmp_path, app={"tpm": 1000, "mode": "exact"}, clock=StoppedClock()) as port:
        large = {"messages": [{"role": "user", "content": [{"text": "x" * 40_000}]}]}
        answers = [await ask(port, **large) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 429, 429]
        used = answers[0].body["usage"]["totalTokens"]
        assert parse_stored_bucket(await bucket(port, OF_APP)).limits["tpm"].consumed == used * 1000
        assert int(answers[1].headers["x-amz-retry-after"]) > 0


class Slow:
    """A store that takes its time for settings."""

    seconds = 0.0

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_many(self, *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(self.seconds)
        return await self._store.get_many(*arguments, **named)


async def test_first_read_of_limits_lets_nobody_bypass_them(tmp_path: Path) -> None:
    stores: list[Slow] = []

    def wrapped(store: Any) -> Any:
        stores.append(Slow(store))
        return stores[0]

    async def later(number: int) -> int:
        await asyncio.sleep(0.02 * number)
        return (await ask(port)).status

    async with limited(tmp_path, app={"rpm": 2, "mode": "exact"}, wrap_store=wrapped, clock=StoppedClock()) as port:
        stores[0].seconds = 0.3
        answered = await asyncio.gather(*map(later, range(20)))
        assert answered.count(200) == 2


async def test_responses_state_limits_and_remaining(tmp_path: Path) -> None:
    async with limited(tmp_path, app={"rpm": 600, "tpm": 500_000}, org={"rpm": 400}) as port:
        headers = (await ask(port)).headers
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-limit-tokens"]) == ("400", "500000")
        assert 380 <= int(headers["x-ratelimit-remaining-requests"]) < 400
        assert 490_000 <= int(headers["x-ratelimit-remaining-tokens"]) < 500_000


async def test_missing_limits_add_no_headers_and_write_nothing(tmp_path: Path) -> None:
    async with limited(tmp_path) as port:
        assert not [name for name in (await ask(port)).headers if "ratelimit" in name]
        assert await port.store.get(schema.rate_bucket_key(OF_APP, "RATE")) is None


async def test_call_refused_by_budget_returns_its_tokens(tmp_path: Path) -> None:
    async with limited(tmp_path, app={"rpm": 2, "mode": "exact"}, clock=StoppedClock()) as port:
        key = schema.app_config_key(ORG, APP)
        await port.store.put(
            Put(key, {"limits": {"rpm": 2, "mode": "exact"}, "model_ordering": ["premium"], "quotas": {"premium": 0}})
        )
        assert {(await ask(port)).status for _ in range(4)} == {400}


async def test_free_call_counts_as_request(tmp_path: Path) -> None:
    async with limited(tmp_path, app={"rpm": 2, "tpm": 1000, "mode": "exact"}, clock=StoppedClock()) as port:
        counted = [await ask(port, "/model/premium/count-tokens", input={"converse": TURN}) for _ in range(3)]
        assert counted[-1].status == 429
        assert parse_stored_bucket(await bucket(port, OF_APP)).limits["tpm"].consumed == 0


async def test_changed_limits_apply_within_a_minute(tmp_path: Path) -> None:
    clock = StoppedClock()
    async with data_port(tmp_path, clock=clock) as port:
        await set_limits(port, {"rpm": 1, "mode": "exact"}, None)
        assert await statuses(port, 2) == [200, 429]
        await set_limits(port, {"rpm": 6000, "mode": "exact"}, None, version=2)
        clock.ahead += 60
        await statuses(port, 1)
        clock.ahead += 1
        assert await statuses(port, 10) == [200] * 10


class AwayLater:
    """A store that answers nothing from some time on."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)

        async def perhaps(*arguments: Any, **named: Any) -> Any:
            if self.is_away:
                raise StoreUnavailable("away", maybe_applied=False)
            return await verb(*arguments, **named)

        return perhaps


@pytest.mark.parametrize("policy", ["serve", "refuse"])
async def test_store_outage_follows_policy(tmp_path: Path, policy: str) -> None:
    stores: list[AwayLater] = []

    def wrapped(store: Any) -> Any:
        stores.append(AwayLater(store))
        return stores[0]

    async with limited(tmp_path, app={"rpm": 6, "mode": "exact"}, wrap_store=wrapped, on_store_down=policy) as port:
        assert await statuses(port, 2) == [200] * 2
        stores[0].is_away = True
        assert await statuses(port, 8) == ([200] * 6 + [429] * 2 if policy == "serve" else [503] * 8)
        stores[0].is_away = False
