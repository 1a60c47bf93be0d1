"""Clients renew container credentials themselves: no call fails when a token expires, and few tokens are minted.

A life of a few seconds is possible: botocore then fetches before every call (it wants 15 minutes to be left), and
JavaScript does so too (5 minutes), but beside the call, which goes out with what was fetched for the one before unless
that has ended. Less than 2 seconds is no life, as tokens end with a whole second: one may be over before it arrives.

What each client fetches passes a window that notes it: as every token that is minted for `/credentials` is handed out,
the different tokens seen there are all that were minted.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import pytest
from price_keeper.auth.client_secrets import GRACE_ENDS_AT, client_item_key
from price_keeper.auth.registration import retrieve, rotate
from price_keeper.clock import SystemClock

from tests.flow.clients.renewing import Fetch, Fleet, Known, Window, called, fetched, fleet, long_lived, opened
from tests.support.clients import AWS_CLI, BOTO3, BOTO3_OLDER, JAVASCRIPT, Client, ClientOutcome

CLIENTS = (BOTO3, BOTO3_OLDER, JAVASCRIPT, AWS_CLI)
APPS = {BOTO3: "boto3", BOTO3_OLDER: "boto3-older", JAVASCRIPT: "javascript", AWS_CLI: "command-line"}
USUAL, ROTATED, FLOOD = "usual", "rotated", "flood"

LIFE = 5  # seconds
EXPIRIES = 3
SHORTEST_SHARE = (LIFE - 1) / 2  # of a life that is cut to whole seconds: so long does every handed-out token last
PAUSE = 0.25  # between two calls
GRACE = 4  # seconds
NO_PAIR = "the container authorization token is client_id:client_secret"
TOO_MANY = "too many malformed requests; wait before the next one"
GIVING_UP = 5.0  # a client tries a fetch three or four times, a second apart

FLOOD_SECONDS = 0.2
FLOOD_ROUNDS = 8
LEAST_SHARE = 0.3  # of the rate of refusals; measured is twice as much

each_client = pytest.mark.parametrize("client", CLIENTS, ids=str)


@dataclass(frozen=True)
class Lived:
    outcomes: list[ClientOutcome]
    fetches: list[Fetch]
    tokens: list[str]
    seconds: float

    @property
    def errors(self) -> list[Any]:
        return [each.error for each in self.outcomes if each.error is not None]


@dataclass(frozen=True)
class Rotated:
    ends: float
    failed: float
    error: dict[str, Any]
    fetches: list[Fetch]  # since the rotation
    status_of_the_new: int  # at the same moment


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    apps = [*APPS.values(), *(f"{way}-{app}" for way in (USUAL, ROTATED) for app in APPS.values()), FLOOD]
    with fleet(tmp_path_factory.mktemp("fleet"), LIFE, apps) as sidecars:
        yield sidecars


@pytest.fixture(scope="module")
def lived(running: Fleet) -> dict[Client, Future[Lived]]:
    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        return {client: pool.submit(_live, client, running) for client in CLIENTS if client.is_installed}


@pytest.fixture(scope="module")
def rotated(running: Fleet) -> dict[Client, Future[Rotated]]:
    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        return {client: pool.submit(_outlive_a_secret, client, running) for client in CLIENTS if client.is_installed}


def _live(client: Client, running: Fleet) -> Lived:
    pair = running.known[APPS[client]].pair
    with Window(running.here.data).open() as window, long_lived(client, running, window, pair) as process:
        outcomes = [process.ask()]
        began = time.time()
        while time.time() < began + EXPIRIES * LIFE + 0.5:
            time.sleep(PAUSE)
            outcomes.append(process.ask())
        return Lived(outcomes, window.fetches, window.tokens, time.time() - window.fetches[0].began)


@each_client
def test_renewal_of_expiring_tokens_fails_no_call(
    client: Client, running: Fleet, lived: dict[Client, Future[Lived]]
) -> None:
    client.require_installed()
    found = lived[client].result()
    assert found.errors == []
    assert len(found.outcomes) > EXPIRIES
    assert {each.status for each in found.fetches} == {200}
    for token in found.tokens[:EXPIRIES]:  # each carried calls, and none would now
        status, body = called(running.here.data, token)
        assert (status, json.loads(body)["message"]) == (403, "the token has expired")


@each_client
def test_short_lived_credentials_are_fetched_for_every_call(client: Client, lived: dict[Client, Future[Lived]]) -> None:
    client.require_installed()
    found = lived[client].result()
    calls = len(found.outcomes)
    if client is AWS_CLI:  # once to have any, and once more as they seem to end soon
        assert len(found.fetches) == 2 * calls
    elif client is JAVASCRIPT:  # which fetches beside the call: on a busy machine two calls may share a fetch
        assert 0.9 * calls <= len(found.fetches) <= calls + 2
    else:
        assert calls <= len(found.fetches) <= calls + 2


@each_client
def test_many_fetches_share_few_tokens(client: Client, lived: dict[Client, Future[Lived]]) -> None:
    client.require_installed()
    found = lived[client].result()
    assert EXPIRIES < len(found.tokens) <= found.seconds / SHORTEST_SHARE + 1
    assert len(found.tokens) < len(found.fetches) / (2 if client is AWS_CLI else 4)
    lefts = [each.expires - each.began for each in found.fetches if each.expires is not None]
    assert min(lefts) >= SHORTEST_SHARE - 1  # as seen from before the question, which may take its time


@each_client
def test_hour_long_credentials_are_fetched_once(client: Client, running: Fleet) -> None:
    client.require_installed()
    pair = running.known[f"{USUAL}-{APPS[client]}"].pair
    with Window(running.usual.data).open() as window, long_lived(client, running, window, pair) as process:
        assert [process.ask().error for _ in range(3)] == [None] * 3
        assert len(window.fetches) == (3 if client is AWS_CLI else 1)  # each run is a process of its own
        assert len(window.tokens) == 1


class Behind(SystemClock):
    """Grace is counted in hours: by this clock one of them ends in a few seconds."""

    def now(self) -> float:
        return time.time() - 3600 + GRACE


def _outlive_a_secret(client: Client, running: Fleet) -> Rotated:
    """After the rotation it fetches from the sidecar that has not seen it yet: others know of it within a minute."""
    known = running.known[f"{ROTATED}-{APPS[client]}"]
    with Window(running.here.data).open() as window, long_lived(client, running, window, known.pair) as process:
        assert process.ask().error is None
        new, ends = asyncio.run(_rotate(running, known))
        fetched_before = len(window.fetches)
        window.sidecar = running.other.data
        while time.time() < ends + LIFE + GIVING_UP:
            error = process.ask().error
            if error is not None:
                status, _ = fetched(running.other.data, new.pair)
                return Rotated(ends, time.time(), error, window.fetches[fetched_before:], status)
            time.sleep(PAUSE)
    raise AssertionError(f"{client} still uses an expired secret")


async def _rotate(running: Fleet, known: Known) -> tuple[Known, float]:
    clock, scope = Behind(), known.scope
    async with opened(running.store) as store:
        issued = await rotate(store, clock, scope, 1)
        secret = await retrieve(store, clock, scope, issued.retrieval_token)
        item = await store.get(client_item_key(scope), consistent=True)
    ends = (item or {})[GRACE_ENDS_AT]
    assert isinstance(ends, (int, Decimal))
    return Known(scope, secret), float(ends)


@each_client
def test_rotated_secret_fetches_until_grace_ends(client: Client, rotated: dict[Client, Future[Rotated]]) -> None:
    client.require_installed()
    found = rotated[client].result()
    in_grace = [each.status for each in found.fetches if each.ended < found.ends]
    assert len(in_grace) > 1
    assert set(in_grace) == {200}
    refused = {each.status for each in found.fetches if each.began >= found.ends}
    assert refused
    assert refused <= {403, 429}  # the latter after all that the clients at this address sent together
    assert found.failed > found.ends
    assert found.status_of_the_new == 200


@each_client
def test_fetch_after_grace_reports_reason(client: Client, rotated: dict[Client, Future[Rotated]]) -> None:
    """The SDK for JavaScript keeps the reason to itself, and calls for as long as the token that it has is good."""
    client.require_installed()
    error = rotated[client].result().error
    if client is JAVASCRIPT:
        assert (error["kind"], error["message"]) == (
            "CredentialsProviderError",
            "Could not load credentials from any providers",
        )
    else:
        assert "credentials from container-role" in error["message"]
        refusals = (
            ("403", "the client id or its secret is wrong"),
            ("429", "too many wrong secrets; wait before the next attempt"),
        )
        assert any(status in error["message"] and why in error["message"] for status, why in refusals)


def test_fetch_costs_little_more_than_refusal(running: Fleet) -> None:
    """At the best of several times each, one request after the other on one connection."""
    pair = running.known[FLOOD].pair
    fetched(running.usual.data, pair)  # the one time that the secret is compared
    good, bad = _request(f"authorization: {pair}\r\n"), _request("")
    rounds = [(_flood(running, good), _flood(running, bad)) for _ in range(FLOOD_ROUNDS)]
    fetches, refusals = zip(*rounds, strict=True)
    answers = {body for bodies in fetches for body in bodies}
    assert sum(map(len, fetches)) > 1000
    assert len(answers) == 1  # so many fetches, one token
    assert json.loads(answers.pop())["Token"]
    assert {json.loads(body)["message"] for bodies in refusals for body in set(bodies)} <= {NO_PAIR, TOO_MANY}
    share = max(map(len, fetches)) / max(map(len, refusals))
    assert share > LEAST_SHARE, share


def _request(header: str) -> bytes:
    return f"GET /credentials HTTP/1.1\r\nhost: here\r\n{header}\r\n".encode()


def _flood(running: Fleet, request: bytes) -> list[bytes]:
    """The bodies of all answers that come within the time."""
    place = urlsplit(running.usual.data)
    bodies = []
    with socket.create_connection((place.hostname or "", place.port or 0), 10) as connection:
        ends = time.perf_counter() + FLOOD_SECONDS
        while time.perf_counter() < ends:
            connection.sendall(request)
            answer = connection.recv(65_536)
            while not answer.endswith(b"}"):
                answer += connection.recv(65_536)
            bodies.append(answer.partition(b"\r\n\r\n")[2])
    return bodies
