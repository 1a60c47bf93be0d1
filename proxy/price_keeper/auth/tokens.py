"""Tokens: JWTs that say who calls, minted by the control side and verified everywhere.

An access token gets calls through; a refresh token gets the next pair of tokens, and nothing else. Neither is ever
taken for the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import jwt

from price_keeper.auth.jwks import public_halves
from price_keeper.auth.keys import SigningKey
from price_keeper.auth.marks import Marks
from price_keeper.errors import AccessDenied, TokenRejected, TokenExpired
from price_keeper.model import Caller, client_id_of, is_app_id, is_org_id

AUDIENCE = "price-keeper"
ACCESS: Literal["access"] = "access"
REFRESH: Literal["refresh"] = "refresh"
ACCESS_SECONDS = 3600
REFRESH_SECONDS = 7 * 86_400
REMEMBERED = 10_000  # verified access tokens; a fleet's callers are far fewer
LONGEST = 16 * 1024  # characters of a token; ours have a thousand or two
SKEW_SECONDS = 5  # how far a minting machine's clock may be ahead of ours

Purpose: TypeAlias = Literal["access", "refresh"]

# Some decoders pass over what is no base64, and so one token could be spelled and remembered in any number of ways.
_SPELLING = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a token or a session: it becomes a key of the store
_BAD = "the token is not good: ask for a new one"
_EXPIRED = "the token has expired"
_REQUIRED = ["aud", "exp", "iat", "iss", "jti", "sub"]
# Times are checked against our own clock, which tests can set; ids by ourselves, as the store's keys depend on them.
_CHECKS = {"require": _REQUIRED, "verify_exp": False, "verify_iat": False, "verify_nbf": False, "verify_jti": False}


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says that is signed by one of our keys and has not expired.

    `sid` is that of its session; `generation` its client's, when it was made: once that is over, so is the token.
    """

    caller: Caller
    purpose: Purpose
    jti: str
    sid: str | None
    expires: int
    issued: int
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Minted:
    token: str
    claims: Claims

    @property
    def expires(self) -> int:
        return self.claims.expires


class Tokens:
    """The first key signs, all of them verify."""

    def __init__(
        self,
        keys: Sequence[SigningKey],
        issuer: str,
        now: Callable[[], float],
        access_seconds: int = ACCESS_SECONDS,
        refresh_seconds: int = REFRESH_SECONDS,
    ) -> None:
        self._keys = {key.kid: key for key in keys}
        self.marks = Marks(keys)
        self._signing = keys[0]
        self._issuer = issuer
        self._now = now
        self.access_seconds = access_seconds
        self.refresh_seconds = refresh_seconds
        self._verified: dict[str, Claims] = {}

    @property
    def can_mint(self) -> bool:
        return self._signing.signs_with is not None

    def jwks(self) -> dict[str, list[dict[str, str]]]:
        return public_halves(self._keys.values())

    def mint(
        self,
        org: str,
        app: str | None,
        seconds: int | None = None,
        sid: str | None = None,
        generation: int | None = None,
    ) -> Minted:
        """An access token; without a `sid` it belongs to no session."""
        return self._mint(org, app, ACCESS, self.access_seconds if seconds is None else seconds, sid, generation)

    def mint_refresh(self, org: str, app: str | None, sid: str) -> Minted:
        return self._mint(org, app, REFRESH, self.refresh_seconds, sid)

    def _mint(
        self,
        org: str,
        app: str | None,
        purpose: Purpose,
        seconds: int,
        sid: str | None,
        generation: int | None = None,
    ) -> Minted:
        now = int(self._now())
        claims: dict[str, Any] = {
            "sub": client_id_of(org, app),
            "iat": now,
            "exp": now + seconds,
            "jti": str(uuid4()),
            "org_id": org,
            "scope": purpose,
        }
        more = {"app_id": app, "sid": sid, "gen": generation}
        claims |= {name: value for name, value in more.items() if value is not None}
        token = self.signed(claims, AUDIENCE)
        caller = Caller(org, app, claims["sub"])
        return Minted(token, Claims(caller, purpose, claims["jti"], sid, now + seconds, now, generation))

    def signed(self, claims: dict[str, Any], audience: str) -> str:
        """A token for whoever goes by that audience alone; to all others it is none."""
        if self._signing.signs_with is None:
            raise AccessDenied("this sidecar has no key to sign tokens with; ask the control service")
        told = {"iss": self._issuer, "aud": audience, **claims}
        return jwt.encode(told, self._signing.signs_with, self._signing.alg, headers={"kid": self._signing.kid})

    def verify(self, token: str) -> Caller:
        """Whom an access token names. Raises AccessDenied or TokenExpired. Whether it was revoked is asked apart."""
        return self.access(token).caller

    def access(self, token: str) -> Claims:
        """Raises AccessDenied or TokenExpired. A token seen before costs a look-up."""
        known = self._verified.get(token)
        if known is None:
            known = self._read(token, ACCESS)
            self._remember(token, known)
        elif self._now() >= known.expires:
            del self._verified[token]
            raise TokenExpired(_EXPIRED)
        return known

    def refresh(self, token: str) -> Claims:
        """Raises AccessDenied or TokenExpired. Always has a `sid`."""
        return self._read(token, REFRESH)

    def either(self, token: str) -> Claims:
        """As one of them, for who gives a token back."""
        return self._read(token, None)

    def _read(self, token: str, purpose: Purpose | None) -> Claims:
        claims = self.signed_claims(token, AUDIENCE)
        now, expires, issued = self._now(), claims["exp"], claims["iat"]
        begins = claims.get("nbf", issued)
        if not type(expires) is type(issued) is type(begins) is int or max(issued, begins) > now + SKEW_SECONDS:
            raise AccessDenied(_BAD)
        found = _understood(claims)
        if found is None or purpose not in (found.purpose, None):
            raise TokenRejected(_BAD)
        if now >= expires:
            raise TokenExpired(_EXPIRED)
        return found

    def signed_claims(self, token: str, audience: str) -> dict[str, Any]:
        """What is signed by one of our keys, for that audience; its time is not looked at. Raises AccessDenied."""
        if len(token) > LONGEST or not _SPELLING.fullmatch(token):
            raise AccessDenied(_BAD)
        try:
            key = self._keys[jwt.get_unverified_header(token)["kid"]]
            # The algorithm is the key's own, whatever the token's head claims.
            found: dict[str, Any] = jwt.decode(
                token,
                key.verifies_with,
                [key.alg],
                options=_CHECKS,  # type: ignore[arg-type]
                audience=audience,
                issuer=self._issuer,
            )
        except (jwt.PyJWTError, KeyError, TypeError, ValueError, RecursionError):
            raise AccessDenied(_BAD) from None
        return found

    def _remember(self, token: str, claims: Claims) -> None:
        if len(self._verified) >= REMEMBERED:
            for oldest in list(self._verified)[: REMEMBERED // 2]:
                del self._verified[oldest]
        self._verified[token] = claims


def _understood(claims: dict[str, Any]) -> Claims | None:
    caller, purpose, jti, sid = _caller(claims), claims.get("scope"), claims["jti"], claims.get("sid")
    if caller is None or purpose not in (ACCESS, REFRESH) or not _is_id(jti):
        return None
    if not (_is_id(sid) or (sid is None and purpose == ACCESS)):
        return None
    generation = claims.get("gen")
    if not (generation is None or type(generation) is int):
        return None
    return Claims(caller, purpose, jti, sid, claims["exp"], claims["iat"], generation)


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _caller(claims: dict[str, Any]) -> Caller | None:
    org, app = claims.get("org_id"), claims.get("app_id")
    if not (isinstance(org, str) and is_org_id(org)):
        return None
    if not (app is None or (isinstance(app, str) and is_app_id(app))):
        return None
    client = client_id_of(org, app)
    return Caller(org, app, client) if claims["sub"] == client else None
