"""Access tokens: JWTs that say who calls, minted by the control side and verified everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import jwt

from proxy.auth.keys import SigningKey
from proxy.errors import AccessDenied, TokenExpired
from proxy.model import Caller, client_id_of, is_app_id, is_org_id

AUDIENCE = "price-keeper"
ACCESS = "access"
ACCESS_SECONDS = 3600
REMEMBERED = 10_000  # verified tokens; a fleet's callers are far fewer
LONGEST = 16 * 1024  # characters of a token; ours have a thousand or two
SKEW_SECONDS = 5  # how far a minting machine's clock may be ahead of ours

# Some decoders pass over what is no base64, and so one token could be spelled and remembered in any number of ways.
_SPELLING = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_BAD = "the token is not good: ask for a new one"
_REQUIRED = ["aud", "exp", "iat", "iss", "jti", "sub"]
# Times are checked against our own clock, which tests can set.
_CHECKS = {"require": _REQUIRED, "verify_exp": False, "verify_iat": False, "verify_nbf": False}


@dataclass(frozen=True, slots=True)
class Minted:
    token: str
    expires: int


class Tokens:
    """The first key signs, all of them verify."""

    def __init__(self, keys: Sequence[SigningKey], issuer: str, now: Callable[[], float]) -> None:
        self._keys = {key.kid: key for key in keys}
        self._signing = keys[0]
        self._issuer = issuer
        self._now = now
        self._verified: dict[str, tuple[Caller, float]] = {}

    def mint(self, org: str, app: str | None, seconds: int = ACCESS_SECONDS) -> Minted:
        now = int(self._now())
        claims: dict[str, Any] = {
            "iss": self._issuer,
            "aud": AUDIENCE,
            "sub": client_id_of(org, app),
            "iat": now,
            "exp": now + seconds,
            "jti": str(uuid4()),
            "org_id": org,
            "scope": ACCESS,
        }
        if app is not None:
            claims["app_id"] = app
        if self._signing.signs_with is None:
            raise AccessDenied("this sidecar has no key to sign tokens with; ask the control service")
        token = jwt.encode(claims, self._signing.signs_with, self._signing.alg, headers={"kid": self._signing.kid})
        return Minted(token, now + seconds)

    def verify(self, token: str) -> Caller:
        """Raises AccessDenied or TokenExpired. A token seen before costs a look-up."""
        known = self._verified.get(token)
        if known is not None:
            caller, expires = known
            if self._now() < expires:
                return caller
            del self._verified[token]
            raise TokenExpired("the token has expired")
        return self._verify(token)

    def _verify(self, token: str) -> Caller:
        claims = self._claims(token)
        now, expires = self._now(), claims["exp"]
        if type(expires) is not int or type(claims["iat"]) is not int or claims["iat"] > now + SKEW_SECONDS:
            raise AccessDenied(_BAD)
        if now >= expires:
            raise TokenExpired("the token has expired")
        caller = _caller(claims)
        if len(self._verified) >= REMEMBERED:
            self._forget_half()
        self._verified[token] = (caller, expires)
        return caller

    def _claims(self, token: str) -> dict[str, Any]:
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
                audience=AUDIENCE,
                issuer=self._issuer,
            )
        except (jwt.PyJWTError, KeyError, TypeError, ValueError, RecursionError):
            raise AccessDenied(_BAD) from None
        return found

    def _forget_half(self) -> None:
        for token in list(self._verified)[: REMEMBERED // 2]:
            del self._verified[token]


def _caller(claims: dict[str, Any]) -> Caller:
    org, app = claims.get("org_id"), claims.get("app_id")
    is_good = isinstance(org, str) and is_org_id(org) and (app is None or (isinstance(app, str) and is_app_id(app)))
    if not is_good or claims.get("scope") != ACCESS:
        raise AccessDenied(_BAD)
    assert isinstance(org, str)
    client = client_id_of(org, app)
    if claims["sub"] != client:
        raise AccessDenied(_BAD)
    return Caller(org, app, client)
