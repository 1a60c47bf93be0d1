"""Clients and their secrets: compared with the store's bcrypt hash once, then remembered by a keyed hash.

A comparison takes a core for a fifth of a second, so wrong secrets must not be able to cause many. Beside the hash
stands a check of a few bytes, keyed by the hash, which they fail at no cost; and once the right secret was seen, no
other one is compared. So a flood of wrong secrets locks nobody out: neither other clients nor the one it is sent for.

After a rotation the hash before it is good as well, until its grace ends. Each of the two has a check of its own.

A secret that does not fit what is kept may be newer than that. So before it is called wrong the store is read again,
once in a moment for each client; such reads have a pace (`lookups.py`), as have those of clients nobody knows here. A
secret that bears our mark (`marks.py`) waits for no such turn.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
import secrets
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TypeVar

import bcrypt

from price_keeper.auth.failures import network_of
from price_keeper.auth.lookups import LookupThrottle
from price_keeper.auth.marks import NO_TAGS, SecretTagger
from price_keeper.clock import SystemClock
from price_keeper.errors import AccessDenied, Busy, TooManyRequests, StoreError
from price_keeper.model import Scope, client_id_of, scope_of_client
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Key, Store

# What the store keeps of a client, on the item of the org or app that it is.
HASH = "client_secret_hash"
PREVIOUS_HASH = "client_secret_previous_hash"
CREATED = "client_secret_created_at_epoch"
GRACE_ENDS = "client_secret_rotation_grace_expires_at_epoch"  # until then the previous one is good as well
GENERATION = "client_sessions_generation"  # how often all sessions so far were ended at once

COMPARISONS = 2  # at once
CLIENTS_WAITING = 64  # for a comparison, each with one secret; past this the answer would come too late
WAITING = 1000  # of one client, until the store has answered or another's secret was compared
REMEMBERED = 10_000  # clients; those that do not exist are remembered apart and push nobody out
HASH_SECONDS = 60.0  # how long what the store said of a client is good: a rotation takes effect within this
AGAIN_SECONDS = 2.0  # how old it may be for a secret to be called wrong
FAILURES = 5  # of a client in comparisons, before each further one has to wait
FAILURE_SECONDS = 10.0  # for so long

# With 32 bits, a second's flood of 10,000 guesses passes it once in five days. Of the secret's 256 it tells too few.
_CHECK_BYTES = 4
_SECRET = re.compile(r"[A-Za-z0-9+/]{43}=")  # 32 bytes in base64
_BAD = "the client id or its secret is wrong"

LOOKS = 3  # at a client that is changed meanwhile
_LONG_AGO = float("-inf")

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the store said of a client: its hashes, the newest first, or none if there is no such client."""

    hashes: tuple[bytes, ...]
    grace_ends: float
    read_at: float  # by the monotonic clock
    generation: int = 0

    def is_younger(self, seconds: float, now: float) -> bool:
        return 0 <= now - self.read_at < seconds

    def good(self, now: float) -> tuple[bytes, ...]:
        return self.hashes if now < self.grace_ends else self.hashes[:1]


class _Lane:
    """One at a time of those who ask about the same client."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting = 0
        self.forgotten = 0  # how often, while somebody was in it


class Clients:
    def __init__(
        self,
        store: Store,
        now: Callable[[], float],
        lookup_throttle: LookupThrottle | None = None,
        monotonic: Callable[[], float] | None = None,
        tagger: SecretTagger = NO_TAGS,
    ) -> None:
        """`lookups` is the pace of those reads that anybody can cause. How old something is, `monotonic` tells: a clock
        that is set back, and comes to the same time once more, would take it for new."""
        self._store = store
        self._now = now
        self._monotonic = monotonic or now
        self._lookup_throttle = lookup_throttle or LookupThrottle(SystemClock())
        self._tagger = tagger
        self._key = secrets.token_bytes(32)
        self._kept: dict[Scope, _Kept] = {}
        self._absent: dict[Scope, _Kept] = {}
        self._right: dict[Scope, dict[bytes, bytes]] = {}  # by each hash, a keyed hash of the one secret it is of
        self._failures: dict[Scope, float] = {}  # when the last of them will be forgiven
        self._lanes: dict[Hashable, _Lane] = {}
        self._comparing = asyncio.Semaphore(COMPARISONS)
        self._clients_waiting = 0

    async def check(self, client_id: str, secret: str, address: str = "") -> Scope:
        """Raises AccessDenied, from which cannot be told whether the client exists; Busy and SlowDown.

        `address` is whose pace it is at which the store is asked about a client that is not known here.
        """
        scope = scope_of_client(client_id)
        if scope is None or not _SECRET.fullmatch(secret):
            raise AccessDenied(_BAD)
        if not await self._is_right(scope, secret.encode(), address):
            raise AccessDenied(_BAD)
        return scope

    async def checked(self, client_id: str, secret: str, address: str = "") -> tuple[Scope, int]:
        """As `check`, with the generation of the client's sessions. It was read together with the hash, so a session
        begun by a secret that this process did not know to be over is of the generation that ended with it."""
        for _ in range(LOOKS):
            scope = await self.check(client_id, secret, address)
            if self._known(scope, secret.encode()):  # else something about it was changed this moment
                return scope, self._kept[scope].generation
        raise Busy("the credentials of this client are changed all the time; try again", retry_after=2)

    def may_be_invented(self, client_id: str, secret: str) -> bool:
        """Whether the store would be asked, in its turn, about what anybody may have made up."""
        scope = scope_of_client(client_id)
        if scope is None or not _SECRET.fullmatch(secret):
            return False  # it is refused at once
        return self._known(scope, secret.encode()) is None and self._is_strangers(scope, secret.encode())

    def forget(self, scope: Scope) -> None:
        """For whoever changes a client's secret: here it takes effect at once, elsewhere within HASH_SECONDS.

        That there is such a client is not forgotten: its next login need not wait in line with strangers.
        """
        if scope in self._kept:
            self._kept[scope] = replace(self._kept[scope], read_at=_LONG_AGO)
        self._absent.pop(scope, None)
        self._right.pop(scope, None)
        if scope in self._lanes:
            self._lanes[scope].forgotten += 1

    async def _is_right(self, scope: Scope, secret: bytes, address: str) -> bool:
        is_right = self._known(scope, secret)
        if is_right is not None:
            return is_right
        if not self._is_strangers(scope, secret):
            return await self._found_out(scope, secret)
        async with self._lane((scope, network_of(address))):  # of those, one takes a turn, and the others know
            if self._known(scope, secret) is None and self._is_strangers(scope, secret):
                await self._lookup_throttle.wait_for_address(address)
            return await self._found_out(scope, secret)

    def _known(self, scope: Scope, secret: bytes) -> bool | None:
        """Whether it is the right one, as far as that can be said without the store and a comparison."""
        moment, kept = self._monotonic(), self._last(scope)
        if kept is None or not kept.is_younger(HASH_SECONDS, moment):
            return None
        verdicts = [self._verdict(scope, hashed, secret) for hashed in kept.good(self._now())]
        if True in verdicts:
            return True
        return None if None in verdicts or not kept.is_younger(AGAIN_SECONDS, moment) else False

    def _is_strangers(self, scope: Scope, secret: bytes) -> bool:
        """Whether the store would be read because somebody came who is, as far as is known here, no client.

        A marked secret was a client's once. If it is not any more, it causes a read in AGAIN_SECONDS at most.
        """
        if self._tagger.is_tagged(_secret_purpose(client_id_of(scope.org, scope.app)), base64.b64decode(secret)):
            return False
        kept = self._kept.get(scope)
        if kept is None:
            return True
        is_wrong = all(self._verdict(scope, hashed, secret) is False for hashed in kept.good(self._now()))
        return is_wrong and kept.is_younger(HASH_SECONDS, self._monotonic())

    def _last(self, scope: Scope) -> _Kept | None:
        return self._kept.get(scope) or self._absent.get(scope)

    def _verdict(self, scope: Scope, kept: bytes, secret: bytes) -> bool | None:
        mark = self._right.get(scope, {}).get(kept)
        if mark is not None:
            return hmac.compare_digest(mark, self._mark(secret))
        hashed, _, check = kept.partition(b"#")
        if check and not hmac.compare_digest(check, _check(hashed, secret)):
            return False
        return None

    def _mark(self, secret: bytes) -> bytes:
        return hmac.digest(self._key, secret, "sha256")

    async def _found_out(self, scope: Scope, secret: bytes) -> bool:
        async with self._lane(scope) as lane:
            is_right = self._known(scope, secret)  # by whoever was there before
            if is_right is not None:
                return is_right
            tried: Sequence[bytes] = ()
            kept = self._last(scope)
            if kept is not None and kept.is_younger(HASH_SECONDS, self._monotonic()):
                tried = kept.good(self._now())
                if await self._is_of_one(scope, tried, secret):
                    return True
            kept = self._last(scope)
            if kept is None or not kept.is_younger(AGAIN_SECONDS, self._monotonic()):
                kept = await self._read(scope, lane)
            newer = [hashed for hashed in kept.good(self._now()) if hashed not in tried]
            return await self._is_of_one(scope, newer, secret)

    @asynccontextmanager
    async def _lane(self, about: Hashable) -> AsyncIterator[_Lane]:
        lane = self._lanes.setdefault(about, _Lane())
        if lane.waiting >= WAITING:
            raise Busy("too many secrets of this client are being checked", retry_after=2)
        lane.waiting += 1
        try:
            async with lane.turn:
                yield lane
        finally:
            lane.waiting -= 1
            if not lane.waiting:
                del self._lanes[about]

    async def _read(self, scope: Scope, lane: _Lane) -> _Kept:
        """Read again if it was changed meanwhile: the answer may be from before that."""
        forgotten = -1
        while forgotten != lane.forgotten:
            forgotten, moment = lane.forgotten, self._monotonic()
            try:
                item = await self._store.get(credentials_key(scope), consistent=True)
            except StoreError:
                raise Busy("secrets cannot be checked while the store is away", retry_after=5) from None
        kept = _kept(item or {}, moment)
        is_client = bool(kept.hashes)
        _remember(self._kept if is_client else self._absent, scope, kept)
        (self._absent if is_client else self._kept).pop(scope, None)
        return kept

    async def _is_of_one(self, scope: Scope, hashes: Sequence[bytes], secret: bytes) -> bool:
        """First with the hashes that have a check: a flood that uses up the patience of another leaves them alone."""
        for hashed in sorted(hashes, key=lambda each: b"#" not in each):
            is_right = self._verdict(scope, hashed, secret)
            if is_right or (is_right is None and await self._is_of(scope, hashed, secret)):
                return True
        return False

    async def _is_of(self, scope: Scope, kept: bytes, secret: bytes) -> bool:
        hashed, _, check = kept.partition(b"#")
        if not check:  # without it anybody's guess comes so far
            self._demand_patience(scope)
        if self._clients_waiting >= CLIENTS_WAITING:
            raise Busy("too many secrets are being checked", retry_after=2)
        self._clients_waiting += 1
        try:
            async with self._comparing:
                is_right = await asyncio.to_thread(_matches, secret, hashed)
        finally:
            self._clients_waiting -= 1
        if is_right:
            self._remember_right(scope, kept, secret)
        else:
            _remember(self._failures, scope, max(self._forgiven(scope), self._monotonic()) + FAILURE_SECONDS)
        return is_right

    def _remember_right(self, scope: Scope, hashed: bytes, secret: bytes) -> None:
        kept = self._kept.get(scope)
        is_current = kept is not None and kept.read_at != _LONG_AGO
        if kept is not None and is_current and hashed in kept.hashes:  # else it was changed during the comparison
            marks = {each: mark for each, mark in self._right.get(scope, {}).items() if each in kept.hashes}
            _remember(self._right, scope, {**marks, hashed: self._mark(secret)})

    def _demand_patience(self, scope: Scope) -> None:
        """A bucket of failures that leaks one at a time, told by when it will be empty."""
        wait = self._forgiven(scope) - self._monotonic() - (FAILURES - 1) * FAILURE_SECONDS
        if wait > 0:
            raise TooManyRequests("too many wrong secrets were sent for this client", retry_after=wait)

    def _forgiven(self, scope: Scope) -> float:
        full = self._monotonic() + FAILURES * FAILURE_SECONDS
        if self._failures.get(scope, 0.0) > full:  # the clock was set back
            self._failures[scope] = full
        return self._failures.get(scope, 0.0)


def credentials_key(scope: Scope) -> Key:
    return schema.org_config_key(scope.org) if scope.app is None else schema.app_config_key(scope.org, scope.app)


def _kept(item: Item, moment: float) -> _Kept:
    """Without a newest hash there is no client, and without an end of the grace there is none."""
    newest, previous, ends = item.get(HASH), item.get(PREVIOUS_HASH), item.get(GRACE_ENDS)
    if not isinstance(newest, str):
        return _Kept((), 0.0, moment)
    generation = generation_of(item)
    if not isinstance(previous, str) or not isinstance(ends, (int, Decimal)):
        return _Kept((newest.encode(),), 0.0, moment, generation)
    return _Kept((newest.encode(), previous.encode()), float(ends), moment, generation)


def generation_of(item: Item | None) -> int:
    """Of a client's item. A session that was begun in an earlier one is over."""
    found = (item or {}).get(GENERATION, 0)
    return int(found) if isinstance(found, (int, Decimal)) else 0


def _matches(secret: bytes, hashed: bytes) -> bool:
    try:
        return bcrypt.checkpw(secret, hashed)
    except ValueError:  # what was written by hand may be no hash
        return False


def _remember(known: dict[Scope, V], scope: Scope, value: V) -> None:
    if len(known) >= REMEMBERED and scope not in known:
        for oldest in list(known)[: REMEMBERED // 2]:
            del known[oldest]
    known[scope] = value


def _check(hashed: bytes, secret: bytes) -> bytes:
    return hmac.digest(hashed, secret, "sha256")[:_CHECK_BYTES].hex().encode()


def new_secret(client_id: str = "", tagger: SecretTagger = NO_TAGS) -> str:
    return base64.b64encode(tagger.make_secret(_secret_purpose(client_id))).decode()


def _secret_purpose(client_id: str) -> str:
    return f"secret of {client_id}"


def hash_secret(secret: str) -> bytes:
    """As it is kept in the store: the bcrypt hash, a `#`, and the check that wrong secrets fail."""
    hashed = bcrypt.hashpw(secret.encode(), bcrypt.gensalt())
    return b"%b#%b" % (hashed, _check(hashed, secret.encode()))
