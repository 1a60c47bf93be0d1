"""Turns usage into money: exact integers of pico-dollars. Pure.

START HERE: `PriceTable`. It holds all prices of one label at one endpoint, by service tier, latency mode and price
dimension (`price_dimensions`). It never changes: a new price is a new table, and a call is charged by the table that it
began with. Usage without a price of its own is charged at the highest known price and flagged `price_unknown`; it is
never free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from price_keeper.config.config_sections import EndpointConfig, LabelConfig, PicoPrices, PricesConfig, TierPrices
from price_keeper.price_dimensions import TOKEN_NAMES, UNITS_BY_NAME
from price_keeper.usage.token_usage import Usage, make_plain_usage

PRICE_UNKNOWN: Final = "price_unknown"  # some usage has no price of its own and was charged at the highest one
DEFAULT_TIER: Final = "default"
LATENCY_OPTIMIZED: Final = "optimized"
LONG_CONTEXT: Final = "long_context"

# What Anthropic publishes of cache prices, in hundredths of the price of input.
CACHE_MULTIPLES: Final = MappingProxyType({"cache_read": 10, "cache_write_5m": 125, "cache_write_1h": 200})
DERIVED_SUFFIX: Final = "+derived"  # of a version with cache prices that follow these multiples

MAX_PRICE_RATIO: Final = 10  # between a listed and the configured price; beyond it the listed one was misread

PriceSource = Literal["config", "aws", "aws+config"]

# What a response states for an ordinary call: Bedrock calls the ordinary tier "default", Claude "standard".
_ORDINARY_TIERS: Final = ("", DEFAULT_TIER, "standard")
_ORDINARY_LATENCIES: Final = ("", "standard")

_NO_FLAGS: frozenset[str] = frozenset()
_PRICE_UNKNOWN_FLAGS: Final = frozenset((PRICE_UNKNOWN,))
_NO_PRICES: Final = (None,) * len(TOKEN_NAMES)
_NO_UNIT_PRICES: Final[Mapping[str, int]] = MappingProxyType({})
_UNLIMITED_TOKENS: Final = 10**18


class Cost(NamedTuple):
    pico: int
    flags: frozenset[str] = _NO_FLAGS


class LongContextPrices(NamedTuple):
    """Prices of whole calls whose input, including cache reads and writes, exceeds `above`; in the default tier."""

    above: int
    prices: PicoPrices


@dataclass(frozen=True, slots=True)
class Pricer:
    """Turns usage into money. `description` names the prices. `price_plain` is a fast path for calls with only input
    and output."""

    price: Callable[[Usage], Cost]
    description: str
    price_plain: Callable[[int, int], int] | None = None


@dataclass(frozen=True, slots=True)
class PriceTable:
    tiers: Mapping[str, PicoPrices]  # by service tier; always has the default one
    latencies: Mapping[str, PicoPrices]  # of the default tier, by performance mode other than the ordinary one
    version: str  # equal for equal prices from the same source
    source: PriceSource
    long_context: LongContextPrices | None = None
    derives_cache_prices: bool = False  # missing ones follow CACHE_MULTIPLES
    derived: frozenset[tuple[str, str]] = frozenset()  # tier, mode or LONG_CONTEXT, and dimension
    # of what is sold by the piece, by price dimension
    unit_prices: Mapping[str, int] = field(default_factory=lambda: _NO_UNIT_PRICES)
    highest_prices: tuple[int, ...] = field(init=False, repr=False, compare=False)  # per dimension, over all tables
    default_prices: PicoPrices = field(init=False, repr=False, compare=False)
    default_up_to_tokens: int = field(init=False, repr=False, compare=False)  # of input
    pricer: Pricer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        long = self.long_context
        tables = [*self.tiers.values(), *self.latencies.values(), *([] if long is None else [long.prices])]
        object.__setattr__(self, "highest_prices", _find_highest_prices(tables))
        object.__setattr__(self, "default_prices", self.tiers[DEFAULT_TIER])
        object.__setattr__(self, "default_up_to_tokens", _UNLIMITED_TOKENS if long is None else long.above)
        object.__setattr__(
            self,
            "pricer",
            Pricer(
                partial(price_usage, self),
                f"{self.source} {self.version}",
                None if self.unit_prices else self._price_plain,
            ),
        )

    def _price_plain(self, input: int, output: int) -> int:
        if input > self.default_up_to_tokens:
            return price_usage(self, make_plain_usage(input, output, 0)).pico
        prices = self.default_prices
        return input * prices[0] + output * prices[1]

    def prices_for(self, tier: str, latency: str, whole_input: int = 0) -> PicoPrices | None:
        """Return the prices of such a call; None if they are not known."""
        if self.long_context is not None and whole_input > self.default_up_to_tokens:
            is_ordinary = tier in _ORDINARY_TIERS and latency in _ORDINARY_LATENCIES
            return self.long_context.prices if is_ordinary else None
        if latency in _ORDINARY_LATENCIES:
            return self.tiers[DEFAULT_TIER] if tier in _ORDINARY_TIERS else self.tiers.get(tier)
        return self.latencies.get(latency) if tier in _ORDINARY_TIERS else None


def _find_highest_prices(tables: Iterable[PicoPrices]) -> tuple[int, ...]:
    """Return the highest price of each dimension. A dimension without a price, or that is always free, gets the highest
    of all: usage must not be free unless that is known."""
    highest = [
        max((price for price in dimension_prices if price is not None), default=0)
        for dimension_prices in zip(*tables, strict=True)
    ]
    return tuple(price or max(highest) for price in highest)


def price_usage(table: PriceTable, usage: Usage) -> Cost:
    """Price a usage. Additive except for long contexts: two usages of one tier and mode together cost the sum."""
    tokens_by_dimension = usage[:5]
    pico, flags = 0, _NO_FLAGS
    prices = table.prices_for(usage.tier, usage.latency, sum(tokens_by_dimension) - usage.output) or _NO_PRICES
    for tokens, price, highest in zip(tokens_by_dimension, prices, table.highest_prices, strict=True):
        if not tokens:
            continue
        if price is None:
            price, flags = highest, _PRICE_UNKNOWN_FLAGS
        pico += tokens * price
    if usage.quantities:
        units = price_units(table.unit_prices, usage.quantities)
        return Cost(pico + units.pico, flags | units.flags)
    return Cost(pico, flags)


def price_units(prices: Mapping[str, int], quantities: Mapping[str, int]) -> Cost:
    """Price what is sold by the piece: at the price of its dimension or of the general one, else at the dearest price
    of all. A general dimension stands for a piece of unknown size, so it costs the dearest of its kind."""
    pico, flags = 0, _NO_FLAGS
    for name, quantity in quantities.items():
        price, unit = _find_piece_price(prices, name), UNITS_BY_NAME[name]
        if price is None and quantity:
            price, flags = max(prices.values(), default=0), _PRICE_UNKNOWN_FLAGS
        elif not unit.general:
            price = max((prices[each] for each in prices if UNITS_BY_NAME[each].counter == unit.counter), default=0)
        pico += quantity * (price or 0)
    return Cost(pico, flags)


def find_highest_piece_prices(tables: Sequence[PriceTable]) -> Mapping[str, int]:
    """The highest price of each piece at any endpoint of a label."""
    names = {name for table in tables for name in table.unit_prices}
    return {name: max(_find_piece_price(table.unit_prices, name) or 0 for table in tables) for name in names}


# ---------------------------------------------------------------- from the configuration


def build_price_table(prices: TierPrices) -> PriceTable:
    """Build the table of the configured prices alone."""
    tiers, latencies, long = {DEFAULT_TIER: prices.pico_per_token}, {}, None
    if isinstance(prices, PricesConfig):
        tiers |= {tier: table.pico_per_token for tier, table in prices.service_tiers.items()}
        if prices.latency_optimized is not None:
            latencies[LATENCY_OPTIMIZED] = prices.latency_optimized.pico_per_token
        if prices.long_context is not None:
            long = LongContextPrices(prices.long_context.above_input_tokens, prices.long_context.pico_per_token)
    version = f"config-{_digest(tiers, latencies, long)}"
    return PriceTable(MappingProxyType(tiers), MappingProxyType(latencies), version, "config", long)


def build_label_price_table(label: LabelConfig, endpoint: EndpointConfig | None = None) -> PriceTable:
    """Build the table of a label's configured prices. Of an Anthropic model, missing cache prices are derived."""
    table = build_price_table(label.prices_usd_per_1m if endpoint is None else label.prices_at(endpoint))
    if label.prices_usd_per_unit:
        table = _add_unit_prices(table, label.pico_per_unit)
    return derive_cache_prices(table) if label.format == "anthropic" else table


def _add_unit_prices(table: PriceTable, prices: Mapping[str, int]) -> PriceTable:
    digest = sha256(repr((table.version, sorted(prices.items()))).encode()).hexdigest()[:8]
    return replace(table, version=f"config-{digest}", unit_prices=prices)


def derive_cache_prices(table: PriceTable) -> PriceTable:
    """Fill in missing cache prices by CACHE_MULTIPLES, from the price of input beside them."""
    derived: set[tuple[str, str]] = set()

    def fill(name: str, prices: PicoPrices) -> PicoPrices:
        # Rounded up, as usage must never cost less than it does at Bedrock.
        missing = {
            dimension: -(-prices.input * hundredths // 100)
            for dimension, hundredths in CACHE_MULTIPLES.items()
            if getattr(prices, dimension) is None
        }
        derived.update((name, dimension) for dimension in missing)
        return prices._replace(**missing)

    filled = _map_prices(table, fill)
    version = filled.version + (DERIVED_SUFFIX if derived else "")
    return replace(filled, version=version, derives_cache_prices=True, derived=frozenset(derived))


def describe_derived(table: PriceTable) -> dict[str, str]:
    """The derived prices in USD per million tokens, by where they would stand in the configuration."""
    places = [
        ("" if name == DEFAULT_TIER else f"service_tiers.{name}.", name, each) for name, each in table.tiers.items()
    ]
    places += [(f"latency_{name}.", name, each) for name, each in table.latencies.items()]
    if table.long_context is not None:
        places.append((f"{LONG_CONTEXT}.", LONG_CONTEXT, table.long_context.prices))
    return {
        path + dimension: _format_usd(getattr(prices, dimension))
        for path, name, prices in places
        for dimension in CACHE_MULTIPLES
        if (name, dimension) in table.derived
    }


def _remove_derived(table: PriceTable) -> PriceTable:
    """The table as it was before its missing prices were derived."""

    def clear(name: str, prices: PicoPrices) -> PicoPrices:
        cache = (None if (name, each) in table.derived else getattr(prices, each) for each in CACHE_MULTIPLES)
        return PicoPrices(prices.input, prices.output, *cache)

    version = table.version.removesuffix(DERIVED_SUFFIX)
    return replace(_map_prices(table, clear), version=version, derived=frozenset())


def _map_prices(table: PriceTable, change: Callable[[str, PicoPrices], PicoPrices]) -> PriceTable:
    """Change the prices of each tier, each latency mode and long contexts."""
    long = table.long_context
    return replace(
        table,
        tiers=MappingProxyType({name: change(name, prices) for name, prices in table.tiers.items()}),
        latencies=MappingProxyType({name: change(name, prices) for name, prices in table.latencies.items()}),
        long_context=None if long is None else long._replace(prices=change(LONG_CONTEXT, long.prices)),
    )


def _digest(
    tiers: Mapping[str, PicoPrices], latencies: Mapping[str, PicoPrices], long: LongContextPrices | None
) -> str:
    figures = [[(name, *table[name]) for name in sorted(table)] for table in (tiers, latencies)]
    if long is not None:
        figures.append([(str(long.above), *long.prices)])
    return sha256(repr(figures).encode()).hexdigest()[:8]


# ---------------------------------------------------------------- listed prices over the configuration


class ListedPrices(NamedTuple):
    """The listed prices of one model in one region, in pico-dollars per token or piece. Unlisted ones are missing."""

    tiers: Mapping[str, Mapping[str, int]]
    latencies: Mapping[str, Mapping[str, int]]
    pieces: Mapping[str, int] = _NO_UNIT_PRICES

    def iter_prices(self) -> Iterator[tuple[str, str, int]]:
        """Yield tier or mode, dimension and price of all tokens."""
        for tables in (self.tiers, self.latencies):
            for name, table in tables.items():
                yield from ((name, dimension, price) for dimension, price in table.items())


def overlay_prices(configured: PriceTable, listed: ListedPrices, day: str) -> PriceTable:
    """Overlay listed prices. The configuration's hold where none is listed, and always for long contexts. Derived
    prices are derived again, from the resulting price of input."""
    if configured.derives_cache_prices:
        return derive_cache_prices(_overlay_prices(_remove_derived(configured), listed, day))
    return _overlay_prices(configured, listed, day)


def _overlay_prices(configured: PriceTable, listed: ListedPrices, day: str) -> PriceTable:
    tiers, long = _overlay_tables(configured.tiers, listed.tiers), configured.long_context
    latencies = _overlay_tables(configured.latencies, listed.latencies)
    units = _overlay_pieces(configured.unit_prices, listed.pieces)
    if (
        long is None
        and not units
        and _lists_every_price(listed.tiers, tiers)
        and _lists_every_price(listed.latencies, latencies)
    ):
        return PriceTable(tiers, latencies, day, "aws")
    return PriceTable(tiers, latencies, f"{day}+{configured.version}", "aws+config", long, unit_prices=units)


def _overlay_pieces(configured: Mapping[str, int], listed: Mapping[str, int]) -> Mapping[str, int]:
    """Only what the label sells by the piece: of nothing else is known how much a call uses."""
    sold = {name: price for name, price in listed.items() if _find_piece_price(configured, name) is not None}
    return MappingProxyType({**configured, **sold})


def _find_piece_price(prices: Mapping[str, int], name: str) -> int | None:
    return prices.get(name, prices.get(UNITS_BY_NAME[name].general))


def _overlay_tables(
    configured: Mapping[str, PicoPrices], listed: Mapping[str, Mapping[str, int]]
) -> Mapping[str, PicoPrices]:
    merged = {name: _overlay_table(configured.get(name), listed.get(name, {})) for name in (*configured, *listed)}
    return MappingProxyType({name: table for name, table in merged.items() if table is not None})


def _overlay_table(configured: PicoPrices | None, listed: Mapping[str, int]) -> PicoPrices | None:
    """Overlay one table; None for a tier for which neither source has both input and output."""
    fallback = configured or _NO_PRICES
    input, output, *cache = (
        listed.get(dimension, price) for dimension, price in zip(TOKEN_NAMES, fallback, strict=True)
    )
    return None if input is None or output is None else PicoPrices(input, output, *cache)


def _lists_every_price(listed: Mapping[str, Mapping[str, int]], merged: Mapping[str, PicoPrices]) -> bool:
    return all(
        price is None or dimension in listed.get(name, {})
        for name, table in merged.items()
        for dimension, price in zip(TOKEN_NAMES, table, strict=True)
    )


def find_implausible_prices(configured: PriceTable, listed: ListedPrices) -> str:
    """Describe listed prices that are implausible compared with the configuration's; empty if there are none."""
    implausible = []
    for name, dimension, price in listed.iter_prices():
        reference, is_same_dimension = _find_reference_price(configured, name, dimension)
        if not _is_plausible(dimension, price, reference, is_same_dimension):
            implausible.append(
                f"{name} {dimension} at {_format_usd(price)}, beside {_format_usd(reference)} in the configuration"
            )
    for name, price in listed.pieces.items():
        piece_price = _find_piece_price(configured.unit_prices, name)
        if piece_price is not None and not _is_plausible(name, price, piece_price, is_same_dimension=True):
            listed_usd, usd = _format_usd(price), _format_usd(piece_price)
            implausible.append(f"a million of {name} at {listed_usd}, beside {usd} in the configuration")
    return "; ".join(implausible)


def _find_reference_price(configured: PriceTable, name: str, dimension: str) -> tuple[int, bool]:
    """Return the closest configured price, and whether it is of the same dimension."""
    default = configured.tiers[DEFAULT_TIER]
    for table in (configured.tiers.get(name), configured.latencies.get(name), default):
        price = getattr(table, dimension, None)
        if price is not None:
            return price, True
    return default.input, False


def _is_plausible(dimension: str, price: int, reference: int, is_same_dimension: bool) -> bool:
    if is_same_dimension:
        return price <= reference * MAX_PRICE_RATIO and reference <= price * MAX_PRICE_RATIO
    is_free = price == 0 and dimension.startswith("cache_write")  # Amazon's own models write caches for free
    return is_free or 0 < price <= reference * MAX_PRICE_RATIO


def _format_usd(pico: int) -> str:
    """Format for messages: USD per million tokens."""
    return f"{Decimal(pico) / 10**6:f}"
