"""Clients and their secrets: checked against the store's bcrypt hash, once; then remembered by a keyed hash."""

from __future__ import annotations

import asyncio
import base64
import hmac
import secrets
from collections.abc import Callable

import bcrypt

from proxy.errors import AccessDenied, Busy, StoreError
from proxy.model import Scope, scope_of_client
from proxy.stores import schema
from proxy.stores.contract import Store

SECRET_LENGTH = 44  # 32 random bytes in base64
COMPARISONS = 2  # at once; each takes a core for a fifth of a second
WAITING = 64  # comparisons; past this the answer would come too late
REMEMBERED = 10_000  # secrets that were found right
HASH_SECONDS = 60.0  # how long a client's hash, once read, is good: a rotation takes effect within this

_BAD = "the client id or its secret is wrong"


class Clients:
    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._key = secrets.token_bytes(32)
        self._right: dict[bytes, bytes] = {}  # a keyed hash of client and secret -> the bcrypt hash it was right for
        self._hashes: dict[Scope, tuple[bytes | None, float]] = {}
        self._comparing = asyncio.Semaphore(COMPARISONS)
        self._waiting = 0

    async def check(self, client_id: str, secret: str) -> Scope:
        """Raises AccessDenied; whether the client exists cannot be told from it."""
        scope = scope_of_client(client_id)
        if scope is None or len(secret) != SECRET_LENGTH:
            raise AccessDenied(_BAD)
        kept = await self._hash(scope)
        mark = hmac.digest(self._key, f"{client_id}:{secret}".encode(), "sha256")
        if kept is not None and self._right.get(mark) == kept:
            return scope
        if not await self._is_right(secret.encode(), kept or _nobodys_hash()) or kept is None:
            raise AccessDenied(_BAD)
        if len(self._right) >= REMEMBERED:
            self._right.clear()
        self._right[mark] = kept
        return scope

    async def _hash(self, scope: Scope) -> bytes | None:
        known = self._hashes.get(scope)
        if known is not None and self._now() < known[1]:
            return known[0]
        key = schema.org_config(scope.org) if scope.app is None else schema.app_config(scope.org, scope.app)
        try:
            item = await self._store.get(key)
        except StoreError:
            raise Busy("secrets cannot be checked while the store is away", retry_after=5) from None
        found = (item or {}).get("client_secret_hash")
        kept = found.encode() if isinstance(found, str) else None
        if len(self._hashes) >= REMEMBERED:
            self._hashes.clear()
        self._hashes[scope] = (kept, self._now() + HASH_SECONDS)
        return kept

    async def _is_right(self, secret: bytes, kept: bytes) -> bool:
        if self._waiting >= WAITING:
            raise Busy("too many secrets are being checked", retry_after=2)
        self._waiting += 1
        try:
            async with self._comparing:
                return await asyncio.to_thread(bcrypt.checkpw, secret, kept)
        finally:
            self._waiting -= 1


_nobody: list[bytes] = []


def _nobodys_hash() -> bytes:
    """Compared with where there is no client, so that the time taken does not tell."""
    if not _nobody:
        _nobody.append(hash_secret(new_secret()))
    return _nobody[0]


def new_secret() -> str:
    return base64.b64encode(secrets.token_bytes(32)).decode()


def hash_secret(secret: str) -> bytes:
    return bcrypt.hashpw(secret.encode(), bcrypt.gensalt())
