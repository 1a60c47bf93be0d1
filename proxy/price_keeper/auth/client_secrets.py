"""Verify a client's id and secret against the bcrypt hash in the store, and cache the verdict as a keyed hash.

A bcrypt comparison takes a core for a fifth of a second, so wrong secrets must not cause many. The store holds a
precheck of four bytes beside each hash, which nearly all wrong secrets fail at no cost; once the right secret was
seen, no other one is compared. A flood of wrong secrets therefore locks out no client, not even the one it names.

After a rotation the previous hash is valid as well, until its grace ends. Each hash has a precheck of its own.

A secret that does not match the cached hashes may be newer than they are. Before it is called wrong the store is
read again, at most once per REREAD_SECONDS and client. Reads for unknown clients and wrong secrets pass the
lookup throttle (`throttles.py`), except for secrets that carry a tag (`secret_tags.py`).

START HERE: `ClientVerifier.verify`.
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
from typing import NamedTuple

import bcrypt
from cachetools import LRUCache

from price_keeper.auth.secret_tags import NO_TAGS, SecretTagger
from price_keeper.auth.throttles import LookupThrottle, network_of
from price_keeper.clock import SystemClock
from price_keeper.domain import Scope, build_client_id, parse_client_id
from price_keeper.errors import AccessDenied, Busy, StoreError, TooManyRequests
from price_keeper.leaky_buckets import LeakyBuckets
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Key, Store

# Attributes of a client, on the item of its org or app.
SECRET_HASH = "client_secret_hash"
PREVIOUS_SECRET_HASH = "client_secret_previous_hash"
SECRET_CREATED_AT = "client_secret_created_at_epoch"
GRACE_ENDS_AT = "client_secret_rotation_grace_expires_at_epoch"  # until then the previous secret is valid too
SESSIONS_GENERATION = "client_sessions_generation"  # how often all sessions of the client were ended at once


class HashAttributes(NamedTuple):
    """Where an item has the hashes of one kind of secret, and what a secret of that kind is tagged for."""

    newest: str
    previous: str
    grace_ends_at: str
    purpose: str


CLIENT_SECRET = HashAttributes(SECRET_HASH, PREVIOUS_SECRET_HASH, GRACE_ENDS_AT, "secret of")

MAX_CONCURRENT_COMPARISONS = 2
MAX_QUEUED_COMPARISONS = 64  # of one secret each; further ones would be answered too late
MAX_WAITERS_PER_CLIENT = 1000  # while the store is read, or another secret of the client is compared
MAX_CACHED_CLIENTS = 10_000  # clients that do not exist are cached apart and cannot evict those that do
HASH_CACHE_SECONDS = 60.0  # TTL of cached hashes: a rotation takes effect within this time
REREAD_SECONDS = 2.0  # the most that cached hashes may be old for a secret to be called wrong
MAX_FAILED_COMPARISONS = 5  # of one client, before each further comparison has to wait
FAILED_COMPARISON_SECONDS = 10.0  # how long it waits

# With 32 bits, a flood of 10,000 guesses a second passes once in five days; of the secret's 256 bits it tells too few.
_PRECHECK_BYTES = 4
_SECRET_FORMAT = re.compile(r"[A-Za-z0-9+/]{43}=")  # 32 bytes in base64
_WRONG_SECRET = "the client id or its secret is wrong"

MAX_STALE_RETRIES = 3  # when a client is changed during its verification
_LONG_AGO = float("-inf")


@dataclass(frozen=True, slots=True)
class _CachedHashes:
    """The hashes of a client as the store returned them, the newest first; none if there is no such client."""

    hashes: tuple[bytes, ...]
    grace_ends: float
    read_at: float  # by the monotonic clock
    generation: int = 0

    def is_younger_than(self, seconds: float, now: float) -> bool:
        return 0 <= now - self.read_at < seconds

    def select_valid(self, now: float) -> tuple[bytes, ...]:
        return self.hashes if now < self.grace_ends else self.hashes[:1]


class _VerificationQueue:
    """Lets one verification at a time run for a client. Not a SingleFlight: each caller has a secret of its own."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiters = 0
        self.invalidations = 0  # how often the client was invalidated while the queue exists


class ClientVerifier:
    """Verifies client ids and secrets."""

    def __init__(
        self,
        store: Store,
        now: Callable[[], float],
        lookup_throttle: LookupThrottle | None = None,
        monotonic: Callable[[], float] | None = None,
        tagger: SecretTagger = NO_TAGS,
        attributes: HashAttributes = CLIENT_SECRET,
    ) -> None:
        """`lookup_throttle` limits the reads that any sender can cause.

        `monotonic` measures the age of cached hashes: a clock that is set back would pass the same time twice and
        take old hashes for fresh.
        """
        self._store = store
        self._now = now
        self._monotonic = monotonic or now
        self._lookup_throttle = lookup_throttle or LookupThrottle(SystemClock())
        self._tagger = tagger
        self._attributes = attributes
        self._digest_key = secrets.token_bytes(32)
        self._cached = LRUCache[Scope, _CachedHashes](MAX_CACHED_CLIENTS)
        self._cached_absent = LRUCache[Scope, _CachedHashes](MAX_CACHED_CLIENTS)
        # For each hash, a keyed digest of the one secret that matches it.
        self._verified_digests = LRUCache[Scope, dict[bytes, bytes]](MAX_CACHED_CLIENTS)
        self._failed_comparisons = LeakyBuckets(
            self._monotonic, MAX_FAILED_COMPARISONS, FAILED_COMPARISON_SECONDS, MAX_CACHED_CLIENTS
        )
        self._queues: dict[Hashable, _VerificationQueue] = {}
        self._comparison_slots = asyncio.Semaphore(MAX_CONCURRENT_COMPARISONS)
        self._queued_comparisons = 0

    async def verify(self, client_id: str, secret: str, address: str = "") -> Scope:
        """Return the client of this id and secret. Raises AccessDenied, which does not reveal whether the client
        exists; Busy; and TooManyRequests.

        `address` selects the sender's rate of reads for clients that are not cached here.
        """
        scope = parse_client_id(client_id)
        if scope is None or not _SECRET_FORMAT.fullmatch(secret):
            raise AccessDenied(_WRONG_SECRET)
        if not await self._is_correct(scope, secret.encode(), address):
            raise AccessDenied(_WRONG_SECRET)
        return scope

    async def verify_with_generation(self, client_id: str, secret: str, address: str = "") -> tuple[Scope, int]:
        """Like `verify`, and return the generation of the client's sessions too.

        The generation was read together with the hash. So a session that is begun with a secret that is over, which
        this process does not know yet, has the generation that ended with the secret.
        """
        for _ in range(MAX_STALE_RETRIES):
            scope = await self.verify(client_id, secret, address)
            if self._check_cached(scope, secret.encode()):  # otherwise the client was changed during the verification
                return scope, self._cached[scope].generation
        raise Busy("the credentials of this client keep changing; try again", retry_after=2)

    def needs_throttled_lookup(self, client_id: str, secret: str) -> bool:
        """Whether verifying this would read the store for a client that may be an invention, throttled."""
        scope = parse_client_id(client_id)
        if scope is None or not _SECRET_FORMAT.fullmatch(secret):
            return False  # it is refused without a read
        return self._check_cached(scope, secret.encode()) is None and self._is_unknown(scope, secret.encode())

    def invalidate(self, scope: Scope) -> None:
        """Expire the cached hashes after a change of the client's secret. Other processes see it within
        HASH_CACHE_SECONDS.

        The client stays known, so its next login is not throttled like those of unknown clients.
        """
        if scope in self._cached:
            self._cached[scope] = replace(self._cached[scope], read_at=_LONG_AGO)
        self._cached_absent.pop(scope, None)
        self._verified_digests.pop(scope, None)
        if scope in self._queues:
            self._queues[scope].invalidations += 1

    async def _is_correct(self, scope: Scope, secret: bytes, address: str) -> bool:
        is_correct = self._check_cached(scope, secret)
        if is_correct is not None:
            return is_correct
        if not self._is_unknown(scope, secret):
            return await self._check_fully(scope, secret)
        async with self._wait_in_queue((scope, network_of(address))):  # one of them takes a turn for all
            if self._check_cached(scope, secret) is None and self._is_unknown(scope, secret):
                await self._lookup_throttle.wait_for_address(address)
            return await self._check_fully(scope, secret)

    def _check_cached(self, scope: Scope, secret: bytes) -> bool | None:
        """Return whether the secret is correct; None if that needs a read of the store or a comparison."""
        moment, cached = self._monotonic(), self._get_cached(scope)
        if cached is None or not cached.is_younger_than(HASH_CACHE_SECONDS, moment):
            return None
        verdicts = [self._check_hash(scope, hashed, secret) for hashed in cached.select_valid(self._now())]
        if True in verdicts:
            return True
        return None if None in verdicts or not cached.is_younger_than(REREAD_SECONDS, moment) else False

    def _is_unknown(self, scope: Scope, secret: bytes) -> bool:
        """Whether reading the store now would be caused by a sender that is not known to be a client.

        A tagged secret belonged to a client once. If it is not valid any more, it causes at most one read per
        REREAD_SECONDS.
        """
        purpose = f"{self._attributes.purpose} {build_client_id(scope.org, scope.app)}"
        if self._tagger.is_tagged(purpose, base64.b64decode(secret)):
            return False
        cached = self._cached.get(scope)
        if cached is None:
            return True
        is_wrong = all(self._check_hash(scope, hashed, secret) is False for hashed in cached.select_valid(self._now()))
        return is_wrong and cached.is_younger_than(HASH_CACHE_SECONDS, self._monotonic())

    def _get_cached(self, scope: Scope) -> _CachedHashes | None:
        return self._cached.get(scope) or self._cached_absent.get(scope)

    def _check_hash(self, scope: Scope, stored: bytes, secret: bytes) -> bool | None:
        digest = self._verified_digests.get(scope, {}).get(stored)
        if digest is not None:
            return hmac.compare_digest(digest, self._digest(secret))
        hashed, _, check = stored.partition(b"#")
        if check and not hmac.compare_digest(check, _precheck(hashed, secret)):
            return False
        return None

    def _digest(self, secret: bytes) -> bytes:
        return hmac.digest(self._digest_key, secret, "sha256")

    async def _check_fully(self, scope: Scope, secret: bytes) -> bool:
        async with self._wait_in_queue(scope) as queue:
            is_correct = self._check_cached(scope, secret)  # the one before in the queue may have settled it
            if is_correct is not None:
                return is_correct
            tried: Sequence[bytes] = ()
            cached = self._get_cached(scope)
            if cached is not None and cached.is_younger_than(HASH_CACHE_SECONDS, self._monotonic()):
                tried = cached.select_valid(self._now())
                if await self._matches_any(scope, tried, secret):
                    return True
            cached = self._get_cached(scope)
            if cached is None or not cached.is_younger_than(REREAD_SECONDS, self._monotonic()):
                cached = await self._read_hashes(scope, queue)
            newer = [hashed for hashed in cached.select_valid(self._now()) if hashed not in tried]
            return await self._matches_any(scope, newer, secret)

    @asynccontextmanager
    async def _wait_in_queue(self, key: Hashable) -> AsyncIterator[_VerificationQueue]:
        queue = self._queues.setdefault(key, _VerificationQueue())
        if queue.waiters >= MAX_WAITERS_PER_CLIENT:
            raise Busy("too many secrets of this client are being checked", retry_after=2)
        queue.waiters += 1
        try:
            async with queue.lock:
                yield queue
        finally:
            queue.waiters -= 1
            if not queue.waiters:
                del self._queues[key]

    async def _read_hashes(self, scope: Scope, queue: _VerificationQueue) -> _CachedHashes:
        """Read the hashes, and again if the client was invalidated during the read."""
        invalidations = -1
        while invalidations != queue.invalidations:
            invalidations, moment = queue.invalidations, self._monotonic()
            try:
                item = await self._store.get(client_item_key(scope), consistent=True)
            except StoreError:
                raise Busy("secrets cannot be checked while the store is away", retry_after=5) from None
        read = _parse_hashes(item or {}, moment, self._attributes)
        is_client = bool(read.hashes)
        known, other = (self._cached, self._cached_absent) if is_client else (self._cached_absent, self._cached)
        known[scope] = read
        other.pop(scope, None)
        return read

    async def _matches_any(self, scope: Scope, hashes: Sequence[bytes], secret: bytes) -> bool:
        """Compare with each hash. Those with a precheck come first: failed guesses at the others do not delay them."""
        for hashed in sorted(hashes, key=lambda candidate: b"#" not in candidate):
            is_correct = self._check_hash(scope, hashed, secret)
            if is_correct or (is_correct is None and await self._compare(scope, hashed, secret)):
                return True
        return False

    async def _compare(self, scope: Scope, stored: bytes, secret: bytes) -> bool:
        hashed, _, check = stored.partition(b"#")
        if not check:  # without a precheck every wrong secret leads to a comparison
            self._limit_failures(scope)
        if self._queued_comparisons >= MAX_QUEUED_COMPARISONS:
            raise Busy("too many secrets are being checked", retry_after=2)
        self._queued_comparisons += 1
        try:
            async with self._comparison_slots:
                is_correct = await asyncio.to_thread(_is_bcrypt_match, secret, hashed)
        finally:
            self._queued_comparisons -= 1
        if is_correct:
            self._cache_correct(scope, stored, secret)
        else:
            self._failed_comparisons.add(scope)
        return is_correct

    def _cache_correct(self, scope: Scope, hashed: bytes, secret: bytes) -> None:
        cached = self._cached.get(scope)
        is_current = cached is not None and cached.read_at != _LONG_AGO
        if cached is not None and is_current and hashed in cached.hashes:  # otherwise it changed during the comparison
            digests = {
                known: digest
                for known, digest in self._verified_digests.get(scope, {}).items()
                if known in cached.hashes
            }
            self._verified_digests[scope] = {**digests, hashed: self._digest(secret)}

    def _limit_failures(self, scope: Scope) -> None:
        """Raise TooManyRequests if the client's leaky bucket of failed comparisons is full."""
        wait = self._failed_comparisons.wait_seconds(scope)
        if wait > 0:
            raise TooManyRequests("too many wrong secrets were sent for this client", retry_after=wait)


def client_item_key(scope: Scope) -> Key:
    return schema.org_config_key(scope.org) if scope.app is None else schema.app_config_key(scope.org, scope.app)


def _parse_hashes(item: Item, moment: float, attributes: HashAttributes) -> _CachedHashes:
    """Read the hashes of an item. Without a newest hash there is no client, and without its end there is no grace."""
    newest, previous, ends = (item.get(name) for name in attributes[:3])
    if not isinstance(newest, str):
        return _CachedHashes((), 0.0, moment)
    generation = read_generation(item)
    if not isinstance(previous, str) or not isinstance(ends, (int, Decimal)):
        return _CachedHashes((newest.encode(),), 0.0, moment, generation)
    return _CachedHashes((newest.encode(), previous.encode()), float(ends), moment, generation)


def read_generation(item: Item | None) -> int:
    """Return the generation of a client's item. A session that was begun in an earlier one is over."""
    generation = (item or {}).get(SESSIONS_GENERATION, 0)
    return int(generation) if isinstance(generation, (int, Decimal)) else 0


def _is_bcrypt_match(secret: bytes, hashed: bytes) -> bool:
    try:
        return bcrypt.checkpw(secret, hashed)
    except ValueError:  # an attribute that was written by hand may not be a bcrypt hash
        return False


def _precheck(hashed: bytes, secret: bytes) -> bytes:
    return hmac.digest(hashed, secret, "sha256")[:_PRECHECK_BYTES].hex().encode()


def make_secret(client_id: str = "", tagger: SecretTagger = NO_TAGS, purpose: str = CLIENT_SECRET.purpose) -> str:
    return base64.b64encode(tagger.make_secret(f"{purpose} {client_id}")).decode()


def hash_secret(secret: str) -> bytes:
    """Return what the store keeps: the bcrypt hash, a `#`, and the precheck that wrong secrets fail."""
    hashed = bcrypt.hashpw(secret.encode(), bcrypt.gensalt())
    return b"%b#%b" % (hashed, _precheck(hashed, secret.encode()))
