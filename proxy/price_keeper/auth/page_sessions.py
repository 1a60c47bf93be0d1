"""Sessions of the status page: what a browser shows in the place of a key or a token, which it never keeps.

A session is a token of its own kind, good for the page alone: no call is let through with it, and the data port knows
nothing of it. It ends with its time, by signing out, with the token it was made of, or with the admin key.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.tokens import Claims, TokenService
from price_keeper.errors import AccessDenied, TokenRejected, TokenExpired
from price_keeper.model import Caller, client_id_of, is_app_id, is_org_id

AUDIENCE = "price-keeper-page"
PURPOSE = "page"
SECONDS = 4 * 3600  # half a working day
ADMIN = "admin"

_BAD = "the session is not good: sign in again"
_OVER = "the session is over: sign in again"


@dataclass(frozen=True, slots=True)
class PageSession:
    """`caller` is None for the administrator."""

    caller: Caller | None
    jti: str
    expires: int
    of_token: Claims | None = None


class PageSessions:
    """`admin_mark` tells one admin key from another, and nothing else of it."""

    def __init__(self, tokens: TokenService, revocation: RevocationList, admin_mark: str | None) -> None:
        self._tokens = tokens
        self._revocation = revocation
        self._admin_mark = admin_mark

    @property
    def can_begin(self) -> bool:
        return self._tokens.can_mint

    def of_admin(self, now: float) -> tuple[str, PageSession]:
        return self._begun({"sub": ADMIN, "key": self._admin_mark}, None, int(now) + SECONDS, now)

    def of_client(self, token: str, now: float) -> tuple[str, PageSession]:
        """No longer than the token itself. Raises AccessDenied or TokenExpired."""
        claims = self._tokens.verify_access(token)
        caller = claims.caller
        of = {"jti": claims.jti, "sid": claims.sid, "exp": claims.expires, "iat": claims.issued}
        told = {
            "sub": caller.client_id,
            "org_id": caller.org,
            "app_id": caller.app,
            "of": {**of, "gen": claims.generation},
        }
        return self._begun(told, claims, min(claims.expires, int(now) + SECONDS), now)

    def _begun(self, told: dict[str, Any], of: Claims | None, expires: int, now: float) -> tuple[str, PageSession]:
        jti = str(uuid4())
        claims = {**told, "jti": jti, "iat": int(now), "exp": expires, "scope": PURPOSE}
        return self._tokens.sign(claims, AUDIENCE), PageSession(of.caller if of else None, jti, expires, of)

    async def checked(self, cookie: str, now: float) -> PageSession:
        """Raises AccessDenied or TokenExpired, and Busy where it cannot be told whether it was ended."""
        session = self._read(cookie, now)
        for claims in (_own_claims(session), session.of_token):
            if claims is not None and not self._revocation.is_known_valid(claims):
                await self._revocation.check_store(claims)
        return session

    async def end(self, cookie: str, now: float) -> None:
        """Raises as `checked` does. The token it was made of stays good."""
        await self._revocation.revoke_token(_own_claims(self._read(cookie, now)))

    def _read(self, cookie: str, now: float) -> PageSession:
        claims = self._tokens.verify_signature(cookie, AUDIENCE)
        if claims.get("scope") != PURPOSE or type(claims["exp"]) is not int:
            raise TokenRejected(_BAD)
        if now >= claims["exp"]:
            raise TokenExpired(_OVER)
        if claims["sub"] == ADMIN:
            if self._admin_mark is None or not hmac.compare_digest(str(claims.get("key")), self._admin_mark):
                raise TokenExpired(_OVER)  # of a key that is replaced
            return PageSession(None, str(claims["jti"]), claims["exp"])
        of_token = _of_token(claims)
        return PageSession(of_token.caller, str(claims["jti"]), claims["exp"], of_token)


def _own_claims(session: PageSession) -> Claims:
    """As the list of revoked tokens has them."""
    caller = session.caller or Caller("", None, ADMIN)
    return Claims(caller, "access", session.jti, None, session.expires, 0)


def _of_token(claims: dict[str, Any]) -> Claims:
    org, app, of = claims.get("org_id"), claims.get("app_id"), claims.get("of")
    is_known = isinstance(org, str) and is_org_id(org) and (app is None or is_app_id(app))
    if not is_known or not isinstance(of, dict):
        raise AccessDenied(_BAD)
    caller = Caller(str(org), app, client_id_of(str(org), app))
    return Claims(caller, "access", of["jti"], of.get("sid"), of["exp"], of["iat"], of.get("gen"))
