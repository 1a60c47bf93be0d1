"""A store in memory that counts what is read and written, by table, and what DynamoDB would charge for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from price_keeper.stores.contract import Item, Key, Page, Put, Query, Update, Write
from price_keeper.stores.item_values import check_item

from tests.support.memory_store import MemoryStore

READ_BYTES, WRITE_BYTES = 4096, 1024  # of one unit; a read that need not be consistent takes half a unit


@dataclass
class Units:
    reads: float = 0.0
    writes: float = 0.0


class MeteredStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.reads, self.writes = Counter[str](), Counter[str]()  # items, by table; rows of a query too
        self.requests = 0
        self.units = Units()

    def _count_read(self, table: str, found: Sequence[tuple[Key, Item | None]], *, consistent: bool) -> None:
        self.reads[table] += len(found)
        size = sum(check_item(key, item) for key, item in found if item is not None)
        units = -(-max(1, size) // READ_BYTES)
        self.units.reads += units if consistent else units / 2

    def _count_write(self, key: Key, factor: int) -> None:
        self.writes[key.table] += 1
        self.units.writes += factor * -(-check_item(key, self.items.get(key) or {}) // WRITE_BYTES)

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        self.requests += 1
        item = await super().get(key)
        self._count_read(key.table, [(key, item)], consistent=consistent)
        return item

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        self.requests += -(-len(keys) // 100)
        items = await super().get_many(keys)
        for key, item in zip(keys, items, strict=True):
            self._count_read(key.table, [(key, item)], consistent=consistent)
        return items

    async def query(self, query: Query) -> Page:
        self.requests += 1
        page = await super().query(query)
        self._count_read(query.table, page.rows, consistent=query.consistent)
        return page

    async def put(self, put: Put) -> None:
        self.requests += 1
        await super().put(put)
        self._count_write(put.key, 1)

    async def update(self, update: Update) -> Item:
        self.requests += 1
        item = await super().update(update)
        self._count_write(update.key, 1)
        return item

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        self.requests += 1
        await super().transact(writes, token=token)
        for write in writes:
            self._count_write(write.key, 2)
