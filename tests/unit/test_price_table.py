"""What usage costs: each family's prices, exactness against plain arithmetic, and that nothing unknown is free."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.config.config_sections import (
    EndpointConfig,
    LabelConfig,
    LongContext,
    PicoPrices,
    PricesConfig,
    TierPrices,
)
from price_keeper.price_dimensions import TOKEN_NAMES
from price_keeper.usage.price_table import (
    PRICE_UNKNOWN,
    Cost,
    ListedPrices,
    PriceTable,
    build_label_price_table,
    build_price_table,
    describe_derived,
    find_implausible_prices,
    overlay_prices,
    price_usage,
)
from price_keeper.usage.token_usage import Usage

from tests.support.effort import tries

UNKNOWN = frozenset((PRICE_UNKNOWN,))


def usd(text: str) -> tuple[Decimal, ...]:
    return tuple(map(Decimal, text.split()))


CLAUDE = PricesConfig(
    *usd("3 15 0.30 3.75 6"),
    service_tiers=MappingProxyType({"priority": TierPrices(*usd("5.25 26.25 0.525 6.5625 10.5"))}),
    latency_optimized=TierPrices(*usd("4 20 0.40 5 8")),
)
NOVA = PricesConfig(
    *usd("0.06 0.24 0.015 0"), service_tiers=MappingProxyType({"flex": TierPrices(*usd("0.03 0.12 0.0075"))})
)
LLAMA = PricesConfig(*usd("0.72 0.72"))
TITAN = PricesConfig(*usd("0.02 0"))


@pytest.mark.parametrize(
    ("prices", "usage", "micros"),
    [
        (CLAUDE, Usage(1000, 500), "10500"),
        (CLAUDE, Usage(0, 0), "0"),
        (CLAUDE, Usage(1, 1, cache_read=100_000, cache_write_5m=2000, cache_write_1h=300), "39318"),
        (CLAUDE, Usage(1000, 500, tier="default", latency="standard"), "10500"),
        (CLAUDE, Usage(1000, 500, tier="standard"), "10500"),
        (CLAUDE, Usage(1000, 500, tier="priority"), "18375"),
        (CLAUDE, Usage(0, 0, cache_write_1h=3, tier="priority"), "31.5"),
        (CLAUDE, Usage(1000, 500, latency="optimized"), "14000"),
        (CLAUDE, Usage(10, 0, cache_read=10, tier="default", latency="optimized"), "44"),
        (NOVA, Usage(1000, 500, cache_read=2000, cache_write_5m=9000), "210"),
        (NOVA, Usage(1000, 500, cache_read=2000, tier="flex"), "105"),
        (NOVA, Usage(1, 0), "0.06"),
        (LLAMA, Usage(7, 5), "8.64"),
        (TITAN, Usage(1), "0.02"),
    ],
)
def test_usage_is_priced_per_family(prices: PricesConfig, usage: Usage, micros: str) -> None:
    assert price_usage(build_price_table(prices), usage) == Cost(int(Decimal(micros) * 10**6), frozenset())


@pytest.mark.parametrize(
    ("prices", "usage", "micros"),
    [
        (CLAUDE, Usage(1000, tier="flex"), "5250"),  # the dearest input is the priority tier's
        (CLAUDE, Usage(0, 0, cache_write_5m=1, tier="reserved"), "6.5625"),
        (CLAUDE, Usage(1000, latency="turbo"), "5250"),
        (CLAUDE, Usage(1000, tier="priority", latency="optimized"), "5250"),  # each has a price, both at once have none
        (NOVA, Usage(0, 0, cache_read=1000, tier="priority"), "15"),
        (NOVA, Usage(0, 0, cache_write_1h=1000), "240"),  # a kind without a price anywhere is as dear as output
        (NOVA, Usage(1000, 0, cache_write_5m=1000, tier="flex"), "270"),  # free elsewhere, which says nothing of here
        (LLAMA, Usage(0, 0, cache_read=1000), "720"),
    ],
)
def test_missing_price_costs_highest_and_is_flagged(prices: PricesConfig, usage: Usage, micros: str) -> None:
    assert price_usage(build_price_table(prices), usage) == Cost(int(Decimal(micros) * 10**6), UNKNOWN)


def test_unused_kind_needs_no_price() -> None:
    assert price_usage(build_price_table(LLAMA), Usage(1, 1)).flags == frozenset()
    assert price_usage(build_price_table(LLAMA), Usage(tier="unheard of")) == Cost(0, frozenset())


# ---------------------------------------------------------------- against plain arithmetic

MONEY = st.decimals(0, 1000, places=6)
MAYBE = st.none() | MONEY
TABLES = st.builds(TierPrices, MONEY, MONEY, MAYBE, MAYBE, MAYBE)
ALL_PRICES = st.builds(
    lambda table, tiers, optimized: PricesConfig(
        *(getattr(table, kind) for kind in TOKEN_NAMES), service_tiers=tiers, latency_optimized=optimized
    ),
    TABLES,
    st.dictionaries(st.sampled_from(["flex", "priority", "reserved"]), TABLES),
    st.none() | TABLES,
)
COUNTS = st.integers(0, 10**7)
TIERS = st.sampled_from(["", "default", "standard", "flex", "priority", "reserved", "new"])
LATENCIES = st.sampled_from(["", "standard", "optimized", "new"])
TOKENS = st.tuples(COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)


def plain_cost(prices: PricesConfig, tokens: tuple[int, ...], tier: str, latency: str) -> Fraction:
    """The rule once more, in fractions of a dollar and the words of the configuration."""
    tables = [table for _, table in prices.iterate_tables()]
    is_plain, is_default = latency in ("", "standard"), tier in ("", "default", "standard")
    table: TierPrices | None = None
    if prices.long_context is not None and sum(tokens) - tokens[1] > prices.long_context.above_input_tokens:
        table = prices.long_context if is_plain and is_default else None
    elif is_plain:
        table = prices if is_default else prices.service_tiers.get(tier)  # type: ignore[call-overload]
    elif is_default and latency == "optimized":
        table = prices.latency_optimized
    total = Fraction(0)
    for kind, count in zip(TOKEN_NAMES, tokens, strict=True):
        price = getattr(table, kind) if table is not None else None
        if price is None:
            of_kind = [getattr(each, kind) for each in tables if getattr(each, kind) is not None]
            every = [getattr(each, any_kind) for each in tables for any_kind in TOKEN_NAMES]
            price = max(of_kind, default=0) or max(each for each in every if each is not None)
        total += Fraction(price) * count / 10**6
    return total


LONG_PRICES = st.builds(
    lambda prices, table, above: replace(
        prices, long_context=LongContext(*(getattr(table, kind) for kind in TOKEN_NAMES), above_input_tokens=above)
    ),
    ALL_PRICES,
    TABLES,
    st.sampled_from([1000, 200_000, 5_000_000]),
)


@settings(max_examples=tries(200))
@given(ALL_PRICES | LONG_PRICES, TOKENS, TIERS, LATENCIES)
def test_cost_is_exact(prices: PricesConfig, tokens: tuple[int, ...], tier: str, latency: str) -> None:
    priced = price_usage(build_price_table(prices), Usage(*tokens, tier, latency))
    assert Fraction(priced.pico, 10**12) == plain_cost(prices, tokens, tier, latency)


@settings(max_examples=tries(200))
@given(ALL_PRICES, TOKENS, TOKENS, TIERS, LATENCIES)
def test_costs_add_up(
    prices: PricesConfig, one: tuple[int, ...], two: tuple[int, ...], tier: str, latency: str
) -> None:
    tariff = build_price_table(prices)
    first, second = (price_usage(tariff, Usage(*tokens, tier, latency)) for tokens in (one, two))
    both = price_usage(tariff, Usage(*map(sum, zip(one, two, strict=True)), tier, latency))
    assert both == Cost(first.pico + second.pico, first.flags | second.flags)


PAID_PRICES = st.builds(lambda prices: replace(prices, output=prices.output + 1), ALL_PRICES)


@settings(max_examples=tries(200))
@given(PAID_PRICES, st.sampled_from(TOKEN_NAMES), TIERS, LATENCIES)
def test_unknown_usage_is_never_free(prices: PricesConfig, kind: str, tier: str, latency: str) -> None:
    priced = price_usage(build_price_table(prices), Usage(tier=tier, latency=latency)._replace(**{kind: 1}))
    assert PRICE_UNKNOWN not in priced.flags or priced.pico > 0


# ---------------------------------------------------------------- long contexts

LONG = replace(CLAUDE, long_context=LongContext(*usd("6 22.50 0.60 7.50 12"), above_input_tokens=200_000))


@pytest.mark.parametrize(
    ("usage", "micros"),
    [
        (Usage(200_000, 1000), "615000"),
        (Usage(200_001, 1000), "1222506"),  # all of it, the output too
        (Usage(1, 1000, cache_read=200_000), "142506"),
        (Usage(1, 1000, cache_read=199_999), "75002.7"),
        (Usage(1, 0, 100_000, 50_000, 50_000), "1035006"),
        (Usage(0, 10**6), "15000000"),  # however much is said
        (Usage(200_001, 1000, tier="default", latency="standard"), "1222506"),
    ],
)
def test_long_context_has_its_own_prices(usage: Usage, micros: str) -> None:
    assert price_usage(build_price_table(LONG), usage) == Cost(int(Decimal(micros) * 10**6), frozenset())


def test_long_context_in_other_tier_or_mode_has_unknown_price() -> None:
    for usage in (Usage(300_000, tier="priority"), Usage(300_000, latency="optimized")):
        assert price_usage(build_price_table(LONG), usage) == Cost(300_000 * 6_000_000, UNKNOWN)
    assert price_usage(build_price_table(LONG), Usage(200_000, tier="priority")).flags == frozenset()


def test_highest_price_may_be_of_long_context() -> None:
    assert build_price_table(LONG).highest_prices == (6_000_000, 26_250_000, 600_000, 7_500_000, 12_000_000)
    assert price_usage(build_price_table(LONG), Usage(1, tier="new")) == Cost(6_000_000, UNKNOWN)


def test_version_covers_long_context_prices() -> None:
    more = replace(CLAUDE, long_context=LongContext(*usd("6 22.50 0.60 7.50 12"), above_input_tokens=200_001))
    assert len({build_price_table(prices).version for prices in (CLAUDE, LONG, more)}) == 3
    assert build_price_table(LONG).version == build_price_table(replace(LONG)).version


def test_long_context_prices_come_from_configuration() -> None:
    config = build_price_table(LONG)
    both = {"input": 3_300_000, "output": 16_500_000, "cache_read": 330_000, **WRITES}
    tariff = overlay_prices(config, listed(both, default=both, priority=both), "2026-11-18")
    assert (tariff.source, tariff.version) == ("aws+config", f"2026-11-18+{config.version}")
    assert price_usage(tariff, Usage(200_000)).pico == 200_000 * 3_300_000
    assert price_usage(tariff, Usage(200_001)).pico == 200_001 * 6_000_000


# ---------------------------------------------------------------- tariffs


def test_equal_prices_have_equal_version() -> None:
    tariff = build_price_table(CLAUDE)
    assert tariff.source == "config"
    assert (
        tariff.version
        == build_price_table(replace(CLAUDE)).version
        != build_price_table(replace(CLAUDE, input=Decimal(4))).version
    )
    assert tariff.version != build_price_table(replace(CLAUDE, latency_optimized=None)).version
    assert tariff.version.startswith("config-")


def test_price_table_is_immutable() -> None:
    tariff = build_price_table(CLAUDE)
    with pytest.raises(TypeError):
        tariff.tiers["default"] = tariff.tiers["priority"]  # type: ignore[index]


def test_default_price_makes_a_price_table() -> None:
    table = TierPrices(*usd("15 75 1.5 18.75 30"))
    assert build_price_table(table).tiers == {"default": table.pico_per_token}
    assert price_usage(build_price_table(table), Usage(1, tier="flex")) == Cost(15_000_000, UNKNOWN)


def test_endpoint_prices_win_over_label_prices() -> None:
    label = LabelConfig("m", "llama", LLAMA)
    assert (
        build_label_price_table(label)
        == build_label_price_table(label, EndpointConfig("us-east-1"))
        == build_price_table(LLAMA)
    )
    assert build_label_price_table(label, EndpointConfig("us-east-1", prices_usd_per_1m=NOVA)) == build_price_table(
        NOVA
    )


# ---------------------------------------------------------------- the list's prices over the configuration's


def listed(optimized: dict[str, int] | None = None, **tiers: dict[str, int]) -> ListedPrices:
    return ListedPrices(tiers, {} if optimized is None else {"optimized": optimized})


WHOLE = {"input": 3_300_000, "output": 16_500_000, "cache_read": 330_000}
WRITES = {"cache_write_5m": 4_125_000, "cache_write_1h": 6_600_000}


def test_listed_prices_win_over_configured() -> None:
    config = build_price_table(PricesConfig(*usd("3 15 0.30 3.75 6")))
    tariff = overlay_prices(config, listed(default=WHOLE | WRITES), "2026-11-18")
    assert tariff == PriceTable({"default": PicoPrices(**WHOLE, **WRITES)}, {}, "2026-11-18", "aws")


def test_missing_listed_price_comes_from_configuration() -> None:
    config = build_price_table(CLAUDE)
    tariff = overlay_prices(config, listed(default=WHOLE), "2026-11-18")
    assert tariff.source == "aws+config"
    assert tariff.version == f"2026-11-18+{config.version}"
    assert tariff.tiers["default"] == PicoPrices(**WHOLE, cache_write_5m=3_750_000, cache_write_1h=6_000_000)
    assert tariff.tiers["priority"] == config.tiers["priority"]
    assert tariff.latencies == config.latencies


def test_price_list_may_add_tiers() -> None:
    both = {"input": 1, "output": 2}
    tariff = overlay_prices(
        build_price_table(LLAMA), listed(both, default=both, flex=both, priority={"input": 1}), "2026-11-18"
    )
    assert tariff.source == "aws"
    assert set(tariff.tiers) == {"default", "flex"}  # the priority tier's output price is unknown
    assert set(tariff.latencies) == {"optimized"}
    assert tariff.tiers["flex"] == PicoPrices(1, 2, None, None, None)


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        (listed(default={"input": 30_000_000}), ""),
        (listed(default={"input": 30_000_001}), "default input at 30.000001, beside 3 in the configuration"),
        (listed(default={"input": 300_000}), ""),
        (listed(default={"input": 299_999}), "default input at 0.299999, beside 3 in the configuration"),
        (listed(default={"input": 3000}), "default input at 0.003, beside 3 in the configuration"),
        (listed(default={"output": 0}), "default output at 0, beside 15 in the configuration"),
        (listed(priority={"input": 52_500_000}), ""),  # beside its own tier's
        (listed(flex={"input": 30_000_001}), "flex input at 30.000001, beside 3 in the configuration"),
        (listed({"output": 200_000_001}), "optimized output at 200.000001, beside 20 in the configuration"),
        (
            listed(default={"input": 1, "output": 1}),
            "default input at 0.000001, beside 3 in the configuration; "
            "default output at 0.000001, beside 15 in the configuration",
        ),
    ],
)
def test_price_off_by_factor_ten_is_implausible(tables: ListedPrices, what: str) -> None:
    assert find_implausible_prices(build_price_table(CLAUDE), tables) == what


@pytest.mark.parametrize(
    ("kind", "price", "is_right"),
    [
        ("cache_write_5m", 0, True),  # Amazon's own models write caches for nothing
        ("cache_write_5m", 7_200_001, False),
        ("cache_read", 0, False),
        ("cache_read", 1, True),
        ("cache_read", 7_200_000, True),
        ("cache_read", 7_200_001, False),
    ],
)
def test_unconfigured_kind_is_compared_with_input_price(kind: str, price: int, is_right: bool) -> None:
    assert (find_implausible_prices(build_price_table(LLAMA), listed(default={kind: price})) == "") is is_right


def test_zero_price_is_plausible_only_if_configured_zero() -> None:
    assert find_implausible_prices(build_price_table(NOVA), listed(default={"cache_write_5m": 0})) == ""
    assert find_implausible_prices(build_price_table(NOVA), listed(default={"cache_write_5m": 1})) != ""


# Derived cache prices.


def anthropic(prices: PricesConfig) -> PriceTable:
    return build_label_price_table(LabelConfig("anthropic.m", "anthropic", prices))


def test_anthropic_label_with_input_and_output_alone_has_the_published_cache_prices() -> None:
    table = anthropic(PricesConfig(*usd("3 15")))
    assert table.tiers["default"] == PicoPrices(3_000_000, 15_000_000, 300_000, 3_750_000, 6_000_000)
    assert table.version.endswith("+derived")
    assert table.pricer.description == f"config {table.version}"
    assert describe_derived(table) == {"cache_read": "0.3", "cache_write_5m": "3.75", "cache_write_1h": "6"}
    cost = price_usage(table, Usage(10, 1, 100, 1000, 10000))
    assert cost == Cost(30_000_000 + 15_000_000 + 100 * 300_000 + 1000 * 3_750_000 + 10000 * 6_000_000)


def test_configured_cache_price_is_never_replaced_by_a_derived_one() -> None:
    table = anthropic(PricesConfig(*usd("3 15 0.42")))
    assert table.tiers["default"] == PicoPrices(3_000_000, 15_000_000, 420_000, 3_750_000, 6_000_000)
    assert describe_derived(table).keys() == {"cache_write_5m", "cache_write_1h"}
    whole = anthropic(CLAUDE)
    assert (whole.derived, whole.version) == (frozenset(), build_price_table(CLAUDE).version)


def test_each_tier_mode_and_context_length_derives_from_its_own_input() -> None:
    prices = PricesConfig(
        *usd("3 15 0.30 3.75 6"),
        service_tiers=MappingProxyType({"flex": TierPrices(*usd("1.5 7.5"))}),
        latency_optimized=TierPrices(*usd("4 20")),
        long_context=LongContext(*usd("6 22.5"), above_input_tokens=200_000),
    )
    table = anthropic(prices)
    assert table.tiers["flex"][2:] == (150_000, 1_875_000, 3_000_000)
    assert table.latencies["optimized"][2:] == (400_000, 5_000_000, 8_000_000)
    assert table.long_context is not None
    assert table.long_context.prices[2:] == (600_000, 7_500_000, 12_000_000)
    assert describe_derived(table).keys() == {
        f"{path}.{name}"
        for path in ("service_tiers.flex", "latency_optimized", "long_context")
        for name in ("cache_read", "cache_write_5m", "cache_write_1h")
    }


def test_derived_price_is_rounded_up_and_never_free() -> None:
    table = anthropic(PricesConfig(*usd("0.000001 1")))
    assert table.tiers["default"][2:] == (1, 2, 2)


@pytest.mark.parametrize("format", ["nova", "openai", "llama"])
def test_other_formats_derive_nothing(format: Any) -> None:
    table = build_label_price_table(LabelConfig("m", format, PricesConfig(*usd("3 15"))))
    assert table.tiers["default"] == PicoPrices(3_000_000, 15_000_000, None, None, None)
    assert price_usage(table, Usage(0, 0, 1)).flags == UNKNOWN


def test_listed_price_of_input_is_what_the_rest_is_derived_from() -> None:
    configured = anthropic(PricesConfig(*usd("3 15")))
    table = overlay_prices(configured, listed(default={"input": 4_000_000, "output": 20_000_000}), "2026-11-18")
    assert table.tiers["default"] == PicoPrices(4_000_000, 20_000_000, 400_000, 5_000_000, 8_000_000)
    assert (table.source, table.version) == ("aws", "2026-11-18+derived")
    again = overlay_prices(configured, listed(default=WHOLE), "2026-11-19")
    assert again.tiers["default"] == PicoPrices(3_300_000, 16_500_000, 330_000, 4_125_000, 6_600_000)
    whole = overlay_prices(configured, listed(default=WHOLE | WRITES), "2026-11-20")
    assert (whole.source, whole.version, whole.derived) == ("aws", "2026-11-20", frozenset())
