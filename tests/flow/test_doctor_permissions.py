"""What the doctor tries of the store's tables is what the roles do with them: each runs here, and is watched."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from price_keeper import app
from price_keeper.clock import SystemClock
from price_keeper.config import Address, Config
from price_keeper.data_port_wiring import build_token_service
from price_keeper.doctor.permissions import ACTIONS, get_table_permissions
from price_keeper.stores.contract import ConditionCheck, Delete, Item, Key, Page, Put, Query, Update, Write
from price_keeper.stores.schema import TABLES
from price_keeper.stores.sqlite import SqliteStore

from tests.support.control_harness import API, ORG, SETTINGS
from tests.support.doctor import write_config
from tests.support.running_app import ENVIRON, ask, run_app

SECONDS = 30
_NAMES = {Put: "PutItem", Update: "UpdateItem", Delete: "DeleteItem", ConditionCheck: "ConditionCheckItem"}

Seen = set[tuple[str, str]]


class Watched(SqliteStore):
    """Notes each action as DynamoDB would be asked for it."""

    seen: Seen

    async def probe(self) -> None:
        self.seen.add(("config", "GetItem"))

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        self.seen.add((key.table, "GetItem"))
        return await super().get(key, consistent=consistent)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        self.seen.update((key.table, "BatchGetItem") for key in keys)
        return await super().get_many(keys, consistent=consistent)

    async def query(self, query: Query) -> Page:
        self.seen.add((query.table, "Query"))
        return await super().query(query)

    async def put(self, put: Put) -> None:
        self._note(put)
        await super().put(put)

    async def update(self, update: Update) -> Item:
        self._note(update)
        return await super().update(update)

    async def exchange(self, update: Update) -> Item | None:
        self._note(update)
        return await super().exchange(update)

    async def delete(self, delete: Delete) -> Item | None:
        self._note(delete)
        return await super().delete(delete)

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        for write in writes:
            self._note(write)
        await super().transact(writes, token=token)

    def _note(self, write: Write) -> None:
        self.seen.add((write.key.table, _NAMES[type(write)]))


@asynccontextmanager
async def running(
    config: Config, role: app.Role, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[app.StartedServer]:
    async def watched(store: Any, clock: Any) -> SqliteStore:
        made = Watched(Path(store.path), clock.now)
        made.seen = seen
        return await made.open()

    monkeypatch.setattr(app, "open_sqlite", watched)
    async with run_app(config, role) as started:
        yield started


def fleet(folder: Path, name: str) -> Config:
    free = {"data": Address("127.0.0.1", 0), "control": Address("127.0.0.1", 0)}
    config = write_config(folder, listen=free, journal={"dir": str(folder / name)}, aggregator={"interval_secs": 1})
    (label,) = config.labels.values()
    return dataclasses.replace(config, labels={"premium": label, "economy": label})


async def administered(url: str) -> None:
    """Whatever the control API can be asked for, at least once."""
    shop = f"{API}/apps/shop"
    client = (await ask(url, "PUT", API, SETTINGS, 201))["client_id"]
    token = (await ask(url, "PUT", shop, {"app_name": "x"}, 201))["secret_retrieval_token"]
    client, secret = (await ask(url, "GET", f"{shop}/credentials/secret", X_Retrieval_Token=token)).values()
    login = {"client_id": client, "client_secret": secret}
    for _ in range(7):  # more than a client may have
        tokens = await ask(url, "POST", "/auth/token", login)
    tokens = await ask(url, "POST", "/auth/refresh", {"refresh_token": tokens["refresh_token"]})
    await ask(url, "GET", "/credentials", Authorization=f"{client}:{secret}")
    own = f"Bearer {tokens['access_token']}"
    await ask(url, "GET", f"{shop}/model-selection?force_check=true", Authorization=own)
    usage = {"request_id": "r1", "label": "premium", "input_tokens": 10**6, "output_tokens": 1}
    await ask(url, "POST", f"{shop}/usage", usage, 201, Authorization=own)
    await ask(url, "POST", f"{shop}/usage", usage, 200, Authorization=own)
    for path in ("/api/v1/orgs", API, f"{API}/apps", shop, f"{API}/audit", f"{shop}/inference-profiles"):
        await ask(url, "GET", path)
    for path in (f"{API}/aggregates/today", f"{shop}/aggregates/today", f"{shop}/sessions"):
        await ask(url, "GET", path)
    arn = "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/x"
    profile = {"label": "own", "inference_profile_arn": arn, "format": "nova"}
    prices = {"prices_usd_per_1m": {"input": 1, "output": 2}}
    await ask(url, "POST", f"{shop}/inference-profiles", profile | prices, 201)
    await ask(url, "PUT", f"{shop}/override", {"label": "economy", "reason": "a test"})
    await ask(url, "DELETE", f"{shop}/override")
    await ask(url, "POST", "/auth/revoke", {"token": tokens["access_token"]})
    await ask(url, "POST", "/auth/revoke", {"token": tokens["refresh_token"]})
    await ask(url, "DELETE", f"{shop}/sessions")
    await ask(url, "POST", f"{shop}/credentials/rotate", {"grace_hours": 1})


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110 - no event for writes to a store
            await asyncio.sleep(0.05)


async def test_roles_use_no_permission_doctor_does_not_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control: Seen = set()
    async with running(fleet(tmp_path, "control"), "control", control, monkeypatch) as started:
        await administered(f"http://{started.control_address}")
        await until(lambda: ("daily-total", "PutItem") in control)
    assert {("secret-retrieval-tokens", "UpdateItem"), ("audit", "PutItem"), ("sessions", "Query")} <= control
    assert _untried("control", control) == set()
    sidecar: Seen = set()
    config = fleet(tmp_path, "sidecar")
    shown = f"Bearer {build_token_service(config, ENVIRON, SystemClock()).mint_access(ORG, 'shop').token}"
    body = {"messages": [{"role": "user", "content": [{"text": "Hello"}]}]}
    async with running(config, "sidecar", sidecar, monkeypatch) as started:
        for label, status in {"premium": 200, "economy": 200, "nobodys": 400}.items():
            await ask(
                f"http://{started.data_address}", "POST", f"/model/{label}/converse", body, status, Authorization=shown
            )
        await until(lambda: {("daily-total", "PutItem"), ("usage-agg-sharded", "UpdateItem")} <= sidecar)
    assert ("revoked-tokens", "BatchGetItem") in sidecar
    assert _untried("sidecar", sidecar) == set()
    assert _untried("both", control | sidecar) == set()


def _untried(role: app.Role, seen: Seen) -> Seen:
    return {(table, action) for table, action in seen if action not in get_table_permissions(role).get(table, ())}


def test_role_is_not_asked_for_permissions_of_others() -> None:
    sidecar, control, both = (
        get_table_permissions("sidecar"),
        get_table_permissions("control"),
        get_table_permissions("both"),
    )
    for table in ("sessions", "audit", "secret-retrieval-tokens"):
        assert table not in sidecar
    assert sidecar["revoked-tokens"] == {"BatchGetItem"}  # it revokes nothing
    assert sidecar["config"].isdisjoint({"PutItem", "UpdateItem", "DeleteItem"})  # and sets nothing
    assert "pricing-cache" not in control
    assert set(both) == set(TABLES)
    for table, actions in both.items():
        assert actions == sidecar.get(table, frozenset()) | control.get(table, frozenset())
        assert actions <= set(ACTIONS)
