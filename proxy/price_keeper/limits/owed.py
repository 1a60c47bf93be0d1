"""What is still to be told to buckets: adjustments, and the undoing of writes whose outcome is not known."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from price_keeper.errors import InvalidStoreRequest, StoreError, StoreUnavailable, StoreThrottled, TransactionFailed, is_condition_failure
from price_keeper.limits.bucket import REFILLED_AT, RateBucket, resolve_bucket
from price_keeper.limits.known import BucketCache
from price_keeper.limits.sending import TransactionSender, BucketTransaction
from price_keeper.limits.writes import build_adjustment, build_create
from price_keeper.stores.contract import Key, Put, Update

MOST_BUCKETS = 10_000
MOST_UNSURE = 1_000
ROUNDS = 10  # in one go, over what was added in the round before
ATTEMPTS = 8  # at one adjustment, each of which somebody else was faster than

Amounts = Mapping[str, int]


@dataclass(slots=True, eq=False)
class _Debt:
    """Of one bucket, summed up. What is in a transaction under way is in it alone."""

    bucket: RateBucket
    taken: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    under_way: BucketTransaction | None = None
    sent: tuple[Amounts, Amounts] = ({}, {})

    def add(self, taken: Amounts, used: Amounts) -> None:
        for counts, more in ((self.taken, taken), (self.used, used)):
            for name, amount in more.items():
                counts[name] += amount

    @property
    def is_paid(self) -> bool:
        return self.under_way is None and not any(self.taken.values()) and not any(self.used.values())


@dataclass(slots=True, eq=False)
class _Unsure:
    transaction: BucketTransaction
    buckets: Sequence[RateBucket]
    taken: Amounts
    used: Amounts
    is_refused: bool  # when it was last sent; what was sent before may be carried out yet


class Owed:
    def __init__(self, cache: BucketCache, sender: TransactionSender, now_ms: Callable[[], int]) -> None:
        self._cache, self._sender, self._now_ms = cache, sender, now_ms
        self._debts: dict[Key, _Debt] = {}
        self._unsure: list[_Unsure] = []
        self._one_at_a_time = asyncio.Lock()
        self.written = 0
        self.dropped = 0  # for want of room, or since nobody can know any more

    def __len__(self) -> int:
        return len(self._debts) + len(self._unsure)

    def add(self, buckets: Sequence[RateBucket], taken: Amounts, used: Amounts) -> None:
        for bucket in buckets:
            debt = self._debts.setdefault(bucket.key, _Debt(bucket))
            debt.bucket = max(debt.bucket, bucket, key=lambda each: each.version)
            debt.add(taken, used)
            if debt.is_paid:
                del self._debts[bucket.key]
        while len(self._debts) > MOST_BUCKETS:
            del self._debts[next(iter(self._debts))]
            self.dropped += 1

    def unsure(
        self,
        transaction: BucketTransaction,
        buckets: Sequence[RateBucket],
        taken: Amounts,
        used: Amounts,
        *,
        is_refused: bool,
    ) -> None:
        """Whoever asked for it was told that it failed. If it did not, it is to be undone."""
        self._unsure.append(_Unsure(transaction, buckets, taken, used, is_refused))
        if len(self._unsure) > MOST_UNSURE:
            del self._unsure[0]
            self.dropped += 1

    @property
    def is_settling(self) -> bool:
        return self._one_at_a_time.locked()

    async def settle(self, *, is_last: bool = False) -> None:
        """Raises a StoreError when something had to be left for later. `is_last`: there is no later, so whatever may
        still be on its way is asked for now."""
        trouble: StoreError | None = None
        left: dict[int, _Unsure | _Debt] = {}
        async with self._one_at_a_time:
            for _ in range(ROUNDS):
                unsure = [each for each in self._unsure if is_last or not self._waits(each)]
                everything: list[_Unsure | _Debt] = [*unsure, *self._debts.values()]
                now = [each for each in everything if id(each) not in left]
                if not now:
                    break
                for work in now:
                    try:
                        await (self._undo(work, is_last) if isinstance(work, _Unsure) else self._pay(work))
                    except (StoreUnavailable, StoreThrottled):
                        raise  # the others would fare no better, and each would wait for it
                    except StoreError as failure:
                        trouble, left[id(work)] = failure, work
        if trouble is not None:
            raise trouble

    def _waits(self, unsure: _Unsure) -> bool:
        """Nothing is to be done about it before nothing of it can be on its way."""
        return unsure.is_refused and self._sender.may_arrive(unsure.transaction)

    async def _undo(self, unsure: _Unsure, is_last: bool) -> None:
        if self._sender.is_token_expired(unsure.transaction):
            self.dropped += 1  # it counts as taken
        else:
            try:
                await self._sender.send(unsure.transaction)
            except TransactionFailed as failure:
                if not is_condition_failure(failure):
                    raise
                unsure.is_refused = True
                if self._waits(unsure) and not is_last:
                    return
            else:
                self.add(unsure.buckets, _negative(unsure.taken), _negative(unsure.used))
        if unsure in self._unsure:
            self._unsure.remove(unsure)

    async def _pay(self, debt: _Debt) -> None:
        attempts = 0
        while not debt.is_paid:
            if debt.under_way is None:
                seen = self._cache.get(debt.bucket.key)
                force = resolve_bucket(debt.bucket, seen.state if seen is not None else None)
                self._begin(debt, build_adjustment(force, None, debt.taken, debt.used, self._now_ms()))
            else:
                attempts += 1
                await self._carry_on(debt, is_last=attempts >= ATTEMPTS)
        if self._debts.get(debt.bucket.key) is debt:
            del self._debts[debt.bucket.key]

    def _begin(self, debt: _Debt, write: Put | Update) -> None:
        """Nothing to write: nothing of it fits, or nothing of it is a limit any more."""
        debt.under_way = None if isinstance(write, Update) and not write.add else BucketTransaction([write])
        debt.sent, debt.taken, debt.used = (debt.taken, debt.used), Counter(), Counter()

    async def _carry_on(self, debt: _Debt, *, is_last: bool) -> None:
        """The transaction under way is done, or another one is to be tried in its place."""
        assert debt.under_way is not None
        if self._sender.is_token_expired(debt.under_way):
            self.dropped += 1
            debt.under_way = None
            return
        try:
            await self._sender.send(debt.under_way)
        except StoreError as failure:
            if debt.under_way.has_unknown_outcome:
                if not is_condition_failure(failure):
                    raise
                # It may still be carried out, beside the next one.
                self.unsure(debt.under_way, [debt.bucket], *debt.sent, is_refused=True)
            self._take_back(debt)
            if isinstance(failure, InvalidStoreRequest):
                self._debts.pop(debt.bucket.key, None)  # it would be rejected for ever
                self.dropped += 1
            if is_last or not is_condition_failure(failure):
                raise
            await self._again(debt, failure)
        else:
            self._done(debt)

    def _take_back(self, debt: _Debt) -> None:
        debt.under_way = None
        debt.add(*debt.sent)

    async def _again(self, debt: _Debt, failure: TransactionFailed) -> None:
        """What stands there now tells how much fits, and whether it is there at all."""
        key = debt.bucket.key
        self._cache.update_from_failure(failure, [key])
        seen = self._cache.get(key) or (await self._cache.read([key]))[0]
        if seen.state is None:
            self._begin(debt, build_create(debt.bucket, debt.taken, debt.used, self._now_ms()))
        else:
            self._begin(debt, build_adjustment(debt.bucket, seen.state, debt.taken, debt.used, self._now_ms()))

    def _done(self, debt: _Debt) -> None:
        assert debt.under_way is not None
        (write,) = debt.under_way.writes
        debt.under_way = None
        self.written += 1
        if isinstance(write, Update) and REFILLED_AT not in write.set:
            self._cache.record_take(write)
        else:
            self._cache.forget([write.key])


def _negative(amounts: Amounts) -> dict[str, int]:
    return {name: -amount for name, amount in amounts.items()}
