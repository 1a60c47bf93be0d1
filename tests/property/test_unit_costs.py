"""Of every family, form and price dimension: what a call costs is what an independent table's arithmetic says.

The oracle knows nothing of the product. Its prices were transcribed on 2026-11-20 from LiteLLM 1.106.2 (PyPI package
`litellm`, file `model_prices_and_context_window_backup.json`), in US dollars, as they stand there.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from bedrock_simulator.event_frames import encode_event
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.config.config_sections import LabelConfig, LongContext, PricesConfig
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, UsageCounts
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.operations import Operation
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.meter import Meter, OperationPricing, UsageForecast
from price_keeper.usage.price_table import build_label_price_table
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.unit_usage import NO_UNITS, RequestedUnits, read_request

from tests.support.effort import tries

# ---------------------------------------------------------------- the oracle


class Listed(NamedTuple):
    """One row of LiteLLM's table."""

    model: str
    format: str
    input: str = "0"  # input_cost_per_token
    output: str = "0"  # output_cost_per_token
    cache_read: str = "0"  # cache_read_input_token_cost
    cache_write: str = "0"  # cache_creation_input_token_cost
    cache_write_1h: str = "0"  # cache_creation_input_token_cost_above_1hr
    above: int = 10**9
    long: tuple[str, ...] = ("0",) * 5  # the five above with _above_200k_tokens, _above_272k_tokens
    piece: str = "0"  # input_cost_per_query or output_cost_per_image


CLAUDE = Listed(
    "anthropic.claude-sonnet-4-5-20250929-v1:0", "anthropic", "3e-06", "1.5e-05", "3e-07", "3.75e-06", "6e-06",
    200_000, ("6e-06", "2.25e-05", "6e-07", "7.5e-06", "1.2e-05"),
)  # fmt: skip
NOVA = Listed("amazon.nova-lite-v1:0", "nova", "6e-08", "2.4e-07", "1.5e-08")
TITAN = Listed("amazon.titan-text-express-v1", "titan", "2e-07", "6e-07")
LLAMA = Listed("meta.llama3-3-70b-instruct-v1:0", "llama", "7.2e-07", "7.2e-07")
MISTRAL = Listed("mistral.mistral-large-2402-v1:0", "mistral", "4e-06", "1.2e-05")
JAMBA = Listed("ai21.jamba-1-5-large-v1:0", "ai21", "2e-06", "8e-06")
DEEPSEEK = Listed("deepseek.v3-v1:0", "deepseek", "5.8e-07", "1.68e-06")
OPENAI = Listed("openai.gpt-oss-120b-1:0", "openai", "1.5e-07", "6e-07")
COHERE_RERANK = Listed("cohere.rerank-v3-5:0", "cohere", piece="0.002")
AMAZON_RERANK = Listed("amazon.rerank-v1:0", "titan", piece="0.001")
CANVAS = Listed("amazon.nova-canvas-v1:0", "nova", piece="0.06")
TITAN_IMAGE = Listed("amazon.titan-image-generator-v2:0", "titan", piece="0.008")
STABLE_DIFFUSION = Listed("stability.sd3-5-large-v1:0", "nova", piece="0.08")

Tokens = tuple[int, int, int, int, int]  # input, output, and what a cache read, wrote for 5 minutes and for an hour


def expected_pico(listed: Listed, tokens: Tokens, pieces: int = 0) -> Fraction:
    prices = listed.long if sum(tokens) - tokens[1] > listed.above else listed[2:7]
    dollars = sum(count * Fraction(str(price)) for count, price in zip(tokens, prices, strict=True))
    return (dollars + pieces * Fraction(listed.piece)) * 10**12


# ---------------------------------------------------------------- answers that state tokens


def converse(tokens: Tokens) -> dict[str, Any]:
    input, output, read, written, written_1h = tokens
    usage: dict[str, Any] = {
        "inputTokens": input,
        "outputTokens": output,
        "totalTokens": sum(tokens),
        "cacheReadInputTokens": read,
        "cacheWriteInputTokens": written + written_1h,
        "cacheDetails": [{"ttl": "5m", "inputTokens": written}, {"ttl": "1h", "inputTokens": written_1h}],
    }
    return {"output": {"message": {"content": [{"text": "a"}]}}, "stopReason": "end_turn", "usage": usage}


def claude(tokens: Tokens) -> dict[str, Any]:
    input, output, read, written, written_1h = tokens
    usage = {
        "input_tokens": input,
        "output_tokens": output,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written + written_1h,
        "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": written_1h},
    }
    return {"type": "message", "content": [{"type": "text", "text": "a"}], "usage": usage}


def nova(tokens: Tokens) -> dict[str, Any]:
    usage = {"inputTokens": tokens[0], "outputTokens": tokens[1], "cacheReadInputTokenCount": tokens[2]}
    return {"output": {"message": {"content": [{"text": "a"}]}}, "usage": usage}


def titan(tokens: Tokens) -> dict[str, Any]:
    return {"inputTextTokenCount": tokens[0], "results": [{"tokenCount": tokens[1], "outputText": "a"}]}


def llama(tokens: Tokens) -> dict[str, Any]:
    return {"generation": "a", "prompt_token_count": tokens[0], "generation_token_count": tokens[1]}


def chat(tokens: Tokens) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": tokens[0] + tokens[1]}
    return {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": usage}


def whole(build: Callable[[Tokens], dict[str, Any]]) -> Callable[[Tokens], bytes]:
    return lambda tokens: json.dumps(build(tokens)).encode()


def converse_stream(tokens: Tokens) -> bytes:
    return (
        encode_event("messageStart", {"role": "assistant"})
        + encode_event("contentBlockDelta", {"delta": {"text": "a"}, "contentBlockIndex": 0})
        + encode_event("messageStop", {"stopReason": "end_turn"})
        + encode_event("metadata", {"usage": converse(tokens)["usage"], "metrics": {"latencyMs": 1}})
    )


def chunk_stream(*documents: dict[str, Any]) -> bytes:
    return b"".join(
        encode_event("chunk", {"bytes": b64encode(json.dumps(each).encode()).decode()}) for each in documents
    )


def claude_stream(tokens: Tokens) -> bytes:
    started = claude(tokens)["usage"] | {"output_tokens": 1}
    return chunk_stream(
        {"type": "message_start", "message": {"usage": started}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": tokens[1]}},
        {"type": "message_stop"},
    )


def metrics_stream(tokens: Tokens) -> bytes:
    metrics = {"inputTokenCount": tokens[0], "outputTokenCount": tokens[1]}
    return chunk_stream({"generation": "a"}, {"generation": "", "amazon-bedrock-invocationMetrics": metrics})


def chat_stream(tokens: Tokens) -> bytes:
    events = ({"choices": [{"delta": {"content": "a"}}]}, {"choices": [], "usage": chat(tokens)["usage"]})
    return b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in events) + b"data: [DONE]\n\n"


JSON, EVENTS, SSE = b"application/json", b"application/vnd.amazon.eventstream", b"text/event-stream"
INVOKE, INVOKE_STREAM = Operation.INVOKE, Operation.INVOKE_STREAM


class Case(NamedTuple):
    listed: Listed
    operation: Operation
    kind: bytes
    answer: Callable[[Tokens], bytes]
    stated: int = 2  # of the five kinds of tokens


TOKEN_CASES = {
    "claude": Case(CLAUDE, INVOKE, JSON, whole(claude), 5),
    "claude, stream": Case(CLAUDE, INVOKE_STREAM, EVENTS, claude_stream, 5),
    "claude, converse": Case(CLAUDE, Operation.CONVERSE, JSON, whole(converse), 5),
    "claude, converse stream": Case(CLAUDE, Operation.CONVERSE_STREAM, EVENTS, converse_stream, 5),
    "nova": Case(NOVA, INVOKE, JSON, whole(nova), 3),
    "nova, converse": Case(NOVA, Operation.CONVERSE, JSON, whole(converse), 3),
    "nova, converse stream": Case(NOVA, Operation.CONVERSE_STREAM, EVENTS, converse_stream, 3),
    "titan": Case(TITAN, INVOKE, JSON, whole(titan)),
    "titan, stream": Case(TITAN, INVOKE_STREAM, EVENTS, metrics_stream),
    "llama": Case(LLAMA, INVOKE, JSON, whole(llama)),
    "llama, stream": Case(LLAMA, INVOKE_STREAM, EVENTS, metrics_stream),
    "llama, converse": Case(LLAMA, Operation.CONVERSE, JSON, whole(converse)),
    "mistral": Case(MISTRAL, INVOKE, JSON, whole(chat)),
    "jamba": Case(JAMBA, INVOKE, JSON, whole(chat)),
    "deepseek": Case(DEEPSEEK, INVOKE, JSON, whole(chat)),
    "openai": Case(OPENAI, INVOKE, JSON, whole(chat)),
    "openai, chat": Case(OPENAI, Operation.CHAT_COMPLETIONS, JSON, whole(chat)),
    "openai, chat stream": Case(OPENAI, Operation.CHAT_COMPLETIONS, SSE, chat_stream),
}

# ---------------------------------------------------------------- requests that are sold by the piece

Pieces = tuple[dict[str, Any], dict[str, Any], int]  # the request, its answer, and what is charged


def search(count: int) -> Pieces:
    request = {"query": "a", "documents": ["b"] * count}
    return request, {"results": [{"index": 0, "relevance_score": 0.5}]}, -(-count // 100)


def amazon_images(count: int) -> Pieces:
    config = {"numberOfImages": count, "width": 1024, "height": 1024}
    request = {"taskType": "TEXT_IMAGE", "textToImageParams": {"text": "a fox"}, "imageGenerationConfig": config}
    return request, {"images": ["aGk="] * count}, count


def stability_images(count: int) -> Pieces:
    return {"prompt": "a fox", "samples": count}, {"images": ["aGk="] * count, "finish_reasons": [None]}, count


PIECE_CASES = {
    "cohere rerank": (COHERE_RERANK, "search_unit", search),
    "amazon rerank": (AMAZON_RERANK, "search_unit", search),
    "canvas": (CANVAS, "image", amazon_images),
    "titan image": (TITAN_IMAGE, "image", amazon_images),
    "stable diffusion": (STABLE_DIFFUSION, "image", stability_images),
}

# ---------------------------------------------------------------- the product

TARGET = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", "m", "/")
CHARGED = ChargedCounters.from_counters([Counter("ORG#a", "one", "DAY#20261120", 8)])


def per_million(prices: tuple[Any, ...]) -> list[Decimal]:
    return [Decimal(price) * 10**6 for price in prices]


def configure(listed: Listed, piece: str = "") -> LabelConfig:
    long = LongContext(*per_million(listed.long), above_input_tokens=listed.above) if listed.above < 10**9 else None
    prices = PricesConfig(*per_million(listed[2:7]), long_context=long)
    pieces = {piece: Decimal(listed.piece)} if piece else {}
    return LabelConfig(listed.model, listed.format, prices, prices_usd_per_unit=pieces)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journal]:
    made = Journal(tmp_path_factory.mktemp("journal"), UlidFactory(lambda: 1_795_003_200.0, os.urandom, ""))
    yield made
    made.close()


def record(
    journal: Journal, label: LabelConfig, operation: Operation, kind: bytes, answer: bytes, requested: RequestedUnits
) -> UsageCounts:
    before = journal.tally.total()
    pricer, guess = build_label_price_table(label).pricer, Usage(1, 501, quantities=requested.quantities)
    sold = tuple(label.prices_usd_per_unit)
    pricing = OperationPricing(
        "one", operation, label.format, lambda _: pricer, lambda _: guess, UsageForecast(), sold, requested
    )
    meter = Meter(journal, pricing, CHARGED, TARGET, guess, 1.0)
    meter.on_sent(TARGET)
    meter.on_head(200, {b"content-type": kind})
    meter.on_data(answer)
    meter.on_end(True)
    meter.close()
    return journal.tally.total().less(before)


COUNTS = st.integers(1, 5000) | st.integers(150_000, 300_000)
CACHED = st.just(0) | COUNTS


@pytest.mark.parametrize("case", TOKEN_CASES.values(), ids=TOKEN_CASES.keys())
@settings(max_examples=tries(25), deadline=None)
@given(st.tuples(COUNTS, COUNTS, CACHED, CACHED, CACHED))
def test_tokens_cost_what_the_oracle_says(journal: Journal, case: Case, drawn: Tokens) -> None:
    tokens = (*drawn[: case.stated], *(0,) * (5 - case.stated))
    counts = record(journal, configure(case.listed), case.operation, case.kind, case.answer(tokens), NO_UNITS)
    assert (counts.pico, counts.estimated_requests) == (expected_pico(case.listed, tokens), 0)


@pytest.mark.parametrize(("listed", "piece", "build"), PIECE_CASES.values(), ids=PIECE_CASES.keys())
@settings(max_examples=tries(25), deadline=None)
@given(st.integers(1, 450))
def test_pieces_cost_what_the_oracle_says(
    journal: Journal, listed: Listed, piece: str, build: Callable[[int], Pieces], count: int
) -> None:
    request, answer, pieces = build(count)
    requested = read_request(INVOKE, json.dumps(request).encode(), (piece,))
    counts = record(journal, configure(listed, piece), INVOKE, JSON, json.dumps(answer).encode(), requested)
    assert (counts.pico, counts.estimated_requests) == (expected_pico(listed, (0, 0, 0, 0, 0), pieces), 0)
