"""Serves as `price-keeper serve` does, and counts what is asked of the embedded store, for another process to read.

python -m bench.speed.scaling_counted FILE serve --config config.yaml
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from price_keeper.cli.entry_point import main
from price_keeper.stores.contract import Delete, Item, Key, Page, Put, Query, Update, Write
from price_keeper.stores.sqlite import SqliteStore

_SHAPE = struct.Struct("=4Q")


class Asked(NamedTuple):
    """`items` are those of single writes and of transactions; so on DynamoDB each of the latter counts twice."""

    writes: int = 0
    transactions: int = 0
    items: int = 0
    reads: int = 0

    def since(self, before: Asked) -> Asked:
        return Asked(*(now - then for now, then in zip(self, before, strict=True)))


class Counted:
    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _SHAPE.size)

    @classmethod
    def made(cls, file: Path) -> Counted:
        file.write_bytes(bytes(_SHAPE.size))
        return cls(file)

    def told(self) -> Asked:
        return Asked(*_SHAPE.unpack_from(self._memory))

    def add(self, writes: int = 0, transactions: int = 0, items: int = 0, reads: int = 0) -> None:
        more = (writes, transactions, items, reads)
        _SHAPE.pack_into(self._memory, 0, *(sum(each) for each in zip(self.told(), more, strict=True)))


def counting(counted: Counted) -> type[SqliteStore]:
    class CountingStore(SqliteStore):
        async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
            counted.add(reads=1)
            return await super().get(key, consistent=consistent)

        async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
            counted.add(reads=len(keys))
            return await super().get_many(keys, consistent=consistent)

        async def query(self, query: Query) -> Page:
            counted.add(reads=1)
            return await super().query(query)

        async def _write(self, write: Put | Update | Delete) -> Any:
            counted.add(writes=1, items=1)
            return await super()._write(write)

        async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
            counted.add(transactions=1, items=len(writes))
            await super().transact(writes, token=token)

    return CountingStore


if __name__ == "__main__":
    import price_keeper.app

    price_keeper.app.SqliteStore = counting(Counted(Path(sys.argv[1])))  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))
