"""Who calls the control API, and whether he may: the administrator by his key, all others by their token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from proxy.auth.failures import ADMIN, WrongSecrets
from proxy.config.keys import Auth
from proxy.control.calls import Principal, Route, Who
from proxy.control.problems import forbidden, invalid, unauthorized
from proxy.control.terms import API_KEY, AUTHORIZATION
from proxy.errors import AccessDenied, ConfigError, NoGuess, TokenExpired
from proxy.model import Caller

SHORTEST_KEY = 24  # characters, so that guessing is hopeless and need not lock anybody out

_BEARER = "bearer "

Verify = Callable[[str], Awaitable[Caller]]


class Headers(Protocol):
    def getall(self, key: str, default: list[str]) -> list[str]: ...


def load_admin_key(config: Auth, environ: Mapping[str, str]) -> str | None:
    """None where there is none, and so no administrator. Raises ConfigError, which never says what was found."""
    if config.admin_api_key_file is None:
        key, source = environ.get(config.admin_api_key_env, ""), f"the variable {config.admin_api_key_env}"
    else:
        key, source = _read(config.admin_api_key_file), config.admin_api_key_file
    key = key.strip()
    if not key and config.admin_api_key_file is None:
        return None
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable():
        raise ConfigError([f"{source}: an admin key has at least {SHORTEST_KEY} printable ASCII characters"])
    return key


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or "not UTF-8 text"
        raise ConfigError([f"auth.admin_api_key_file: cannot read {file}: {reason}"]) from None


class Access:
    def __init__(self, admin_key: str | None, verify: Verify, wrong: WrongSecrets) -> None:
        self._admin = None if admin_key is None else _digest(admin_key)
        self._verify = verify
        self._wrong = wrong

    async def who(self, headers: Headers, address: str) -> Principal:
        """Raises Problem, or SlowDown. Of a key or a token nothing is told, nor which part of it is wrong."""
        keys, tokens = headers.getall(API_KEY, []), headers.getall(AUTHORIZATION, [])
        if len(keys) > 1 or len(tokens) > 1 or (keys and tokens):
            raise invalid(f"who calls is said once: by {API_KEY} or by {AUTHORIZATION}")
        if keys:
            return self._admin_by(keys[0], address)
        if not tokens:
            raise unauthorized(f"say who calls: by {API_KEY}, or by {AUTHORIZATION} with a bearer token")
        return await self._client_by(tokens[0], address)

    def _admin_by(self, key: str, address: str) -> Principal:
        if self._admin is None:
            raise forbidden("no admin key is configured here")
        if hmac.compare_digest(_digest(key), self._admin):
            return Principal(ADMIN, is_admin=True)
        self._wrong.count(ADMIN, address)
        raise unauthorized("the admin key is wrong")

    async def _client_by(self, authorization: str, address: str) -> Principal:
        if authorization[: len(_BEARER)].lower() != _BEARER:
            self._wrong.count(None, address)
            raise unauthorized(f"{AUTHORIZATION} has a bearer token, and nothing else")
        try:
            caller = await self._verify(authorization[len(_BEARER) :].strip())
        except (TokenExpired, NoGuess) as failure:  # it was ours, and nobody's guess
            raise unauthorized(failure.message) from None
        except AccessDenied as failure:
            self._wrong.count(None, address)
            raise unauthorized(failure.message) from None
        return Principal(caller.client_id, caller.org, caller.app)


def check(principal: Principal, route: Route, path: Mapping[str, str]) -> None:
    """Raises Problem where this is not for him, be it there or not."""
    if principal.is_admin or route.who is Who.ANYBODY:
        return
    if route.who is Who.ADMIN:
        raise forbidden("this is for the administrator alone")
    if principal.org != path["org"]:
        raise forbidden("a token acts on its own org and app alone")
    if principal.app is None and (route.who is Who.ORG or route.is_read):
        return
    if route.who is not Who.APP or principal.app != path.get("app"):
        raise forbidden("a token acts on its own org and app alone")


def _digest(text: str) -> bytes:
    """Of one length, so that comparing takes the same time whatever was sent."""
    return sha256(text.encode("utf-8", "surrogateescape")).digest()
