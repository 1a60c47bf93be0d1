"""Every store engine the contract is held to, opened fresh; DynamoDB's tables are made once for each server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import time

from price_keeper.stores.contract import Store
from price_keeper.stores.dynamodb import DynamoStore
from price_keeper.stores.dynamodb_tables import create_missing_tables
from price_keeper.stores.sqlite import SqliteStore

# An endpoint to hold to the contract as well: DynamoDB itself, or another engine that speaks its protocol.
OWN_ENDPOINT = "PRICE_KEEPER_TEST_DYNAMODB"

ALL = ["sqlite", "moto", "ministack", *(["endpoint"] if OWN_ENDPOINT in os.environ else [])]

# moto ignores ClientRequestToken, isolates neither concurrent transactions nor, on a busy machine, single writes, and
# compares values of different kinds, so what needs those is shown on the others; `test_tokens.py` says so when moto
# learns the first.
EXACT = [engine for engine in ALL if engine != "moto"]

TEST_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
PREFIX = "price-keeper-test-"


@dataclass
class Engines:
    """`endpoints` holds the address of each running DynamoDB-compatible server."""

    endpoints: dict[str, str]
    _made: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def open(
        self,
        engine: str,
        folder: Path,
        now: Callable[[], float] = time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> AsyncIterator[Store]:
        store = await self._opened(engine, folder, now, sleep)
        try:
            yield store
        finally:
            await store.close()

    async def _opened(
        self, engine: str, folder: Path, now: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> SqliteStore | DynamoStore:
        if engine == "sqlite":
            return await SqliteStore(folder / "store.db", now).open()
        endpoint = self.endpoints[engine]
        store = await DynamoStore(region="us-east-1", table_prefix=PREFIX, endpoint=endpoint, sleep=sleep).open()
        if engine not in self._made:
            await create_missing_tables(store.client, PREFIX, asyncio.sleep, lambda *_: None)
            self._made.add(engine)
        return store
