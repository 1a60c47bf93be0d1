"""The tariffs that are in force: the configuration's, and over them what the AWS Price List told last.

The list is read once a day for a whole fleet: whoever comes first keeps the prices in the table `pricing-cache`, under
the UTC day, and everybody else reads them there. What cannot be read or believed changes nothing: the newest prices
that are known stay in force, and that is told.
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
from price_keeper.config.keys import Config
from price_keeper.errors import ConditionFailed, StoreError
from price_keeper.metering.aws_price_list import PriceListUnreadable
from price_keeper.metering.price_list import Product, UnclearPrices, select_prices, identify_model
from price_keeper.metering.pricing import PRICE_DIMENSIONS, ListedPrices, PriceSource, PriceTable, build_label_price_table, find_implausible_prices, overlay_prices, build_price_table
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Between, Item, Put, Query, Store, ignore_expired, missing_or_expired
from price_keeper.telemetry import PRICE_AGE_SECONDS, PRICE_SOURCE_INFO, PRICE_TROUBLE, MetricsRegistry

T = TypeVar("T")

REFRESH_SECONDS = 600.0  # between refreshes; once the day's prices are known, one costs nothing
KEPT_SECONDS = 3 * 86_400
CLAIM_SECONDS = 300  # in which whoever reads the list for the others is done, or has failed
ROWS_KEPT = 4  # of one model: those of three days and of today

_UNIT = "_price_usd_micros_per_1m"  # and pico-dollars a token: the same number
_CLAIM = "PRICE-LIST"  # in the place of a model: who reads the list of a region today

_NAMELESS = "the id does not say which model of the price list it is"
_WAITING = "another process is reading the price list"

_log = logging.getLogger("price_keeper.prices")


class PriceList(Protocol):
    async def read(self, region: str) -> Sequence[Product]:
        """Every price for tokens in a region, or PriceListUnreadable: never a part of them."""


# ---------------------------------------------------------------- rows of the cache


class Known(NamedTuple):
    """What the list told of a model in a region on a day."""

    day: str
    listed: ListedPrices | None  # None: nothing certain, for the reason given
    reason: str
    read_at: float


def row_of(found: ListedPrices | UnclearPrices, now: float) -> Item:
    told = _prices(found) if isinstance(found, ListedPrices) else {"unclear": found.reason}
    return {**told, "fetched_at_epoch": int(now), EXPIRY_ATTRIBUTE: int(now) + KEPT_SECONDS}


def _prices(listed: ListedPrices) -> dict[str, Any]:
    return {
        name: {mode: {dimension + _UNIT: price for dimension, price in table.items()} for mode, table in tables.items()}
        for name, tables in listed._asdict().items()
    }


def known_from(day: str, item: Item) -> Known:
    try:
        read_at = float(item["fetched_at_epoch"])  # type: ignore[arg-type]
        if "unclear" in item:
            return Known(day, None, str(item["unclear"]), read_at)
        return Known(day, ListedPrices(*(_tables(item[name]) for name in ListedPrices._fields)), "", read_at)
    except (AttributeError, LookupError, TypeError, ValueError):
        return Known(day, None, "the entry of the day is not one of ours", 0.0)


def _tables(tables: Any) -> Mapping[str, Mapping[str, int]]:
    return MappingProxyType({name: MappingProxyType(dict(_table(table))) for name, table in tables.items()})


def _table(table: Any) -> Iterator[tuple[str, int]]:
    for attribute, price in table.items():
        dimension = attribute.removesuffix(_UNIT)
        if dimension == attribute or dimension not in PRICE_DIMENSIONS or type(price) is not int or price < 0:
            raise ValueError(f"not a price: {attribute}")
        yield dimension, price


# ---------------------------------------------------------------- the tariffs


class _Asked(NamedTuple):
    """What the list is asked about."""

    model: str
    region: str


@dataclass(slots=True, eq=False)
class _Place:
    label: str
    asked: _Asked
    config: PriceTable
    is_followed: bool  # whether the list's prices go before the configuration's
    tariff: PriceTable  # in force
    read_at: float | None = None  # None: it is the configuration's
    trouble: str = ""


class TariffStatus(NamedTuple):
    label: str
    region: str
    model: str
    source: PriceSource
    version: str
    age_seconds: float | None  # since the list was read; None where the configuration's prices are in force
    trouble: str  # why these are not the list's prices of today; empty if they are, or need not be


class Tariffs:
    """`price_list` is None where it is not to be read; prices that others have put into the cache are used even so."""

    def __init__(self, config: Config, store: Store, price_list: PriceList | None, clock: Clock) -> None:
        self._store = store
        self._price_list = price_list
        self._clock = clock
        self._places = tuple(_places(config))
        self._models = {place.asked: identify_model(place.asked.model) for place in self._places if place.is_followed}
        self._other = build_price_table(config.default_price) if config.default_price is not None else None
        self._by_label = self._nested()
        self._known: dict[_Asked, Known] = {}
        self._settled: dict[_Asked, str] = {}  # the day whose prices need not be looked for any more
        self._troubles: dict[_Asked, str] = {}
        self._turn = asyncio.Lock()
        self.failures = 0  # refreshes that did not learn all that they wanted

    def succeed(self, before: Tariffs) -> None:
        """Those of another configuration. What they know of the list holds at once."""
        self._known, self._settled = self._kept(before._known), self._kept(before._settled)
        self._troubles, self._turn = self._kept(before._troubles), before._turn
        self._put_in_force()

    def _kept(self, learned: Mapping[_Asked, T]) -> dict[_Asked, T]:
        return {asked: each for asked, each in learned.items() if asked in self._models}

    def for_label(self, label: str, region: str, model: str) -> PriceTable:
        """Of a label's place as the configuration names it; with an empty label, of any model that has none. A call
        keeps the tariff it began with. Raises LookupError for what is not configured: nobody knows its price."""
        if label:
            return self._by_label[label][region][model]
        if self._other is None:
            raise LookupError("a model without a label, and no default_price")
        return self._other

    def status(self) -> list[TariffStatus]:
        now = self._clock.now()
        return [
            TariffStatus(
                place.label,
                place.asked.region,
                place.asked.model,
                place.tariff.source,
                place.tariff.version,
                None if place.read_at is None else now - place.read_at,
                place.trouble,
            )
            for place in self._places
        ]

    async def refresh(self) -> None:
        """Asks nobody for what is known of today. Store and list may fail: what is known stays in force."""
        async with self._turn:  # what those of the configuration before are about to learn is not asked for twice
            await self._refresh()

    async def _refresh(self) -> None:
        today = datetime.fromtimestamp(self._clock.now(), UTC).date().isoformat()
        wanted = [asked for asked in self._models if self._settled.get(asked) != today]
        has_failed = False
        for region in dict.fromkeys(asked.region for asked in wanted):
            here = [asked for asked in wanted if asked.region == region]
            try:
                await self._learn_region(region, here, today)
            except (PriceListUnreadable, StoreError) as failure:
                has_failed = True
                self._trouble((asked for asked in here if self._settled.get(asked) != today), str(failure))
        self.failures += has_failed
        self._put_in_force()

    async def _learn_region(self, region: str, here: Sequence[_Asked], today: str) -> None:
        for asked in here:
            await self._look_up(asked, today)
        unread = [asked for asked in here if self._settled.get(asked) != today]
        if not unread or self._price_list is None:
            return
        if not await self._is_first(region, today):
            self._trouble(unread, _WAITING)
            return
        products = await self._price_list.read(region)
        if not products:
            raise PriceListUnreadable(f"the AWS Price List has nothing for {region}")
        await self._keep({asked: self._row(asked, products) for asked in unread}, today)

    def _row(self, asked: _Asked, products: Sequence[Product]) -> Item:
        model = self._models[asked]
        return row_of(UnclearPrices(_NAMELESS) if model is None else select_prices(model, products), self._clock.now())

    async def _look_up(self, asked: _Asked, today: str) -> None:
        if self._models[asked] is None:
            self._settled[asked] = today
            self._trouble([asked], _NAMELESS if self._price_list is not None else "")
            return
        key = schema.price_key(asked.model, asked.region, today)
        newest_first = Query(key.table, key.pk, Between(None, key.sk), descending=True, limit=ROWS_KEPT)
        page = await self._store.query(newest_first)
        self._trouble([asked], "")
        now = self._clock.now()
        for row in page.rows:
            if ignore_expired(row.item, now) is not None:
                self._learn(asked, known_from(row.key.sk, row.item), today)

    def _learn(self, asked: _Asked, known: Known, today: str) -> None:
        if known.day == today:
            self._settled[asked] = today
            self._trouble([asked], known.reason)
        before = self._known.get(asked)
        if known.listed is not None and (before is None or not known.day < before.day <= today):
            self._known[asked] = known

    async def _is_first(self, region: str, today: str) -> bool:
        """Of a fleet that wants to read the list of a region at once, one does."""
        now = self._clock.now()
        claim = {EXPIRY_ATTRIBUTE: int(now) + CLAIM_SECONDS}
        try:
            await self._store.put(Put(schema.price_key(_CLAIM, region, today), claim, missing_or_expired(now)))
        except ConditionFailed:
            return False
        return True

    async def _keep(self, rows: Mapping[_Asked, Item], today: str) -> None:
        for asked, row in rows.items():
            self._learn(asked, known_from(today, row), today)
        for asked, row in rows.items():
            try:
                key = schema.price_key(*asked, today)
                await self._store.put(Put(key, row, missing_or_expired(self._clock.now())))
            except ConditionFailed as earlier:  # somebody else's: on one day all have the same prices
                self._learn(asked, known_from(today, earlier.item or row), today)

    def _trouble(self, all_asked: Iterable[_Asked], trouble: str) -> None:
        self._troubles.update(dict.fromkeys(all_asked, trouble))

    def _put_in_force(self) -> None:
        for place in self._places:
            if place.is_followed:
                trouble = self._follow(place) or self._troubles.get(place.asked, "")
                if trouble not in (place.trouble, "", _WAITING):
                    _log.warning("prices of %s stay those of %s: %s", _named(place), place.tariff.version, trouble)
                place.trouble = trouble
        self._by_label = self._nested()

    def _follow(self, place: _Place) -> str:
        """Takes the list's prices, or says why they are not taken."""
        known = self._known.get(place.asked)
        if known is None or known.listed is None:
            return ""
        doubt = find_implausible_prices(place.config, known.listed)
        if doubt:
            return f"of those listed on {known.day} some can hardly be right, in USD for a million tokens: {doubt}"
        tariff = overlay_prices(place.config, known.listed, known.day)
        if tariff != place.tariff:
            _log.info("prices of %s are now those of %s", _named(place), tariff.version)
            place.tariff = tariff
        place.read_at = known.read_at
        return ""

    def _nested(self) -> Mapping[str, Mapping[str, Mapping[str, PriceTable]]]:
        """For three look-ups that make no new object."""
        nested: dict[str, dict[str, dict[str, PriceTable]]] = {}
        for place in self._places:
            nested.setdefault(place.label, {}).setdefault(place.asked.region, {})[place.asked.model] = place.tariff
        return nested


def _named(place: _Place) -> str:
    return f"label {place.label} in {place.asked.region}"


def _places(config: Config) -> Iterator[_Place]:
    for name, label in config.labels.items():
        follows = label.price_source == "aws"
        own = build_label_price_table(label)
        found = {
            _Asked(place.model or label.model, place.region): build_label_price_table(label, place) for place in label.endpoints
        }
        for asked, tariff in (found or {_Asked(label.model, config.upstream.region): own}).items():
            yield _Place(name, asked, tariff, follows, tariff)


def add_to(telemetry: MetricsRegistry, tariffs: Callable[[], Tariffs]) -> None:
    """`tariffs` tells those in force."""

    def named(status: TariffStatus) -> dict[str, str]:
        return {"label": status.label, "region": status.region, "source": status.source}

    telemetry.add(
        PRICE_AGE_SECONDS,
        lambda: [(named(each), each.age_seconds) for each in tariffs().status() if each.age_seconds is not None],
    )
    telemetry.add(PRICE_SOURCE_INFO, lambda: [({**named(each), "version": each.version}, 1) for each in tariffs().status()])
    telemetry.add(PRICE_TROUBLE, lambda: [(named(each), float(bool(each.trouble))) for each in tariffs().status()])
