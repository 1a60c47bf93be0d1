"""From a request to its caller, by token and by binding."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from price_keeper.auth.authenticate import FixedIdentityAuthenticator, TokenAuthenticator
from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.domain import parse_client_id
from price_keeper.errors import AccessDenied
from price_keeper.exchange import Request
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryStore

ORG = "550e8400-e29b-41d4-a716-446655440000"
SECRET = b"a secret that is long enough for HS256"

TOKENS = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", lambda: 1_800_000_000.0)
WEB, WEB_TOO, JOB = (TOKENS.mint_access(ORG, app).token.encode() for app in ("web", "web", "job"))
REFRESH = TOKENS.mint_refresh(ORG, "web", "s1").token.encode()


@pytest.fixture
async def by_token() -> AsyncIterator[TokenAuthenticator]:
    clock = ManualClock()
    async with Tasks(clock) as tasks:
        yield TokenAuthenticator(TOKENS, RevocationList(MemoryStore(), clock, tasks))


def request(headers: dict[bytes, bytes], method: bytes = b"POST", repeated: frozenset[bytes] = frozenset()) -> Request:
    return Request(method, b"/model/premium/converse", headers, repeated)


SIGNED = b"AWS4-HMAC-SHA256 Credential=any/20261118/us-east-1/bedrock/aws4_request, SignedHeaders=host, Signature=00"


@pytest.mark.parametrize(
    "headers",
    [
        {b"x-amz-security-token": WEB},
        {b"x-amz-security-token": WEB, b"authorization": SIGNED},
        {b"authorization": b"Bearer " + WEB},
        {b"authorization": b"bearer  " + WEB},
        {b"x-amz-security-token": WEB, b"authorization": b"Bearer " + WEB_TOO},
        {b"x-api-key": WEB},
    ],
)
async def test_token_is_found_in_every_sdk_header(by_token: TokenAuthenticator, headers: dict[bytes, bytes]) -> None:
    assert by_token.cached(request(headers)) is None
    assert (await by_token.load(request(headers))).app == "web"
    caller = by_token.cached(request(headers))
    assert caller is not None
    assert caller.app == "web"


async def test_refusal_without_token_names_each_way_to_present_one(by_token: TokenAuthenticator) -> None:
    with pytest.raises(AccessDenied, match="AWS session token, as bearer, as x-api-key, or by container credentials"):
        by_token.cached(request({}))


@pytest.mark.parametrize("header", [b"authorization", b"x-amz-security-token"])
@pytest.mark.parametrize(
    "key", [b"ABSKQmVkcm9ja0FQSUtleS1hYmNkOnNlY3JldA==", b"bedrock-api-key-YmVkcm9jay5hbWF6b25hd3MuY29tLz9BY3Rpb24="]
)
async def test_bedrock_api_key_in_place_of_token_is_refused_with_what_to_do(
    by_token: TokenAuthenticator, header: bytes, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    sent = request({header: b"Bearer " + key if header == b"authorization" else key})
    with pytest.raises(AccessDenied, match=r"a Bedrock API key of AWS.*: unset AWS_BEARER_TOKEN_BEDROCK") as refused:
        by_token.cached(sent)
    assert key.decode() not in str(refused.value) + caplog.text


async def test_token_resembling_bedrock_api_key_is_refused_as_any_other(
    by_token: TokenAuthenticator,
) -> None:
    for token in (b"abskQmVk", b"my-bedrock-api-key-x", b"eyJABSK"):
        with pytest.raises(AccessDenied, match="the token is not good"):
            by_token.cached(request({b"authorization": b"Bearer " + token}))


@pytest.mark.parametrize(
    ("headers", "repeated"),
    [
        ({}, frozenset()),
        ({b"authorization": SIGNED}, frozenset()),
        ({b"authorization": b"Basic " + WEB}, frozenset()),
        ({b"authorization": WEB}, frozenset()),
        ({b"x-amz-security-token": b"\xff\xfe"}, frozenset()),
        ({b"x-amz-security-token": b""}, frozenset()),
        ({b"x-amz-security-token": WEB, b"authorization": b"Bearer " + JOB}, frozenset()),
        ({b"x-amz-security-token": WEB, b"authorization": b"Bearer nonsense"}, frozenset()),
        ({b"x-amz-security-token": REFRESH}, frozenset()),
        ({b"authorization": b"Bearer " + REFRESH}, frozenset()),
        ({b"x-amz-security-token": WEB, b"authorization": b"Bearer " + REFRESH}, frozenset()),
        ({b"x-amz-security-token": WEB}, frozenset({b"x-amz-security-token"})),
        ({b"authorization": b"Bearer " + WEB}, frozenset({b"authorization"})),
    ],
)
async def test_request_without_exactly_one_valid_token_is_refused(
    by_token: TokenAuthenticator, headers: dict[bytes, bytes], repeated: frozenset[bytes]
) -> None:
    with pytest.raises(AccessDenied):
        by_token.cached(request(headers, repeated=repeated))
    with pytest.raises(AccessDenied):
        await by_token.load(request(headers, repeated=repeated))


JSON = {b"content-type": b"application/json; charset=utf-8"}


@pytest.mark.parametrize("host", [b"127.0.0.1", b"127.0.0.1:8080", b"127.8.8.8:1", b"[::1]:8080", b"[::1]"])
def test_bound_sidecar_serves_local_host_names(host: bytes) -> None:
    caller = FixedIdentityAuthenticator(ORG, "web").cached(request({b"host": host} | JSON))
    assert (caller.org, caller.app, caller.client_id) == (ORG, "web", f"org-{ORG}-app-web")
    FixedIdentityAuthenticator(ORG, "web").cached(request({b"host": host}, method=b"GET"))


@pytest.mark.parametrize(
    "headers",
    [
        {b"host": b"evil.example:8080"} | JSON,
        {b"host": b"localhost:8080"} | JSON,
        {b"host": b"127.0.0.1.evil.example"} | JSON,
        {b"host": b"0x7f.1"} | JSON,
        {b"host": b""} | JSON,
        {b"host": b"\xff"} | JSON,
        dict(JSON),
        {b"host": b"127.0.0.1", b"origin": b"null"} | JSON,
        {b"host": b"127.0.0.1", b"content-type": b"text/plain"},
        {b"host": b"127.0.0.1", b"content-type": b"application/jsonp"},
        {b"host": b"127.0.0.1"},
    ],
)
def test_bound_sidecar_refuses_browser_requests(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(AccessDenied):
        FixedIdentityAuthenticator(ORG, "web").cached(request(headers))


@pytest.mark.parametrize(
    ("client_id", "scope"),
    [
        (f"org-{ORG}", (ORG, None)),
        (f"org-{ORG}-app-web", (ORG, "web")),
        (f"org-{ORG}-app-my-app-2", (ORG, "my-app-2")),
        (f"org-{ORG}-app-", None),
        (f"org-{ORG}-app-a#b", None),
        (f"org-{ORG}web", None),
        (f"org-{ORG}-", None),
        (ORG, None),
        ("org-acme", None),
        ("", None),
    ],
)
def test_client_id_parses_to_org_or_app(client_id: str, scope: tuple[str, str | None] | None) -> None:
    found = parse_client_id(client_id)
    assert (None if found is None else (found.org, found.app)) == scope
