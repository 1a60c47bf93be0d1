"""Authenticate a request: from its headers to its caller. START HERE.

`cached` answers from memory and never waits; `load` asks the store whether the token was revoked. Both raise
AccessDenied or TokenExpired. A token comes as the session token beside an AWS signature, as a bearer token, or as an
API key of Anthropic's clients. A sidecar with a configured identity (`auth.identity`) takes no tokens: every local
caller is that identity.
"""

from __future__ import annotations

import ipaddress
from typing import Final, Protocol

from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.tokens import Claims, TokenService
from price_keeper.bounded_dict import BoundedDict
from price_keeper.domain import Caller
from price_keeper.errors import AccessDenied
from price_keeper.exchange import Request

SESSION_TOKEN: Final = b"x-amz-security-token"
AUTHORIZATION: Final = b"authorization"
API_KEY: Final = b"x-api-key"  # of Anthropic's clients
_CREDENTIAL_HEADERS: Final = frozenset({SESSION_TOKEN, AUTHORIZATION, API_KEY})
_BEARER: Final = b"bearer "
# The prefixes of AWS's own Bedrock keys, long-term and short-term. No Price Keeper token begins like that.
_BEDROCK_KEY_PREFIXES: Final = (b"ABSK", b"bedrock-api-key-")
MAX_CACHED_HEADERS = 1000


class Authenticator(Protocol):
    """Finds the caller of a request. Both methods raise AccessDenied or TokenExpired."""

    def cached(self, request: Request) -> Caller | None:
        """Return the caller without I/O; None if `load` must ask the store."""

    async def load(self, request: Request) -> Caller:
        """Return the caller after asking the store. Raises Busy if it cannot be known whether the token is revoked."""


class TokenAuthenticator:
    """A token comes as the session token beside an AWS signature, as a bearer, or as an API key."""

    def __init__(self, tokens: TokenService, revocation: RevocationList) -> None:
        self._tokens = tokens
        self._revocation = revocation
        # The tokens of Authorization headers that were verified.
        self._tokens_by_header = BoundedDict[bytes, str](MAX_CACHED_HEADERS)

    def cached(self, request: Request) -> Caller | None:
        headers = request.headers
        header = headers.get(AUTHORIZATION)
        token = None if header is None else self._tokens_by_header.get(header)
        if token is not None and not request.repeated and SESSION_TOKEN not in headers:  # the usual case
            claims = self._tokens.verify_access(token)
            return claims.caller if self._revocation.is_known_valid(claims) else None
        first, second = self._read_claims(request)
        if not self._revocation.is_known_valid(first) or (
            second is not None and not self._revocation.is_known_valid(second)
        ):
            return None
        return first.caller

    async def load(self, request: Request) -> Caller:
        first, second = self._read_claims(request)
        for claims in (first, second):
            if claims is not None and not self._revocation.is_known_valid(claims):
                await self._revocation.check_store(claims)
        return first.caller

    def _read_claims(self, request: Request) -> tuple[Claims, Claims | None]:
        """Return the claims of the request's one or two tokens. Each must be valid, and both must name one caller."""
        if request.repeated and request.repeated & _CREDENTIAL_HEADERS:
            raise AccessDenied("the headers with credentials may occur only once each")
        session, bearer = request.headers.get(SESSION_TOKEN), _parse_bearer(request)
        if session is None and bearer is None:
            raise AccessDenied(
                "a token is needed: as AWS session token, as bearer, as x-api-key, or by container credentials"
            )
        if session is None and bearer is not None:
            return self._cache_bearer(request.headers.get(AUTHORIZATION), bearer), None
        if session is None or bearer is None:
            return self._verify(session or b""), None
        first, second = self._verify(session), self._verify(bearer)
        if first.caller != second.caller:
            raise AccessDenied("the two tokens of this request name different callers")
        return first, second

    def _cache_bearer(self, header: bytes | None, bearer: bytes) -> Claims:
        claims = self._verify(bearer)
        if header is not None:
            self._tokens_by_header[header] = bearer.decode("latin-1")
        return claims

    def _verify(self, token: bytes) -> Claims:
        try:
            return self._tokens.verify_access(token.decode("latin-1"))
        except AccessDenied:
            if token.startswith(_BEDROCK_KEY_PREFIXES):
                raise AccessDenied(
                    "a Bedrock API key of AWS is no token here, and an SDK that finds one sends nothing else: "
                    "unset AWS_BEARER_TOKEN_BEDROCK, or put a token of Price Keeper there"
                ) from None
            raise


def _parse_bearer(request: Request) -> bytes | None:
    """The token of a bearer header, or else that of a key as Anthropic's clients send it."""
    value = request.headers.get(AUTHORIZATION)
    if value is None:
        return request.headers.get(API_KEY)
    return value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else None


class FixedIdentityAuthenticator:
    """Takes every caller for the sidecar's one identity, so requests that a web page could send are refused."""

    def __init__(self, org: str, app: str) -> None:
        self._caller = Caller(org, app, f"org-{org}-app-{app}")

    def cached(self, request: Request) -> Caller:
        headers = request.headers
        if b"origin" in headers or not _is_literal_loopback(headers.get(b"host", b"")):
            raise AccessDenied("this sidecar serves programs on this machine, at http://127.0.0.1")
        is_json = headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"
        if request.method == b"POST" and not is_json:
            raise AccessDenied("this sidecar accepts only requests of content type application/json")
        return self._caller

    async def load(self, request: Request) -> Caller:
        return self.cached(request)


def _is_literal_loopback(host: bytes) -> bool:
    """Whether the host is a loopback address. Names do not count: a web page's own name can be made to resolve here."""
    name, _, _ = host.decode("latin-1").rpartition(":") if _has_port(host) else (host.decode("latin-1"), "", "")
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _has_port(host: bytes) -> bool:
    return host.rpartition(b":")[2].isdigit() and (not host.startswith(b"[") or b"]:" in host)
