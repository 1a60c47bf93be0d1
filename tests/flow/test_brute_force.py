"""Guessing at the control API, over real sockets: it is slowed down, and valid secrets always work."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import aiohttp
import pytest
from price_keeper.auth.client_secrets import make_secret
from price_keeper.auth.throttles import FAILURE_BURST, FAILURE_INTERVAL_SECONDS, LOOKUP_RATE_PER_ADDRESS
from price_keeper.control.api_rate_limits import LocalApiRateLimiter
from price_keeper.stores.contract import Key

from tests.support.clock import ManualClock
from tests.support.commands import sidecar
from tests.support.control_harness import ADMIN_KEY, API, ORG, ControlHarness, open_control_harness
from tests.support.engines import Engines

SHOP, BOT = f"org-{ORG}-app-shop", f"org-{ORG}-app-bot"
TRIES = 300


@dataclass
class Attacked:
    api: ControlHarness
    clock: ManualClock
    secrets: dict[str, str]

    async def asks(self, method: str, path: str, address: str = "127.0.0.1", **more: Any) -> tuple[int, dict[str, str]]:
        connector = aiohttp.TCPConnector(local_addr=(address, 0))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(method, self.api.url + path, **more) as answer,
        ):
            return answer.status, dict(answer.headers)

    async def login(self, client: str, secret: str, address: str = "127.0.0.1") -> int:
        given = {"client_id": client, "client_secret": secret}
        return (await self.asks("POST", "/auth/token", address, json=given))[0]

    async def guesses(self, client: str, address: str = "127.0.0.1", tries: int = TRIES) -> Counter[int]:
        gate = asyncio.Semaphore(20)

        async def once() -> int:
            async with gate:
                return await self.login(client, make_secret(), address)

        return Counter(await asyncio.gather(*(once() for _ in range(tries))))


@pytest.fixture
async def attacked(tmp_path: Path) -> AsyncIterator[Attacked]:
    clock = ManualClock()
    rates = LocalApiRateLimiter(clock.monotonic, 20, 1.0)
    async with (
        Engines({}).open("sqlite", tmp_path) as store,
        open_control_harness(store, tmp_path, clock, rates) as api,
    ):
        await api.put_org()
        secrets = {}
        for app in ("shop", "bot"):
            made = (await api.ask("PUT", f"{API}/apps/{app}", {"app_name": app})).body
            token = {"X-Retrieval-Token": made["secret_retrieval_token"]}
            document = (await api.ask("GET", f"{API}/apps/{app}/credentials/secret", who=None, headers=token)).body
            secrets[document["client_id"]] = document["client_secret"]
        await clock.advance(60)
        attacked = Attacked(api, clock, secrets)
        for client, secret in secrets.items():  # as those who call here are known here
            assert await attacked.login(client, secret) == 200
        yield attacked


async def test_login_flood_is_limited_and_valid_secret_always_works(attacked: Attacked) -> None:
    flood = asyncio.create_task(attacked.guesses(SHOP))
    for _ in range(10):
        assert await attacked.login(SHOP, attacked.secrets[SHOP]) == 200
        assert await attacked.login(BOT, attacked.secrets[BOT]) == 200
    assert await flood == {401: FAILURE_BURST, 429: TRIES - FAILURE_BURST}
    assert await attacked.login(SHOP, attacked.secrets[SHOP]) == 200


async def test_client_cannot_be_guessed_from_other_addresses(attacked: Attacked) -> None:
    await attacked.guesses(SHOP, "127.0.0.2", FAILURE_BURST)
    assert await attacked.guesses(SHOP, "127.0.0.3", 5) == {429: 5}
    assert await attacked.login(BOT, make_secret(), "127.0.0.4") == 401
    assert await attacked.login(SHOP, attacked.secrets[SHOP], "127.0.0.3") == 200


async def test_address_cannot_guess_many_clients(attacked: Attacked) -> None:
    found = [await attacked.login(f"org-{ORG}-app-a{number}", make_secret()) for number in range(FAILURE_BURST + 3)]
    assert found == [401] * FAILURE_BURST + [429] * 3
    assert await attacked.login(BOT, attacked.secrets[BOT]) == 200


async def test_limited_login_states_retry_after(attacked: Attacked) -> None:
    await attacked.guesses(SHOP, tries=FAILURE_BURST)
    given = {"client_id": SHOP, "client_secret": make_secret()}
    status, headers = await attacked.asks("POST", "/auth/token", json=given)
    assert (status, headers["Retry-After"]) == (429, f"{FAILURE_INTERVAL_SECONDS:g}")
    await attacked.clock.advance(FAILURE_INTERVAL_SECONDS)
    assert await attacked.guesses(SHOP, tries=3) == {401: 1, 429: 2}


async def test_credentials_endpoint_has_same_limits(attacked: Attacked) -> None:
    async def fetch(secret: str) -> int:
        return (await attacked.asks("GET", "/credentials", headers={"Authorization": f"{SHOP}:{secret}"}))[0]

    assert [await fetch(make_secret()) for _ in range(FAILURE_BURST + 2)] == [401] * FAILURE_BURST + [429] * 2
    assert await attacked.login(SHOP, make_secret(), "127.0.0.2") == 429
    assert await fetch(attacked.secrets[SHOP]) == 200


async def test_retrieval_tokens_cannot_be_guessed_and_valid_one_works(attacked: Attacked) -> None:
    path = f"{API}/apps/shop/credentials"
    rotated = (await attacked.api.ask("POST", f"{path}/rotate", {})).body
    wrong = {"X-Retrieval-Token": "x" * 43}
    addresses = [f"127.0.0.{2 + number % 4}" for number in range(40)]  # each has a pace of its own
    found = Counter([(await attacked.asks("GET", f"{path}/secret", each, headers=wrong))[0] for each in addresses])
    assert found == {401: FAILURE_BURST, 429: 40 - FAILURE_BURST}
    right = {"X-Retrieval-Token": rotated["secret_retrieval_token"]}
    assert (await attacked.asks("GET", f"{path}/secret", headers=right))[0] == 200
    assert (await attacked.asks("GET", f"{path}/secret", headers=right))[0] == 429  # it is used, and so a wrong one


async def test_admin_key_cannot_be_guessed_and_works_from_everywhere(attacked: Attacked) -> None:
    found = [
        (await attacked.asks("GET", API, f"127.0.0.{2 + number % 3}", headers={"X-API-Key": f"guess {number}"}))[0]
        for number in range(FAILURE_BURST + 5)
    ]
    assert found == [401] * FAILURE_BURST + [429] * 5
    assert (await attacked.asks("GET", API, "127.0.0.2", headers={"X-API-Key": ADMIN_KEY}))[0] == 200
    assert await attacked.login(SHOP, make_secret(), "127.0.0.9") == 401


async def test_other_invalid_tokens_count_by_address(attacked: Attacked) -> None:
    async def refresh(token: str, address: str) -> int:
        return (await attacked.asks("POST", "/auth/refresh", address, json={"refresh_token": token}))[0]

    assert [await refresh("a.b.c", "127.0.0.2") for _ in range(FAILURE_BURST + 2)] == [401] * FAILURE_BURST + [429] * 2
    assert await refresh("a.b.c", "127.0.0.3") == 401
    given = {"client_id": SHOP, "client_secret": attacked.secrets[SHOP]}
    issued = (await attacked.api.ask("POST", "/auth/token", given, who=None)).body
    assert await refresh(issued["refresh_token"], "127.0.0.2") == 200


async def test_expired_token_counts_as_no_guess(attacked: Attacked) -> None:
    token = attacked.api.tokens.mint_access(ORG, "shop", 10).token
    await attacked.clock.advance(20)
    shown = {"Authorization": f"Bearer {token}"}
    assert {(await attacked.asks("GET", f"{API}/apps/shop", headers=shown))[0] for _ in range(FAILURE_BURST + 5)} == {
        401
    }


async def test_invented_clients_cause_limited_reads(attacked: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Key] = []
    kind = type(attacked.api.store)
    get = kind.get

    async def counted(self: Any, key: Key, **options: Any) -> Any:
        reads.append(key)
        return await get(self, key, **options)

    monkeypatch.setattr(kind, "get", counted)
    began = attacked.clock.monotonic()
    gate = asyncio.Semaphore(30)  # more at once of one address have no place

    async def invented() -> int:
        async with gate:
            return await attacked.login(f"org-{uuid4()}", make_secret(), "127.0.0.2")

    flood = asyncio.gather(*(invented() for _ in range(60)))
    while not flood.done():
        await asyncio.sleep(0.01)
        seconds = attacked.clock.monotonic() - began
        assert len(reads) <= LOOKUP_RATE_PER_ADDRESS.burst + LOOKUP_RATE_PER_ADDRESS.per_second * seconds + 1
        if len(reads) >= LOOKUP_RATE_PER_ADDRESS.burst:
            await attacked.clock.advance(0.01)
    assert Counter(await flood) == {401: FAILURE_BURST, 429: 60 - FAILURE_BURST}
    assert len(reads) == 60


async def trickle(attacked: Attacked) -> None:
    """One more as soon as it would be counted, at each of the ways to show a secret."""
    await attacked.clock.advance(FAILURE_INTERVAL_SECONDS)
    await attacked.login(f"org-{uuid4()}", make_secret())
    await attacked.asks("GET", "/credentials", headers={"Authorization": f"org-{uuid4()}:{make_secret()}"})


async def fetch(attacked: Attacked, client: str, secret: str) -> int:
    return (await attacked.asks("GET", "/credentials", headers={"Authorization": f"{client}:{secret}"}))[0]


async def test_trickle_of_wrong_secrets_after_rotation_locks_nobody_out(attacked: Attacked) -> None:
    """Sent from the same address, for as long as the new secret needs to come everywhere."""
    for _ in range(FAILURE_BURST + 2):
        await trickle(attacked)
    old = attacked.secrets[SHOP]
    path = f"{API}/apps/shop/credentials"
    rotated = (await attacked.api.ask("POST", f"{path}/rotate", {"grace_hours": 1})).body
    headers = {"X-Retrieval-Token": rotated["secret_retrieval_token"]}
    new = (await attacked.api.ask("GET", f"{path}/secret", who=None, headers=headers)).body["client_secret"]
    found: Counter[tuple[str, int]] = Counter()
    for _ in range(20):
        await trickle(attacked)
        for name, secret in (("old", old), ("new", new)):
            found[name, await attacked.login(SHOP, secret)] += 1
            found[name, await fetch(attacked, SHOP, secret)] += 1
    assert found == {("old", 200): 40, ("new", 200): 40}


async def test_trickle_of_wrong_secrets_after_start_locks_nobody_out(attacked: Attacked) -> None:
    """When no client is cached yet."""
    for way in ("login", "credentials"):
        attacked.api.parts.clients.__init__(attacked.api.store, attacked.clock.now)  # type: ignore[misc]
        for _ in range(3):
            await trickle(attacked)
        for client, secret in attacked.secrets.items():
            asked = attacked.login(client, secret) if way == "login" else fetch(attacked, client, secret)
            assert await asked == 200


def test_failed_logins_at_both_ports_share_a_limit(tmp_path: Path) -> None:
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=tmp_path) as running:
        found = Counter(_guessed(running.data) for _ in range(FAILURE_BURST + 5))
        assert found == {403: FAILURE_BURST, 429: 5}
        assert _guessed(running.control) == 429


def _guessed(url: str) -> int:
    shown = {"Authorization": f"org-{uuid4()}:{make_secret()}"}
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(f"{url}/credentials", headers=shown), timeout=10)
    refused.value.close()
    return int(refused.value.code)
