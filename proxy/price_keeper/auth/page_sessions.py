"""Sessions of the status page: the cookie that a browser holds instead of an admin key or an access token.

A page session is a JWT with an audience of its own: it authorizes no call, and the data port does not accept it.
It ends at its expiry, at sign-out, and with the token or the admin key that it was begun with.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.tokens import Claims, TokenService
from price_keeper.domain import Caller, build_client_id, is_app_id, is_org_id
from price_keeper.errors import AccessDenied, TokenExpired, TokenRejected

PAGE_AUDIENCE = "price-keeper-page"
PAGE_PURPOSE = "page"
PAGE_SESSION_SECONDS = 4 * 3600  # half a working day
ADMIN = "admin"

_INVALID_SESSION = "the session is invalid: sign in again"
_SESSION_OVER = "the session is over: sign in again"


@dataclass(frozen=True, slots=True)
class PageSession:
    """`caller` is None for the administrator."""

    caller: Caller | None
    jti: str
    expires: int
    source_claims: Claims | None = None


class PageSessions:
    """Begins, verifies and ends page sessions. `admin_key_digest` only tells one admin key from another."""

    def __init__(self, tokens: TokenService, revocation: RevocationList, admin_key_digest: str | None) -> None:
        self._tokens = tokens
        self._revocation = revocation
        self._admin_key_digest = admin_key_digest

    @property
    def can_begin(self) -> bool:
        return self._tokens.can_mint

    def begin_for_admin(self, now: float) -> tuple[str, PageSession]:
        return self._begin({"sub": ADMIN, "key": self._admin_key_digest}, None, int(now) + PAGE_SESSION_SECONDS, now)

    def begin_for_client(self, token: str, now: float) -> tuple[str, PageSession]:
        """Begin a session that ends no later than the token. Raises AccessDenied or TokenExpired."""
        claims = self._tokens.verify_access(token)
        caller = claims.caller
        source = {"jti": claims.jti, "sid": claims.sid, "exp": claims.expires, "iat": claims.issued}
        identity = {
            "sub": caller.client_id,
            "org_id": caller.org,
            "app_id": caller.app,
            "of": {**source, "gen": claims.generation},
        }
        return self._begin(identity, claims, min(claims.expires, int(now) + PAGE_SESSION_SECONDS), now)

    def _begin(
        self, identity: dict[str, Any], source_claims: Claims | None, expires: int, now: float
    ) -> tuple[str, PageSession]:
        jti = str(uuid4())
        claims = {**identity, "jti": jti, "iat": int(now), "exp": expires, "scope": PAGE_PURPOSE}
        return self._tokens.sign(claims, PAGE_AUDIENCE), PageSession(
            source_claims.caller if source_claims else None, jti, expires, source_claims
        )

    async def verify(self, cookie: str, now: float) -> PageSession:
        """Raises AccessDenied or TokenExpired; Busy if it cannot be known whether the session was ended."""
        session = self._read(cookie, now)
        for claims in (_build_own_claims(session), session.source_claims):
            if claims is not None and not self._revocation.is_known_valid(claims):
                await self._revocation.check_store(claims)
        return session

    async def end(self, cookie: str, now: float) -> None:
        """End the session; the token that it was begun with stays valid. Raises like `verify`."""
        await self._revocation.revoke_token(_build_own_claims(self._read(cookie, now)))

    def _read(self, cookie: str, now: float) -> PageSession:
        claims = self._tokens.verify_signature(cookie, PAGE_AUDIENCE)
        if claims.get("scope") != PAGE_PURPOSE or type(claims["exp"]) is not int:
            raise TokenRejected(_INVALID_SESSION)
        if now >= claims["exp"]:
            raise TokenExpired(_SESSION_OVER)
        if claims["sub"] == ADMIN:
            if self._admin_key_digest is None or not hmac.compare_digest(
                str(claims.get("key")), self._admin_key_digest
            ):
                raise TokenExpired(_SESSION_OVER)  # the admin key was replaced
            return PageSession(None, str(claims["jti"]), claims["exp"])
        source_claims = _parse_source_claims(claims)
        return PageSession(source_claims.caller, str(claims["jti"]), claims["exp"], source_claims)


def _build_own_claims(session: PageSession) -> Claims:
    """Build claims under which the list of revoked tokens can hold this session."""
    caller = session.caller or Caller("", None, ADMIN)
    return Claims(caller, "access", session.jti, None, session.expires, 0)


def _parse_source_claims(claims: dict[str, Any]) -> Claims:
    org, app, source = claims.get("org_id"), claims.get("app_id"), claims.get("of")
    is_caller_valid = isinstance(org, str) and is_org_id(org) and (app is None or is_app_id(app))
    if not is_caller_valid or not isinstance(source, dict):
        raise AccessDenied(_INVALID_SESSION)
    caller = Caller(str(org), app, build_client_id(str(org), app))
    return Claims(caller, "access", source["jti"], source.get("sid"), source["exp"], source["iat"], source.get("gen"))
