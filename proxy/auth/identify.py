"""From a request to its caller."""

from __future__ import annotations

import ipaddress
from typing import Protocol

from proxy.auth.tokens import Tokens
from proxy.errors import AccessDenied
from proxy.exchange import Request
from proxy.model import Caller

SESSION_TOKEN = b"x-amz-security-token"
AUTHORIZATION = b"authorization"
_CREDENTIALS = frozenset({SESSION_TOKEN, AUTHORIZATION})
_BEARER = b"bearer "


class Identify(Protocol):
    def __call__(self, request: Request) -> Caller:
        """Raises AccessDenied or TokenExpired."""


class ByToken:
    """A token comes as the session token beside an AWS signature, or as a bearer."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __call__(self, request: Request) -> Caller:
        if request.repeated and request.repeated & _CREDENTIALS:
            raise AccessDenied("a header that says who calls comes only once")
        session, bearer = request.headers.get(SESSION_TOKEN), _bearer(request)
        if session is None and bearer is None:
            raise AccessDenied("a token is needed: as AWS session token, as bearer, or by container credentials")
        first = self._verified(session or bearer or b"")
        if session is not None and bearer is not None and self._verified(bearer) != first:
            raise AccessDenied("the two tokens of this request name different callers")
        return first

    def _verified(self, token: bytes) -> Caller:
        return self._tokens.verify(token.decode("latin-1"))


def _bearer(request: Request) -> bytes | None:
    value = request.headers.get(AUTHORIZATION)
    if value is None or value[: len(_BEARER)].lower() != _BEARER:
        return None
    return value[len(_BEARER) :].strip()


class Bound:
    """Every caller is the one identity of this sidecar, so what a web page could send must not get through."""

    def __init__(self, org: str, app: str) -> None:
        self._caller = Caller(org, app, f"org-{org}-app-{app}")

    def __call__(self, request: Request) -> Caller:
        headers = request.headers
        if b"origin" in headers or not _is_literal_loopback(headers.get(b"host", b"")):
            raise AccessDenied("this sidecar serves programs on this machine, at http://127.0.0.1")
        is_json = headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"
        if request.method == b"POST" and not is_json:
            raise AccessDenied("this sidecar takes requests of content type application/json alone")
        return self._caller


def _is_literal_loopback(host: bytes) -> bool:
    """Names do not count: a web page's own name can be made to point here."""
    name, _, _ = host.decode("latin-1").rpartition(":") if _has_port(host) else (host.decode("latin-1"), "", "")
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _has_port(host: bytes) -> bool:
    return host.rpartition(b":")[2].isdigit() and (not host.startswith(b"[") or b"]:" in host)
