"""A client's sessions on the control API: how a stolen one ends, and that valid clients are not counted as guessing."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from price_keeper.auth.client_secrets import REREAD_SECONDS, ClientVerifier, make_secret
from price_keeper.auth.refresh_sessions import StaleGeneration
from price_keeper.auth.throttles import FAILURE_BURST, MAX_LOOKUP_WAIT_SECONDS, LookupRate, LookupThrottle
from price_keeper.control.api_errors import ApiError
from price_keeper.control.api_types import ApiRequest, Principal
from price_keeper.control.client_endpoints import RETRIEVAL_TOKEN_HEADER
from price_keeper.control.client_endpoints import fetch_secret as fetched_by
from price_keeper.control.control_services import (
    MAX_CONCURRENT_RETRIEVALS,
    MAX_WAITING_RETRIEVALS,
    RETRIEVAL_RATE_PER_ADDRESS,
)
from price_keeper.errors import Busy, CancellationReason, ReasonCode, TooManyRequests, TransactionFailed
from price_keeper.stores import schema
from price_keeper.stores.contract import Key

from tests.support.clock import ManualClock, settle
from tests.support.control_harness import API, ORG, OTHER, ControlHarness, ControlResponse, open_control_harness
from tests.support.engines import Engines

SHOP = f"{API}/apps/shop"
SESSIONS = f"{SHOP}/sessions"
MANY = FAILURE_BURST + 4

Pair = dict[str, Any]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ControlHarness]:
    async with (
        Engines({}).open("sqlite", tmp_path) as store,
        open_control_harness(store, tmp_path, ManualClock()) as running,
    ):
        await running.put_org()
        yield running


async def client(api: ControlHarness) -> Pair:
    return await fetched(api, (await api.ask("PUT", SHOP, {"app_name": "s"})).body)


async def fetched(api: ControlHarness, issued: Pair) -> Pair:
    shown = {RETRIEVAL_TOKEN_HEADER: issued["secret_retrieval_token"]}
    found: Pair = (await api.ask("GET", f"{SHOP}/credentials/secret", who=None, headers=shown)).body
    return found


async def login(api: ControlHarness, given: Pair) -> Pair:
    answer = await api.ask("POST", "/auth/token", given, who=None)
    assert answer.status == 200, answer.body
    found: Pair = answer.body
    return found


async def refreshed(api: ControlHarness, pair: Pair) -> ControlResponse:
    return await api.ask("POST", "/auth/refresh", {"refresh_token": pair["refresh_token"]}, who=None)


async def opens(api: ControlHarness, pair: Pair) -> int:
    shown = {"Authorization": f"Bearer {pair['access_token']}"}
    return (await api.ask("GET", SHOP, who=None, headers=shown)).status


async def rotated(api: ControlHarness, grace: int) -> Pair:
    answer = await api.ask("POST", f"{SHOP}/credentials/rotate", {"grace_hours": grace})
    assert answer.status == 200, answer.body
    found: Pair = answer.body
    return found


async def test_rotation_without_grace_ends_all_sessions(api: ControlHarness) -> None:
    thief = await login(api, await client(api))
    new = await fetched(api, await rotated(api, 0))
    assert (await refreshed(api, thief)).status == 401
    assert await opens(api, thief) == 401
    honest = await login(api, new)
    again = await refreshed(api, honest)
    assert again.status == 200
    assert await opens(api, again.body) == 200


async def test_rotation_with_grace_keeps_sessions(api: ControlHarness) -> None:
    pair = await login(api, await client(api))
    await rotated(api, 1)
    assert (await refreshed(api, pair)).status == 200


async def test_other_process_starts_no_session_with_old_secret(api: ControlHarness) -> None:
    """It knows of a rotation a minute late, and until then takes the old secret for good."""
    given = await client(api)
    late = ClientVerifier(api.store, api.clock.now)
    shown = (given["client_id"], given["client_secret"])
    await late.verify(*shown)
    await rotated(api, 0)
    with pytest.raises(StaleGeneration):
        await api.parts.sessions.login(*await late.verify_with_generation(*shown))


@pytest.fixture
async def two(api: ControlHarness, tmp_path: Path) -> AsyncIterator[list[ControlHarness]]:
    """Two processes on one store."""
    async with open_control_harness(api.store, tmp_path / "there", api.clock) as there:  # type: ignore[arg-type]
        yield [api, there]


async def credentials(api: ControlHarness, given: Pair) -> Pair:
    shown = {"Authorization": f"{given['client_id']}:{given['client_secret']}"}
    answer = await api.ask("GET", "/credentials", who=None, headers=shown)
    return {"status": answer.status, "access_token": (answer.body or {}).get("Token")}


async def test_all_sessions_ended_elsewhere_allow_new_login_at_once(two: list[ControlHarness]) -> None:
    here, there = two
    given = await client(here)
    await login(there, given)
    assert (await here.ask("DELETE", SESSIONS)).body == {"ended": 1}
    new = await login(there, given)
    again = await refreshed(there, new)
    assert again.status == 200
    assert [await opens(api, again.body) for api in two] == [200] * 2
    assert [each["session_id"] for each in (await here.ask("GET", SESSIONS)).body["sessions"]] == [new["session_id"]]


@pytest.mark.parametrize("how", ["end all", "rotate"])
async def test_ending_all_sessions_ends_former_access_tokens(two: list[ControlHarness], how: str) -> None:
    """Tokens of evicted sessions, and tokens without a session."""
    here, there = two
    given = await client(here)
    pairs = [await login(here, given) for _ in range(6)]
    tokens = [pairs[0], pairs[-1], await credentials(there, given)]
    for api in two:
        assert [await opens(api, each) for each in tokens] == [200] * 3
    if how == "end all":
        await here.ask("DELETE", SESSIONS)
    else:
        given = await fetched(here, await rotated(here, 0))
    assert [await opens(here, each) for each in tokens] == [401] * 3
    await here.clock.advance(60)  # type: ignore[attr-defined]
    assert [await opens(there, each) for each in tokens] == [401] * 3
    for api in two:
        new = [await login(api, given), await credentials(api, given)]
        assert [await opens(each, token) for each in two for token in new] == [200] * 4


async def test_old_secret_gets_no_token_that_outlives_cache_minute(
    two: list[ControlHarness],
) -> None:
    here, there = two
    given = await client(here)
    assert (await credentials(there, given))["status"] == 200
    await rotated(here, 0)
    late = await credentials(there, given)
    await here.clock.advance(60)  # type: ignore[attr-defined]
    assert (await credentials(there, given))["status"] == 401
    assert [await opens(api, late) for api in two] == [401] * 2


async def test_token_revoked_elsewhere_is_not_issued_again_after_a_minute(two: list[ControlHarness]) -> None:
    here, there = two
    given = await client(here)
    first = await credentials(here, given)
    await there.ask("POST", "/auth/revoke", {"token": first["access_token"]}, who=None)
    await here.clock.advance(60)  # type: ignore[attr-defined]
    second = await credentials(here, given)
    assert second["access_token"] != first["access_token"]
    assert [await opens(api, second) for api in two] == [200] * 2


async def test_new_secret_is_accepted_elsewhere_within_moments(two: list[ControlHarness]) -> None:
    here, there = two
    given = await client(here)
    await login(there, given)
    new = await fetched(here, await rotated(here, 24))
    await here.clock.advance(REREAD_SECONDS)  # type: ignore[attr-defined]
    await login(there, new)
    await login(there, given)  # in its grace


async def test_client_asking_before_registration_is_accepted_shortly_after(two: list[ControlHarness]) -> None:
    here, there = two
    unknown = {"client_id": f"org-{ORG}-app-shop", "client_secret": make_secret()}
    assert (await there.ask("POST", "/auth/token", unknown, who=None)).status == 401
    given = await client(here)
    await here.clock.advance(REREAD_SECONDS)  # type: ignore[attr-defined]
    await login(there, given)


async def test_access_tokens_of_evicted_session_can_be_revoked(api: ControlHarness) -> None:
    given = await client(api)
    pairs = [await login(api, given) for _ in range(6)]
    assert await opens(api, pairs[0]) == 200
    await api.clock.advance(1)  # type: ignore[attr-defined]
    one = f"{SESSIONS}/{pairs[0]['session_id']}"
    assert (await api.ask("DELETE", one)).body == {"ended": 0}
    assert [await opens(api, pair) for pair in (pairs[0], pairs[1])] == [401, 200]
    record = (await api.ask("GET", f"{API}/audit")).body["records"][0]
    assert (record["action"], record["before"]) == ("session.end", {"session_id": pairs[0]["session_id"]})
    kept = await api.store.get(schema.revoked_session_key(pairs[0]["session_id"]), consistent=True)
    assert kept is not None
    assert kept["expires_at_epoch"] == int(api.clock.now()) + api.tokens.refresh_seconds


async def test_administrator_lists_sessions_and_ends_one(api: ControlHarness) -> None:
    given = await client(api)
    first, second = await login(api, given), await login(api, given)
    listed = (await api.ask("GET", SESSIONS)).body["sessions"]
    assert {each["session_id"] for each in listed} == {first["session_id"], second["session_id"]}
    assert all(each.keys() == {"session_id", "began_at", "refreshed_at", "expires_at"} for each in listed)
    one = f"{SESSIONS}/{first['session_id']}"
    assert (await api.ask("DELETE", one)).body == {"ended": 1}
    assert (await api.ask("DELETE", one)).body == {"ended": 0}
    assert (await refreshed(api, first)).status == 401
    assert await opens(api, first) == 401
    assert (await refreshed(api, second)).status == 200


@pytest.mark.parametrize("over", ["generation", "time"])
async def test_session_with_leftover_row_counts_as_ended_before(api: ControlHarness, over: str) -> None:
    pair = await login(api, await client(api))
    if over == "generation":
        assert (await api.ask("DELETE", SESSIONS)).body == {"ended": 1}
    else:
        await api.clock.advance(api.tokens.refresh_seconds)  # type: ignore[attr-defined]
    for _ in range(2):
        assert (await api.ask("DELETE", f"{SESSIONS}/{pair['session_id']}")).body == {"ended": 0}


async def test_administrator_ends_all_sessions_and_secret_stays_valid(api: ControlHarness) -> None:
    given = await client(api)
    pairs = [await login(api, given) for _ in range(3)]
    assert (await api.ask("DELETE", SESSIONS)).body == {"ended": 3}
    assert [(await refreshed(api, pair)).status for pair in pairs] == [401] * 3
    assert [await opens(api, pair) for pair in pairs] == [401] * 3
    assert (await api.ask("GET", SESSIONS)).body == {"sessions": []}
    assert (await refreshed(api, await login(api, given))).status == 200


async def test_ending_sessions_is_audited(api: ControlHarness) -> None:
    pair = await login(api, await client(api))
    for path in (f"{SESSIONS}/{pair['session_id']}", SESSIONS):
        await api.clock.advance(1)  # type: ignore[attr-defined]
        await api.ask("DELETE", path)
    answer = await api.ask("GET", f"{API}/audit")
    records = answer.body["records"][:2]
    assert [(each["action"], each["app"]) for each in records] == [("sessions.end", "shop"), ("session.end", "shop")]
    assert records[1]["before"] == {"session_id": pair["session_id"]}
    assert records[1]["after"] == {
        "token_type": "refresh",
        "client_id": f"org-{ORG}-app-shop",
        "revoked_at_epoch": int(api.clock.now()) - 1,
        "original_expiry_epoch": int(api.clock.now()) - 2 + 30 * 86_400,
    }
    assert pair["refresh_token"] not in answer.raw.decode()


@pytest.mark.parametrize("what", ["session", "token"])
async def test_revocation_tells_which_token_of_whom_and_when_to_the_administrator(
    api: ControlHarness, what: str
) -> None:
    pair = await login(api, await client(api))
    claims = api.tokens.verify_access(pair["access_token"])
    name = pair["session_id"] if what == "session" else claims.jti
    assert (await api.ask("GET", f"{SHOP}/revocations/{name}")).status == 404
    await api.clock.advance(5)  # type: ignore[attr-defined]
    given_back = pair["refresh_token"] if what == "session" else pair["access_token"]
    await api.ask("POST", "/auth/revoke", {"token": given_back}, who=None)
    expiry = claims.expires if what == "token" else int(api.clock.now()) - 5 + 30 * 86_400
    assert (await api.ask("GET", f"{SHOP}/revocations/{name}")).body == {
        "id": name,
        "token_type": "refresh" if what == "session" else "access",
        "client_id": f"org-{ORG}-app-shop",
        "revoked_at_epoch": int(api.clock.now()),
        "original_expiry_epoch": expiry,
        "expires_at_epoch": expiry,
    }
    assert (await api.ask("GET", f"{API}/revocations/{name}")).status == 404  # it is not the org's own
    assert (await api.ask("GET", f"{SHOP}/revocations/a%23b")).status == 400
    assert (await api.ask("GET", f"{SHOP}/revocations/{name}", who=(ORG, "shop"))).status == 403


async def test_sessions_are_admin_only_and_unknown_one_is_reported(api: ControlHarness) -> None:
    pair = await login(api, await client(api))
    one = f"{SESSIONS}/{pair['session_id']}"
    for who in ((ORG, None), (ORG, "shop"), (OTHER, "shop")):
        for method, path in (("GET", SESSIONS), ("DELETE", SESSIONS), ("DELETE", one)):
            assert (await api.ask(method, path, who=who)).status == 403
    assert (await api.ask("DELETE", f"{SESSIONS}/{uuid4()}")).body == {"ended": 0}
    assert (await api.ask("DELETE", f"{SESSIONS}/a%23b")).status == 400
    assert (await api.ask("DELETE", f"{API}/apps/nobody/sessions")).status == 404
    assert (await api.ask("DELETE", f"{API}/apps/nobody/sessions/{pair['session_id']}")).status == 404
    assert (await refreshed(api, pair)).status == 200


# Who is no guesser.


async def test_formerly_valid_refresh_tokens_count_as_no_guess(api: ControlHarness) -> None:
    given = await client(api)
    pairs = [await login(api, given) for _ in range(MANY + 5)]
    assert [(await refreshed(api, pair)).status for pair in pairs[:MANY]] == [401] * MANY
    for _ in range(MANY):
        assert (await refreshed(api, {"refresh_token": pairs[-1]["access_token"]})).status == 401


async def test_revoked_access_tokens_count_as_no_guess(api: ControlHarness) -> None:
    pair = await login(api, await client(api))
    await api.ask("POST", "/auth/revoke", {"token": pair["access_token"]}, who=None)
    assert [await opens(api, pair) for _ in range(MANY)] == [401] * MANY


async def test_missing_signing_key_counts_as_no_guess(api: ControlHarness) -> None:
    given = await client(api)
    pair = await login(api, given)
    tokens = api.tokens
    tokens._signing_key = None
    shown = {"Authorization": f"{given['client_id']}:{given['client_secret']}"}
    for _ in range(MANY):
        answers = [
            await api.ask("POST", "/auth/token", given, who=None),
            await refreshed(api, pair),
            await api.ask("GET", "/credentials", who=None, headers=shown),
        ]
        assert [answer.status for answer in answers] == [503] * 3
        assert all("auth.keys" in answer.body["message"] for answer in answers)
    wrong = given | {"client_secret": given["client_secret"][::-1]}
    assert (await api.ask("POST", "/auth/token", wrong, who=None)).status == 503
    described = (await api.ask("GET", "/openapi.json", who=None)).body["paths"]
    for path in ("/auth/token", "/auth/refresh"):
        assert "key to sign" in described[path]["post"]["responses"]["503"]["description"]


async def test_flood_of_invented_retrieval_tokens_has_bounded_waiters(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, gate, over = type(api.store), asyncio.Event(), 20
    get = kind.get

    async def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        await gate.wait()
        return await get(self, *arguments, **options)

    monkeypatch.setattr(kind, "get", slow)

    async def guess(number: int) -> type[Exception]:
        shown = {RETRIEVAL_TOKEN_HEADER: secrets.token_urlsafe(32)}
        call = ApiRequest("r", Principal("anybody"), f"127.0.0.{number}", {"org": ORG, "app": "shop"}, {}, shown)
        with pytest.raises((ApiError, Busy, TooManyRequests)) as refused:
            await fetched_by(api.parts, call)
        return refused.type

    most = MAX_CONCURRENT_RETRIEVALS + MAX_WAITING_RETRIEVALS
    patient = LookupThrottle(api.clock, RETRIEVAL_RATE_PER_ADDRESS, LookupRate(1000, 1.0))
    object.__setattr__(api.parts, "retrieval_throttle", patient)
    guesses = [asyncio.create_task(guess(number)) for number in range(most + over)]
    done: set[asyncio.Task[type[Exception]]] = set()
    while len(done) < over:
        done, _ = await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)
    assert {task.result() for task in done} == {Busy}
    gate.set()
    assert Counter(await asyncio.gather(*guesses)) == {
        Busy: over,
        ApiError: FAILURE_BURST,
        TooManyRequests: most - FAILURE_BURST,
    }


async def test_invented_retrieval_tokens_cause_limited_reads_and_block_no_other_address(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = (await api.ask("PUT", SHOP, {"app_name": "s"})).body
    kind, reads = type(api.store), Counter[str]()
    get = kind.get

    async def counted(self: Any, key: Key, **options: Any) -> Any:
        reads[key.table] += 1
        return await get(self, key, **options)

    monkeypatch.setattr(kind, "get", counted)

    async def asked(token: str, address: str) -> Any:
        call = ApiRequest(
            "r", Principal("anybody"), address, {"org": ORG, "app": "shop"}, {}, {RETRIEVAL_TOKEN_HEADER: token}
        )
        return await fetched_by(api.parts, call)

    flood = [asyncio.ensure_future(asked(secrets.token_urlsafe(32), "192.0.2.1")) for _ in range(200)]
    await settle()
    assert reads["secret-retrieval-tokens"] <= RETRIEVAL_RATE_PER_ADDRESS.burst
    right = await asked(issued["secret_retrieval_token"], "192.0.2.2")  # at once, with no time passing
    assert right.body["client_secret"]
    await api.clock.advance(MAX_LOOKUP_WAIT_SECONDS + 1)  # type: ignore[attr-defined]
    found = Counter(type(each) for each in await asyncio.gather(*flood, return_exceptions=True))
    assert found.keys() == {ApiError, TooManyRequests, Busy}
    most = RETRIEVAL_RATE_PER_ADDRESS.burst + MAX_LOOKUP_WAIT_SECONDS * RETRIEVAL_RATE_PER_ADDRESS.per_second
    assert reads["secret-retrieval-tokens"] <= most + 2


async def test_login_that_loses_every_race_is_answered_retryable_with_the_stores_reasons(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = await client(api)
    transact, reasons = api.store.transact, [ReasonCode.CONDITION_FAILED, ReasonCode.CONFLICT, ReasonCode.NONE]

    async def lose(*_: Any, **__: Any) -> None:
        raise TransactionFailed([CancellationReason(code) for code in reasons])

    monkeypatch.setattr("price_keeper.auth.refresh_sessions.MAX_ATTEMPTS", 1)
    monkeypatch.setattr(api.store, "transact", lose)
    answer = await api.ask("POST", "/auth/token", pair, who=None)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert (answer.body["error"], answer.body["retryable"]) == ("session_limit_race", True)
    assert answer.body["details"] == [
        {"path": "writes.0", "message": "condition failed"},
        {"path": "writes.1", "message": "conflict"},
        {"path": "writes.2", "message": "none"},
    ]
    (line,) = [each.getMessage() for each in caplog.records if "session_limit_race" in each.getMessage()]
    assert pair["client_id"] in line
    assert "condition failed, conflict, none" in line
    monkeypatch.setattr(api.store, "transact", transact)
    await login(api, pair)


async def test_store_that_is_away_is_no_session_race(api: ControlHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = await client(api)

    async def throttled(*_: Any, **__: Any) -> None:
        raise TransactionFailed([CancellationReason(ReasonCode.THROTTLED), CancellationReason(ReasonCode.NONE)])

    monkeypatch.setattr(api.store, "transact", throttled)
    answer = await api.ask("POST", "/auth/token", pair, who=None)
    assert (answer.status, answer.body["error"], "retryable" in answer.body) == (503, "unavailable", False)


async def test_refused_retrieval_tokens_are_counted_by_reason(api: ControlHarness) -> None:
    issued = (await api.ask("PUT", SHOP, {"app_name": "s"})).body
    await fetched(api, issued)
    rotated_to = await rotated(api, 1)
    shown = [issued["secret_retrieval_token"], "x" * 43]
    statuses = [
        (await api.ask("GET", f"{SHOP}/credentials/secret", who=None, headers={RETRIEVAL_TOKEN_HEADER: token})).status
        for token in shown
    ]
    await api.clock.advance(600)  # type: ignore[attr-defined]
    late = {RETRIEVAL_TOKEN_HEADER: rotated_to["secret_retrieval_token"]}
    statuses.append((await api.ask("GET", f"{SHOP}/credentials/secret", who=None, headers=late)).status)
    assert statuses == [401] * 3
    assert api.parts.retrieval_refusals == {"expired": 1, "reused": 1, "unknown": 1}
    assert api.parts.retrieval_token_counts == {"made": 3, "used": 1, "refused": 3}
