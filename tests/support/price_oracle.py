"""Prices of Amazon Bedrock, and what a call costs by them: the oracle of `tests/property/test_unit_costs.py`.

It imports nothing of the product. The prices were transcribed on 2026-11-20 from LiteLLM 1.106.2 (PyPI package
`litellm`, file `model_prices_and_context_window_backup.json`), whose rows name AWS's price list or model pages as their
source; in US dollars, as they stand there. What that table has no row for is marked `is_inferred`: it stands in no list
that can be read without an AWS account, and is a figure to calculate with, not a claim about AWS.

`make test-prices` compares these figures with the newest LiteLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

Tokens = tuple[int, int, int, int, int]  # input, output, and what a cache read, wrote for 5 minutes and for an hour
Five = tuple[str, str, str, str, str]  # their prices
FREE: Five = ("0", "0", "0", "0", "0")


class Listed(NamedTuple):
    """One model, with the prices of one token of each kind."""

    model: str
    format: str
    prices: Five = FREE
    tiers: Mapping[str, Five] = {}
    above: int = 10**9  # of input tokens, cached ones included; then `long` holds for the whole call
    long: Five = FREE
    piece: str = "0"  # of an image, a search or a second
    piece_name: str = ""  # what LiteLLM calls the price of a piece
    is_inferred: bool = False


CLAUDE = Listed(
    "anthropic.claude-sonnet-4-5-20250929-v1:0",
    "anthropic",
    ("3e-06", "1.5e-05", "3e-07", "3.75e-06", "6e-06"),
    above=200_000,
    long=("6e-06", "2.25e-05", "6e-07", "7.5e-06", "1.2e-05"),
)
GPT = Listed(
    "us.openai.gpt-6-astra",
    "openai",
    ("1.1e-05", "5.5e-05", "1.1e-06", "1.375e-05", "0"),
    above=272_000,
    long=("2.2e-05", "8.25e-05", "2.2e-06", "2.75e-05", "0"),
)
NOVA = Listed("amazon.nova-lite-v1:0", "nova", ("6e-08", "2.4e-07", "1.5e-08", "0", "0"))
NOVA_PRO = Listed(
    "amazon.nova-pro-v1:0",
    "nova",
    ("8e-07", "3.2e-06", "2e-07", "0", "0"),
    {"flex": ("4e-07", "1.6e-06", "1e-07", "0", "0"), "priority": ("1.4e-06", "5.6e-06", "3.5e-07", "0", "0")},
)
TITAN = Listed("amazon.titan-text-express-v1", "titan", ("2e-07", "6e-07", "0", "0", "0"))
TITAN_EMBEDDING = Listed("amazon.titan-embed-text-v2:0", "titan", ("2e-08", "0", "0", "0", "0"))
LLAMA = Listed("meta.llama3-3-70b-instruct-v1:0", "llama", ("7.2e-07", "7.2e-07", "0", "0", "0"))
MISTRAL = Listed("mistral.mistral-large-2402-v1:0", "mistral", ("4e-06", "1.2e-05", "0", "0", "0"))
JAMBA = Listed("ai21.jamba-1-5-large-v1:0", "ai21", ("2e-06", "8e-06", "0", "0", "0"))
DEEPSEEK = Listed("deepseek.v3-v1:0", "deepseek", ("5.8e-07", "1.68e-06", "0", "0", "0"))
OPENAI = Listed(
    "openai.gpt-oss-120b-1:0",
    "openai",
    ("1.5e-07", "6e-07", "0", "0", "0"),
    {"flex": ("7.5e-08", "3e-07", "0", "0", "0"), "priority": ("2.625e-07", "1.05e-06", "0", "0", "0")},
)
COHERE_RERANK = Listed("cohere.rerank-v3-5:0", "cohere", piece="0.002", piece_name="input_cost_per_query")
AMAZON_RERANK = Listed("amazon.rerank-v1:0", "titan", piece="0.001", piece_name="input_cost_per_query")
CANVAS = Listed("amazon.nova-canvas-v1:0", "nova", piece="0.06", piece_name="output_cost_per_image")
TITAN_IMAGE = Listed("amazon.titan-image-generator-v2:0", "titan", piece="0.008", piece_name="output_cost_per_image")
STABLE_DIFFUSION = Listed("stability.sd3-5-large-v1:0", "nova", piece="0.08", piece_name="output_cost_per_image")
TITAN_IMAGE_EMBEDDING = Listed(
    "amazon.titan-embed-image-v1",
    "titan",
    ("8e-07", "0", "0", "0", "0"),
    piece="6e-05",
    piece_name="input_cost_per_image",
)
WEB_SEARCHING = CLAUDE._replace(piece="0.01", piece_name="search_context_cost_per_query")
NOVA_REEL = Listed("amazon.nova-reel-v1:1", "nova", piece="0.08", is_inferred=True)
RAY = Listed("luma.ray-v2:0", "nova", piece="1.5", is_inferred=True)  # in 720p

ROWS = (
    CLAUDE, GPT, NOVA, NOVA_PRO, TITAN, TITAN_EMBEDDING, LLAMA, MISTRAL, JAMBA, DEEPSEEK, OPENAI, COHERE_RERANK,
    AMAZON_RERANK, CANVAS, TITAN_IMAGE, STABLE_DIFFUSION, TITAN_IMAGE_EMBEDDING, WEB_SEARCHING, NOVA_REEL, RAY,
)  # fmt: skip

# Of one image, by its largest side and its quality. LiteLLM has one price for all; inferred like those above.
IMAGE_PRICES: Mapping[tuple[int, str], str] = {
    (512, "standard"): "0.008",
    (512, "premium"): "0.01",
    (1024, "standard"): "0.01",
    (1024, "premium"): "0.012",
}

# Of one unit of a guardrail, LiteLLM's row `bedrock/guardrails`.
GUARDRAIL_UNITS: Mapping[str, str] = {
    "topicPolicyUnits": "0.00015",
    "contentPolicyUnits": "0.00015",
    "contentPolicyImageUnits": "0.00075",
    "wordPolicyUnits": "0.0",
    "sensitiveInformationPolicyUnits": "0.0001",
    "sensitiveInformationPolicyFreeUnits": "0.0",
    "contextualGroundingPolicyUnits": "0.0001",
    "automatedReasoningPolicyUnits": "0.00017",
}


def expected_pico(listed: Listed, tokens: Tokens, pieces: int = 0, tier: str = "") -> Fraction:
    prices = listed.tiers.get(tier, listed.prices)
    if sum(tokens) - tokens[1] > listed.above:
        prices = listed.long
    dollars = sum(count * Fraction(price) for count, price in zip(tokens, prices, strict=True))
    return (dollars + pieces * Fraction(listed.piece)) * 10**12


def expected_guardrail_pico(units: Mapping[str, int]) -> Fraction:
    return sum((count * Fraction(GUARDRAIL_UNITS[name]) for name, count in units.items()), Fraction()) * 10**12
