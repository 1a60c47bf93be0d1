"""What the price list says: every way in which usage types and models are written, and that nothing is guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.usage.price_list import (
    Product,
    UnclearPrices,
    UsageType,
    identify_model,
    normalize_model_name,
    parse_product,
    parse_usage_type,
    select_prices,
)
from price_keeper.usage.price_table import ListedPrices

from tests.support import price_list_server as list_of
from tests.support.effort import tries
from tests.support.price_list_server import (
    US_EAST,
    list_claude,
    list_marketplace,
    list_native,
    list_new_claude,
    list_nova,
    list_product,
)

# ---------------------------------------------------------------- usage types

# As AWS writes them: routing, tier, latency mode, kind of token.
UNDERSTOOD = {
    "USE1-NovaLite-input-tokens": ("", "default", "", "input"),
    "USE1-NovaLite-output-tokens": ("", "default", "", "output"),
    "USE1-NovaLite-cache-read-input-token-count": ("", "default", "", "cache_read"),
    "USE1-NovaLite-cache-write-input-token-count": ("", "default", "", "cache_write_5m"),
    "USE1-NovaPro-input-tokens-flex": ("", "flex", "", "input"),
    "USE1-NovaPro-input-tokens-latency-optimized": ("", "default", "optimized", "input"),
    "USE1-gpt-oss-120b-output-tokens-priority": ("", "priority", "", "output"),
    "USE1-Llama4-Maverick-17B-output-tokens": ("", "default", "", "output"),
    "EU-Nova2.0Lite-input-tokens-cross-region-global": ("global", "default", "", "input"),
    "USE1-Nova2.0Pro-text-input-tokens-priority-cross-region-global": ("global", "priority", "", "input"),
    "USW2-Nova2.0Lite-cache-write-input-token-count-flex": ("", "flex", "", "cache_write_5m"),
    "USE1-Claude4Sonnet-output-tokens-cross-region-geo": ("geo", "default", "", "output"),
    "USE1-MP:USE1_InputTokenCount-Units": ("", "default", "", "input"),
    "USE1-MP:USE1_OutputTokenCount_Global-Units": ("global", "default", "", "output"),
    "USE1-MP:USE1_ResponseTokenCount-Units": ("", "default", "", "output"),
    "USE1-MP:USE1_InputTokenCount_LatencyOptimized-Units": ("", "default", "optimized", "input"),
    "USE1-MP:USE1_CacheReadInputTokenCount-Units": ("", "default", "", "cache_read"),
    "USE1-MP:USE1_CacheWriteInputTokenCount_Global-Units": ("global", "default", "", "cache_write_5m"),
    "EU-MP:EU_CacheWrite1hInputTokenCount-Units": ("", "default", "", "cache_write_1h"),
    "USE1-MP:USE1_input_tokens_standard-Units": ("", "default", "", "input"),
    "USE1-MP:USE1_input_tokens_global_standard-Units": ("global", "default", "", "input"),
    "USE1-MP:USE1_cache_read_tokens_standard-Units": ("", "default", "", "cache_read"),
    "USE1-MP:USE1_cache_write_tokens_standard-Units": ("", "default", "", "cache_write_5m"),
    "USE1-MP:USE1_cache_write_tokens_1h_global_standard-Units": ("global", "default", "", "cache_write_1h"),
    "USE1-MP:USE1_cache_write_tokens_30m_standard-Units": ("", "default", "", "cache_write_30m"),
    "USE1-MP:USE1_output_tokens_priority-Units": ("", "priority", "", "output"),
    "USE1-NovaCanvas-T2I-1024-Standard": ("", "default", "", "image_1024_standard"),
    "USE1-NovaCanvas-T2I-2048-Premium": ("", "default", "", "image_2048_premium"),
    "USE1-NovaReel-output-seconds": ("", "default", "", "video_second"),
    "USE1-MP:USE1_CreatedImage-Units": ("", "default", "", "image"),
    "USE1-MP:USE1_search_units-Units": ("", "default", "", "search_unit"),
    "USE1-cohere.rerank-english-v3-search-units": ("", "default", "", "search_unit"),
}

# Batches, long contexts, reservations, non-text, other endpoints, custom models, and unknown ones.
LEFT_ALONE = """
USE1-NovaLite-input-tokens-batch
USE1-Nova2.0Lite-input-tokens-cross-region-global-batch
USE1-NovaPro-cache-write-input-token-count-custom-model
USE1-NovaLite-customization-training
USE1-NovaSonic-speech-input-tokens
USE1-Nova2.0Omni-input-audio-token-count
USE1-Nova2.0Omni-output-image-token-count
USE1-Nova2.0Lite-nova-grounding
USE1-openai.gpt-oss-120b-mantle-input-tokens-standard
USE1-xai.grok-4.7-mantle-cache-write-tokens-30m-long-ctx-flex
USE1-Claude4Sonnet-input-tokens-long-context-cross-region-global
EU-Claude4.5Sonnet-reserved-1-month-input-tokens-per-minute-cross-region-global
USE1-MP:USE1_InputTokenCount_Batch-Units
USE1-MP:USE1_InputTokenCount_Global_Batch-Units
USE1-MP:USE1_MillionBatchInputTokens-Units
USE1-MP:USE1_InputTokenCount_LCtx-Units
USE1-MP:USE1_output_tokens_long_ctx_standard-Units
USE1-MP:USE1_input_tokens_batch-Units
USE1-MP:USE1_Reserved_1Month_InputTPM_Geo-Units
USE1-Guardrail-ContentPolicyUnitsConsumed
USE1-NovaCanvas-batch-T2I-1024-Standard
USE1-NovaCanvas-T2I-4096-Standard
USE1-output-seconds
USE1-MP:USE1_ReservedCreatedImage-Units
USE1-NovaLite-input-tokens-turbo
USE1-NovaLite-input-tokens-flex-priority
USE1-MP:USE1_cache_write_tokens_7d_standard-Units
USE1-NovaLite-input
USE1-NovaLite-token-count
USE1-input-tokens
input-tokens
NovaLite-input-tokens
"""


@pytest.mark.parametrize(("text", "said"), UNDERSTOOD.items(), ids=UNDERSTOOD.keys())
def test_known_usage_type_is_parsed(text: str, said: tuple[str, ...]) -> None:
    assert parse_usage_type(text) == UsageType(*said)


@pytest.mark.parametrize("text", LEFT_ALONE.split())
def test_unknown_usage_type_is_ignored(text: str) -> None:
    assert parse_usage_type(text) is None


# ---------------------------------------------------------------- names

SAME = {
    "anthropic.claude-sonnet-4-5-20250929-v1:0": "Claude Sonnet 4.5 (Amazon Bedrock Edition)",
    "anthropic.claude-haiku-4-5-20251001-v1:0": "Claude Haiku 4.5",
    "anthropic.claude-sonnet-4-20250514-v1:0": "Claude Sonnet 4",
    "anthropic.claude-sonnet-4-6": "Claude Sonnet 4.6",
    "anthropic.claude-opus-4-6-v1": "Claude 4.6 Opus",
    "anthropic.claude-opus-5-5": "Claude Opus 5.5",
    "anthropic.claude-3-5-sonnet-20240620-v1:0": "Claude 3.5 Sonnet",
    "anthropic.claude-3-5-sonnet-20241022-v2:0": "Claude 3.5 Sonnet v2",
    "anthropic.claude-3-haiku-20240307-v1:0": "Claude 3 Haiku",
    "amazon.nova-lite-v1:0": "Nova Lite",
    "amazon.nova-2-lite-v1:0": "Nova 2.0 Lite",
    "meta.llama3-3-70b-instruct-v1:0": "Llama 3.3 70B",
    "meta.llama4-maverick-17b-instruct-v1:0": "Llama 4 Maverick 17B",
    "mistral.mistral-7b-instruct-v0:2": "Mistral 7B",
    "mistral.mixtral-8x7b-instruct-v0:1": "Mixtral 8x7B",
    "mistral.mistral-large-2402-v1:0": "Mistral Large",
    "mistral.pixtral-large-2502-v1:0": "Pixtral Large 25.02",
    "cohere.command-r-plus-v1:0": "Cohere Command R+ (Amazon Bedrock Edition)",
    "cohere.command-r-v1:0": "Cohere Command R (Amazon Bedrock Edition)",
    "ai21.jamba-1-5-large-v1:0": "Jamba 1.5 Large (Amazon Bedrock Edition)",
    "deepseek.r1-v1:0": "R1",
    "deepseek.v3-v1:0": "DeepSeek V3.1",
    "deepseek.v3.2": "DeepSeek v3.2",
    "openai.gpt-oss-120b-1:0": "gpt-oss-120b",
    "openai.gpt-6-astra": "OpenAI GPT-6 Astra (Amazon Bedrock Edition)",
}


@pytest.mark.parametrize(("model", "name"), SAME.items(), ids=SAME.keys())
def test_model_id_maps_to_listed_name(model: str, name: str) -> None:
    found = identify_model(model)
    assert found is not None
    assert found.name == normalize_model_name(name)


def test_model_ids_never_share_a_listed_name() -> None:
    """Two generations, two sizes, two versions: whatever is not the same model is not matched, however near."""
    names = [normalize_model_name(name) for name in SAME.values()]
    assert len(set(names)) == len(names)
    near = [
        "Claude Sonnet 5.4",
        "Claude Sonnet 4 (100K)",
        "Claude Opus 4",
        "Llama 3.3",
        "Mistral Large 2407",
    ]
    assert not {normalize_model_name(name) for name in near} & set(names)


@pytest.mark.parametrize(
    ("model", "routings"),
    [
        ("anthropic.claude-sonnet-4-6", ("",)),
        ("us.anthropic.claude-sonnet-4-6", ("geo", "")),
        ("apac.anthropic.claude-sonnet-4-6", ("geo", "")),
        ("amer.anthropic.claude-sonnet-4-6", ("geo", "")),
        ("us-gov.anthropic.claude-sonnet-4-6", ("geo", "")),
        ("global.anthropic.claude-sonnet-4-6", ("global",)),
        ("arn:aws:bedrock:us-east-1:123456789012:inference-profile/eu.anthropic.claude-sonnet-4-6", ("geo", "")),
        ("arn:aws:bedrock:us-east-1::foundation-model/anthropic.claude-sonnet-4-6", ("",)),
    ],
)
def test_inference_profile_states_model_and_routing(model: str, routings: tuple[str, ...]) -> None:
    found = identify_model(model)
    assert found is not None
    assert (found.name, found.routings) == (normalize_model_name("Claude Sonnet 4.6"), routings)


@pytest.mark.parametrize(
    "model",
    [
        "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/a1b2c3",
        "arn:aws:bedrock:us-east-1:123456789012:provisioned-model/a1b2c3",
        "arn:aws:bedrock:us-east-1:123456789012:imported-model/a.b",
        "mine",
    ],
)
def test_ambiguous_model_id_is_not_identified(model: str) -> None:
    assert identify_model(model) is None


# ---------------------------------------------------------------- products


def test_product_is_parsed() -> None:
    product = list_native("Nova Lite", "NovaLite-input-tokens", "0.0000600000", inferenceType="Input tokens")
    assert parse_product(product.entry, "us-east-1") == Product(
        normalize_model_name("Nova Lite"), "", "default", "", "input", 60_000
    )


@pytest.mark.parametrize(
    ("usd", "unit", "pico"),
    [
        ("0.0000600000", "1K tokens", 60_000),
        ("0.0000087500", "1k tokens", 8750),
        ("0.0000000001375", "1K tokens", 1),  # rounded up: less than AWS takes is never charged
        ("3.3000000000", "1M tokens", 3_300_000),
        ("3.3000000000", "Units", 3_300_000),
        ("0.0000000000", "1M tokens", 0),
        ("15", "1M tokens", 15_000_000),
    ],
)
def test_product_price_is_converted_from_each_unit(usd: str, unit: str, pico: int) -> None:
    product = parse_product(list_marketplace("Claude Haiku 4.5", "InputTokenCount", usd, unit=unit).entry, "us-east-1")
    assert product is not None
    assert product.pico == pico


def test_units_are_millions_only_in_marketplace() -> None:
    assert (
        parse_product(
            list_product("AmazonBedrock", "1", "Units", model="M 1", usagetype="USE1-M1-input-tokens").entry,
            "us-east-1",
        )
        is None
    )


def test_latency_optimised_model_name_is_recognised() -> None:
    found = parse_product(list_native("Nova Pro Latency Optimized", "NovaPro-input-tokens", "0.001").entry, "us-east-1")
    assert found is not None
    assert (found.name, found.latency) == (normalize_model_name("Nova Pro"), "optimized")


def changed(change: Callable[[Any], object]) -> str:
    document = json.loads(
        list_native("Nova Lite", "NovaLite-input-tokens", "0.00006", inferenceType="Input tokens").entry
    )
    change(document)
    return json.dumps(document)


def attribute(**values: str) -> Callable[[Any], None]:
    return lambda document: document["product"]["attributes"].update(values)


def dimension(**values: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        (term,) = document["terms"]["OnDemand"].values()
        (first,) = term["priceDimensions"].values()
        first.update(values)

    return change


def steps(document: Any) -> None:
    (term,) = document["terms"]["OnDemand"].values()
    term["priceDimensions"] |= {"2": next(iter(term["priceDimensions"].values()))}


def two_terms(document: Any) -> None:
    document["terms"]["OnDemand"]["2"] = next(iter(document["terms"]["OnDemand"].values()))


@pytest.mark.parametrize(
    "change",
    [
        attribute(regionCode="us-west-2"),
        attribute(inferenceType="Output tokens"),
        attribute(inferenceType="Prompt cache read input tokens"),
        attribute(inferenceType="Input tokens batch"),
        attribute(inferenceType="Input audio tokens"),
        attribute(feature="Batch Inference"),
        attribute(feature="Reserved - 1 Month"),
        attribute(feature="Model customization"),
        attribute(service_tier="flex"),
        attribute(service_tier="global-standard"),
        attribute(usagetype="USE1-NovaLite-input-tokens-batch"),
        dimension(unit="1K TPM Hour"),
        dimension(unit="Images"),
        dimension(beginRange="1000"),
        dimension(pricePerUnit={"CNY": "1"}),
        dimension(pricePerUnit={"USD": "-1"}),
        dimension(pricePerUnit={"USD": "1e999999999"}),
        dimension(pricePerUnit={"USD": "NaN"}),
        dimension(pricePerUnit={"USD": 3}),
        steps,
        two_terms,
        lambda document: document.pop("terms"),
        lambda document: document["terms"].update(OnDemand={}),
        lambda document: document.update(product=None),
        lambda document: document["product"]["attributes"].pop("usagetype"),
        attribute(usagetype=5),  # type: ignore[arg-type]
        attribute(model=5),  # type: ignore[arg-type]
        attribute(model={"a": "b"}),  # type: ignore[arg-type]
    ],
)
def test_product_that_is_no_plain_token_price_is_ignored(change: Callable[[Any], object]) -> None:
    assert parse_product(changed(change), "us-east-1") is None


@pytest.mark.parametrize(
    "change",
    [
        attribute(service_tier="standard"),
        attribute(service_tier="default"),
        attribute(usagetype="USE1-NovaLite-input-tokens-flex", service_tier="flex"),
        attribute(usagetype="USE1-NovaLite-input-tokens-flex", inferenceType="Input tokens flex"),
        attribute(usagetype="USE1-NovaLite-input-tokens-cross-region-global", service_tier="global-standard"),
        lambda document: document["product"]["attributes"].pop("feature"),
        lambda document: document["product"]["attributes"].pop("inferenceType"),
    ],
)
def test_redundant_product_attribute_is_accepted(change: Callable[[Any], object]) -> None:
    assert parse_product(changed(change), "us-east-1") is not None


@settings(max_examples=tries(200))
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["product", "attributes", "terms", "OnDemand", "usagetype"]), inner)
        ),
    ).map(json.dumps)
    | st.text()
)
def test_other_entry_is_no_product(entry: str) -> None:
    assert parse_product(entry, "us-east-1") is None


# ---------------------------------------------------------------- prices of a model


def prices(
    model: str, products: list[list_of.ListedProduct], region: str = "us-east-1"
) -> ListedPrices | UnclearPrices:
    found = identify_model(model)
    assert found is not None
    return select_prices(
        found, [product for each in products if (product := parse_product(each.entry, region)) is not None]
    )


def unclear(model: str, products: list[list_of.ListedProduct]) -> str:
    found = prices(model, products)
    assert isinstance(found, UnclearPrices)
    return found.reason


def plain(input: int, output: int, read: int, write: int, write_1h: int) -> dict[str, int]:
    kinds = ("input", "output", "cache_read", "cache_write_5m", "cache_write_1h")
    return dict(zip(kinds, (input, output, read, write, write_1h), strict=True))


REGIONAL = plain(3_300_000, 16_500_000, 330_000, 4_125_000, 6_600_000)
WORLDWIDE = plain(3_000_000, 15_000_000, 300_000, 3_750_000, 6_000_000)


@pytest.mark.parametrize(
    ("model", "table"),
    [
        ("anthropic.claude-sonnet-4-5-20250929-v1:0", REGIONAL),
        ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", REGIONAL),
        ("global.anthropic.claude-sonnet-4-5-20250929-v1:0", WORLDWIDE),
    ],
)
def test_global_profile_is_cheaper_than_region(model: str, table: dict[str, int]) -> None:
    assert prices(model, US_EAST) == ListedPrices({"default": table}, {})


def test_model_has_prices_per_tier_and_mode() -> None:
    fast = [
        list_native("Nova Lite", f"NovaLite-{kind}-tokens-latency-optimized", "0.0001") for kind in ("input", "output")
    ]
    found = prices("us.amazon.nova-lite-v1:0", US_EAST + fast)
    default = {"input": 60_000, "output": 240_000, "cache_read": 15_000, "cache_write_5m": 0}
    flex = {"input": 30_000, "output": 120_000, "cache_read": 7500}
    assert found == ListedPrices(
        {"default": default, "flex": flex}, {"optimized": {"input": 100_000, "output": 100_000}}
    )


def test_newer_usage_types_give_same_prices() -> None:
    rows = list_new_claude("Claude Opus 5.5", "4.4 22 0.22 5.5 8.8") + list_new_claude(
        "Claude Opus 5.5", "4 20 0.2 5 8", routing="global_"
    )
    assert prices("eu.anthropic.claude-opus-5-5", rows) == ListedPrices(
        {"default": plain(4_400_000, 22_000_000, 220_000, 5_500_000, 8_800_000)}, {}
    )
    assert prices("global.anthropic.claude-opus-5-5", rows) == ListedPrices(
        {"default": plain(4_000_000, 20_000_000, 200_000, 5_000_000, 8_000_000)}, {}
    )


def test_geography_prices_win_over_region() -> None:
    rows = list_nova("M 1", "M1", "0.003 0.004") + list_nova("M 1", "M1", "0.001 0.002", tier="-cross-region-geo")
    assert prices("us.x.m-1", rows) == ListedPrices({"default": {"input": 1_000_000, "output": 2_000_000}}, {})
    assert prices("x.m-1", rows) == ListedPrices({"default": {"input": 3_000_000, "output": 4_000_000}}, {})


def test_half_hour_cache_writes_are_used_alone() -> None:
    rows = [
        list_marketplace("GPT-6 Astra", f"{kind}_standard", usd)
        for kind, usd in (("input_tokens", "11"), ("output_tokens", "55"))
    ]
    half_hour = list_marketplace("GPT-6 Astra", "cache_write_tokens_30m_standard", "13.75")
    both = {"cache_write_5m": 13_750_000, "cache_write_1h": 13_750_000}
    assert prices("openai.gpt-6-astra", [*rows, half_hour]) == ListedPrices(
        {"default": {"input": 11_000_000, "output": 55_000_000} | both}, {}
    )
    five_minutes = list_marketplace("GPT-6 Astra", "cache_write_tokens_standard", "12")
    assert prices("openai.gpt-6-astra", [*rows, half_hour, five_minutes]) == ListedPrices(
        {"default": {"input": 11_000_000, "output": 55_000_000, "cache_write_5m": 12_000_000}}, {}
    )


def test_identical_prices_are_merged() -> None:
    assert prices("amazon.nova-lite-v1:0", US_EAST + list_of.NOVA_LITE) == prices("amazon.nova-lite-v1:0", US_EAST)


def test_uncertain_price_is_refused() -> None:
    sonnet = "anthropic.claude-sonnet-4-5-20250929-v1:0"
    two = [*US_EAST, list_marketplace("Claude Sonnet 4.5", "CacheReadInputTokenCount", "0.34")]
    assert unclear(sonnet, two) == "there are two prices for cache_read of tier default"
    assert unclear(sonnet, list_of.HAIKU) == "no product is certainly this model's"
    assert unclear(sonnet, list_of.SONNET[:1]) == "input and output of the default tier are not both listed"
    assert unclear(sonnet, list_of.SONNET_GLOBAL) == "it is listed, but not in its region"
    assert unclear(f"global.{sonnet}", list_of.SONNET) == "it is listed, but not globally"
    assert (
        unclear("amazon.nova-lite-v1:0", list_of.NOVA_LITE_FLEX)
        == "input and output of the default tier are not both listed"
    )


def test_price_of_related_model_is_not_used() -> None:
    rows = list_claude("Claude Opus 4", "15 75 1.5 18.75 30")
    assert unclear("anthropic.claude-opus-4-8", rows) == "no product is certainly this model's"


def test_price_of_other_region_is_not_used() -> None:
    rows = list_claude("Claude Haiku 4.5", "9 9 9 9 9", region="eu-west-1") + list_of.HAIKU
    found = prices("anthropic.claude-haiku-4-5-20251001-v1:0", rows)
    assert found == ListedPrices({"default": plain(1_100_000, 5_500_000, 110_000, 1_375_000, 2_200_000)}, {})


# ---------------------------------------------------------------- what is sold by the piece

CANVAS = identify_model("amazon.nova-canvas-v1:0")


def list_canvas(usage: str, usd: str, unit: str = "image") -> Product | None:
    """The usage types are the real list's of 2026; the units are inferred, as no recorded list has such a product."""
    product = list_product(
        "AmazonBedrock", usd, unit, model="Nova Canvas", usagetype=f"USE1-{usage}", feature="On-demand Inference"
    )
    return parse_product(product.entry, "us-east-1")


def test_prices_of_pieces_are_listed_without_prices_of_tokens() -> None:
    assert CANVAS is not None
    products = [list_canvas("NovaCanvas-T2I-1024-Standard", "0.04"), list_canvas("NovaCanvas-T2I-2048-Premium", "0.08")]
    found = select_prices(CANVAS, [each for each in products if each is not None])
    assert found == ListedPrices({}, {}, {"image_1024_standard": 4 * 10**10, "image_2048_premium": 8 * 10**10})


def test_two_prices_of_one_piece_are_unclear() -> None:
    assert CANVAS is not None
    products = [list_canvas("NovaCanvas-T2I-1024-Standard", usd) for usd in ("0.04", "0.05")]
    assert isinstance(select_prices(CANVAS, [each for each in products if each is not None]), UnclearPrices)


@pytest.mark.parametrize("unit", ["1K images", "1K tokens", "month"])
def test_piece_in_a_unit_that_is_not_known_is_ignored(unit: str) -> None:
    assert list_canvas("NovaCanvas-T2I-1024-Standard", "0.04", unit) is None
