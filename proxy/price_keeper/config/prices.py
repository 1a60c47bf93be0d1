"""What is sold and at what price, as config.yaml says: labels, the places that serve them, units of guardrails.

All prices here are US dollars in decimals, as people write them; `pico` is the same in pico-dollars for one piece, as
the product counts. None is a price that nobody has told, which is not zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from types import MappingProxyType
from typing import Literal, NamedTuple

from price_keeper.config import checks as must_be
from price_keeper.config.checks import pico_per_job, pico_per_token, pico_per_unit
from price_keeper.config.encryption import endpoint_is_encrypted
from price_keeper.config.reader import RuleViolation, constraints

Format = Literal["anthropic", "nova", "titan", "llama", "mistral", "cohere", "ai21", "deepseek", "openai"]
Tier = Literal["flex", "priority", "reserved"]  # next to the default one

MAX_OUTPUT_TOKENS = 10_000_000  # of one answer: ten times what any model can say

# What is spent apart from any model is counted under labels of its own, which no model may have.
GUARDRAIL_LABEL = "guardrails"
ASYNC_JOB_LABEL = "async-jobs"
PSEUDO_LABELS: Mapping[str, str] = MappingProxyType({GUARDRAIL_LABEL: "guardrails", ASYNC_JOB_LABEL: "async jobs"})


class PicoPrices(NamedTuple):
    """Pico-dollars for one token; None where no price is known, which is not zero."""

    input: int
    output: int
    cache_read: int | None
    cache_write_5m: int | None
    cache_write_1h: int | None


@dataclass(frozen=True, slots=True)
class TierPrices:
    """USD for a million tokens."""

    input: Decimal = field(metadata=constraints(must_be.price))
    output: Decimal = field(metadata=constraints(must_be.price))
    cache_read: Decimal | None = field(default=None, metadata=constraints(must_be.price))
    cache_write_5m: Decimal | None = field(default=None, metadata=constraints(must_be.price))
    cache_write_1h: Decimal | None = field(default=None, metadata=constraints(must_be.price))

    @property
    def pico_per_token(self) -> PicoPrices:
        cache = (self.cache_read, self.cache_write_5m, self.cache_write_1h)
        cache_pico = (None if price is None else pico_per_token(price) for price in cache)
        return PicoPrices(pico_per_token(self.input), pico_per_token(self.output), *cache_pico)


@dataclass(frozen=True, slots=True)
class LongContext(TierPrices):
    """The prices of a whole call whose input, with all that a cache read and wrote, is larger than this."""

    above_input_tokens: int = field(kw_only=True, metadata=constraints(must_be.between(1000, 100_000_000)))


@dataclass(frozen=True, slots=True)
class PricesConfig(TierPrices):
    """The prices of the default tier, and those of the other tiers, the optimized latency mode and long contexts."""

    service_tiers: Mapping[Tier, TierPrices] = field(default_factory=lambda: MappingProxyType({}), kw_only=True)
    latency_optimized: TierPrices | None = field(default=None, kw_only=True)
    long_context: LongContext | None = field(default=None, kw_only=True)

    def iterate_tables(self) -> Iterator[tuple[tuple[str, ...], TierPrices]]:
        """Every table of prices with its path below this one."""
        yield (), self
        for tier, prices in self.service_tiers.items():
            yield ("service_tiers", tier), prices
        if self.latency_optimized is not None:
            yield ("latency_optimized",), self.latency_optimized
        if self.long_context is not None:
            yield ("long_context",), self.long_context


@dataclass(frozen=True, slots=True)
class UnitPrices:
    """USD for a thousand units of ApplyGuardrail's policies, and of InvokeGuardrailChecks' checks."""

    content: Decimal = field(metadata=constraints(must_be.unit_price))
    content_image: Decimal = field(metadata=constraints(must_be.unit_price))
    topic: Decimal = field(metadata=constraints(must_be.unit_price))
    sensitive_information: Decimal = field(metadata=constraints(must_be.unit_price))
    contextual_grounding: Decimal = field(metadata=constraints(must_be.unit_price))
    automated_reasoning: Decimal = field(metadata=constraints(must_be.unit_price))
    check_content_filter: Decimal = field(metadata=constraints(must_be.unit_price))
    check_prompt_attack: Decimal = field(metadata=constraints(must_be.unit_price))
    check_sensitive_information: Decimal = field(metadata=constraints(must_be.unit_price))
    word: Decimal = field(default=Decimal(0), metadata=constraints(must_be.unit_price))  # AWS does not charge for it


@dataclass(frozen=True, slots=True)
class GuardrailsConfig:
    prices_usd_per_1000_units: UnitPrices

    def pico_per_unit(self, policy: str) -> int:
        return pico_per_unit(getattr(self.prices_usd_per_1000_units, policy))


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """One place that serves a label; what it leaves out is the label's own, or the upstream's."""

    rules = (endpoint_is_encrypted,)

    region: str = field(metadata=constraints(must_be.region))
    model: str | None = field(default=None, metadata=constraints(must_be.model))
    endpoint: str | None = field(default=None, metadata=constraints(must_be.url, private=True))
    prices_usd_per_1m: PricesConfig | None = None
    allow_insecure: bool = False


# Formats whose models use caches in every region, so that a label without these prices is one with unknown prices.
_CACHE_PRICES_BY_FORMAT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"anthropic": ("cache_read", "cache_write_5m", "cache_write_1h")}
)


def find_missing_cache_prices(
    path: tuple[str, ...],
    prices: TierPrices,
    reason: str,
    names: tuple[str, ...] = _CACHE_PRICES_BY_FORMAT["anthropic"],
) -> Iterator[RuleViolation]:
    for name in names:
        if getattr(prices, name) is None:
            yield (*path, name), f"required, but missing: {reason}"


def caches_have_prices(
    format: Format, prices_usd_per_1m: PricesConfig, endpoints: tuple[EndpointConfig, ...]
) -> Iterator[RuleViolation]:
    if format not in _CACHE_PRICES_BY_FORMAT:
        return
    reason = f"models of format {format} read and write caches"
    tables = [(("prices_usd_per_1m",), prices_usd_per_1m)] + [
        (("endpoints", str(number), "prices_usd_per_1m"), endpoint.prices_usd_per_1m)
        for number, endpoint in enumerate(endpoints)
        if endpoint.prices_usd_per_1m is not None
    ]
    for path, table in tables:
        for below, prices in table.iterate_tables():
            yield from find_missing_cache_prices((*path, *below), prices, reason, _CACHE_PRICES_BY_FORMAT[format])


def places_have_one_price(model: str, endpoints: tuple[EndpointConfig, ...]) -> Iterator[RuleViolation]:
    first: dict[tuple[str, str], int] = {}
    for number, endpoint in enumerate(endpoints):
        earlier = first.setdefault((endpoint.region, endpoint.model or model), number)
        if endpoint.prices_usd_per_1m != endpoints[earlier].prices_usd_per_1m:
            complaint = f"not those of endpoints.{earlier}, which is the same model in the same region"
            yield ("endpoints", str(number), "prices_usd_per_1m"), complaint


@dataclass(frozen=True, slots=True)
class LabelConfig:
    rules = (caches_have_prices, places_have_one_price)

    model: str = field(metadata=constraints(must_be.model))
    format: Format
    prices_usd_per_1m: PricesConfig
    price_source: Literal["aws", "config"] = "aws"
    endpoints: tuple[EndpointConfig, ...] = ()  # tried in this order; without any, the upstream's own
    price_usd_per_async_job: Decimal | None = field(default=None, metadata=constraints(must_be.job_price))
    # Put into requests of hard budgets that do not say how long their answer may be; without it those are refused.
    max_output_tokens: int | None = field(default=None, metadata=constraints(must_be.between(1, MAX_OUTPUT_TOKENS)))

    def prices_at(self, endpoint: EndpointConfig) -> PricesConfig:
        return endpoint.prices_usd_per_1m or self.prices_usd_per_1m

    @property
    def pico_per_async_job(self) -> int | None:
        """None: nobody knows what a job costs, so none is begun."""
        return None if self.price_usd_per_async_job is None else pico_per_job(self.price_usd_per_async_job)


def _build_demo_label(model: str, format: Format, *usd_per_1m: str) -> LabelConfig:
    return LabelConfig(model, format, PricesConfig(*(Decimal(usd) for usd in usd_per_1m)))


DEMO_LABELS: Mapping[str, LabelConfig] = MappingProxyType(
    {
        "premium": _build_demo_label(
            "anthropic.claude-sonnet-4-5-20250929-v1:0", "anthropic", "3.00", "15.00", "0.30", "3.75", "6.00"
        ),
        "standard": _build_demo_label(
            "anthropic.claude-haiku-4-5-20251001-v1:0", "anthropic", "1.00", "5.00", "0.10", "1.25", "2.00"
        ),
        "economy": _build_demo_label("amazon.nova-lite-v1:0", "nova", "0.06", "0.24", "0.015", "0"),
    }
)
