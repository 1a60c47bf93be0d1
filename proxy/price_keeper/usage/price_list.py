"""Parses products of the AWS Price List and selects those that are the prices of a model. Pure.

A product is one price: of a price dimension, in a tier, of a model with its marketing name ("Claude Sonnet 4.5"). The
rest is in its usage type, which is written in three ways:

    USE1-NovaLite-cache-read-input-token-count-flex         AmazonBedrock
    USE1-MP:USE1_CacheReadInputTokenCount_Global-Units      AmazonBedrockFoundationModels, models up to 4.6
    USE1-MP:USE1_cache_read_tokens_global_standard-Units    the same, newer models

START HERE: `parse_product` and `select_prices`. Nothing is guessed. A product with an unknown word in its usage type is
ignored; a model has the prices of the one name that matches it; two different prices for the same thing are no price.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import orjson

from price_keeper.model_ids import PROFILE_PREFIXES
from price_keeper.price_dimensions import UNITS_BY_NAME
from price_keeper.usage.price_table import DEFAULT_TIER, LATENCY_OPTIMIZED, ListedPrices

SERVICE_CODES: Final = ("AmazonBedrock", "AmazonBedrockFoundationModels")

# The words of a model's name, sorted, and its numbers in their order.
ModelName = tuple[tuple[str, ...], tuple[str, ...]]

IN_REGION, GEOGRAPHY, GLOBAL = "", "geo", "global"


class Product(NamedTuple):
    """One price of the list."""

    name: ModelName
    routing: str
    tier: str
    latency: str  # empty for the ordinary one
    dimension: str
    pico: int  # per token, or per piece


class ListedModel(NamedTuple):
    name: ModelName
    routings: tuple[str, ...]  # in order of preference; the first one that is listed has the model's prices


class UnclearPrices(NamedTuple):
    """Why a model has no prices."""

    reason: str


# ---------------------------------------------------------------- names of models

_PROFILE = re.compile(rf"({'|'.join(PROFILE_PREFIXES)}|[a-z]{{2}})\.(?=[a-z0-9]+\.)")
_ARN = re.compile(r"arn:[^:]*:bedrock:[^:]*:[^:]*:(?:inference-profile|foundation-model)/(.+)")
_BEDROCK_EDITION = re.compile(r"\s*\(amazon bedrock edition\)$", re.IGNORECASE)
_LATENCY_OPTIMIZED_NAME = re.compile(r"\s+latency optimized$", re.IGNORECASE)

# Parts of an id that no listed name has: the date, and the versions 0 and 1. A second version is part of the name.
_DATE = re.compile(r"-20[0-9]{6}(?=-|$)")
_FIRST_VERSION = re.compile(r"(-v0:[0-9]+|-v?1:0|-v1|:0)$")
_NAME_TOKENS = re.compile(r"[a-z]+|[0-9]+[a-z0-9]*")
_VENDORS = frozenset(("amazon", "anthropic", "meta", "cohere", "openai", "deepseek", "instruct"))

# Listed names that no rule leads to.
_LISTED_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "deepseek.v3-v1:0": "DeepSeek V3.1",
        "mistral.ministral-3-3b-instruct": "Ministral 3B 3.0",
        "mistral.ministral-3-8b-instruct": "Ministral 8B 3.0",
        "mistral.ministral-3-14b-instruct": "Ministral 14B 3.0",
        "mistral.mistral-large-2402-v1:0": "Mistral Large",
        "mistral.mistral-large-3-675b-instruct": "Mistral Large 3",
        "mistral.mistral-small-2402-v1:0": "Mistral Small",
        "mistral.pixtral-large-2502-v1:0": "Pixtral Large 25.02",
    }
)


def identify_model(model: str) -> ListedModel | None:
    """Identify a model id's model; None if the id does not name it, such as an application inference profile's."""
    arn = _ARN.fullmatch(model)
    bare = arn[1] if arn else model
    profile = _PROFILE.match(bare)
    bare = bare[profile.end() :] if profile else bare
    vendor, dot, rest = bare.partition(".")
    if not dot or ":" in vendor or "/" in bare:
        return None
    name = normalize_model_name(_LISTED_NAMES.get(bare) or _DATE.sub("", _FIRST_VERSION.sub("", rest)))
    return ListedModel(name, _routings_of_profile(profile[1] if profile else ""))


def _routings_of_profile(profile: str) -> tuple[str, ...]:
    if profile == GLOBAL:
        return (GLOBAL,)
    return (GEOGRAPHY, IN_REGION) if profile else (IN_REGION,)


def normalize_model_name(text: str) -> ModelName:
    """Make two spellings of one name equal. The order of the words does not count, that of the numbers does."""
    plain = re.sub(r"([0-9])\.0(?![0-9])", r"\1", _BEDROCK_EDITION.sub("", text).lower()).replace("+", " plus")
    tokens = _NAME_TOKENS.findall(plain)
    words = [token for token in tokens if token.isalpha() and token not in _VENDORS]
    return tuple(sorted(words)), tuple(token for token in tokens if not token.isalpha())


# ---------------------------------------------------------------- usage types

_REGION_PREFIX = re.compile(r"[A-Z0-9]+-(MP:[A-Z0-9]+_)?")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_TOKEN_USAGE_TYPE = re.compile(
    r"""(?P<slug>.*?)(?:^|-)
        (?: cache-read(?P<read>)(?:-input)?-tokens?(?:-count)?
          | cache-write(?P<write>)(?:-?(?P<early>[0-9]+[mh]))?(?:-input)?-tokens?(?:-count)?(?:-(?P<late>[0-9]+[mh]))?
          | (?:text-)?(?P<plain>input|output|response)-tokens?(?:-count)?
        )
        (?P<more>(?:-(?:standard|flex|priority|global|cross-region-(?:global|geo)|latency-optimized))*)""",
    re.VERBOSE,
)
# What is sold by the piece, after the model's slug.
_PIECE_USAGE_TYPES = (
    (re.compile(r"(?:(?P<slug>.+)-)?t2-i-(512|1024|2048)-(standard|premium)"), "image_{}_{}"),
    (re.compile(r"(?:(?P<slug>.+)-)?created-image"), "image"),
    (re.compile(r"(?:(?P<slug>.+)-)?search-units"), "search_unit"),
    (re.compile(r"(?:(?P<slug>.+)-)?output-seconds"), "video_second"),
)
# Words before the dimension that mean another offer: other terms, customers or endpoints ("mantle"), or not text.
_NON_TEXT_WORDS = ("speech", "audio", "image", "images", "video")
_OTHER_TERMS_WORDS = frozenset(("mantle", "batch", "reserved", "provisioned", "customization", "custom"))
_OTHER_OFFER_WORDS = _OTHER_TERMS_WORDS | set(_NON_TEXT_WORDS)
_WRITE_DIMENSIONS = {"": "cache_write_5m", "5m": "cache_write_5m", "1h": "cache_write_1h", "30m": "cache_write_30m"}
_PLAIN_DIMENSIONS = {"input": "input", "output": "output", "response": "output"}


class UsageType(NamedTuple):
    routing: str
    tier: str
    latency: str
    dimension: str


def parse_usage_type(text: str) -> UsageType | None:
    """Parse a usage type that states a price for tokens or pieces; None if it states anything else, or anything
    more."""
    region_prefix = _REGION_PREFIX.match(text)
    if region_prefix is None:
        return None
    plain = _CAMEL.sub("-", text[region_prefix.end() :].removesuffix("-Units")).lower().replace("_", "-")
    match = _TOKEN_USAGE_TYPE.fullmatch(plain)
    if match is None:
        return _parse_piece(plain, is_marketplace=region_prefix[1] is not None)
    if _is_other_offer(match["slug"], is_marketplace=region_prefix[1] is not None):
        return None
    dimension = _parse_dimension(match)
    more = match["more"]
    tiers = {tier for tier in ("standard", "flex", "priority") if f"-{tier}" in more}
    if dimension is None or len(tiers) > 1:
        return None
    tier = next(iter(tiers - {"standard"}), DEFAULT_TIER)
    routing = GLOBAL if "-global" in more else GEOGRAPHY if "-geo" in more else IN_REGION
    return UsageType(routing, tier, LATENCY_OPTIMIZED if "-latency-optimized" in more else "", dimension)


def _parse_piece(plain: str, *, is_marketplace: bool) -> UsageType | None:
    for pattern, name in _PIECE_USAGE_TYPES:
        match = pattern.fullmatch(plain)
        if match is not None:
            slug = match["slug"] or ""
            if bool(slug) is is_marketplace or not _OTHER_TERMS_WORDS.isdisjoint(slug.split("-")):
                return None
            return UsageType(IN_REGION, DEFAULT_TIER, "", name.format(*match.groups()[1:]))
    return None


def _is_other_offer(slug: str, *, is_marketplace: bool) -> bool:
    return bool(slug) if is_marketplace else not slug or not _OTHER_OFFER_WORDS.isdisjoint(slug.split("-"))


def _parse_dimension(match: re.Match[str]) -> str | None:
    if match["plain"] is not None:
        return _PLAIN_DIMENSIONS[match["plain"]]
    if match["read"] is not None:
        return "cache_read"
    return _WRITE_DIMENSIONS.get(match["early"] or match["late"] or "")


# ---------------------------------------------------------------- products

_AMOUNT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,20})?")
_TOKENS_PER_UNIT = {"1k tokens": 10**3, "1m tokens": 10**6}
# No recorded list has a product of these, so their units are inferred. A wrong one is far from the configured price.
_PIECE_UNITS = ("image", "images", "second", "seconds", "search unit", "search units", "unit", "units")
_DIMENSION_WORDS = {"input": "input", "output": "output", "cache_read": "read"}  # "write" for all others


def parse_product(entry: str, region: str) -> Product | None:
    """Parse one entry of GetProducts' response, which is JSON in a string; None if it is no price for calls here."""
    try:
        document = orjson.loads(entry)
        attributes = document["product"]["attributes"]
        usage = parse_usage_type(attributes["usagetype"])
        if usage is None or attributes.get("regionCode") != region or not _is_consistent(attributes, usage):
            return None
        pico = _read_pico(document["terms"]["OnDemand"], attributes["usagetype"], usage.dimension in UNITS_BY_NAME)
        listed_name = attributes.get("model") or attributes["servicename"]
        latency = LATENCY_OPTIMIZED if _LATENCY_OPTIMIZED_NAME.search(listed_name) else usage.latency
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None
    if pico is None:
        return None
    return Product(
        normalize_model_name(_LATENCY_OPTIMIZED_NAME.sub("", listed_name)),
        usage.routing,
        usage.tier,
        latency,
        usage.dimension,
        pico,
    )


def _is_consistent(attributes: Mapping[str, str], usage: UsageType) -> bool:
    """Whether the attributes in which newer products repeat their usage type agree with it."""
    if usage.dimension in UNITS_BY_NAME:
        return _OTHER_TERMS_WORDS.isdisjoint(attributes.get("feature", "").lower().replace("-", " ").split())
    inference_type = attributes.get("inferenceType", "").lower()
    if inference_type and _DIMENSION_WORDS.get(usage.dimension, "write") not in inference_type:
        return False
    if (usage.dimension in ("input", "output") and "cache" in inference_type) or not _OTHER_OFFER_WORDS.isdisjoint(
        inference_type.split()
    ):
        return False
    if not _OTHER_OFFER_WORDS.isdisjoint(attributes.get("feature", "").lower().replace("-", " ").split()):
        return False
    tier = attributes.get("service_tier", "").lower()
    return not tier or tier in _tier_spellings(usage)


def _tier_spellings(usage: UsageType) -> tuple[str, ...]:
    names = ("standard", "default") if usage.tier == DEFAULT_TIER else (usage.tier,)
    return tuple(f"global-{name}" for name in names) if usage.routing == GLOBAL else names


def _read_pico(terms: Mapping[str, Any], usage_type: str, is_piece: bool) -> int | None:
    (term,) = terms.values()  # Bedrock has no product with several terms or tiered prices
    (dimension,) = term["priceDimensions"].values()
    if dimension.get("beginRange", "0") != "0":
        return None
    unit = dimension["unit"].lower()
    if unit == "units" and "-MP:" in usage_type:  # a million tokens, as the Marketplace's offers state in their text
        unit = "1m tokens"
    usd = dimension["pricePerUnit"]["USD"]
    if is_piece:
        is_known = dimension["unit"].lower() in _PIECE_UNITS and _AMOUNT.fullmatch(usd)
        return math.ceil(Fraction(usd) * 10**12) if is_known else None
    if unit not in _TOKENS_PER_UNIT or not _AMOUNT.fullmatch(usd):
        return None
    return math.ceil(Fraction(usd) * 10**12 / _TOKENS_PER_UNIT[unit])


# ---------------------------------------------------------------- prices of a model


def select_prices(model: ListedModel, products: Iterable[Product]) -> ListedPrices | UnclearPrices:
    """Return the prices of one model, or why they are not certain."""
    matching = [product for product in products if product.name == model.name]
    if not matching:
        return UnclearPrices("no product is certainly this model's")
    listed_routings = {product.routing for product in matching}
    routing = next((candidate for candidate in model.routings if candidate in listed_routings), None)
    if routing is None:
        return UnclearPrices(f"it is listed, but not {'globally' if GLOBAL in model.routings else 'in its region'}")
    tables: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    pieces: dict[str, int] = {}
    for product in matching:
        if product.routing == routing:
            table = pieces if product.dimension in UNITS_BY_NAME else tables[product.tier, product.latency]
            price = table.setdefault(product.dimension, product.pico)
            if price != product.pico:
                return UnclearPrices(f"there are two prices for {product.dimension} of tier {product.tier}")
    if pieces and not tables:
        return ListedPrices({}, {}, MappingProxyType(pieces))
    if not {"input", "output"} <= tables[DEFAULT_TIER, ""].keys():
        return UnclearPrices("input and output of the default tier are not both listed")
    return _build_listed_prices(tables, pieces)


def _build_listed_prices(tables: Mapping[tuple[str, str], dict[str, int]], pieces: dict[str, int]) -> ListedPrices:
    tiers, latencies = {}, {}
    for (tier, latency), table in tables.items():
        _apply_half_hour_writes(table)
        if not latency:
            tiers[tier] = MappingProxyType(table)
        elif tier == DEFAULT_TIER:
            latencies[latency] = MappingProxyType(table)
    return ListedPrices(MappingProxyType(tiers), MappingProxyType(latencies), MappingProxyType(pieces))


def _apply_half_hour_writes(table: dict[str, int]) -> None:
    """Use the price of a cache that lives half an hour for all writes, if the model has no other lifetime."""
    half_hour = table.pop("cache_write_30m", None)
    if half_hour is not None and "cache_write_5m" not in table and "cache_write_1h" not in table:
        table["cache_write_5m"] = table["cache_write_1h"] = half_hour
