"""A store that delays each request, and counts how many a caller waits for one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from price_keeper.stores.contract import Item, Key, Page, Query, Store

KEYS_PER_REQUEST = 100  # of DynamoDB's BatchGetItem
T = TypeVar("T")


class SlowStore:
    """`rounds` is the length of the longest chain of requests that were sent after the one before was answered. Without
    a delay, requests that could overlap may not, and it is higher. `items` are all that were asked for by their keys,
    or returned by a query."""

    def __init__(self, store: Store, delay: float = 0.0) -> None:
        self._store = store
        self.delay = delay
        self.rounds = self.items = 0

    def reset(self) -> None:
        self.rounds = self.items = 0

    async def _wait(self, answer: Awaitable[T], requests: int = 1) -> T:
        sent_after = self.rounds
        await asyncio.sleep(self.delay * requests)
        found = await answer
        self.rounds = max(self.rounds, sent_after + requests)
        return found

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        self.items += 1
        return await self._wait(self._store.get(key, consistent=consistent))

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        self.items += len(set(keys))
        pages = -(-len(set(keys)) // KEYS_PER_REQUEST)
        return await self._wait(self._store.get_many(keys, consistent=consistent), pages)

    async def query(self, query: Query) -> Page:
        page = await self._wait(self._store.query(query))
        self.items += len(page.rows)
        return page

    async def transact(self, *arguments: Any, **named: Any) -> None:
        await self._wait(self._store.transact(*arguments, **named))

    async def update(self, *arguments: Any) -> Item:
        return await self._wait(self._store.update(*arguments))

    async def exchange(self, *arguments: Any) -> Item | None:
        return await self._wait(self._store.exchange(*arguments))

    async def put(self, *arguments: Any) -> None:
        await self._wait(self._store.put(*arguments))

    async def delete(self, *arguments: Any) -> Item | None:
        return await self._wait(self._store.delete(*arguments))

    async def probe(self) -> None:
        await self._store.probe()

    async def close(self) -> None:
        await self._store.close()
