"""Clients' secrets and the container credentials made from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.auth import clients as module
from proxy.auth.clients import Clients, hash_secret, new_secret
from proxy.auth.container import ContainerCredentials
from proxy.auth.keys import SigningKey
from proxy.auth.tokens import Tokens
from proxy.errors import AccessDenied, Busy, StoreUnavailable
from proxy.exchange import Request
from proxy.stores import schema
from proxy.stores.contract import Put
from proxy.stores.sqlite import SqliteStore

ORG = "550e8400-e29b-41d4-a716-446655440000"
WEB = f"org-{ORG}-app-web"
SECRET, OTHER = new_secret(), new_secret()
KEY = b"a secret that is long enough for HS256"


class Time:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore(tmp_path / "store.db", lambda: 0.0).open()
    await _set_secret(opened, SECRET)
    yield opened
    await opened.close()


async def _set_secret(store: SqliteStore, secret: str) -> None:
    await store.put(Put(schema.app_config(ORG, "web"), {"client_secret_hash": hash_secret(secret).decode()}))


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Each secret that bcrypt was asked about."""
    seen: list[bytes] = []
    real = module.bcrypt.checkpw

    def counted(secret: bytes, kept: bytes) -> bool:
        seen.append(secret)
        return real(secret, kept)

    monkeypatch.setattr(module.bcrypt, "checkpw", counted)
    return seen


async def test_the_right_secret_is_compared_once(store: SqliteStore, time: Time, comparisons: list[bytes]) -> None:
    clients = Clients(store, time)
    for _ in range(3):
        assert (await clients.check(WEB, SECRET)).app == "web"
    assert comparisons == [SECRET.encode()]


@pytest.mark.parametrize(
    ("client_id", "secret"),
    [(WEB, OTHER), (f"org-{ORG}-app-nobody", SECRET), (f"org-{ORG}", SECRET), ("nonsense", SECRET)],
)
async def test_what_is_wrong_is_not_told(store: SqliteStore, time: Time, client_id: str, secret: str) -> None:
    clients = Clients(store, time)
    for _ in range(2):
        with pytest.raises(AccessDenied, match=r"^the client id or its secret is wrong$"):
            await clients.check(client_id, secret)


@pytest.mark.parametrize("secret", ["", "short", SECRET + "x", SECRET[:-1], "x" * 10_000])
async def test_a_secret_of_another_length_costs_nothing(
    store: SqliteStore, time: Time, comparisons: list[bytes], secret: str
) -> None:
    with pytest.raises(AccessDenied):
        await Clients(store, time).check(WEB, secret)
    assert comparisons == []


async def test_a_client_that_does_not_exist_takes_as_long(
    store: SqliteStore, time: Time, comparisons: list[bytes]
) -> None:
    with pytest.raises(AccessDenied):
        await Clients(store, time).check(f"org-{ORG}-app-nobody", SECRET)
    assert comparisons == [SECRET.encode()]


async def test_a_new_secret_takes_effect_within_a_minute(store: SqliteStore, time: Time) -> None:
    clients = Clients(store, time)
    await clients.check(WEB, SECRET)
    await _set_secret(store, OTHER)
    time.now += module.HASH_SECONDS
    with pytest.raises(AccessDenied):
        await clients.check(WEB, SECRET)
    assert (await clients.check(WEB, OTHER)).app == "web"


async def test_the_store_away_is_no_wrong_secret(store: SqliteStore, time: Time) -> None:
    class Away:
        async def get(self, *_: Any, **__: Any) -> None:
            raise StoreUnavailable("by the test")

    with pytest.raises(Busy):
        await Clients(Away(), time).check(WEB, SECRET)  # type: ignore[arg-type]


async def test_too_many_comparisons_are_turned_away(
    store: SqliteStore, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING", 3)
    clients = Clients(store, time)
    outcomes = await asyncio.gather(*(clients.check(WEB, new_secret()) for _ in range(8)), return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["AccessDenied"] * 3 + ["Busy"] * 5
    assert (await clients.check(WEB, SECRET)).app == "web"


class Kept:
    """A responder that keeps what it is given."""

    has_started = is_gone = False

    def __init__(self) -> None:
        self.status, self.headers, self.body, self.is_finished = 0, {}, b"", False

    def start(self, status: int, headers: Any, length: int | None) -> None:
        self.status, self.headers = status, dict(headers)

    def write(self, data: bytes) -> None:
        self.body += data

    def finish(self) -> None:
        self.is_finished = True


async def _fetch(container: ContainerCredentials, authorization: bytes) -> dict[str, str]:
    responder = Kept()
    request = Request(b"GET", b"/credentials", {b"authorization": authorization}, frozenset())
    await container.answer(request, responder)  # type: ignore[arg-type]
    assert responder.is_finished
    assert responder.status == 200
    assert responder.headers[b"cache-control"] == b"no-store"
    found: dict[str, str] = orjson.loads(responder.body)
    return found


async def test_credentials_carry_a_token_that_lasts_for_half_its_life(store: SqliteStore, time: Time) -> None:
    tokens = Tokens([SigningKey("k1", "HS256", KEY, KEY)], "price-keeper", time)
    container = ContainerCredentials(Clients(store, time), tokens, time)
    authorization = f"{WEB}:{SECRET}".encode()
    first = await _fetch(container, authorization)
    assert set(first) == {"AccessKeyId", "SecretAccessKey", "Token", "Expiration"}
    assert first["Expiration"] == "2027-01-15T09:00:00Z"
    assert tokens.verify(first["Token"]).app == "web"
    time.now += 1799
    assert await _fetch(container, authorization) == first
    time.now += 1
    second = await _fetch(container, authorization)
    assert second["Token"] != first["Token"]
    assert second["Expiration"] == "2027-01-15T09:30:00Z"


@pytest.mark.parametrize(
    "authorization", [b"", b"nonsense", f"{WEB}:".encode(), f"{WEB}:{OTHER}".encode(), b"\xff:\xff"]
)
async def test_no_credentials_for_strangers(store: SqliteStore, time: Time, authorization: bytes) -> None:
    tokens = Tokens([SigningKey("k1", "HS256", KEY, KEY)], "price-keeper", time)
    with pytest.raises(AccessDenied):
        await _fetch(ContainerCredentials(Clients(store, time), tokens, time), authorization)
