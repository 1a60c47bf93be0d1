"""The price tables in force: those of the configuration, overlaid with the newest prices of the AWS Price List.

The list is fetched once a day for a whole fleet. The process that claims a region writes the prices to the table
`pricing-cache`, under the UTC day, and all others read them there. If the list cannot be read, or its prices are
implausible, the newest known prices stay in force and `PriceStatus.trouble` says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from price_keeper.clock import Clock
from price_keeper.config.config_sections import Config
from price_keeper.errors import ConditionFailed, StoreError
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    Between,
    Item,
    Put,
    Query,
    Store,
    ignore_expired,
    missing_or_expired,
)
from price_keeper.telemetry.metrics import PRICE_AGE_SECONDS, PRICE_SOURCE_INFO, PRICE_TROUBLE, MetricsRegistry
from price_keeper.usage.price_list import Product, UnclearPrices, identify_model, select_prices
from price_keeper.usage.price_list_client import PriceListUnreadable
from price_keeper.usage.price_table import (
    PRICE_DIMENSIONS,
    ListedPrices,
    PriceSource,
    PriceTable,
    build_label_price_table,
    build_price_table,
    find_implausible_prices,
    overlay_prices,
)

T = TypeVar("T")

REFRESH_SECONDS = 600.0  # between refreshes; once the day's prices are known, one costs nothing
CACHE_TTL_SECONDS = 3 * 86_400
CLAIM_TTL_SECONDS = 300  # in which whoever reads the list for the others is done, or has failed
MAX_ROWS_READ = 4  # of one model: those of three days and of today

_UNIT_SUFFIX = "_price_usd_micros_per_1m"  # and pico-dollars a token: the same number
_CLAIM_MODEL = "PRICE-LIST"  # in the place of a model: who reads the list of a region today

_UNIDENTIFIED_MODEL = "the id does not say which model of the price list it is"
_READ_BY_OTHER = "another process is reading the price list"

_log = logging.getLogger("price_keeper.prices")


class PriceList(Protocol):
    async def read(self, region: str) -> Sequence[Product]:
        """Every price for tokens in a region, or PriceListUnreadable: never a part of them."""


# ---------------------------------------------------------------- rows of the cache


class CachedPrices(NamedTuple):
    """What the list told of a model in a region on a day."""

    day: str
    listed: ListedPrices | None  # None: nothing certain, for the reason given
    reason: str
    read_at: float


def build_cache_row(found: ListedPrices | UnclearPrices, now: float) -> Item:
    prices = _encode_prices(found) if isinstance(found, ListedPrices) else {"unclear": found.reason}
    return {**prices, "fetched_at_epoch": int(now), EXPIRY_ATTRIBUTE: int(now) + CACHE_TTL_SECONDS}


def _encode_prices(listed: ListedPrices) -> dict[str, Any]:
    return {
        name: {
            mode: {dimension + _UNIT_SUFFIX: price for dimension, price in table.items()}
            for mode, table in tables.items()
        }
        for name, tables in listed._asdict().items()
    }


def parse_cache_row(day: str, item: Item) -> CachedPrices:
    try:
        read_at = float(item["fetched_at_epoch"])  # type: ignore[arg-type]
        if "unclear" in item:
            return CachedPrices(day, None, str(item["unclear"]), read_at)
        return CachedPrices(
            day, ListedPrices(*(_parse_tables(item[name]) for name in ListedPrices._fields)), "", read_at
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        return CachedPrices(day, None, "the entry of the day is not one of ours", 0.0)


def _parse_tables(tables: Any) -> Mapping[str, Mapping[str, int]]:
    return MappingProxyType({name: MappingProxyType(dict(_parse_table(table))) for name, table in tables.items()})


def _parse_table(table: Any) -> Iterator[tuple[str, int]]:
    for attribute, price in table.items():
        dimension = attribute.removesuffix(_UNIT_SUFFIX)
        if dimension == attribute or dimension not in PRICE_DIMENSIONS or type(price) is not int or price < 0:
            raise ValueError(f"not a price: {attribute}")
        yield dimension, price


# ---------------------------------------------------------------- the tariffs


class _ModelRegion(NamedTuple):
    """What the list is asked about."""

    model: str
    region: str


@dataclass(slots=True, eq=False)
class _LabelPrices:
    label: str
    model_region: _ModelRegion
    configured: PriceTable
    follows_list: bool  # whether the list's prices go before the configuration's
    table: PriceTable  # in force
    read_at: float | None = None  # None: it is the configuration's
    trouble: str = ""


class PriceStatus(NamedTuple):
    label: str
    region: str
    model: str
    source: PriceSource
    version: str
    age_seconds: float | None  # since the list was read; None where the configuration's prices are in force
    trouble: str  # why these are not the list's prices of today; empty if they are, or need not be


class PriceTables:
    """`price_list` is None where it is not to be read; prices that others have put into the cache are used even so."""

    def __init__(self, config: Config, store: Store, price_list: PriceList | None, clock: Clock) -> None:
        self._store = store
        self._price_list = price_list
        self._clock = clock
        self._labels = tuple(_build_label_prices(config))
        self._model_by_region = {
            place.model_region: identify_model(place.model_region.model) for place in self._labels if place.follows_list
        }
        self._default_table = build_price_table(config.default_price) if config.default_price is not None else None
        self._by_label = self._index_tables()
        self._cached: dict[_ModelRegion, CachedPrices] = {}
        self._settled_days: dict[_ModelRegion, str] = {}  # the day whose prices need not be looked for any more
        self._troubles: dict[_ModelRegion, str] = {}
        self._refresh_lock = asyncio.Lock()
        self.failures = 0  # refreshes that did not learn all that they wanted

    def inherit(self, predecessor: PriceTables) -> None:
        """Those of another configuration. What they know of the list holds at once."""
        self._cached, self._settled_days = (
            self._select_followed(predecessor._cached),
            self._select_followed(predecessor._settled_days),
        )
        self._troubles, self._refresh_lock = self._select_followed(predecessor._troubles), predecessor._refresh_lock
        self._apply_prices()

    def _select_followed(self, inherited: Mapping[_ModelRegion, T]) -> dict[_ModelRegion, T]:
        return {model_region: each for model_region, each in inherited.items() if model_region in self._model_by_region}

    def for_label(self, label: str, region: str, model: str) -> PriceTable:
        """Of a label's place as the configuration names it; with an empty label, of any model that has none. A call
        keeps the tariff it began with. Raises LookupError for what is not configured: nobody knows its price."""
        if label:
            return self._by_label[label][region][model]
        if self._default_table is None:
            raise LookupError("a model without a label, and no default_price")
        return self._default_table

    def status(self) -> list[PriceStatus]:
        now = self._clock.now()
        return [
            PriceStatus(
                place.label,
                place.model_region.region,
                place.model_region.model,
                place.table.source,
                place.table.version,
                None if place.read_at is None else now - place.read_at,
                place.trouble,
            )
            for place in self._labels
        ]

    async def refresh(self) -> None:
        """Asks nobody for what is known of today. Store and list may fail: what is known stays in force."""
        async with (
            self._refresh_lock
        ):  # what those of the configuration before are about to learn is not asked for twice
            await self._refresh()

    async def _refresh(self) -> None:
        today = datetime.fromtimestamp(self._clock.now(), UTC).date().isoformat()
        unsettled = [asked for asked in self._model_by_region if self._settled_days.get(asked) != today]
        has_failed = False
        for region in dict.fromkeys(asked.region for asked in unsettled):
            in_region = [asked for asked in unsettled if asked.region == region]
            try:
                await self._refresh_region(region, in_region, today)
            except (PriceListUnreadable, StoreError) as failure:
                has_failed = True
                self._set_trouble(
                    (asked for asked in in_region if self._settled_days.get(asked) != today), str(failure)
                )
        self.failures += has_failed
        self._apply_prices()

    async def _refresh_region(self, region: str, in_region: Sequence[_ModelRegion], today: str) -> None:
        for asked in in_region:
            await self._read_cache(asked, today)
        unread = [asked for asked in in_region if self._settled_days.get(asked) != today]
        if not unread or self._price_list is None:
            return
        if not await self._claim_region(region, today):
            self._set_trouble(unread, _READ_BY_OTHER)
            return
        products = await self._price_list.read(region)
        if not products:
            raise PriceListUnreadable(f"the AWS Price List has nothing for {region}")
        await self._write_cache({asked: self._build_row(asked, products) for asked in unread}, today)

    def _build_row(self, model_region: _ModelRegion, products: Sequence[Product]) -> Item:
        model = self._model_by_region[model_region]
        return build_cache_row(
            UnclearPrices(_UNIDENTIFIED_MODEL) if model is None else select_prices(model, products), self._clock.now()
        )

    async def _read_cache(self, model_region: _ModelRegion, today: str) -> None:
        if self._model_by_region[model_region] is None:
            self._settled_days[model_region] = today
            self._set_trouble([model_region], _UNIDENTIFIED_MODEL if self._price_list is not None else "")
            return
        key = schema.price_key(model_region.model, model_region.region, today)
        newest_first = Query(key.table, key.pk, Between(None, key.sk), descending=True, limit=MAX_ROWS_READ)
        page = await self._store.query(newest_first)
        self._set_trouble([model_region], "")
        now = self._clock.now()
        for row in page.rows:
            if ignore_expired(row.item, now) is not None:
                self._accept(model_region, parse_cache_row(row.key.sk, row.item), today)

    def _accept(self, model_region: _ModelRegion, prices: CachedPrices, today: str) -> None:
        if prices.day == today:
            self._settled_days[model_region] = today
            self._set_trouble([model_region], prices.reason)
        before = self._cached.get(model_region)
        if prices.listed is not None and (before is None or not prices.day < before.day <= today):
            self._cached[model_region] = prices

    async def _claim_region(self, region: str, today: str) -> bool:
        """Of a fleet that wants to read the list of a region at once, one does."""
        now = self._clock.now()
        claim = {EXPIRY_ATTRIBUTE: int(now) + CLAIM_TTL_SECONDS}
        try:
            await self._store.put(Put(schema.price_key(_CLAIM_MODEL, region, today), claim, missing_or_expired(now)))
        except ConditionFailed:
            return False
        return True

    async def _write_cache(self, rows: Mapping[_ModelRegion, Item], today: str) -> None:
        for asked, row in rows.items():
            self._accept(asked, parse_cache_row(today, row), today)
        for asked, row in rows.items():
            try:
                key = schema.price_key(*asked, today)
                await self._store.put(Put(key, row, missing_or_expired(self._clock.now())))
            except ConditionFailed as earlier:  # somebody else's: on one day all have the same prices
                self._accept(asked, parse_cache_row(today, earlier.item or row), today)

    def _set_trouble(self, model_regions: Iterable[_ModelRegion], trouble: str) -> None:
        self._troubles.update(dict.fromkeys(model_regions, trouble))

    def _apply_prices(self) -> None:
        for label in self._labels:
            if label.follows_list:
                trouble = self._apply_listed_prices(label) or self._troubles.get(label.model_region, "")
                if trouble not in (label.trouble, "", _READ_BY_OTHER):
                    _log.warning("prices of %s stay those of %s: %s", _describe(label), label.table.version, trouble)
                label.trouble = trouble
        self._by_label = self._index_tables()

    def _apply_listed_prices(self, label: _LabelPrices) -> str:
        """Takes the list's prices, or says why they are not taken."""
        cached = self._cached.get(label.model_region)
        if cached is None or cached.listed is None:
            return ""
        implausible = find_implausible_prices(label.configured, cached.listed)
        if implausible:
            return (
                f"of those listed on {cached.day} some can hardly be right, in USD for a million tokens: {implausible}"
            )
        table = overlay_prices(label.configured, cached.listed, cached.day)
        if table != label.table:
            _log.info("prices of %s are now those of %s", _describe(label), table.version)
            label.table = table
        label.read_at = cached.read_at
        return ""

    def _index_tables(self) -> Mapping[str, Mapping[str, Mapping[str, PriceTable]]]:
        """For three look-ups that make no new object."""
        nested: dict[str, dict[str, dict[str, PriceTable]]] = {}
        for place in self._labels:
            nested.setdefault(place.label, {}).setdefault(place.model_region.region, {})[place.model_region.model] = (
                place.table
            )
        return nested


def _describe(label: _LabelPrices) -> str:
    return f"label {label.label} in {label.model_region.region}"


def _build_label_prices(config: Config) -> Iterator[_LabelPrices]:
    for name, label in config.labels.items():
        follows = label.price_source == "aws"
        label_table = build_label_price_table(label)
        tables = {
            _ModelRegion(endpoint.model or label.model, endpoint.region): build_label_price_table(label, endpoint)
            for endpoint in label.endpoints
        }
        for asked, tariff in (tables or {_ModelRegion(label.model, config.upstream.region): label_table}).items():
            yield _LabelPrices(name, asked, tariff, follows, tariff)


def add_price_metrics(telemetry: MetricsRegistry, price_tables: Callable[[], PriceTables]) -> None:
    """`tariffs` tells those in force."""

    def build_labels(status: PriceStatus) -> dict[str, str]:
        return {"label": status.label, "region": status.region, "source": status.source}

    telemetry.add(
        PRICE_AGE_SECONDS,
        lambda: [
            (build_labels(each), each.age_seconds) for each in price_tables().status() if each.age_seconds is not None
        ],
    )
    telemetry.add(
        PRICE_SOURCE_INFO,
        lambda: [({**build_labels(each), "version": each.version}, 1) for each in price_tables().status()],
    )
    telemetry.add(
        PRICE_TROUBLE, lambda: [(build_labels(each), float(bool(each.trouble))) for each in price_tables().status()]
    )
