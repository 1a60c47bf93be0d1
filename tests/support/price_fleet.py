"""Sidecars that share a store and a price list, in time that a test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from price_keeper.config.config_sections import Config, parse_config
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Store
from price_keeper.stores.sqlite import SqliteStore
from price_keeper.usage.price_list_client import AwsPriceList
from price_keeper.usage.price_table import PriceTable, price_usage
from price_keeper.usage.price_updates import PriceStatus, PriceTables
from price_keeper.usage.token_usage import Usage

from tests.support import price_list_server as aws
from tests.support.clock import ManualClock
from tests.support.price_list_server import PriceListServer, list_claude, price_list_server

HAIKU = "anthropic.claude-haiku-4-5-20251001-v1:0"
NOVA = "amazon.nova-lite-v1:0"
CLAUDE_PRICES = "{input: 1, output: 5, cache_read: 0.1, cache_write_5m: 1.25, cache_write_1h: 2}"
LABELS = f"""
labels:
  standard: {{model: "{HAIKU}", format: anthropic, prices_usd_per_1m: {CLAUDE_PRICES}}}
  economy: {{model: "{NOVA}", format: nova, prices_usd_per_1m: {{input: 0.05, output: 0.2}}}}
"""
MILLION = Usage(1_000_000)
DAY = 86_400.0
NOON = 1_795_003_200.0  # of 18 November 2026, UTC


@dataclass
class PriceFleet:
    server: PriceListServer
    store: Store
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOON))

    def sidecar(self, text: str = LABELS, *, reads: bool = True, store: Any = None) -> PriceTables:
        price_list = AwsPriceList(self.server.url) if reads else None
        return PriceTables(configured(text), store or self.store, price_list, self.clock)

    async def start_sidecar(self, text: str = LABELS, **how: Any) -> PriceTables:
        price_tables = self.sidecar(text, **how)
        await price_tables.refresh()
        return price_tables

    def raise_prices(self) -> None:
        self.server.products = [*list_claude("Claude Haiku 4.5", "2.2 11 0.22 2.75 4.4"), *aws.NOVA_LITE]

    async def row(self, model: str, day: str) -> Item | None:
        return await self.store.get(schema.price_key(model, "us-east-1", day))


def configured(text: str) -> Config:
    return parse_config(text, "config.yaml", {})


@asynccontextmanager
async def open_fleet(folder: Path) -> AsyncIterator[PriceFleet]:
    store = await SqliteStore(folder / "store.db", lambda: NOON).open()
    try:
        async with price_list_server() as server:
            yield PriceFleet(server, store)
    finally:
        await store.close()


def find_standard(price_tables: PriceTables) -> PriceTable:
    return price_tables.for_label("standard", "us-east-1", HAIKU)


def usd_per_1m(price_table: PriceTable) -> float:
    return price_usage(price_table, MILLION).pico / 10**12


def status(price_tables: PriceTables, name: str = "standard") -> PriceStatus:
    return next(each for each in price_tables.status() if each.label == name)
