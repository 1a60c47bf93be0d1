"""What this process knows of buckets: as it last saw them, and whether others write to them too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from price_keeper.errors import ReasonCode, TransactionFailed
from price_keeper.rates.bucket_writes import TAKE_ONLY_WINDOW_MS
from price_keeper.rates.token_bucket import TOKENS, StoredBucket, encode_stored_bucket, parse_stored_bucket
from price_keeper.stores.contract import Item, Key, Put, Store, Update
from price_keeper.stores.item_values import apply_update

MAX_CACHED_BUCKETS = 10_000  # buckets; a few hundred bytes each. One that is forgotten costs a read.
MAX_FRESH_MS = 500  # for as long nothing is read again, to refuse or to work out a share


class RefillCompetition(Enum):
    """Who else refills a bucket decides what is worth trying on what is known of it."""

    NONE = "what is known holds until this process changes it"
    SOME = "what is known is out of date: look first"
    MANY = "it has always been refilled a moment ago"


@dataclass(frozen=True, slots=True)
class CachedBucket:
    """`state` is None where there was no item."""

    state: StoredBucket | None
    at_ms: int
    competition: RefillCompetition = RefillCompetition.NONE

    def is_fresh(self, now_ms: int) -> bool:
        return abs(now_ms - self.at_ms) <= MAX_FRESH_MS


class BucketCache:
    def __init__(self, store: Store, now_ms: Callable[[], int]) -> None:
        self._store, self._now_ms = store, now_ms
        self._buckets: dict[Key, CachedBucket] = {}

    def get(self, key: Key) -> CachedBucket | None:
        return self._buckets.get(key)

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._buckets.pop(key, None)

    async def read(self, keys: Sequence[Key]) -> list[CachedBucket]:
        items = await self._store.get_many(keys, consistent=True)
        return [self._update(key, item) for key, item in zip(keys, items, strict=True)]

    def update_from_failure(self, failure: TransactionFailed, keys: Sequence[Key]) -> None:
        """From what a transaction on these keys was refused for. Where nothing is told, nothing is known any more."""
        for key, reason in zip(keys, failure.reasons, strict=True):
            if reason.code is not ReasonCode.CONDITION_FAILED:
                continue
            if reason.item is not None:
                self._update(key, reason.item)
            else:
                self.forget([key])

    def record_created(self, put: Put) -> None:
        self._store_entry(put.key, CachedBucket(parse_stored_bucket(put.item), self._now_ms()))

    def record_refill(self, write: Update, state: StoredBucket) -> None:
        """A refill of ours upon `state` was carried out. If something newer is known, that is left alone."""
        cached = self._buckets.get(write.key)
        if cached is None or cached.state is None:
            return
        if (cached.state.refilled_at, cached.state.version) == (state.refilled_at, state.version):
            after = parse_stored_bucket(apply_update(write, encode_stored_bucket(cached.state)))
            self._store_entry(write.key, CachedBucket(after, self._now_ms(), cached.competition))

    def record_take(self, write: Update) -> None:
        """Something of ours was added, without a refill: what else became of the bucket is not known."""
        cached = self._buckets.get(write.key)
        if cached is None or cached.state is None:
            return
        limits = {
            name: kept._replace(tokens=kept.tokens + int(write.add.get(name + TOKENS, 0)))
            for name, kept in cached.state.limits.items()
        }
        self._buckets[write.key] = replace(cached, state=replace(cached.state, limits=limits))

    def _update(self, key: Key, item: Item | None) -> CachedBucket:
        state = parse_stored_bucket(item) if item is not None else None
        return self._store_entry(key, CachedBucket(state, self._now_ms(), self._classify_competition(key, state)))

    def _classify_competition(self, key: Key, state: StoredBucket | None) -> RefillCompetition:
        before = self._buckets.get(key)
        if before is None or before.state is None or state is None:
            return RefillCompetition.NONE
        if state.refilled_at == before.state.refilled_at:
            return RefillCompetition.NONE
        return (
            RefillCompetition.MANY
            if state.refilled_at >= self._now_ms() - TAKE_ONLY_WINDOW_MS
            else RefillCompetition.SOME
        )

    def _store_entry(self, key: Key, cached: CachedBucket) -> CachedBucket:
        self._buckets.pop(key, None)
        self._buckets[key] = cached
        while len(self._buckets) > MAX_CACHED_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return cached
