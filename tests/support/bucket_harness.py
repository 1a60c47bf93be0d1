"""Buckets in tests: scopes, and a store whose answers get lost and at whose items others are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias
from uuid import uuid4

from price_keeper.domain import Scope
from price_keeper.errors import CancellationReason, ReasonCode, StoreThrottled, StoreUnavailable, TransactionFailed
from price_keeper.rates.bucket_client import BucketClient
from price_keeper.rates.token_bucket import RateBucket, RateLimit
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Item, Key, Put, Store, Update, Write
from price_keeper.stores.sqlite import SqliteStore

from tests.support.clock import ManualClock

NOW = 1_795_003_200_000

ANSWER_LOST = "done, and the answer lost"
OUTCOME_UNKNOWN = "not done, and nobody knows"
NEVER_ANSWERED = "done, and no answer comes"
NOT_SENT = "not sent"
CONFLICT = "others are at it"
THROTTLED = "too much"

Fault: TypeAlias = "str | Callable[[], Awaitable[object]] | None"


class StoreTimeStub:
    """The store's time, which stands still until a test moves it. `skewed` is a wrong idea of it."""

    def __init__(self, ms: int = NOW) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms

    def with_skew(self, by_ms: int) -> Callable[[], int]:
        return lambda: self.ms + by_ms


def bucket(*limits: RateLimit, org: str | None = None, app: str | None = None, version: int = 1) -> RateBucket:
    return RateBucket(schema.rate_bucket_key(Scope(org or str(uuid4()), app), "RATE"), limits, version)


class ScriptedFaultStore:
    """A store in front of another: each transaction meets the next of the `faults`, which may also be something that
    happens just before it."""

    def __init__(self, store: Store, faults: Sequence[Fault] = ()) -> None:
        self.store = store
        self.faults: list[Fault] = list(faults)
        self.sent: list[tuple[tuple[Write, ...], str | None]] = []
        self.reads = 0
        self.silent = asyncio.Event()

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        self.reads += 1
        return await self.store.get(key, consistent=consistent)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        self.reads += 1
        return await self.store.get_many(keys, consistent=consistent)

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        self.sent.append((tuple(writes), token))
        fault = self.faults.pop(0) if self.faults else None
        match fault:
            case "done, and the answer lost":
                await self.store.transact(writes, token=token)
                raise StoreUnavailable("lost", maybe_applied=True)
            case "done, and no answer comes":
                await self.store.transact(writes, token=token)
                self.silent.set()
                await asyncio.Event().wait()
            case "not done, and nobody knows":
                raise StoreUnavailable("unheard", maybe_applied=True)
            case "not sent":
                raise StoreUnavailable("away")
            case "others are at it":
                raise TransactionFailed([CancellationReason(ReasonCode.CONFLICT) for _ in writes])
            case "too much":
                raise StoreThrottled("slow down")
            case None:
                pass
            case happens:
                await happens()
        await asyncio.sleep(0)
        await self.store.transact(writes, token=token)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


RPM = RateLimit("rpm", 10_000, 1_000, 1_000)  # ten at once, one a second
TPM = RateLimit("tpm", 500_000, 7, 3)
DAY = {EXPIRY_ATTRIBUTE: NOW // 1000 + 10 + 86_400}


class BucketHarness:
    def __init__(self, store: SqliteStore) -> None:
        self.store = ScriptedFaultStore(store)
        self.now = StoreTimeStub()
        self.clock = ManualClock()
        self.client = self.new_client()
        self.bucket = bucket(RPM)

    def new_client(self) -> BucketClient:
        return BucketClient(self.store, self.now, self.clock, lambda low, high: 0.0)

    async def put_item(self, item: Mapping[str, int], of: RateBucket | None = None, limit: RateLimit = RPM) -> None:
        await self.store.store.put(Put((of or self.bucket).key, rpm_item(limit) | dict(item)))

    async def get_item(self, of: RateBucket | None = None) -> Item | None:
        return await self.store.store.get((of or self.bucket).key)

    async def add_concurrently(self, **add: int) -> None:
        """Another process, just now."""
        await self.store.store.update(Update(self.bucket.key, add=add))

    async def take(self, tokens: int, limiter: BucketClient | None = None) -> tuple[str, int]:
        grant = await (limiter or self.client).acquire([self.bucket], {"rpm": tokens})
        assert grant.taken == ({} if grant.is_refused else {"rpm": tokens})
        return grant.path, grant.writes

    async def deliver_late(self, number: int) -> None:
        """What was sent so long ago, and given up."""
        writes, token = self.store.sent[number]
        await self.store.store.transact(writes, token=token)

    def set_faults(self, *faults: Fault) -> None:
        """Nothing of the rig's own preparations does."""
        self.store.faults = list(faults)
        self.store.sent.clear()


def rpm_item(limit: RateLimit = RPM) -> dict[str, int]:
    rates = {"rpm_cp": limit.capacity, "rpm_ra": limit.amount, "rpm_rp": limit.period_ms}
    return {"rf": NOW, "v": 1, "rpm_tk": limit.capacity, "rpm_tc": 0, "rpm_rem": 0, **rates, **DAY}
