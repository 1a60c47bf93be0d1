"""What whole answers say they used: a table of bodies as each family sends them, and of those that cannot be true."""

from __future__ import annotations

from typing import get_args

import pytest
from botocore.session import get_session
from price_keeper.budgets.hard import request_forms
from price_keeper.config.config_sections import Format
from price_keeper.usage import model_families
from price_keeper.usage.model_families import MAX_TOKENS
from price_keeper.usage.token_usage import Usage

INPUT = b"x-amzn-bedrock-input-token-count"
OUTPUT = b"x-amzn-bedrock-output-token-count"
READ = b"x-amzn-bedrock-cache-read-input-token-count"
WRITTEN = b"x-amzn-bedrock-cache-write-input-token-count"
TIER = b"x-amzn-bedrock-service-tier"
LATENCY = b"x-amzn-bedrock-performanceconfig-latency"

IMPOSSIBLE = (-1, 1.0, 1.5, "7", True, False, [], {}, MAX_TOKENS + 1, 10**40, float("inf"))


# ---------------------------------------------------------------- Converse


def conversation(usage, **more):
    message = {"role": "assistant", "content": [{"text": "hello"}]}
    return {
        "output": {"message": message},
        "stopReason": "end_turn",
        "usage": usage,
        "metrics": {"latencyMs": 9},
        **more,
    }


CONVERSE_USAGES = [
    ({"inputTokens": 30, "outputTokens": 5, "totalTokens": 35}, Usage(30, 5)),
    (
        {"inputTokens": 3, "outputTokens": 5, "cacheReadInputTokens": 7, "cacheWriteInputTokens": 11},
        Usage(3, 5, 7, 11),
    ),
    (  # both names, as Bedrock often sends them
        {
            "inputTokens": 18,
            "outputTokens": 386,
            "totalTokens": 7906,
            "cacheReadInputTokenCount": 0,
            "cacheReadInputTokens": 0,
            "cacheWriteInputTokenCount": 7502,
            "cacheWriteInputTokens": 7502,
            "cacheDetails": [{"ttl": "5m", "inputTokens": 7502}],
            "serverToolUsage": {},
        },
        Usage(18, 386, 0, 7502),
    ),
    (
        {
            "inputTokens": 3,
            "outputTokens": 5,
            "cacheWriteInputTokens": 110,
            "cacheDetails": [{"ttl": "1h", "inputTokens": 100}, {"ttl": "5m", "inputTokens": 10}],
        },
        Usage(3, 5, 0, 10, 100),
    ),
    (  # details of a part: the rest is for five minutes
        {
            "inputTokens": 3,
            "outputTokens": 5,
            "cacheWriteInputTokens": 110,
            "cacheDetails": [{"ttl": "1h", "inputTokens": 60}],
        },
        Usage(3, 5, 0, 50, 60),
    ),
    (  # details of more than the whole
        {
            "inputTokens": 3,
            "outputTokens": 5,
            "cacheWriteInputTokens": 10,
            "cacheDetails": [{"ttl": "5m", "inputTokens": 10}, {"ttl": "1h", "inputTokens": 60}],
        },
        Usage(3, 5, 0, 10, 60),
    ),
    (  # an unknown lifetime
        {"inputTokens": 3, "outputTokens": 5, "cacheDetails": [{"ttl": "24h", "inputTokens": 60}]},
        Usage(3, 5, 0, 0, 60),
    ),
    ({"inputTokens": 3, "outputTokens": 5, "cacheReadInputTokens": None, "cacheDetails": None}, Usage(3, 5)),
    ({"inputTokens": 3, "outputTokens": 5, "cacheDetails": ["5m", None]}, Usage(3, 5)),
    ({"inputTokens": MAX_TOKENS, "outputTokens": 5}, Usage(MAX_TOKENS, 5)),
    ({"inputTokens": 3}, None),
    ({"outputTokens": 3}, None),
    ({}, None),
    (None, None),
    ([1], None),
]


@pytest.mark.parametrize(("usage", "expected"), CONVERSE_USAGES)
def test_converse_usage_is_read(usage, expected):
    assert model_families.read_converse(conversation(usage)) == expected


@pytest.mark.parametrize("name", ["inputTokens", "outputTokens", "cacheReadInputTokens", "cacheWriteInputTokens"])
@pytest.mark.parametrize("number", IMPOSSIBLE, ids=repr)
def test_impossible_count_in_converse_usage_gives_none(name, number):
    usage = {"inputTokens": 3, "outputTokens": 5, "cacheReadInputTokens": 1, "cacheWriteInputTokens": 1}
    assert model_families.read_converse(conversation(usage | {name: number})) is None


@pytest.mark.parametrize("number", IMPOSSIBLE, ids=repr)
def test_impossible_count_in_converse_details_gives_none(number):
    usage = {"inputTokens": 3, "outputTokens": 5, "cacheDetails": [{"ttl": "1h", "inputTokens": number}]}
    assert model_families.read_converse(conversation(usage)) is None


PLAIN = {"inputTokens": 1, "outputTokens": 2}


@pytest.mark.parametrize(
    ("more", "tier", "latency"),
    [
        ({"serviceTier": {"type": "flex"}}, "flex", ""),
        ({"serviceTier": {"type": "default"}, "performanceConfig": {"latency": "standard"}}, "default", "standard"),
        ({"performanceConfig": {"latency": "optimized"}}, "", "optimized"),
        ({"serviceTier": {"type": " Priority "}}, "priority", ""),
        ({"serviceTier": {"type": "brand-new"}}, "brand-new", ""),
        ({"serviceTier": {"type": "x" * 999}}, "x" * 40, ""),
        ({"serviceTier": {"type": 7}, "performanceConfig": "fast"}, "", ""),
        ({"serviceTier": None, "performanceConfig": {"latency": None}}, "", ""),
    ],
)
def test_tier_and_latency_come_from_response(more, tier, latency):
    assert model_families.read_converse(conversation(PLAIN, **more)) == Usage(1, 2, tier=tier, latency=latency)


@pytest.mark.parametrize("document", [None, 5, "usage", [], [{"usage": PLAIN}], True])
def test_document_that_is_no_object_gives_none(document):
    assert model_families.read_converse(document) is None
    assert model_families.read_chat(document) is None
    assert model_families.read_guardrail(document) is None
    assert model_families.read_invocation(document, {}) is None


# ---------------------------------------------------------------- InvokeModel, by its body

CLAUDE = {"id": "msg_bdrk_01", "type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn"}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
COMPACTION = {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3500}


def openai(**usage):
    return {"id": "chatcmpl-1", "object": "chat.completion", "choices": [CHOICE], "usage": usage}


BODIES = [
    ("anthropic", CLAUDE | {"usage": {"input_tokens": 12, "output_tokens": 34}}, Usage(12, 34)),
    (
        "anthropic",
        CLAUDE
        | {
            "usage": {
                "input_tokens": 4,
                "cache_creation_input_tokens": 110,
                "cache_read_input_tokens": 9000,
                "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 100},
                "output_tokens": 34,
                "service_tier": "standard",
            }
        },
        Usage(4, 34, 9000, 10, 100, tier="default"),
    ),
    (  # before writes were split
        "anthropic",
        CLAUDE | {"usage": {"input_tokens": 4, "cache_creation_input_tokens": 110, "output_tokens": 34}},
        Usage(4, 34, 0, 110),
    ),
    (  # a split that forgets some: what it does not say is for an hour is not
        "anthropic",
        CLAUDE
        | {
            "usage": {
                "input_tokens": 4,
                "cache_creation_input_tokens": 110,
                "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
                "output_tokens": 34,
            }
        },
        Usage(4, 34, 0, 110),
    ),
    (  # a split of more than the whole
        "anthropic",
        {
            "usage": {
                "input_tokens": 4,
                "cache_creation_input_tokens": 50,
                "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 100},
                "output_tokens": 34,
            }
        },
        Usage(4, 34, 0, 10, 100),
    ),
    ("anthropic", {"usage": {"input_tokens": 4, "cache_creation": None, "output_tokens": 1}}, Usage(4, 1)),
    (  # the top leaves out what the compaction used
        "anthropic",
        CLAUDE
        | {
            "usage": {
                "input_tokens": 23_000,
                "output_tokens": 1000,
                "iterations": [COMPACTION, {"type": "message", "input_tokens": 23_000, "output_tokens": 1000}],
            }
        },
        Usage(203_000, 4500),
    ),
    (  # without one, the top has it all
        "anthropic",
        CLAUDE
        | {
            "usage": {
                "input_tokens": 300,
                "output_tokens": 30,
                "iterations": [{"type": "message", "input_tokens": 150, "output_tokens": 15}],
            }
        },
        Usage(300, 30),
    ),
    ("anthropic", {"completion": " hello", "stop_reason": "stop_sequence"}, None),
    (
        "nova",
        {
            "output": {"message": {"content": [{"text": "hello"}], "role": "assistant"}},
            "usage": {
                "inputTokens": 5,
                "outputTokens": 6,
                "totalTokens": 28,
                "cacheReadInputTokenCount": 7,
                "cacheWriteInputTokenCount": 10,
            },
        },
        Usage(5, 6, 7, 10),
    ),
    ("nova", {"embeddings": [{"embeddingType": "TEXT", "embedding": [0.1]}], "inputTokenCount": 9}, Usage(9)),
    (
        "titan",
        {"inputTextTokenCount": 5, "results": [{"tokenCount": 6, "outputText": "hi", "completionReason": "FINISH"}]},
        Usage(5, 6),
    ),
    ("titan", {"inputTextTokenCount": 5, "results": [{"tokenCount": 6}, {"tokenCount": 7}]}, Usage(5, 13)),
    ("titan", {"embedding": [0.1, 0.2], "inputTextTokenCount": 5}, Usage(5)),
    ("llama", {"generation": "hi", "prompt_token_count": 5, "generation_token_count": 6}, Usage(5, 6)),
    ("mistral", {"outputs": [{"text": "hi", "stop_reason": "stop"}]}, None),
    ("mistral", openai(prompt_tokens=5, completion_tokens=6, total_tokens=11), Usage(5, 6)),
    ("cohere", {"generations": [{"text": "hi"}]}, None),
    (
        "cohere",
        {
            "text": "hi",
            "meta": {
                "api_version": {"version": "1"},
                "billed_units": {"input_tokens": 5, "output_tokens": 6},
                "tokens": {"input_tokens": 71, "output_tokens": 8},
            },
        },
        Usage(5, 6),
    ),
    ("cohere", {"text": "hi", "meta": {"tokens": {"input_tokens": 71, "output_tokens": 8}}}, Usage(71, 8)),
    ("cohere", {"usage": {"billed_units": {"input_tokens": 5, "output_tokens": 6}}}, Usage(5, 6)),
    ("cohere", {"id": "1", "texts": ["hi"], "embeddings": [[0.1]], "response_type": "embeddings_floats"}, None),
    ("ai21", openai(prompt_tokens=5, completion_tokens=6, total_tokens=11) | {"meta": {"x": 1}}, Usage(5, 6)),
    (
        "ai21",
        {
            "id": 1234,
            "prompt": {"text": "hi you", "tokens": [{"generatedToken": {}}] * 2},
            "completions": [{"data": {"text": "a", "tokens": [{}] * 3}}, {"data": {"text": "b", "tokens": [{}] * 4}}],
        },
        Usage(2, 7),
    ),
    ("ai21", {"prompt": "hi", "completions": "none"}, None),
    ("deepseek", {"choices": [{"text": "hi", "stop_reason": "stop"}]}, None),
    ("deepseek", {"generation": "hi", "prompt_token_count": 5, "generation_token_count": 6}, Usage(5, 6)),
    (
        "openai",
        openai(prompt_tokens=100, completion_tokens=6, prompt_tokens_details={"cached_tokens": 60}),
        Usage(40, 6, 60),
    ),
    (
        "openai",
        openai(
            prompt_tokens=2600,
            completion_tokens=300,
            prompt_tokens_details={"cached_tokens": 2000, "cache_write_tokens": 400},
        ),
        Usage(200, 300, 2000, 400),
    ),
    (  # what is more than the prompt is not in it
        "openai",
        openai(prompt_tokens=10, completion_tokens=6, prompt_tokens_details={"cached_tokens": 60}),
        Usage(10, 6, 60),
    ),
    (
        "openai",
        openai(prompt_tokens=5, completion_tokens=6) | {"service_tier": "priority"},
        Usage(5, 6, tier="priority"),
    ),
    ("openai", openai(prompt_tokens=5, completion_tokens=6) | {"service_tier": "auto"}, Usage(5, 6)),
]


@pytest.mark.parametrize(("family", "body", "expected"), BODIES)
def test_invoke_body_usage_is_read_per_family(family, body, expected):
    assert model_families.read_invocation(body, {}) == expected


@pytest.mark.parametrize(
    "usage",
    [
        lambda number: {"usage": {"input_tokens": number, "output_tokens": 5}},
        lambda number: {"usage": {"input_tokens": 5, "output_tokens": number}},
        lambda number: {"usage": {"input_tokens": 5, "cache_read_input_tokens": number}},
        lambda number: {"usage": {"input_tokens": 5, "cache_creation": {"ephemeral_1h_input_tokens": number}}},
        lambda number: {"usage": {"input_tokens": 5, "iterations": [COMPACTION | {"input_tokens": number}]}},
        lambda number: {"usage": {"inputTokens": number, "outputTokens": 5}},
        lambda number: openai(prompt_tokens=number, completion_tokens=5),
        lambda number: openai(prompt_tokens=5, completion_tokens=5, prompt_tokens_details={"cached_tokens": number}),
        lambda number: {"inputTextTokenCount": number, "results": [{"tokenCount": 4}]},
        lambda number: {"inputTextTokenCount": 5, "results": [{"tokenCount": number}]},
        lambda number: {"prompt_token_count": number, "generation_token_count": 5},
        lambda number: {"meta": {"billed_units": {"input_tokens": number}}},
    ],
)
@pytest.mark.parametrize("number", IMPOSSIBLE, ids=repr)
def test_impossible_count_in_invoke_body_gives_none(usage, number):
    assert model_families.read_invocation(usage(number), {}) is None
    assert model_families.read_invocation(usage(number), {INPUT: b"8", OUTPUT: b"9"}) == Usage(8, 9)


# ---------------------------------------------------------------- InvokeModel, by its headers


def test_headers_state_usage_where_body_does_not():
    headers = {INPUT: b"5", OUTPUT: b"6", READ: b"7", WRITTEN: b"8"}
    assert model_families.read_invocation({"outputs": []}, headers) == Usage(5, 6, 7, 8)
    assert model_families.read_invocation({"embeddings": [[0.1]]}, {INPUT: b"5"}) == Usage(5)
    assert model_families.read_invocation(None, headers) == Usage(5, 6, 7, 8)


def test_body_wins_and_headers_fill_gaps():
    body = {"prompt_token_count": 50, "generation_token_count": 60}
    assert model_families.read_invocation(body, {INPUT: b"1", OUTPUT: b"2", READ: b"7"}) == Usage(50, 60, 7)
    assert model_families.read_invocation({"inputTextTokenCount": 50}, {OUTPUT: b"2"}) == Usage(50, 2)


def test_cache_write_total_comes_from_header_and_ttl_from_body():
    creation = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 100}
    body = CLAUDE | {"usage": {"input_tokens": 4, "output_tokens": 1, "cache_creation": creation}}
    assert model_families.read_invocation(body, {READ: b"9", WRITTEN: b"70"}) == Usage(4, 1, 9, 0, 100)


def test_cohere_usage_prefers_count_of_bedrock():
    body = {"text": "hi", "meta": {"billed_units": {"input_tokens": 5, "output_tokens": 6}}}
    assert model_families.read_invocation(body, {INPUT: b"71", OUTPUT: b"8"}) == Usage(71, 8)
    assert model_families.read_invocation(body, {INPUT: b"71"}) == Usage(71, 6)


@pytest.mark.parametrize("value", [b"", b"-1", b"1.0", b"0x10", b"1_0", b"many", b"\xb2", b"9" * 30, b"9" * 5000])
def test_malformed_header_count_ignores_headers(value):
    assert model_families.read_invocation({}, {INPUT: b"5", OUTPUT: value}) is None
    body = CLAUDE | {"usage": {"input_tokens": 4, "output_tokens": 1}}
    assert model_families.read_invocation(body, {INPUT: value, READ: b"3"}) == Usage(4, 1)


def test_output_count_alone_gives_none():
    assert model_families.read_invocation({}, {OUTPUT: b"5"}) is None


@pytest.mark.parametrize(
    ("headers", "tier", "latency"),
    [
        ({}, "default", ""),
        ({TIER: b"flex"}, "flex", ""),
        ({TIER: b"Reserved", LATENCY: b"optimized"}, "reserved", "optimized"),
        ({TIER: b"standard", LATENCY: b"standard"}, "default", "standard"),
        ({TIER: b"", LATENCY: b""}, "default", ""),
        ({TIER: b"\xff"}, "?", ""),
    ],
)
def test_tier_header_wins_over_body(headers, tier, latency):
    body = CLAUDE | {"usage": {"input_tokens": 4, "output_tokens": 1, "service_tier": "standard"}}
    assert model_families.read_invocation(body, headers) == Usage(4, 1, tier=tier, latency=latency)


# ---------------------------------------------------------------- the other operations


def test_chat_completion_usage_is_read():
    answer = openai(prompt_tokens=100, completion_tokens=6, prompt_tokens_details={"cached_tokens": 60})
    assert model_families.read_chat(answer | {"service_tier": "flex"}) == Usage(40, 6, 60, tier="flex")
    assert model_families.read_chat(answer | {"service_tier": None}) == Usage(40, 6, 60)
    assert model_families.read_chat(openai(prompt_tokens=5)) is None
    assert model_families.read_chat({"choices": [CHOICE], "usage": None}) is None


UNITS = {
    "topicPolicyUnits": 1,
    "contentPolicyUnits": 2,
    "wordPolicyUnits": 3,
    "sensitiveInformationPolicyUnits": 4,
    "sensitiveInformationPolicyFreeUnits": 5,
    "contextualGroundingPolicyUnits": 0,
    "contentPolicyImageUnits": 6,
    "automatedReasoningPolicyUnits": 7,
    "automatedReasoningPolicies": 2,
}


def test_guardrail_units_are_read_separately():
    assert model_families.read_guardrail({"usage": UNITS, "action": "NONE"}) == Usage(units=UNITS)
    assert set(UNITS) >= model_families.UNBILLED_GUARDRAIL_COUNTS


def test_units_of_unknown_guardrail_policy_are_read():
    units = {"dreamPolicyUnits": 3, "region": "moon", "parts": [1]}
    assert model_families.read_guardrail({"usage": units}) == Usage(units={"dreamPolicyUnits": 3})


def test_checks_state_units_one_level_deeper():
    usage = {"contentFilter": {"textUnits": 2}, "promptAttack": {"textUnits": 1}, "sensitiveInformation": None}
    assert model_families.read_guardrail({"usage": usage}) == Usage(units={"contentFilter": 2, "promptAttack": 1})


@pytest.mark.parametrize("number", [number for number in IMPOSSIBLE if number != {}], ids=repr)
def test_impossible_guardrail_count_gives_none(number):
    assert model_families.read_guardrail({"usage": UNITS | {"topicPolicyUnits": number}}) is None
    assert model_families.read_guardrail({"usage": {}}) is None


def test_every_family_reader_sees_its_telltale_member():
    telltales = {member for member, _ in model_families._FAMILY_READERS}
    assert telltales <= set(model_families.USAGE_MEMBERS)


def test_guardrail_units_match_service_model():
    shape = get_session().get_service_model("bedrock-runtime").shape_for("GuardrailUsage")
    assert set(UNITS) >= set(shape.members)


def test_request_forms_have_a_row_for_every_format() -> None:
    assert tuple(request_forms.FAMILIES) == get_args(Format)
