"""Usage that others tell us of, counted once.

    usage -> one transaction: its marker, if nobody put it there before, and the ADD to each counter

Several at once share transactions: the marker of each, and one ADD to each counter of what they come to together. Where
one of them was counted before, it is answered by itself, and the others are counted without it.

The marker keeps a hash of what was told, so that the same name for something else is noticed, and what it came to, so
that a repeat is answered as the first one was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from price_keeper.clock import Clock
from price_keeper.errors import PriceKeeperError, ReasonCode, InvalidStoreRequest, StoreError, TransactionFailed
from price_keeper.recording import flush
from price_keeper.recording.entries import Counter, UsageCounts
from price_keeper.stores import schema
from price_keeper.stores.again import retry_on_conflict
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    MAX_TRANSACTION_WRITES,
    Item,
    Key,
    Put,
    Store,
    ignore_expired,
    missing_or_expired,
)

KEEP_SECONDS = flush.MARKER_TTL_SECONDS
# Usage that is older could come again after its marker is gone, and count twice.
OLDEST_SECONDS = KEEP_SECONDS - 5 * flush.DAY_SECONDS

TOGETHER = 50  # in one transaction at most, which leaves as much room for counters
BY_ITSELF = 8  # at once, of those that cannot be counted together


class NameTaken(PriceKeeperError):
    """Something else was counted under this name."""


@dataclass(frozen=True, slots=True)
class Submission:
    """`digest` is that of what was told; `about` is kept with the marker for repeats."""

    org: str
    app: str
    request_id: str
    digest: str
    counts: UsageCounts
    about: Mapping[str, Any]

    @property
    def key(self) -> Key:
        return schema.request_marker_key(self.org, self.app, self.request_id)

    def marker(self, now: float) -> Item:
        return {**self.about, "payload_hash": self.digest, EXPIRY_ATTRIBUTE: int(now) + KEEP_SECONDS}


Charged: TypeAlias = tuple[Submission, Sequence[Counter]]
Outcome: TypeAlias = "tuple[Item, bool] | Exception"


class _Met(Exception):
    """Some of those that were to be counted together were counted before, or somebody else counts them now."""

    def __init__(self, places: Collection[int]) -> None:
        self.places = places
        super().__init__()


class Submissions:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._day = ""
        self._listed: set[Counter] = set()  # on this day

    async def submit(self, what: Submission, counters: Sequence[Counter]) -> tuple[Item, bool]:
        """What was kept of it, and whether it was counted now. Safe to do again. Raises NameTaken and StoreError."""
        key = what.key

        async def once() -> tuple[Item, bool]:
            now = self._clock.now()
            marker = what.marker(now)
            additions = [flush.build_addition(key.pk, counter, what.counts, now) for counter in counters]
            await self._list(counters, now)
            try:
                await self._store.transact([Put(key, marker, missing_or_expired(now)), *additions])
            except TransactionFailed as failure:
                if failure.reasons[0].code is not ReasonCode.CONDITION_FAILED:
                    raise
                before = ignore_expired(await self._store.get(key, consistent=True), now)
                if before is None:  # it has just gone, so there is room for ours
                    raise
                return _checked(before, what), False
            return marker, True

        return await retry_on_conflict(self._clock, once)

    async def submit_all(self, each: Sequence[Charged]) -> list[Outcome]:
        """As `submit` of each, whatever becomes of the others; what would be raised stands in its place."""
        found: dict[int, Outcome] = {}
        for group in _groups(each):
            found |= await self._submit_together({place: each[place] for place in group})
        gate = asyncio.Semaphore(BY_ITSELF)

        async def by_itself(place: int) -> None:
            async with gate:
                try:
                    found[place] = await self.submit(*each[place])
                except Exception as failure:
                    found[place] = failure

        await asyncio.gather(*(by_itself(place) for place in range(len(each)) if place not in found))
        return [found[place] for place in range(len(each))]

    async def _submit_together(self, group: Mapping[int, Charged]) -> dict[int, Outcome]:
        """What became of those that could be; the others are to be counted by themselves."""
        left = dict(group)
        for _ in range(2):  # the second time without those that were counted before
            if len(left) < 2:
                break
            try:
                now = await self._counted(list(left.values()))
            except _Met as met:
                left = {place: what for number, (place, what) in enumerate(left.items()) if number not in met.places}
            except StoreError as failure:
                if isinstance(failure, InvalidStoreRequest):  # perhaps for one of them alone
                    break
                return dict.fromkeys(left, failure)
            else:
                return {place: (what.marker(now), True) for place, (what, _) in left.items()}
        return {}

    async def _counted(self, group: Sequence[Charged]) -> float:
        """All of them or none, and when. Raises _Met, and what the store may raise."""
        sums: dict[Counter, UsageCounts] = {}
        for what, counters in group:
            for counter in counters:
                sums[counter] = sums[counter].plus(what.counts) if counter in sums else what.counts
        name = group[0][0].key.pk  # any will do: it only spreads them over the shards

        async def once() -> float:
            now = self._clock.now()
            markers = [Put(what.key, what.marker(now), missing_or_expired(now)) for what, _ in group]
            additions = [flush.build_addition(name, counter, counts, now) for counter, counts in sums.items()]
            await self._list(list(sums), now)
            try:
                await self._store.transact([*markers, *additions])
            except TransactionFailed as failure:
                codes = [reason.code for reason in failure.reasons[: len(markers)]]
                met = {number for number, code in enumerate(codes) if code is ReasonCode.CONDITION_FAILED}
                if met:
                    raise _Met(met) from None
                raise
            return now

        return await retry_on_conflict(self._clock, once)

    async def _list(self, counters: Sequence[Counter], now: float) -> None:
        """Before anything is counted, so that nothing is that no report would find."""
        day = flush.format_utc_day(now)
        if day != self._day:
            self._day = day
            self._listed.clear()
        part = tuple((counter, UsageCounts()) for counter in counters)
        for entry in flush.build_active_entries(part, day, self._listed, now):
            await self._store.update(entry)
        self._listed.update(counters)


def _groups(each: Sequence[Charged]) -> list[list[int]]:
    """By their places, as many as one transaction takes. What comes twice is in none the second time."""
    groups: list[list[int]] = []
    seen: set[str] = set()
    counters: set[Counter] = set()
    for place, (what, charged) in enumerate(each):
        if what.request_id in seen:
            continue
        seen.add(what.request_id)
        counters |= set(charged)
        size = len(groups[-1]) if groups else TOGETHER
        if size == TOGETHER or size + 1 + len(counters) > MAX_TRANSACTION_WRITES:
            groups.append([])
            counters = set(charged)
        groups[-1].append(place)
    return groups


def _checked(before: Item, what: Submission) -> Item:
    if before.get("payload_hash") != what.digest:
        raise NameTaken(f"{what.request_id} was used for another usage")
    return before
