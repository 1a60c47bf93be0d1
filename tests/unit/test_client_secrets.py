"""Clients' secrets and the container credentials made from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from price_keeper.auth import client_secrets as module
from price_keeper.auth.client_secrets import ClientVerifier, hash_secret, make_secret
from price_keeper.auth.container_credentials import LocalCredentialIssuer
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.domain import parse_client_id
from price_keeper.errors import AccessDenied, Busy, StoreUnavailable, TooManyRequests
from price_keeper.exchange import Request
from price_keeper.stores import schema
from price_keeper.stores.contract import Put
from price_keeper.stores.sqlite import SqliteStore

from tests.support.client_secrets import use_cheap_hashes

ORG = "550e8400-e29b-41d4-a716-446655440000"
WEB = f"org-{ORG}-app-web"
SECRET, OTHER = make_secret(), make_secret()
KEY = b"a secret that is long enough for HS256"


class Time:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cheap_hashes(monkeypatch)


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
    await store.put(Put(schema.app_config_key(ORG, "web"), {"client_secret_hash": hash_secret(secret).decode()}))


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


async def test_valid_secret_is_compared_once(store: SqliteStore, time: Time, comparisons: list[bytes]) -> None:
    clients = ClientVerifier(store, time)
    for _ in range(3):
        assert (await clients.verify(WEB, SECRET)).app == "web"
    assert comparisons == [SECRET.encode()]


@pytest.mark.parametrize(
    ("client_id", "secret"),
    [(WEB, OTHER), (f"org-{ORG}-app-nobody", SECRET), (f"org-{ORG}", SECRET), ("nonsense", SECRET)],
    ids=["another secret", "another app", "the org", "nobody"],
)
async def test_failed_login_does_not_say_what_is_wrong(
    store: SqliteStore, time: Time, client_id: str, secret: str
) -> None:
    clients = ClientVerifier(store, time)
    for _ in range(2):
        with pytest.raises(AccessDenied, match=r"^the client id or its secret is wrong$"):
            await clients.verify(client_id, secret)


@pytest.mark.parametrize("secret", ["", "short", SECRET + "x", SECRET[:-1], "x" * 10_000], ids=len)
async def test_secret_of_other_length_needs_no_comparison(
    store: SqliteStore, time: Time, comparisons: list[bytes], secret: str
) -> None:
    with pytest.raises(AccessDenied):
        await ClientVerifier(store, time).verify(WEB, secret)
    assert comparisons == []


async def test_malformed_secret_needs_no_comparison(store: SqliteStore, time: Time, comparisons: list[bytes]) -> None:
    """Length in characters is not length in bytes; bcrypt takes 72 bytes."""
    for secret in ("\xe9" * 44, "\u00c4" + SECRET[1:], "\0" * 44, SECRET[:-1] + "\n", " " * 44):
        with pytest.raises(AccessDenied):
            await ClientVerifier(store, time).verify(WEB, secret)
    assert comparisons == []


async def test_wrong_secret_takes_as_long_as_unknown_client(
    store: SqliteStore, time: Time, comparisons: list[bytes]
) -> None:
    for client_id, secret in ((f"org-{ORG}-app-nobody", SECRET), (WEB, OTHER)):
        with pytest.raises(AccessDenied):
            await ClientVerifier(store, time).verify(client_id, secret)
    assert comparisons == []


async def test_new_secret_applies_within_a_minute(store: SqliteStore, time: Time) -> None:
    clients = ClientVerifier(store, time)
    await clients.verify(WEB, SECRET)
    await _set_secret(store, OTHER)
    time.now += module.HASH_CACHE_SECONDS
    with pytest.raises(AccessDenied):
        await clients.verify(WEB, SECRET)
    assert (await clients.verify(WEB, OTHER)).app == "web"


async def test_store_outage_is_not_a_wrong_secret(store: SqliteStore, time: Time) -> None:
    class Away:
        async def get(self, *_: Any, **__: Any) -> None:
            raise StoreUnavailable("by the test")

    with pytest.raises(Busy):
        await ClientVerifier(Away(), time).verify(WEB, SECRET)  # type: ignore[arg-type]


# Floods of wrong secrets.


class Counting:
    """A store that counts what it is asked, and answers when it is let."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.reads = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def get(self, *arguments: Any, **options: Any) -> Any:
        self.reads += 1
        await self.may_answer.wait()
        return await self._store.get(*arguments, **options)


def wrong(clients: ClientVerifier, client_id: str, count: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(clients.verify(client_id, make_secret())) for _ in range(count)]


async def outcomes(tasks: list[asyncio.Task[Any]]) -> set[str]:
    return {type(each).__name__ for each in await asyncio.gather(*tasks, return_exceptions=True)}


async def test_valid_secret_succeeds_during_flood_on_its_client(
    store: SqliteStore, time: Time, comparisons: list[bytes]
) -> None:
    clients = ClientVerifier(store, time)
    flood = wrong(clients, WEB, 500)
    right = [asyncio.create_task(clients.verify(WEB, SECRET)) for _ in range(20)]
    flood += wrong(clients, WEB, 400)
    assert {scope.app for scope in await asyncio.gather(*right)} == {"web"}
    assert await outcomes(flood) == {"AccessDenied"}
    assert comparisons == [SECRET.encode()]


async def test_client_is_read_once_a_minute_whoever_asks(store: SqliteStore, time: Time) -> None:
    counting = Counting(store)
    clients = ClientVerifier(counting, time)  # type: ignore[arg-type]
    for client_id in (WEB, f"org-{ORG}-app-nobody"):
        counting.reads = 0
        counting.may_answer.clear()
        flood = wrong(clients, client_id, 100)
        await asyncio.sleep(0)
        counting.may_answer.set()
        assert await outcomes(flood + wrong(clients, client_id, 100)) == {"AccessDenied"}
        assert counting.reads == 1
        time.now += module.HASH_CACHE_SECONDS
        await outcomes(wrong(clients, client_id, 10))
        assert counting.reads == 2


async def _set_hash_without_a_check(store: SqliteStore, app: str, secret: str) -> None:
    hashed = module.bcrypt.hashpw(secret.encode(), module.bcrypt.gensalt()).decode()
    await store.put(Put(schema.app_config_key(ORG, app), {"client_secret_hash": hashed}))


async def test_failures_without_known_digest_are_rate_limited(
    store: SqliteStore, time: Time, comparisons: list[bytes]
) -> None:
    await _set_hash_without_a_check(store, "web", SECRET)
    clients = ClientVerifier(store, time)
    assert await outcomes(wrong(clients, WEB, 50)) == {"AccessDenied", "TooManyRequests"}
    assert len(comparisons) == module.MAX_FAILED_COMPARISONS
    with pytest.raises(TooManyRequests) as refused:
        await clients.verify(WEB, SECRET)
    time.now += refused.value.retry_after or 0
    assert (await clients.verify(WEB, SECRET)).app == "web"
    await outcomes(wrong(clients, WEB, 50))
    assert (await clients.verify(WEB, SECRET)).app == "web"  # it is known by now
    assert len(comparisons) == module.MAX_FAILED_COMPARISONS + 1


async def test_failures_of_one_client_do_not_delay_others(
    store: SqliteStore, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each client one secret at a time waits for a comparison, however many were sent."""
    turns: list[bytes] = []
    real = module.bcrypt.checkpw

    def slow(secret: bytes, kept: bytes) -> bool:
        turns.append(secret)
        return real(secret, kept)

    monkeypatch.setattr(module.bcrypt, "checkpw", slow)
    await _set_hash_without_a_check(store, "loud", OTHER)
    await _set_hash_without_a_check(store, "web", SECRET)
    clients = ClientVerifier(store, time)
    flood = wrong(clients, f"org-{ORG}-app-loud", 900)
    await asyncio.sleep(0)
    assert (await clients.verify(WEB, SECRET)).app == "web"
    assert turns.index(SECRET.encode()) <= module.MAX_FAILED_COMPARISONS
    await outcomes(flood)


async def test_excess_concurrent_comparisons_are_refused(
    store: SqliteStore, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITERS_PER_CLIENT", 3)
    monkeypatch.setattr(module, "MAX_QUEUED_COMPARISONS", 2)
    counting = Counting(store)
    counting.may_answer.clear()
    clients = ClientVerifier(counting, time)  # type: ignore[arg-type]
    flood = wrong(clients, WEB, 8)
    await asyncio.sleep(0)
    counting.may_answer.set()
    found = [type(each).__name__ for each in await asyncio.gather(*flood, return_exceptions=True)]
    assert sorted(found) == ["AccessDenied"] * 3 + ["Busy"] * 5
    assert (await clients.verify(WEB, SECRET)).app == "web"
    assert clients._queues == {}
    for app in ("a", "b", "c", "d"):
        await _set_hash_without_a_check(store, app, SECRET)
    several = [asyncio.create_task(clients.verify(f"org-{ORG}-app-{app}", SECRET)) for app in ("a", "b", "c", "d")]
    assert await outcomes(several) == {"Scope", "Busy"}


async def test_caches_are_bounded(store: SqliteStore, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_CLIENTS", 10)
    clients = ClientVerifier(store, time)
    await clients.verify(WEB, SECRET)
    for number in range(50):
        await outcomes(wrong(clients, f"org-{ORG}-app-nobody{number}", 1))
    assert len(clients._cached_absent) <= 10
    assert list(clients._cached) == list(clients._verified_digests) == [parse_client_id(WEB)]


class Kept:
    """A responder that keeps what it is given."""

    has_started = is_disconnected = False

    def __init__(self) -> None:
        self.status, self.headers, self.body, self.is_finished = 0, {}, b"", False

    def start(self, status: int, headers: Any, length: int | None) -> None:
        self.status, self.headers = status, dict(headers)

    def write(self, data: bytes) -> None:
        self.body += data

    def finish(self) -> None:
        self.is_finished = True


async def _fetch(container: LocalCredentialIssuer, authorization: bytes) -> dict[str, str]:
    responder = Kept()
    request = Request(b"GET", b"/credentials", {b"authorization": authorization}, frozenset())
    await container.respond(request, responder)  # type: ignore[arg-type]
    assert responder.is_finished
    assert responder.status == 200
    assert responder.headers[b"cache-control"] == b"no-store"
    found: dict[str, str] = orjson.loads(responder.body)
    return found


async def test_credentials_carry_token_for_half_its_life(store: SqliteStore, time: Time) -> None:
    tokens = TokenService([SigningKey("k1", "HS256", KEY, KEY)], "price-keeper", time)
    container = LocalCredentialIssuer(ClientVerifier(store, time), tokens, time)
    authorization = f"{WEB}:{SECRET}".encode()
    first = await _fetch(container, authorization)
    assert set(first) == {"AccessKeyId", "SecretAccessKey", "Token", "Expiration"}
    assert first["Expiration"] == "2027-01-15T09:00:00Z"
    assert tokens.verify_caller(first["Token"]).app == "web"
    time.now += 1799
    assert await _fetch(container, authorization) == first
    time.now += 1
    second = await _fetch(container, authorization)
    assert second["Token"] != first["Token"]
    assert second["Expiration"] == "2027-01-15T09:30:00Z"


@pytest.mark.parametrize(
    "authorization", [b"", b"nonsense", f"{WEB}:".encode(), f"{WEB}:{OTHER}".encode(), b"\xff:\xff"], ids=range(5)
)
async def test_unknown_caller_gets_no_credentials(store: SqliteStore, time: Time, authorization: bytes) -> None:
    tokens = TokenService([SigningKey("k1", "HS256", KEY, KEY)], "price-keeper", time)
    with pytest.raises(AccessDenied):
        await _fetch(LocalCredentialIssuer(ClientVerifier(store, time), tokens, time), authorization)


def test_stored_hash_costs_a_fifth_of_a_second_per_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of what makes it cheap
    hashed = module.hash_secret(module.make_secret())
    assert hashed.startswith(b"$2b$12$")
