"""Tokens: for a client's secret, for a refresh token, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from proxy.auth.sessions import Issued
from proxy.control.calls import Answer, Call, Route, Who, read
from proxy.control.fields import Fields, Text
from proxy.control.parts import Parts
from proxy.control.problems import unauthorized
from proxy.errors import AccessDenied, TokenExpired

_TOKEN = Text(r"[!-~]+", 16 * 1024, "a token")
LOGIN = Fields(
    {
        "grant_type": Text("client_credentials", 18, "client_credentials"),
        "client_id": Text(r"[!-~]+", 128, "a client id"),
        "client_secret": Text(r"[!-~]+", 128, "a secret"),
    },
    ("client_id", "client_secret"),
)
REFRESH = Fields({"refresh_token": _TOKEN}, ("refresh_token",))
REVOKE = Fields({"token": _TOKEN}, ("token",))


async def login(parts: Parts, call: Call) -> Answer:
    given = LOGIN.read(call.body)
    with _as_unauthorized():
        scope = await parts.clients.check(given["client_id"], given["client_secret"])
        return _told(parts, await parts.sessions.login(scope))


async def refresh(parts: Parts, call: Call) -> Answer:
    given = REFRESH.read(call.body)
    with _as_unauthorized():
        return _told(parts, await parts.sessions.refresh(given["refresh_token"]))


async def revoke(parts: Parts, call: Call) -> Answer:
    """Whoever has a token may end it, and with a refresh token its whole session."""
    given = REVOKE.read(call.body)
    with _as_unauthorized():
        await parts.sessions.give_back(given["token"])
    return Answer({"is_revoked": True})


async def jwks(parts: Parts, _: Call) -> Answer:
    return read(parts.tokens.jwks(), "public, max-age=300")


def _told(parts: Parts, issued: Issued) -> Answer:
    told: dict[str, Any] = {
        "access_token": issued.access.token,
        "refresh_token": issued.refresh.token,
        "token_type": "Bearer",
        "expires_in": max(0, int(issued.access.expires - parts.clock.now())),
        "refresh_expires_in": max(0, int(issued.refresh.expires - parts.clock.now())),
        "session_id": issued.sid,
    }
    return Answer(told)


@contextmanager
def _as_unauthorized() -> Iterator[None]:
    try:
        yield
    except (AccessDenied, TokenExpired) as failure:
        raise unauthorized(failure.message) from None


def _post(path: str, name: str, summary: str, handle: Any, answer: str, body: str) -> Route:
    return Route("POST", path, Who.ANYBODY, name, summary, handle, {200: answer}, (401,), body=body, group="auth")


ROUTES = (
    _post("/auth/token", "login", "Tokens for a client's id and secret", login, "Tokens", "Login"),
    _post("/auth/refresh", "refresh", "New tokens for a refresh token, which ends", refresh, "Tokens", "Refresh"),
    _post("/auth/revoke", "revoke", "End a token, or with a refresh token its session", revoke, "Revoked", "Revoke"),
    Route(
        "GET",
        "/.well-known/jwks.json",
        Who.ANYBODY,
        "jwks",
        "The public halves of the keys that sign tokens",
        jwks,
        {200: "Jwks"},
        group="auth",
    ),
)
