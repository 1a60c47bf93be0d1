"""Clients and their secrets: compared with the store's bcrypt hash once, then remembered by a keyed hash.

A comparison takes a core for a fifth of a second, so wrong secrets must not be able to cause many. Beside the hash
stands a check of a few bytes, keyed by the hash, which they fail at no cost; and once the right secret was seen, no
other one is compared. So a flood of wrong secrets locks nobody out: neither other clients nor the one it is sent for.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import bcrypt

from proxy.errors import AccessDenied, Busy, SlowDown, StoreError
from proxy.model import Scope, scope_of_client
from proxy.stores import schema
from proxy.stores.contract import Store

COMPARISONS = 2  # at once
CLIENTS_WAITING = 64  # for a comparison, each with one secret; past this the answer would come too late
WAITING = 1000  # of one client, until the store has answered or another's secret was compared
REMEMBERED = 10_000  # clients; those that do not exist are remembered apart and push nobody out
HASH_SECONDS = 60.0  # how long what the store said of a client is good: a rotation takes effect within this
FAILURES = 5  # of a client in comparisons, before each further one has to wait
FAILURE_SECONDS = 10.0  # for so long

# With 32 bits, a second's flood of 10,000 guesses passes it once in five days. Of the secret's 256 it tells too few.
_CHECK_BYTES = 4
_SECRET = re.compile(r"[A-Za-z0-9+/]{43}=")  # 32 random bytes in base64
_BAD = "the client id or its secret is wrong"

V = TypeVar("V")


class _Lane:
    """One at a time of those who ask about the same client."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting = 0


class Clients:
    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._key = secrets.token_bytes(32)
        self._hashes: dict[Scope, tuple[bytes, float]] = {}  # with the time until which they are good
        self._absent: dict[Scope, float] = {}
        self._right: dict[Scope, tuple[bytes, bytes]] = {}  # the hash, and a keyed hash of the one secret it is of
        self._failures: dict[Scope, float] = {}  # when the last of them will be forgiven
        self._lanes: dict[Scope, _Lane] = {}
        self._comparing = asyncio.Semaphore(COMPARISONS)
        self._clients_waiting = 0

    async def check(self, client_id: str, secret: str) -> Scope:
        """Raises AccessDenied, from which cannot be told whether the client exists; Busy and SlowDown."""
        scope = scope_of_client(client_id)
        if scope is None or not _SECRET.fullmatch(secret):
            raise AccessDenied(_BAD)
        is_right = self._known(scope, secret.encode())
        if is_right is None:
            is_right = await self._found_out(scope, secret.encode())
        if not is_right:
            raise AccessDenied(_BAD)
        return scope

    def _known(self, scope: Scope, secret: bytes) -> bool | None:
        """Whether it is the right one, as far as that can be said without the store and a comparison."""
        if self._absent.get(scope, 0.0) > self._now():
            return False
        kept, good_until = self._hashes.get(scope, (b"", 0.0))
        if good_until <= self._now():
            return None
        before, mark = self._right.get(scope, (b"", b""))
        if before == kept:
            return hmac.compare_digest(mark, self._mark(secret))
        hashed, _, check = kept.partition(b"#")
        if check and not hmac.compare_digest(check, _check(hashed, secret)):
            return False
        return None

    def _mark(self, secret: bytes) -> bytes:
        return hmac.digest(self._key, secret, "sha256")

    async def _found_out(self, scope: Scope, secret: bytes) -> bool:
        async with self._lane(scope):
            is_right = self._known(scope, secret)  # by whoever was there before
            if is_right is None and self._hashes.get(scope, (b"", 0.0))[1] <= self._now():
                await self._read(scope)
                is_right = self._known(scope, secret)
            return await self._compared(scope, secret) if is_right is None else is_right

    @asynccontextmanager
    async def _lane(self, scope: Scope) -> AsyncIterator[None]:
        lane = self._lanes.setdefault(scope, _Lane())
        if lane.waiting >= WAITING:
            raise Busy("too many secrets of this client are being checked", retry_after=2)
        lane.waiting += 1
        try:
            async with lane.turn:
                yield
        finally:
            lane.waiting -= 1
            if not lane.waiting:
                del self._lanes[scope]

    async def _read(self, scope: Scope) -> None:
        key = schema.org_config(scope.org) if scope.app is None else schema.app_config(scope.org, scope.app)
        try:
            item = await self._store.get(key)
        except StoreError:
            raise Busy("secrets cannot be checked while the store is away", retry_after=5) from None
        found = (item or {}).get("client_secret_hash")
        if isinstance(found, str):
            _remember(self._hashes, scope, (found.encode(), self._now() + HASH_SECONDS))
            self._absent.pop(scope, None)
        else:
            _remember(self._absent, scope, self._now() + HASH_SECONDS)
            self._hashes.pop(scope, None)

    async def _compared(self, scope: Scope, secret: bytes) -> bool:
        kept = self._hashes[scope][0]
        hashed, _, check = kept.partition(b"#")
        if not check:  # without it anybody's guess comes so far
            self._demand_patience(scope)
        if self._clients_waiting >= CLIENTS_WAITING:
            raise Busy("too many secrets are being checked", retry_after=2)
        self._clients_waiting += 1
        try:
            async with self._comparing:
                is_right = await asyncio.to_thread(bcrypt.checkpw, secret, hashed)
        finally:
            self._clients_waiting -= 1
        if is_right:
            _remember(self._right, scope, (kept, self._mark(secret)))
        else:
            forgiven = max(self._failures.get(scope, 0.0), self._now()) + FAILURE_SECONDS
            _remember(self._failures, scope, forgiven)
        return is_right

    def _demand_patience(self, scope: Scope) -> None:
        """A bucket of failures that leaks one at a time, told by when it will be empty."""
        wait = self._failures.get(scope, 0.0) - self._now() - (FAILURES - 1) * FAILURE_SECONDS
        if wait > 0:
            raise SlowDown("too many wrong secrets were sent for this client", retry_after=wait)


def _remember(known: dict[Scope, V], scope: Scope, value: V) -> None:
    if len(known) >= REMEMBERED and scope not in known:
        for oldest in list(known)[: REMEMBERED // 2]:
            del known[oldest]
    known[scope] = value


def _check(hashed: bytes, secret: bytes) -> bytes:
    return hmac.digest(hashed, secret, "sha256")[:_CHECK_BYTES].hex().encode()


def new_secret() -> str:
    return base64.b64encode(secrets.token_bytes(32)).decode()


def hash_secret(secret: str) -> bytes:
    """As it is kept in the store: the bcrypt hash, a `#`, and the check that wrong secrets fail."""
    hashed = bcrypt.hashpw(secret.encode(), bcrypt.gensalt())
    return b"%b#%b" % (hashed, _check(hashed, secret.encode()))
