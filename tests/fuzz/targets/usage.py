"""Answers in one piece: the quick readers say what those say that know every case, and what is counted can be kept."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import orjson
from price_keeper.ledger.ledger_entries import Receipt
from price_keeper.ledger.segment import decode_lines, encode_line
from price_keeper.operations import Operation
from price_keeper.usage import model_families
from price_keeper.usage.meter import build_counts
from price_keeper.usage.price_table import price_usage
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.usage_reader import build_reader

from tests.fuzz.documents import document
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader, pieces
from tests.fuzz.targets.worst_case import TARIFF

FORMATS = ("anthropic", "nova", "titan", "llama", "mistral", "cohere", "ai21", "deepseek", "openai", "")
OPERATIONS = (Operation.INVOKE, Operation.CONVERSE, Operation.CHAT_COMPLETIONS, Operation.APPLY_GUARDRAIL,
              Operation.CHECK_GUARDRAILS, Operation.ASYNC_INVOKES)  # fmt: skip
HEADERS = (b"x-amzn-bedrock-input-token-count", b"x-amzn-bedrock-output-token-count",
           b"x-amzn-bedrock-cache-read-input-token-count", b"x-amzn-bedrock-cache-write-input-token-count",
           b"x-amzn-bedrock-service-tier", b"x-amzn-bedrock-performanceconfig-latency")  # fmt: skip
VALUES = (b"7", b"0", b"flex", b"optimized", b"-1", b"9" * 50, b" 5 ", b"\xff")  # fmt: skip
NAMES = ("usage", "inputTokens",
          "outputTokens", "totalTokens", "cacheReadInputTokens", "cacheWriteInputTokens", "cacheReadInputTokenCount",
          "cacheWriteInputTokenCount", "cacheDetails", "ttl", "serviceTier", "type", "performanceConfig", "latency",
          "input_tokens", "output_tokens", "cache_creation_input_tokens", "iterations", "cache_read_input_tokens",
          "cache_creation", "ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens", "service_tier",
          "inputTextTokenCount", "results", "tokenCount", "prompt_token_count", "generation_token_count", "meta",
          "billed_units", "tokens", "prompt", "completions", "data", "prompt_tokens", "completion_tokens",
          "prompt_tokens_details", "cached_tokens", "cache_write_tokens", "inputTokenCount", "outputTokenCount",
          "output", "topicPolicyUnits", "textUnits", "contentFilter")  # fmt: skip
TEXTS = ("5m", "1h", "flex", "optimized", "compaction", "default", "standard", "text")
WORDS = tuple(b'"%b":' % name.encode() for name in NAMES)


def one(data: bytes) -> None:
    reader = Reader(data)
    operation, format, seed = reader.pick(OPERATIONS), reader.pick(FORMATS), reader.byte()
    headers = {reader.pick(HEADERS): reader.pick(VALUES) for _ in range(reader.byte() % 3)}
    answer = document(reader, NAMES, TEXTS)
    readings = [_read_usage(operation, format, headers, parts) for parts in ([answer], pieces(answer, seed))]
    same(readings[1], readings[0], "usage in pieces")
    usage = readings[0][0]
    with suppress(orjson.JSONDecodeError):
        orjson.loads(answer)
        same(usage, _slowly(operation, format, headers, json.loads(answer)), "usage, quickly and slowly read")
    if usage is not None:
        _can_be_kept(usage)


def _read_usage(operation: Operation, format: str, headers: dict[bytes, bytes], parts: list[bytes]) -> tuple[Any, ...]:
    reader = build_reader(operation, format, b"application/json", headers)
    for part in parts:
        reader.feed(part)
    return reader.usage(), reader.partial_usage(), reader.estimate_output()


def _slowly(operation: Operation, format: str, headers: dict[bytes, bytes], parsed: Any) -> Usage | None:
    """Without any of the short ways, which take more for JSON than this, and then may say something where it cannot."""
    if operation is Operation.CONVERSE:
        return model_families.read_converse(parsed, headers)
    if operation is Operation.CHAT_COMPLETIONS:
        return model_families.read_chat(parsed, headers)
    if operation in (Operation.APPLY_GUARDRAIL, Operation.CHECK_GUARDRAILS):
        return model_families.read_guardrail(parsed)
    return Usage() if operation is Operation.ASYNC_INVOKES else model_families.read_invocation(parsed, headers)


def _can_be_kept(usage: Usage) -> None:
    """No number of it is below nothing, it has a price, and a line of the journal holds it."""
    numbers = (*usage[:5], *usage.units.values())
    holds(all(type(number) is int and number >= 0 for number in numbers), f"no counts: {usage}")
    priced = price_usage(TARIFF, usage)
    holds(priced.pico > 0 or not sum(usage[:5]), f"it costs nothing: {usage}")
    receipt = Receipt(build_counts(usage, priced.pico), {"tier": usage.tier, "latency": usage.latency})
    written = encode_line(receipt.encode(1))
    found = decode_lines(written)
    same((len(found.values), found.corrupt_lines), (1, 0), "lines")
    same(Receipt.from_values(found.values[0]), receipt, "a receipt that is read back")
