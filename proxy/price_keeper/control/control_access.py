"""Authenticate callers of the control API and authorize them for a route.

The administrator and an org's administrator send an API key, a client a bearer token, and the status page its session
cookie. A request with the cookie must come from the page itself: only a page of this origin can send the page header,
because no other origin is granted CORS. Wrong keys and tokens count as failed logins. Start with
`ControlAuthenticator` and `authorize`.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from multidict import MultiMapping

from price_keeper.auth.org_keys import OrgKeyVerifier, is_org_key, name_client_of_key, name_org_administrator
from price_keeper.auth.page_sessions import PageSession, PageSessions
from price_keeper.auth.throttles import ADMIN, LoginThrottle
from price_keeper.clock import Clock
from price_keeper.config.config_sections import AuthConfig
from price_keeper.control.api_constants import API_KEY_HEADER, AUTHORIZATION_HEADER
from price_keeper.control.api_errors import forbidden, invalid_request, unauthorized
from price_keeper.control.api_types import AccessLevel, ApiRoute, Principal
from price_keeper.domain import Caller
from price_keeper.errors import AccessDenied, ConfigError, TokenExpired, TokenRejected

PAGE_HEADER = "X-Price-Keeper-Page"
MIN_ADMIN_KEY_LENGTH = 24  # characters; guessing is then hopeless, so no caller needs to be locked out

_BEARER = "bearer "

T = TypeVar("T")

VerifyToken = Callable[[str], Awaitable[Caller]]


def has_page_header(headers: MultiMapping[str]) -> bool:
    return headers.getall(PAGE_HEADER, []) == ["1"]


def check_same_origin(headers: MultiMapping[str], *, is_change: bool) -> None:
    """Protect against cross-site requests: require the page header and, for changes, an Origin that names the Host.
    Raises ApiError."""
    if not has_page_header(headers):
        raise forbidden(f"a request with the session cookie needs the header {PAGE_HEADER}: 1")
    if headers.getall("Sec-Fetch-Site", ["same-origin"]) != ["same-origin"]:
        raise forbidden("pages of another origin may not send this request")
    origins, hosts = headers.getall("Origin", []), headers.getall("Host", [])
    if not origins and not is_change:  # browsers omit Origin from same-origin GET requests
        return
    if len(origins) != 1 or len(hosts) != 1 or not is_origin_of_host(origins[0], hosts[0]):
        raise forbidden("a change needs an Origin header that names the Host; a proxy in front must pass both on")


def is_origin_of_host(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower() != ""


def cookie_name(headers: MultiMapping[str]) -> str:
    """The name of the session cookie. It contains the port, because cookies are shared by all ports of a host."""
    port = (headers.getall("Host", []) or [""])[0].rpartition(":")[2]
    return f"price-keeper-{port}" if port.isascii() and port.isdigit() else "price-keeper"


def read_cookie(headers: MultiMapping[str]) -> str | None:
    """The value of the session cookie; None if it is missing or ambiguous."""
    pairs = (part.partition("=") for line in headers.getall("Cookie", []) for part in line.split(";"))
    name = cookie_name(headers)
    values = [value.strip() for cookie, _, value in pairs if cookie.strip() == name]
    return values[0] if len(values) == 1 and values[0] else None


def fingerprint_admin_key(key: str | None) -> str | None:
    """A fingerprint by which a page session is bound to the admin key that it was started with."""
    return None if key is None else hmac.new(_digest_key(key), b"sessions of the status page", sha256).hexdigest()[:32]


def load_admin_key(config: AuthConfig, environ: Mapping[str, str]) -> str | None:
    """The admin key; None if none is configured, and then there is no administrator. Raises a ConfigError that never
    contains the key."""
    if config.admin_api_key_file is None:
        key, source = environ.get(config.admin_api_key_env, ""), f"the variable {config.admin_api_key_env}"
    else:
        key, source = _read_key_file(config.admin_api_key_file), config.admin_api_key_file
    key = key.strip()
    if not key and config.admin_api_key_file is None:
        return None
    if len(key) < MIN_ADMIN_KEY_LENGTH or not key.isascii() or not key.isprintable():
        raise ConfigError([f"{source}: an admin key has at least {MIN_ADMIN_KEY_LENGTH} printable ASCII characters"])
    return key


def _read_key_file(file: str) -> str:
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or "not UTF-8 text"
        raise ConfigError([f"auth.admin_api_key_file: cannot read {file}: {reason}"]) from None


class ControlAuthenticator:
    """Finds out who calls, and counts failed attempts."""

    def __init__(
        self,
        admin_key: str | None,
        verify: VerifyToken,
        login_throttle: LoginThrottle,
        sessions: PageSessions,
        clock: Clock,
        org_keys: OrgKeyVerifier,
    ) -> None:
        self._org_keys = org_keys
        self._admin_key_digest = None if admin_key is None else _digest_key(admin_key)
        self._verify = verify
        self._login_throttle = login_throttle
        self._sessions = sessions
        self._clock = clock

    async def authenticate(self, headers: MultiMapping[str], address: str, *, is_change: bool = True) -> Principal:
        """The caller of a request. Raises ApiError, or TooManyRequests after too many failures. Messages contain
        nothing of the key or token, and do not say which part of it is wrong."""
        keys, tokens = headers.getall(API_KEY_HEADER, []), headers.getall(AUTHORIZATION_HEADER, [])
        if len(keys) > 1 or len(tokens) > 1 or (keys and tokens):
            raise invalid_request(f"send credentials once: either {API_KEY_HEADER} or {AUTHORIZATION_HEADER}")
        if keys:
            return await self._authenticate_key(keys[0], address)
        if tokens:
            return await self._authenticate_client(tokens[0], address)
        cookie = read_cookie(headers)
        if cookie is None or not has_page_header(headers):
            raise unauthorized(f"send {API_KEY_HEADER}, or {AUTHORIZATION_HEADER} with a bearer token")
        check_same_origin(headers, is_change=is_change)
        return get_session_principal(await self.verify_session(cookie, address))

    async def verify_session(self, cookie: str, address: str) -> PageSession:
        """The page session of a cookie. Raises ApiError, or TooManyRequests after too many failures."""
        return await self._verify_or_count(self._sessions.verify(cookie, self._clock.now()), address)

    def may_be_forged(self, headers: MultiMapping[str]) -> bool:
        """Whether the headers have an org's key that may be an invention, so that checking it waits for the store."""
        keys = headers.getall(API_KEY_HEADER, [])
        return len(keys) == 1 and is_org_key(keys[0]) and self._org_keys.needs_throttled_lookup(keys[0])

    async def _authenticate_key(self, key: str, address: str) -> Principal:
        if self._admin_key_digest is not None and hmac.compare_digest(_digest_key(key), self._admin_key_digest):
            return Principal(ADMIN, is_admin=True)
        if is_org_key(key):
            org = await self._verify_org_key(key, address)
            return Principal(name_org_administrator(org), org, is_org_admin=True)
        if self._admin_key_digest is None:
            raise forbidden("no admin key is configured here")
        self._login_throttle.count_failure(ADMIN, address)
        raise unauthorized("the admin key is wrong")

    async def _verify_org_key(self, key: str, address: str) -> str:
        try:
            return await self._org_keys.verify(key, address)
        except AccessDenied as failure:
            self._login_throttle.count_failure(name_client_of_key(key), address)
            raise unauthorized(failure.message) from None

    async def _authenticate_client(self, authorization: str, address: str) -> Principal:
        if authorization[: len(_BEARER)].lower() != _BEARER:
            self._login_throttle.count_failure(None, address)
            raise unauthorized(f"{AUTHORIZATION_HEADER} must have a bearer token")
        caller = await self._verify_or_count(self._verify(authorization[len(_BEARER) :].strip()), address)
        return Principal(caller.client_id, caller.org, caller.app)

    async def _verify_or_count(self, verification: Awaitable[T], address: str) -> T:
        try:
            return await verification
        except (TokenExpired, TokenRejected) as failure:  # its signature is valid, so it is no guess
            raise unauthorized(failure.message) from None
        except AccessDenied as failure:
            self._login_throttle.count_failure(None, address)
            raise unauthorized(failure.message) from None


def get_session_principal(session: PageSession) -> Principal:
    caller = session.caller
    if caller is None:
        return Principal(ADMIN, is_admin=True)
    return Principal(caller.client_id, caller.org, caller.app)


def authorize(principal: Principal, route: ApiRoute, path: Mapping[str, str]) -> None:
    """Raise ApiError (403) if the caller may not use this route, whether or not the resource exists."""
    if principal.is_admin or route.access_level is AccessLevel.PUBLIC:
        return
    if route.access_level is AccessLevel.ANY_CLIENT:
        if principal.is_org_admin:
            raise forbidden("an org's key does not show the status page; an access token of the org does")
        return
    if route.access_level is AccessLevel.ADMIN:
        raise forbidden("only the administrator may use this")
    if principal.is_org_admin:
        if principal.org != path["org"] or not (route.is_read or route.access_level is AccessLevel.ORG_ADMIN):
            raise forbidden("an org's key acts on that org and its apps alone, and submits no usage")
        return
    if route.access_level is AccessLevel.ORG_ADMIN:
        raise forbidden("only the administrator may use this")
    if principal.org != path["org"]:
        raise forbidden("a token acts on its own org and app alone")
    if principal.app is None and (route.access_level is AccessLevel.ORG or route.is_read):
        return
    if route.access_level is not AccessLevel.APP or principal.app != path.get("app"):
        raise forbidden("a token acts on its own org and app alone")


def _digest_key(text: str) -> bytes:
    """A digest of fixed length, so that the comparison takes constant time for any input."""
    return sha256(text.encode("utf-8", "surrogateescape")).digest()
