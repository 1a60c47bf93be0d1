"""JWTs that name a caller: minted by the control service, verified in every process, published as a JWKS document.

START HERE: `TokenService`. An access token authorizes calls; a refresh token is good for the next pair of tokens and
nothing else. Neither is ever accepted as the other. Verified access tokens are cached. Whether a token was revoked is
the subject of `revocation.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import jwt
from jwt.algorithms import OKPAlgorithm, RSAAlgorithm

from price_keeper.auth.secret_tags import SecretTagger
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.bounded_dict import BoundedDict
from price_keeper.domain import Caller, build_client_id, is_app_id, is_org_id
from price_keeper.errors import AccessDenied, TokenExpired, TokenRejected

AUDIENCE = "price-keeper"
ACCESS: Literal["access"] = "access"
REFRESH: Literal["refresh"] = "refresh"
ACCESS_SECONDS = 3600
REFRESH_SECONDS = 30 * 86_400
MAX_CACHED_TOKENS = 10_000  # verified access tokens; a fleet has far fewer callers
MAX_TOKEN_CHARS = 16 * 1024  # Price Keeper's own tokens have one or two thousand characters
SKEW_SECONDS = 5  # how far the clock of the machine that minted a token may be ahead

Purpose: TypeAlias = Literal["access", "refresh"]

# Some decoders skip characters that are not base64; then one token could be spelled, and cached, in many ways.
_COMPACT_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a token or a session; it becomes part of a store key
_INVALID_TOKEN = "the token is not good: ask for a new one"
_TOKEN_EXPIRED = "the token has expired"
_REQUIRED_CLAIMS = ["aud", "exp", "iat", "iss", "jti", "sub"]
# Times are checked here against the injected clock, which tests can set; ids because they become keys of the store.
_JWT_OPTIONS = {
    "require": _REQUIRED_CLAIMS,
    "verify_exp": False,
    "verify_iat": False,
    "verify_nbf": False,
    "verify_jti": False,
}


@dataclass(frozen=True, slots=True)
class Claims:
    """The contents of a token that is signed by one of the keys and has not expired.

    `sid` is its session's id. `generation` is its client's when it was minted: once that is over, so is the token.
    """

    caller: Caller
    purpose: Purpose
    jti: str
    sid: str | None
    expires: int
    issued: int
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class MintedToken:
    token: str
    claims: Claims

    @property
    def expires(self) -> int:
        return self.claims.expires


class TokenService:
    """Mints and verifies tokens. The first key signs, all of them verify; without keys, every token is rejected."""

    def __init__(
        self,
        keys: Sequence[SigningKey],
        issuer: str,
        now: Callable[[], float],
        access_seconds: int = ACCESS_SECONDS,
        refresh_seconds: int = REFRESH_SECONDS,
    ) -> None:
        self._keys = {key.kid: key for key in keys}
        self.secret_tagger = SecretTagger(keys)
        self._signing_key = keys[0] if keys and keys[0].signs_with is not None else None
        self._issuer = issuer
        self._now = now
        self.access_seconds = access_seconds
        self.refresh_seconds = refresh_seconds
        self._cached_claims = BoundedDict[str, Claims](MAX_CACHED_TOKENS)

    @property
    def can_mint(self) -> bool:
        return self._signing_key is not None

    def build_jwks(self) -> dict[str, list[dict[str, str]]]:
        return build_jwks(self._keys.values())

    def mint_access(
        self,
        org: str,
        app: str | None,
        seconds: int | None = None,
        sid: str | None = None,
        generation: int | None = None,
    ) -> MintedToken:
        """Mint an access token; without a `sid` it belongs to no session."""
        return self._mint(org, app, ACCESS, self.access_seconds if seconds is None else seconds, sid, generation)

    def mint_refresh(self, org: str, app: str | None, sid: str) -> MintedToken:
        return self._mint(org, app, REFRESH, self.refresh_seconds, sid)

    def _mint(
        self,
        org: str,
        app: str | None,
        purpose: Purpose,
        seconds: int,
        sid: str | None,
        generation: int | None = None,
    ) -> MintedToken:
        now = int(self._now())
        claims: dict[str, Any] = {
            "sub": build_client_id(org, app),
            "iat": now,
            "exp": now + seconds,
            "jti": str(uuid4()),
            "org_id": org,
            "scope": purpose,
        }
        optional_claims = {"app_id": app, "sid": sid, "gen": generation}
        claims |= {name: value for name, value in optional_claims.items() if value is not None}
        token = self.sign(claims, AUDIENCE)
        caller = Caller(org, app, claims["sub"])
        return MintedToken(token, Claims(caller, purpose, claims["jti"], sid, now + seconds, now, generation))

    def sign(self, claims: dict[str, Any], audience: str) -> str:
        """Sign a token for this audience. Verification for any other audience rejects it."""
        if self._signing_key is None:
            raise AccessDenied("this sidecar has no key to sign tokens with; ask the control service")
        payload = {"iss": self._issuer, "aud": audience, **claims}
        return jwt.encode(
            payload, self._signing_key.signs_with, self._signing_key.alg, headers={"kid": self._signing_key.kid}
        )

    def verify_caller(self, token: str) -> Caller:
        """Return an access token's caller. Raises AccessDenied or TokenExpired. It does not check for revocation."""
        return self.verify_access(token).caller

    def verify_access(self, token: str) -> Claims:
        """Return an access token's claims, from the cache if seen before. Raises AccessDenied or TokenExpired."""
        claims = self._cached_claims.get(token)
        if claims is None:
            claims = self._cached_claims[token] = self._verify(token, ACCESS)
        elif self._now() >= claims.expires:
            del self._cached_claims[token]
            raise TokenExpired(_TOKEN_EXPIRED)
        return claims

    def verify_refresh(self, token: str) -> Claims:
        """Return a refresh token's claims, which always have a `sid`. Raises AccessDenied or TokenExpired."""
        return self._verify(token, REFRESH)

    def verify_any(self, token: str) -> Claims:
        """Verify an access or a refresh token, for a client that gives it back."""
        return self._verify(token, None)

    def _verify(self, token: str, purpose: Purpose | None) -> Claims:
        claims = self.verify_signature(token, AUDIENCE)
        now, expires, issued = self._now(), claims["exp"], claims["iat"]
        begins = claims.get("nbf", issued)
        if not type(expires) is type(issued) is type(begins) is int or max(issued, begins) > now + SKEW_SECONDS:
            raise AccessDenied(_INVALID_TOKEN)
        parsed = _parse_claims(claims)
        if parsed is None or purpose not in (parsed.purpose, None):
            raise TokenRejected(_INVALID_TOKEN)
        if now >= expires:
            raise TokenExpired(_TOKEN_EXPIRED)
        return parsed

    def verify_signature(self, token: str, audience: str) -> dict[str, Any]:
        """Verify signature, issuer and audience, and return the claims. Expiry is not checked. Raises AccessDenied."""
        if len(token) > MAX_TOKEN_CHARS or not _COMPACT_JWT.fullmatch(token):
            raise AccessDenied(_INVALID_TOKEN)
        try:
            key = self._keys[jwt.get_unverified_header(token)["kid"]]
            # The algorithm is that of the key, whatever the token's header claims.
            claims: dict[str, Any] = jwt.decode(
                token,
                key.verifies_with,
                [key.alg],
                options=_JWT_OPTIONS,  # type: ignore[arg-type]
                audience=audience,
                issuer=self._issuer,
            )
        except (jwt.PyJWTError, KeyError, TypeError, ValueError, RecursionError):
            raise AccessDenied(_INVALID_TOKEN) from None
        return claims


def _parse_claims(claims: dict[str, Any]) -> Claims | None:
    caller, purpose, jti, sid = _parse_caller(claims), claims.get("scope"), claims["jti"], claims.get("sid")
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


def _parse_caller(claims: dict[str, Any]) -> Caller | None:
    org, app = claims.get("org_id"), claims.get("app_id")
    if not (isinstance(org, str) and is_org_id(org)):
        return None
    if not (app is None or (isinstance(app, str) and is_app_id(app))):
        return None
    client = build_client_id(org, app)
    return Caller(org, app, client) if claims["sub"] == client else None


_JWK_ALGORITHMS: dict[str, Any] = {"EdDSA": OKPAlgorithm, "RS256": RSAAlgorithm}
_PUBLIC_FIELDS = ("kty", "crv", "x", "n", "e")  # an allow-list: all else that a library exports stays private


def build_jwks(keys: Iterable[SigningKey]) -> dict[str, list[dict[str, str]]]:
    """Build the JWKS document. A shared HS256 secret has no public half and is left out."""
    return {"keys": [_build_jwk(key) for key in keys if key.alg in _JWK_ALGORITHMS]}


def _build_jwk(key: SigningKey) -> dict[str, str]:
    jwk: dict[str, Any] = _JWK_ALGORITHMS[key.alg].to_jwk(key.verifies_with, as_dict=True)
    return {"kid": key.kid, "alg": key.alg, "use": "sig"} | {name: jwk[name] for name in _PUBLIC_FIELDS if name in jwk}
