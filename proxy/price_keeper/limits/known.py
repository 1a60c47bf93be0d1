"""What this process knows of buckets: as it last saw them, and whether others write to them too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from price_keeper.errors import ReasonCode, TransactionFailed
from price_keeper.limits.bucket import TOKENS, StoredBucket, encode_stored_bucket, parse_stored_bucket
from price_keeper.limits.writes import TAKE_ONLY_WINDOW_MS
from price_keeper.stores.contract import Item, Key, Put, Store, Update
from price_keeper.stores.evaluate import apply_update

MOST = 10_000  # buckets; a few hundred bytes each. One that is forgotten costs a read.
FRESH_MS = 500  # for as long nothing is read again, to refuse or to work out a share


class Company(Enum):
    """Who else refills a bucket decides what is worth trying on what is known of it."""

    NONE = "what is known holds until this process changes it"
    SOME = "what is known is out of date: look first"
    MANY = "it has always been refilled a moment ago"


@dataclass(frozen=True, slots=True)
class Seen:
    """`state` is None where there was no item."""

    state: StoredBucket | None
    at_ms: int
    company: Company = Company.NONE

    def is_fresh(self, now_ms: int) -> bool:
        return abs(now_ms - self.at_ms) <= FRESH_MS


class Known:
    def __init__(self, store: Store, now_ms: Callable[[], int]) -> None:
        self._store, self._now_ms = store, now_ms
        self._seen: dict[Key, Seen] = {}

    def get(self, key: Key) -> Seen | None:
        return self._seen.get(key)

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._seen.pop(key, None)

    async def look(self, keys: Sequence[Key]) -> list[Seen]:
        items = await self._store.get_many(keys, consistent=True)
        return [self._learn(key, item) for key, item in zip(keys, items, strict=True)]

    def learn_from(self, failure: TransactionFailed, keys: Sequence[Key]) -> None:
        """From what a transaction on these keys was refused for. Where nothing is told, nothing is known any more."""
        for key, reason in zip(keys, failure.reasons, strict=True):
            if reason.code is not ReasonCode.CONDITION_FAILED:
                continue
            if reason.item is not None:
                self._learn(key, reason.item)
            else:
                self.forget([key])

    def created(self, put: Put) -> None:
        self._keep(put.key, Seen(parse_stored_bucket(put.item), self._now_ms()))

    def refilled(self, write: Update, state: StoredBucket) -> None:
        """A refill of ours upon `state` was carried out. If something newer is known, that is left alone."""
        seen = self._seen.get(write.key)
        if seen is None or seen.state is None:
            return
        if (seen.state.refilled_at, seen.state.version) == (state.refilled_at, state.version):
            after = parse_stored_bucket(apply_update(write, encode_stored_bucket(seen.state)))
            self._keep(write.key, Seen(after, self._now_ms(), seen.company))

    def counted(self, write: Update) -> None:
        """Something of ours was added, without a refill: what else became of the bucket is not known."""
        seen = self._seen.get(write.key)
        if seen is None or seen.state is None:
            return
        limits = {
            name: kept._replace(tokens=kept.tokens + int(write.add.get(name + TOKENS, 0)))
            for name, kept in seen.state.limits.items()
        }
        self._seen[write.key] = replace(seen, state=replace(seen.state, limits=limits))

    def _learn(self, key: Key, item: Item | None) -> Seen:
        state = parse_stored_bucket(item) if item is not None else None
        return self._keep(key, Seen(state, self._now_ms(), self._company(key, state)))

    def _company(self, key: Key, state: StoredBucket | None) -> Company:
        before = self._seen.get(key)
        if before is None or before.state is None or state is None:
            return Company.NONE
        if state.refilled_at == before.state.refilled_at:
            return Company.NONE
        return Company.MANY if state.refilled_at >= self._now_ms() - TAKE_ONLY_WINDOW_MS else Company.SOME

    def _keep(self, key: Key, seen: Seen) -> Seen:
        self._seen.pop(key, None)
        self._seen[key] = seen
        while len(self._seen) > MOST:
            del self._seen[next(iter(self._seen))]
        return seen
