"""What is read by its shape is what the readers that know every case read."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw
from price_keeper.usage import fast_parse, model_families
from price_keeper.usage.token_usage import Usage

COUNTS = st.sampled_from((0, 0, 1, 7, 10**9, 10**9 + 1, -1, 2**70, True, False, None, "7", [], {}))
NAMES = ("inputTokens", "outputTokens", "totalTokens", "cacheReadInputTokens", "cacheReadInputTokenCount",
         "cacheWriteInputTokens", "cacheWriteInputTokenCount", "cacheDetails", "serverToolUsage")  # fmt: skip
USAGES = st.dictionaries(st.sampled_from(NAMES), COUNTS) | st.none() | st.lists(st.integers(), max_size=2)
PLAIN = {"inputTokens": 3, "outputTokens": 4}
DETAILS = [{"ttl": "1h", "inputTokens": 1}]


@given(
    st.builds(lambda usage: {**PLAIN, **usage} if isinstance(usage, dict) else usage, USAGES),
    st.dictionaries(st.sampled_from(("serviceTier", "performanceConfig", "output")), st.just({"type": "flex"})),
)
@example({**PLAIN, "cacheWriteInputTokens": 5, "cacheDetails": DETAILS}, {})
@example({**PLAIN, "cacheReadInputTokens": None, "cacheReadInputTokenCount": 6}, {})
def test_fast_converse_parser_agrees_or_gives_none(usage: Any, more: dict[str, Any]) -> None:
    answer = {"usage": usage, **more}
    found = fast_parse.parse_converse(json.dumps(answer).encode())
    assert found is None or found == model_families.read_converse(answer)


DIALECTS = ("usage", "service_tier", "serviceTier", "performanceConfig", "inputTextTokenCount", "results",
            "totalOutputTextTokenCount", "prompt_token_count", "generation_token_count", "inputTokenCount",
            "outputTokenCount", "cacheReadInputTokenCount", "cacheWriteInputTokenCount", "meta", "prompt",
            "completions", "embedding", "images", "content", "outputs")  # fmt: skip
INNER = ("input_tokens", "output_tokens", "prompt_tokens", "completion_tokens", "tokens", "billed_units", "tokenCount",
         "data", "inputTokens", "outputTokens", "type", "contentPolicyUnits", "service_tier")  # fmt: skip
DOCUMENTS = st.recursive(
    COUNTS | st.sampled_from(("flex", "\u00e9")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(DIALECTS), DOCUMENTS, max_size=6), st.sampled_from(("cohere", "nova")))
def test_picked_members_hold_all_usage(answer: dict[str, Any], format: str) -> None:
    document = orjson.loads(json.dumps(answer))
    picked = fast_parse.pick_usage_members(json.dumps(answer).encode())
    assert picked is not None
    assert picked.keys() <= answer.keys()
    assert model_families.read_invocation(picked, {}) == model_families.read_invocation(document, {})
    for meaning in (model_families.read_converse, model_families.read_chat, model_families.read_guardrail):
        assert meaning(picked) == meaning(document)


def test_members_without_usage_stay_raw() -> None:
    answer = b'{"embedding":[' + b"{}," * 5000 + b'1],"inputTextTokenCount":5,"trace":{"a":1}}'
    picked = fast_parse.pick_usage_members(answer)
    assert picked is not None
    assert type(picked.pop("embedding")) is Raw
    assert picked == {"inputTextTokenCount": 5}
    assert fast_parse.pick_trace_members(answer) == {"trace": {"a": 1}}
    assert (
        fast_parse.pick_usage_members(b"[]")
        is fast_parse.pick_usage_members(b"{")
        is fast_parse.pick_trace_members(b'{"trace":' + b"[" * 100_000)
        is None
    )


def test_fast_converse_parser_reads_usual_response() -> None:
    usage = {"cacheReadInputTokenCount": 2, "cacheReadInputTokens": 2, "cacheWriteInputTokenCount": 0,
             "cacheWriteInputTokens": 0, "inputTokens": 3, "outputTokens": 4, "serverToolUsage": {}}  # fmt: skip
    answer = {"metrics": {"latencyMs": 1}, "output": {"message": {"content": [{"text": 'é \\ " {'}]}}, "usage": usage}
    assert fast_parse.parse_converse(json.dumps(answer).encode()) == Usage(3, 4, 2)


def test_fast_converse_parser_ignores_other_documents() -> None:
    for answer in (
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"usage":' + b"[" * 100_000,
        b'\xff{"usage":{}}',
        b'{"usage":{"inputTokens":1}}',
    ):
        assert fast_parse.parse_converse(answer) is None
