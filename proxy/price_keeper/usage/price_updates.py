"""The price tables in force: those of the configuration, overlaid with the newest prices of the AWS Price List.

START HERE: `PriceTables`. The list is fetched once a day for a whole fleet. The process that claims a region writes the
prices to the table `pricing-cache`, under the UTC day, and all others read them there. If the list cannot be read, or
its prices are implausible, the newest known prices stay in force and `PriceStatus.trouble` says why.
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
from price_keeper.price_dimensions import TOKEN_NAMES, UNITS_BY_NAME
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
    DEFAULT_TIER,
    ListedPrices,
    PriceSource,
    PriceTable,
    build_label_price_table,
    build_price_table,
    find_implausible_prices,
    overlay_prices,
)

T = TypeVar("T")

REFRESH_SECONDS = 600.0  # between refreshes; once the day's prices are known, a refresh needs no request
CACHE_TTL_SECONDS = 3 * 86_400
CLAIM_TTL_SECONDS = 300  # enough for the process that reads the list for the others to finish or fail
MAX_ROWS_READ = 4  # per model: today's and those of three days before

_UNIT_SUFFIX = "_price_usd_micros_per_1m"  # the same number as pico-dollars per token
_CLAIM_MODEL = "PRICE-LIST"  # stands for the model in the key of a region's claim

_TABLES = ("tiers", "latencies")
_UNIDENTIFIED_MODEL = "the id does not say which model of the price list it is"
_READ_BY_OTHER = "another process is reading the price list"

_log = logging.getLogger("price_keeper.prices")


class PriceList(Protocol):
    async def read(self, region: str) -> Sequence[Product]:
        """Return every token price of a region. Raises PriceListUnreadable instead of returning a part of them."""


# ---------------------------------------------------------------- rows of the cache


class CachedPrices(NamedTuple):
    """The prices of one model in one region, as listed on one day."""

    day: str
    listed: ListedPrices | None  # None if no price is certain; `reason` says why
    reason: str
    read_at: float


def build_cache_row(found: ListedPrices | UnclearPrices, now: float, description: Item) -> Item:
    """`description` says whose prices these are, for people; `parse_cache_row` does not read it."""
    prices = _encode_prices(found) if isinstance(found, ListedPrices) else {"unclear": found.reason}
    return {**description, **prices, "fetched_at_epoch": int(now), EXPIRY_ATTRIBUTE: int(now) + CACHE_TTL_SECONDS}


def _encode_prices(listed: ListedPrices) -> dict[str, Any]:
    """All prices by tier and latency mode, and beside them input and output of the default tier."""
    tables: dict[str, Any] = {
        name: {mode: _encode_table(table) for mode, table in getattr(listed, name).items()} for name in _TABLES
    }
    if listed.pieces:
        tables["pieces"] = dict(listed.pieces)
    default = listed.tiers.get(DEFAULT_TIER, {})
    return tables | _encode_table({name: default[name] for name in ("input", "output") if name in default})


def _encode_table(table: Mapping[str, int]) -> dict[str, int]:
    return {dimension + _UNIT_SUFFIX: price for dimension, price in table.items()}


def parse_cache_row(day: str, item: Item) -> CachedPrices:
    try:
        read_at = float(item["fetched_at_epoch"])  # type: ignore[arg-type]
        if "unclear" in item:
            return CachedPrices(day, None, str(item["unclear"]), read_at)
        tiers, latencies = (_parse_tables(item[name]) for name in _TABLES)
        return CachedPrices(day, ListedPrices(tiers, latencies, _parse_pieces(item.get("pieces", {}))), "", read_at)
    except (AttributeError, LookupError, TypeError, ValueError):
        return CachedPrices(day, None, "the cached entry of the day is malformed", 0.0)


def _parse_pieces(prices: Any) -> Mapping[str, int]:
    for name, price in prices.items():
        if name not in UNITS_BY_NAME or type(price) is not int or price < 0:
            raise ValueError(f"not a price: {name}")
    return MappingProxyType(dict(prices))


def _parse_tables(tables: Any) -> Mapping[str, Mapping[str, int]]:
    return MappingProxyType({name: MappingProxyType(dict(_parse_table(table))) for name, table in tables.items()})


def _parse_table(table: Any) -> Iterator[tuple[str, int]]:
    for attribute, price in table.items():
        dimension = attribute.removesuffix(_UNIT_SUFFIX)
        if dimension == attribute or dimension not in TOKEN_NAMES or type(price) is not int or price < 0:
            raise ValueError(f"not a price: {attribute}")
        yield dimension, price


# ---------------------------------------------------------------- price tables


class _ModelRegion(NamedTuple):
    """What the price list is searched for."""

    model: str
    region: str


@dataclass(slots=True, eq=False)
class _LabelPrices:
    label: str
    family: str
    model_region: _ModelRegion
    configured: PriceTable
    follows_list: bool  # whether listed prices take precedence over the configuration's
    table: PriceTable  # in force
    read_at: float | None = None  # None while the configured prices are in force
    trouble: str = ""
    is_trouble_logged: bool = False


class PriceStatus(NamedTuple):
    label: str
    region: str
    model: str
    source: PriceSource
    version: str
    age_seconds: float | None  # since the list was read; None while the configured prices are in force
    trouble: str  # why today's listed prices are not in force; empty if they are, or are not wanted


class PriceTables:
    """The price tables of one configuration.

    `price_list` is None if this process must not read it; prices that other processes have cached are used even so.
    """

    def __init__(self, config: Config, store: Store, price_list: PriceList | None, clock: Clock) -> None:
        self._store = store
        self._price_list = price_list
        self._clock = clock
        self._labels = tuple(_build_label_prices(config))
        self._model_by_region = {
            each.model_region: identify_model(each.model_region.model) for each in self._labels if each.follows_list
        }
        self._default_table = build_price_table(config.default_price) if config.default_price is not None else None
        self._by_label = self._index_tables()
        self._cached: dict[_ModelRegion, CachedPrices] = {}
        self._settled_days: dict[_ModelRegion, str] = {}  # the last day whose prices need no further lookup
        self._troubles: dict[_ModelRegion, str] = {}
        self._refresh_lock = asyncio.Lock()
        self.failures = 0  # refreshes that could not read everything

    def inherit(self, predecessor: PriceTables) -> None:
        """Take over the listed prices that the tables of the previous configuration know."""
        self._cached, self._settled_days = (
            self._select_followed(predecessor._cached),
            self._select_followed(predecessor._settled_days),
        )
        self._troubles, self._refresh_lock = self._select_followed(predecessor._troubles), predecessor._refresh_lock
        self._apply_prices()

    def _select_followed(self, inherited: Mapping[_ModelRegion, T]) -> dict[_ModelRegion, T]:
        return {key: value for key, value in inherited.items() if key in self._model_by_region}

    def for_label(self, label: str, region: str, model: str) -> PriceTable:
        """Return the table of a label at a configured region and model, or of any model if the label is empty.

        A call keeps the table it began with. Raises LookupError for what is not configured, as it has no price.
        """
        if label:
            return self._by_label[label][region][model]
        if self._default_table is None:
            raise LookupError("a model without a label, and no default_price")
        return self._default_table

    def find_for_model(self, region: str, model: str) -> PriceTable | None:
        """Return the table of a label that calls this model in this region; None if there is none."""
        wanted = identify_model(model)
        for each in self._labels:
            known = each.model_region
            if known.region == region and (
                known.model == model or (wanted is not None and identify_model(known.model) == wanted)
            ):
                return each.table
        return None

    def all_tables(self) -> list[PriceTable]:
        return [each.table for each in self._labels]

    def status(self) -> list[PriceStatus]:
        now = self._clock.now()
        return [
            PriceStatus(
                each.label,
                each.model_region.region,
                each.model_region.model,
                each.table.source,
                each.table.version,
                None if each.read_at is None else now - each.read_at,
                each.trouble,
            )
            for each in self._labels
        ]

    async def refresh(self) -> None:
        """Read today's prices where they are not known yet. If store or list fail, the known prices stay in force."""
        async with self._refresh_lock:  # shared with the previous configuration, so that nothing is read twice
            await self._refresh()

    async def _refresh(self) -> None:
        today = datetime.fromtimestamp(self._clock.now(), UTC).date().isoformat()
        unsettled = [wanted for wanted in self._model_by_region if self._settled_days.get(wanted) != today]
        has_failed = False
        for region in dict.fromkeys(wanted.region for wanted in unsettled):
            in_region = [wanted for wanted in unsettled if wanted.region == region]
            try:
                await self._refresh_region(region, in_region, today)
            except (PriceListUnreadable, StoreError) as failure:
                has_failed = True
                self._set_trouble(
                    (wanted for wanted in in_region if self._settled_days.get(wanted) != today), str(failure)
                )
        self.failures += has_failed
        self._apply_prices()

    async def _refresh_region(self, region: str, in_region: Sequence[_ModelRegion], today: str) -> None:
        for wanted in in_region:
            await self._read_cache(wanted, today)
        unread = [wanted for wanted in in_region if self._settled_days.get(wanted) != today]
        if not unread or self._price_list is None:
            return
        if not await self._claim_region(region, today):
            self._set_trouble(unread, _READ_BY_OTHER)
            return
        products = await self._price_list.read(region)
        if not products:
            raise PriceListUnreadable(f"the AWS Price List has nothing for {region}")
        await self._write_cache({wanted: self._build_row(wanted, products) for wanted in unread}, today)

    def _build_row(self, model_region: _ModelRegion, products: Sequence[Product]) -> Item:
        model = self._model_by_region[model_region]
        found = UnclearPrices(_UNIDENTIFIED_MODEL) if model is None else select_prices(model, products)
        label = next(each for each in self._labels if each.model_region == model_region)
        description: Item = {
            "model_label": label.label,
            "tier": DEFAULT_TIER,
            "family": label.family,
            "description": f"{model_region.model} in {model_region.region}, on demand, from the AWS Price List",
        }
        return build_cache_row(found, self._clock.now(), description)

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
        """Claim the reading of a region's list; one process of the fleet succeeds."""
        now = self._clock.now()
        claim = {EXPIRY_ATTRIBUTE: int(now) + CLAIM_TTL_SECONDS}
        try:
            await self._store.put(Put(schema.price_key(_CLAIM_MODEL, region, today), claim, missing_or_expired(now)))
        except ConditionFailed:
            return False
        return True

    async def _write_cache(self, rows: Mapping[_ModelRegion, Item], today: str) -> None:
        for model_region, row in rows.items():
            self._accept(model_region, parse_cache_row(today, row), today)
        for model_region, row in rows.items():
            try:
                key = schema.price_key(*model_region, today)
                await self._store.put(Put(key, row, missing_or_expired(self._clock.now())))
            except ConditionFailed as earlier:  # another process wrote it: all must have the same prices on one day
                self._accept(model_region, parse_cache_row(today, earlier.item or row), today)

    def _set_trouble(self, model_regions: Iterable[_ModelRegion], trouble: str) -> None:
        self._troubles.update(dict.fromkeys(model_regions, trouble))

    def _apply_prices(self) -> None:
        for label in self._labels:
            if label.follows_list:
                trouble = self._apply_listed_prices(label) or self._troubles.get(label.model_region, "")
                if trouble not in (label.trouble, "", _READ_BY_OTHER):
                    label.is_trouble_logged = True
                    _log.warning("prices of %s stay those of %s: %s", _describe(label), label.table.version, trouble)
                elif not trouble and label.is_trouble_logged:
                    label.is_trouble_logged = False
                    _log.warning("prices of %s follow the price list again", _describe(label))
                label.trouble = trouble
        self._by_label = self._index_tables()

    def _apply_listed_prices(self, label: _LabelPrices) -> str:
        """Apply the listed prices, or return why they are not applied."""
        cached = self._cached.get(label.model_region)
        if cached is None or cached.listed is None:
            return ""
        implausible = find_implausible_prices(label.configured, cached.listed)
        if implausible:
            return f"some prices listed on {cached.day} are implausible, in USD per million tokens: {implausible}"
        table = overlay_prices(label.configured, cached.listed, cached.day)
        if table != label.table:
            _log.info(
                "prices of %s changed; calls are charged by price table %s from now on", _describe(label), table.version
            )
            label.table = table
        label.read_at = cached.read_at
        return ""

    def _index_tables(self) -> Mapping[str, Mapping[str, Mapping[str, PriceTable]]]:
        """Nest by label, region and model, so that `for_label` needs three lookups and creates no key object."""
        nested: dict[str, dict[str, dict[str, PriceTable]]] = {}
        for each in self._labels:
            nested.setdefault(each.label, {}).setdefault(each.model_region.region, {})[each.model_region.model] = (
                each.table
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
        for wanted, table in (tables or {_ModelRegion(label.model, config.upstream.region): label_table}).items():
            yield _LabelPrices(name, label.format, wanted, table, follows, table)


def add_price_metrics(telemetry: MetricsRegistry, price_tables: Callable[[], PriceTables]) -> None:
    """Register the price metrics. `price_tables` returns the tables in force."""

    def build_labels(status: PriceStatus) -> dict[str, str]:
        return {"label": status.label, "region": status.region, "source": status.source}

    telemetry.add(
        PRICE_AGE_SECONDS,
        lambda: [
            (build_labels(status), status.age_seconds)
            for status in price_tables().status()
            if status.age_seconds is not None
        ],
    )
    telemetry.add(
        PRICE_SOURCE_INFO,
        lambda: [({**build_labels(status), "version": status.version}, 1) for status in price_tables().status()],
    )
    telemetry.add(
        PRICE_TROUBLE,
        lambda: [(build_labels(status), float(bool(status.trouble))) for status in price_tables().status()],
    )
