"""Of every family, form and price dimension: what a call costs is what an independent table's arithmetic says.

The oracle, `tests.support.price_oracle`, knows nothing of the product.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bedrock_simulator.event_frames import encode_event
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.config.config_sections import (
    GuardrailsConfig,
    LabelConfig,
    LongContext,
    PricesConfig,
    TierPrices,
    UnitPrices,
)
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, UsageCounts
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.operations import Operation
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.guardrail_usage import build_guardrail_prices, price_guardrail
from price_keeper.usage.meter import Meter, OperationPricing, UsageForecast
from price_keeper.usage.meter_factory import price_job
from price_keeper.usage.price_table import build_label_price_table
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.unit_usage import NO_UNITS, RequestedUnits, read_request

from tests.support import price_oracle
from tests.support.effort import tries
from tests.support.price_oracle import (
    AMAZON_RERANK,
    CANVAS,
    CLAUDE,
    COHERE_RERANK,
    DEEPSEEK,
    GPT,
    GUARDRAIL_UNITS,
    IMAGE_PRICES,
    JAMBA,
    LLAMA,
    MISTRAL,
    NOVA,
    NOVA_PRO,
    NOVA_REEL,
    OPENAI,
    RAY,
    STABLE_DIFFUSION,
    TITAN,
    TITAN_EMBEDDING,
    TITAN_IMAGE,
    TITAN_IMAGE_EMBEDDING,
    WEB_SEARCHING,
    Listed,
    Tokens,
    expected_guardrail_pico,
    expected_pico,
)

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


def responses(tokens: Tokens) -> dict[str, Any]:
    usage = {
        "input_tokens": tokens[0] + tokens[2],
        "input_tokens_details": {"cached_tokens": tokens[2]},
        "output_tokens": tokens[1],
        "total_tokens": sum(tokens),
    }
    output = [{"type": "message", "content": [{"type": "output_text", "text": "a"}]}]
    return {"object": "response", "status": "completed", "output": output, "usage": usage}


def embedding(tokens: Tokens) -> dict[str, Any]:
    return {"embedding": [0.5, 0.25], "inputTextTokenCount": tokens[0]}


def of_tier(build: Callable[[Tokens], dict[str, Any]], tier: str) -> Callable[[Tokens], dict[str, Any]]:
    return lambda tokens: build(tokens) | {"serviceTier": {"type": tier}, "service_tier": tier}


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


def responses_stream(tokens: Tokens) -> bytes:
    events = (
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.completed", "response": responses(tokens)},
    )
    return b"".join(b"event: %b\ndata: %b\n\n" % (each["type"].encode(), json.dumps(each).encode()) for each in events)


JSON, EVENTS, SSE = b"application/json", b"application/vnd.amazon.eventstream", b"text/event-stream"
INVOKE, INVOKE_STREAM = Operation.INVOKE, Operation.INVOKE_STREAM


class Case(NamedTuple):
    listed: Listed
    operation: Operation
    kind: bytes
    answer: Callable[[Tokens], bytes]
    stated: int = 2  # of the five kinds of tokens
    tier: str = ""


TOKEN_CASES = {
    "claude": Case(CLAUDE, INVOKE, JSON, whole(claude), 5),
    "claude, stream": Case(CLAUDE, INVOKE_STREAM, EVENTS, claude_stream, 5),
    "claude, converse": Case(CLAUDE, Operation.CONVERSE, JSON, whole(converse), 5),
    "claude, converse stream": Case(CLAUDE, Operation.CONVERSE_STREAM, EVENTS, converse_stream, 5),
    "nova": Case(NOVA, INVOKE, JSON, whole(nova), 3),
    "nova, converse": Case(NOVA, Operation.CONVERSE, JSON, whole(converse), 3),
    "nova, converse stream": Case(NOVA, Operation.CONVERSE_STREAM, EVENTS, converse_stream, 3),
    **{
        f"nova pro, converse, {tier}": Case(NOVA_PRO, Operation.CONVERSE, JSON, whole(of_tier(converse, tier)), 3, tier)
        for tier in ("default", "flex", "priority")
    },
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
    **{
        f"openai, chat, {tier}": Case(OPENAI, Operation.CHAT_COMPLETIONS, JSON, whole(of_tier(chat, tier)), 2, tier)
        for tier in ("flex", "priority")
    },
    "gpt, responses": Case(GPT, Operation.RESPONSES, JSON, whole(responses), 3),
    "gpt, responses stream": Case(GPT, Operation.RESPONSES, SSE, responses_stream, 3),
    "gpt, converse": Case(GPT, Operation.CONVERSE, JSON, whole(converse), 4),
    "titan, embedding": Case(TITAN_EMBEDDING, INVOKE, JSON, whole(embedding), 1),
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


def embedded_image(_: int) -> Pieces:
    return {"inputImage": "aGk="}, {"embedding": [0.5], "inputTextTokenCount": 0}, 1


PIECE_CASES = {
    "cohere rerank": (COHERE_RERANK, "search_unit", search),
    "amazon rerank": (AMAZON_RERANK, "search_unit", search),
    "canvas": (CANVAS, "image", amazon_images),
    "titan image": (TITAN_IMAGE, "image", amazon_images),
    "stable diffusion": (STABLE_DIFFUSION, "image", stability_images),
    "embedded image": (TITAN_IMAGE_EMBEDDING, "image", embedded_image),
}

# ---------------------------------------------------------------- the product

TARGET = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", "m", "/")
CHARGED = ChargedCounters.from_counters([Counter("ORG#a", "one", "DAY#20261120", 8)])


def per_million(prices: tuple[Any, ...]) -> list[Decimal]:
    return [Decimal(price) * 10**6 for price in prices]


def configure(listed: Listed, piece: str = "", **pieces: str) -> LabelConfig:
    long = LongContext(*per_million(listed.long), above_input_tokens=listed.above) if listed.above < 10**9 else None
    tiers: Any = {tier: TierPrices(*per_million(five)) for tier, five in listed.tiers.items()}
    prices = PricesConfig(*per_million(listed.prices), long_context=long, service_tiers=tiers)
    own = {piece: listed.piece} if piece else {}
    units: Any = {name: Decimal(price) for name, price in (own | pieces).items()}
    return LabelConfig(listed.model, listed.format, prices, prices_usd_per_unit=units)  # type: ignore[arg-type]


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


NO_TOKENS: Tokens = (0, 0, 0, 0, 0)
GUARDRAIL_NAMES = {
    "content": "contentPolicyUnits",
    "content_image": "contentPolicyImageUnits",
    "topic": "topicPolicyUnits",
    "word": "wordPolicyUnits",
    "sensitive_information": "sensitiveInformationPolicyUnits",
    "contextual_grounding": "contextualGroundingPolicyUnits",
    "automated_reasoning": "automatedReasoningPolicyUnits",
}
COUNTS = st.integers(1, 5000) | st.integers(150_000, 300_000)
CACHED = st.just(0) | COUNTS


@pytest.mark.parametrize("case", TOKEN_CASES.values(), ids=TOKEN_CASES.keys())
@settings(max_examples=tries(25), deadline=None)
@given(st.tuples(COUNTS, COUNTS, CACHED, CACHED, CACHED))
def test_tokens_cost_what_the_oracle_says(journal: Journal, case: Case, drawn: Tokens) -> None:
    tokens = (*drawn[: case.stated], *(0,) * (5 - case.stated))
    counts = record(journal, configure(case.listed), case.operation, case.kind, case.answer(tokens), NO_UNITS)
    expected = expected_pico(case.listed, tokens, tier=case.tier)
    assert (counts.pico, counts.estimated_requests) == (expected, 0)


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


@pytest.mark.parametrize(("most", "quality"), IMAGE_PRICES.keys())
@settings(max_examples=tries(10), deadline=None)
@given(st.data())
def test_images_cost_the_price_of_their_size_and_quality(
    journal: Journal, most: int, quality: str, data: st.DataObject
) -> None:
    count, side = data.draw(st.integers(1, 5)), data.draw(st.integers(most // 2 + 1, most))
    config = {"numberOfImages": count, "width": side, "height": min(side, 320), "quality": quality}
    request = {"taskType": "TEXT_IMAGE", "textToImageParams": {"text": "a"}, "imageGenerationConfig": config}
    pieces = {f"image_{size}_{kind}": price for (size, kind), price in IMAGE_PRICES.items()}
    label = configure(TITAN_IMAGE, **pieces)
    requested = read_request(INVOKE, json.dumps(request).encode(), pieces)
    answer = json.dumps({"images": ["aGk="] * count}).encode()
    counts = record(journal, label, INVOKE, JSON, answer, requested)
    expected = expected_pico(TITAN_IMAGE._replace(piece=IMAGE_PRICES[most, quality]), NO_TOKENS, count)
    assert (counts.pico, counts.images, counts.estimated_requests) == (expected, count, 0)


@settings(max_examples=tries(25), deadline=None)
@given(st.tuples(COUNTS, COUNTS, CACHED, CACHED, CACHED), st.integers(1, 30))
def test_web_searches_cost_their_price_and_the_tokens_theirs(journal: Journal, tokens: Tokens, searches: int) -> None:
    answer = claude(tokens)
    answer["usage"]["server_tool_use"] = {"web_search_requests": searches}
    label = configure(WEB_SEARCHING, "web_search")
    counts = record(journal, label, INVOKE, JSON, json.dumps(answer).encode(), NO_UNITS)
    assert (counts.pico, counts.tool_calls) == (expected_pico(WEB_SEARCHING, tokens, searches), searches)


@pytest.mark.parametrize(
    ("listed", "piece", "build"),
    [
        (NOVA_REEL, "video_second", lambda seconds: {"videoGenerationConfig": {"durationSeconds": seconds}}),
        (RAY, "video_second_720p", lambda seconds: {"duration": f"{seconds}s", "resolution": "720p"}),
    ],
)
@settings(max_examples=tries(10), deadline=None)
@given(st.integers(1, 120))
def test_videos_cost_their_seconds(
    listed: Listed, piece: str, build: Callable[[int], dict[str, Any]], seconds: int
) -> None:
    body = json.dumps({"modelInput": build(seconds)}).encode()
    requested = read_request(Operation.ASYNC_INVOKES, body, (piece,))
    cost = price_job(configure(listed, piece).pico_per_unit, None, Usage(quantities=requested.quantities))
    assert cost == (expected_pico(listed, NO_TOKENS, seconds), frozenset())


@settings(max_examples=tries(25), deadline=None)
@given(st.fixed_dictionaries({name: st.integers(0, 5000) for name in GUARDRAIL_UNITS}))
def test_guardrail_units_cost_what_the_oracle_says(units: dict[str, int]) -> None:
    per_1000 = {name: Decimal(GUARDRAIL_UNITS[unit]) * 1000 for name, unit in GUARDRAIL_NAMES.items()}
    checks = dict.fromkeys(("check_content_filter", "check_prompt_attack", "check_sensitive_information"), Decimal(1))
    prices = build_guardrail_prices(GuardrailsConfig(UnitPrices(**per_1000, **checks)))
    assert price_guardrail(prices, units) == (expected_guardrail_pico(units), frozenset())


def test_oracle_imports_nothing_of_the_product() -> None:
    source = Path(price_oracle.__file__).read_text()
    assert set(re.findall(r"^(?:import|from) (\S+)", source, re.MULTILINE)) == {
        "__future__",
        "collections.abc",
        "fractions",
        "typing",
    }
