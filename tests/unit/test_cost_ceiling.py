"""The most that a request can cost: which prices and inputs count, and what is refused or needs CountTokens."""

from __future__ import annotations

import json
import sys
import tracemalloc
from dataclasses import replace
from decimal import Decimal
from typing import Any
from unicodedata import normalize

import pytest
from price_keeper.budgets.hard import cost_ceiling, strict_json, token_bound
from price_keeper.budgets.hard.cost_ceiling import UNCOUNTED_TOKENS, apply_count, compute_ceiling
from price_keeper.config.config_sections import LongContext, PricesConfig, TierPrices
from price_keeper.domain import CostCeiling
from price_keeper.errors import InvalidRequest
from price_keeper.operations import Operation
from price_keeper.usage.guardrail_usage import price_guardrail
from price_keeper.usage.price_table import build_price_table, price_usage
from price_keeper.usage.token_usage import Usage

CONVERSE, INVOKE, CHAT = Operation.CONVERSE, Operation.INVOKE, Operation.CHAT_COMPLETIONS
PLAIN = PricesConfig(*(Decimal(usd) for usd in ("3", "15", "0.3", "3.75", "6")))
PRICES = cost_ceiling.CallPrices([build_price_table(PLAIN)])
CAPPED = {"inferenceConfig": {"maxTokens": 100}}


def asked(
    body: Any,
    operation: Operation = CONVERSE,
    format: str = "anthropic",
    prices: cost_ceiling.CallPrices = PRICES,
    **more: Any,
) -> CostCeiling:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return compute_ceiling(operation, format, sent, more.pop("headers", {}), prices, 100, more.pop("model", "m"))


def refusal(*of: Any, **more: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        asked(*of, **more)
    return caught.value.message


def said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}], **CAPPED}


# ---------------------------------------------------------------- prices


@pytest.mark.parametrize(
    ("more", "input", "output"),
    [
        ({}, 6, 15),
        ({"service_tiers": {"priority": TierPrices(Decimal(9), Decimal(40))}}, 9, 40),
        ({"service_tiers": {"flex": TierPrices(Decimal(1), Decimal(2), cache_write_1h=Decimal(70))}}, 70, 15),
        ({"latency_optimized": TierPrices(Decimal(4), Decimal(20))}, 6, 20),
        ({"long_context": LongContext(Decimal(7), Decimal(22), above_input_tokens=200_000)}, 7, 22),
        ({"cache_write_1h": None}, 15, 15),  # the dearest of all, as such a token would be charged
        ({"cache_read": Decimal(0)}, 15, 15),
    ],
)
def test_ceiling_uses_highest_price_of_any_table(more: dict[str, Any], input: int, output: int) -> None:
    found = asked(said({"text": "a"}), prices=cost_ceiling.CallPrices([build_price_table(replace(PLAIN, **more))]))
    assert found.pico == (found.input_tokens * input + 100 * output) * 10**6


def test_ceiling_uses_most_expensive_target_of_label() -> None:
    dear_input = build_price_table(replace(PLAIN, input=Decimal(50)))
    dear_output = build_price_table(replace(PLAIN, output=Decimal(5000)))
    prices = cost_ceiling.CallPrices([PRICES.price_tables[0], dear_input, dear_output])
    alone = [asked(said({"text": "a"}), prices=cost_ceiling.CallPrices([each])).pico for each in prices.price_tables]
    assert asked(said({"text": "a"}), prices=prices).pico == max(alone) > min(alone)
    with pytest.raises(ValueError, match="at least one target"):
        asked(said({"text": "a"}), prices=cost_ceiling.CallPrices([]))


# ---------------------------------------------------------------- the size of text


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        'quotes " and \\ and \n\t\x00\x7f',
        "é天地😀",
        "\ufdfa" * 500,
        "\U0001d15e" * 500,
        "a" * 10_000,
        "</script>",
        "\u2028",
    ],
)
@pytest.mark.parametrize("ascii", [True, False])
def test_ceiling_has_one_token_per_byte_in_any_encoding(text: str, ascii: bool) -> None:
    body = json.dumps(said({"text": text}), ensure_ascii=ascii, indent=1).encode()
    found = asked(body).input_tokens
    longest = max(len(normalize(form, text).encode()) for form in ("NFC", "NFKC"))
    assert found >= longest + token_bound.REQUEST_TOKENS
    assert found == asked(json.dumps(said({"text": text})).encode()).input_tokens


def test_characters_that_grow_when_normalised_are_known() -> None:
    for code in range(0x80, sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            character = chr(code)
            longest = max(len(normalize(form, character).encode()) for form in ("NFC", "NFKC"))
            if longest > len(character.encode()):
                assert token_bound.measure_growth(character.encode()) >= longest - len(character.encode()), hex(code)
    assert token_bound.measure_growth("Grüße, 天地, привет 😀 한국어 العربية".encode()) == 0


def test_ceiling_includes_template_tokens() -> None:
    def tokens(more: dict[str, Any]) -> int:
        body = {**said({"text": "a"}), **more}
        return asked(body).input_tokens - len(json.dumps(body, separators=(",", ":")))

    tool = {"toolSpec": {"name": "f", "inputSchema": {"json": {"type": "object", "properties": {"a": {}, "b": {}}}}}}
    bare = tokens({})
    assert bare >= token_bound.REQUEST_TOKENS + token_bound.MESSAGE_TOKENS + token_bound.BLOCK_TOKENS
    assert tokens({"system": [{"text": "b"}]}) == bare + token_bound.BLOCK_TOKENS
    one, two = (tokens({"toolConfig": {"tools": [tool] * number}}) for number in (1, 2))
    assert one >= bare + token_bound.TOOLS_TOKENS + token_bound.TOOL_TOKENS + 5 * token_bound.MARK_TOKENS
    assert two - one == one - bare - token_bound.TOOLS_TOKENS


def test_tool_text_is_bounded_as_ascii_escapes() -> None:
    use = {"toolUse": {"toolUseId": "1", "name": "f", "input": {"q": "天" * 1000}}}
    assert asked(said(use)).input_tokens >= 6000


# ---------------------------------------------------------------- what bytes do not tell

BYTES = {"format": "png", "source": {"bytes": "aGk="}}
S3 = {"format": "png", "source": {"s3Location": {"uri": "s3://a/b"}}}
DATA = {"type": "base64", "media_type": "image/png", "data": "aGk="}


@pytest.mark.parametrize(
    "block",
    [
        {"image": BYTES},
        {"document": {"name": "d", "format": "txt", "source": {"text": "a"}}},
        {"video": BYTES},
        {"audio": BYTES},
        {"guardContent": {"text": {"text": "a"}}},
        {"searchResult": {"source": "s", "title": "t", "content": [{"text": "a"}]}},
        {"citationsContent": {"content": [], "citations": []}},
        {"reasoningContent": {"redactedContent": "aGk="}},
        {"toolResult": {"toolUseId": "1", "content": [{"text": "a"}, {"image": BYTES}]}},
    ],
    ids=lambda block: next(iter(block)),
)
def test_non_text_block_needs_token_count(block: Any) -> None:
    found = asked(said({"text": "a"}, block))
    assert found.needs_count
    assert found.input_tokens == UNCOUNTED_TOKENS
    assert found.pico > 10**20
    known = apply_count(found, PRICES, 5000)
    assert not known.needs_count
    assert 5000 * 1.01 < known.input_tokens < 5000 * 1.02 + 1001
    assert known.pico == (known.input_tokens * 6 + 100 * 15) * 10**6
    assert (known.body, known.output_tokens) == (found.body, 100)


def test_count_of_tokens_keeps_cost_of_pieces() -> None:
    prices = PRICES._replace(piece_prices={"routed_request": 7})
    body = said({"image": BYTES})
    plain, with_fee = (apply_count(asked(body, prices=each), each, 5000).pico for each in (PRICES, prices))
    assert with_fee == plain + 7


@pytest.mark.parametrize("count", [-1, 1.0, True, None, "5"])
def test_invalid_token_count_is_refused(count: Any) -> None:
    with pytest.raises(InvalidRequest):
        apply_count(asked(said({"image": BYTES})), PRICES, count)


def claude(*blocks: Any, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [{"role": "user", "content": list(blocks)}], **more}


@pytest.mark.parametrize(
    "body",
    [
        claude({"type": "image", "source": DATA}),
        claude({"type": "document", "source": {"type": "text", "data": "a"}, "citations": {"enabled": True}}),
        claude({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}}),
        claude({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": DATA}]}),
        claude({"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "a"}]}),
        claude({"type": "redacted_thinking", "data": "x"}),
        claude({"type": "text", "text": "a", "citations": [{}]}),
        claude(tools=[{"type": "bash_20250124", "name": "bash"}]),
    ],
)
def test_non_text_block_in_claude_body_needs_token_count(body: Any) -> None:
    assert asked(body, INVOKE).needs_count
    assert asked(body, Operation.INVOKE_STREAM).needs_count


def test_chat_completions_with_images_are_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [image]}]}
    assert asked(body, INVOKE, "mistral").needs_count
    assert "CountTokens" in refusal({**body, "model": "x"}, CHAT, "openai")


USE = {"toolUseId": "1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("operation", "format", "body"),
    [
        (CONVERSE, "anthropic", said({"image": S3})),
        (CONVERSE, "nova", said({"video": S3})),
        (CONVERSE, "anthropic", said({"image": {}})),
        (CONVERSE, "anthropic", said({"hologram": {}})),
        (CONVERSE, "anthropic", said({"Text": "a"})),
        (CONVERSE, "anthropic", said({"text": "a", "more": 1})),
        (CONVERSE, "anthropic", said({"toolUse": {**USE, "type": "server_tool_use"}})),
        (CONVERSE, "anthropic", said({"toolResult": {"toolUseId": "1", "content": [{"image": S3}]}})),
        (CONVERSE, "anthropic", {**said({"text": "a"}), "promptVariables": {"a": {"text": "b"}}}),
        (CONVERSE, "anthropic", {**said({"text": "a"}), "somethingNew": 1}),
        (CONVERSE, "nova", {**said({"text": "a"}), "toolConfig": {"tools": [{"systemTool": {"name": "web"}}]}}),
        (CONVERSE, "martian", said({"text": "a"})),
        (INVOKE, "", claude()),
        (INVOKE, "anthropic", claude({"type": "image", "source": {"type": "url", "url": "http://a"}})),
        (INVOKE, "anthropic", claude({"type": "document", "source": {"type": "file", "file_id": "f"}})),
        (INVOKE, "anthropic", claude({"type": "server_tool_use", "id": "1", "name": "a", "input": {}})),
        (INVOKE, "anthropic", claude({"type": "container_upload"})),
        (INVOKE, "anthropic", claude({"type": ["text"]})),
        (INVOKE, "anthropic", claude({"text": "a"})),
        (INVOKE, "anthropic", claude(tools=[{"type": "web_search_20250305", "name": "web_search"}])),
        (INVOKE, "anthropic", claude(tools=[{"type": "code_execution_20250825"}])),
        (INVOKE, "anthropic", claude(tools=[{"name": "a", "allowed_callers": ["code_execution_20250825"]}])),
        (INVOKE, "anthropic", claude(mcp_servers=[])),
        (INVOKE, "anthropic", claude(container="c")),
        (INVOKE, "anthropic", claude(speed="fast")),
        (INVOKE, "anthropic", claude(context_management={"edits": [{"type": "compact_20260112"}]})),
        (INVOKE, "openai", {"messages": [], "max_tokens": 1, "web_search_options": {}}),
        (INVOKE, "openai", {"messages": [], "max_tokens": 1, "prediction": {}}),
        (INVOKE, "openai", {"messages": [], "max_tokens": 1, "tools": [{"type": "mcp"}]}),
        (INVOKE, "cohere", {"message": "a", "max_tokens": 1, "connectors": [{"id": "web-search"}]}),
        (INVOKE, "cohere", {"images": ["data:"], "input_type": "image"}),
        (INVOKE, "titan", {"inputImage": "aGk="}),
        (INVOKE, "titan", {"inputText": ["a"]}),
        (INVOKE, "nova", {"taskType": "TEXT_IMAGE"}),
        (Operation.INVOKE_BIDIRECTIONAL, "nova", {}),
    ],
)
def test_unknown_field_is_refused(operation: Operation, format: str, body: Any) -> None:
    assert refusal(body, operation, format)


def test_image_by_url_is_refused() -> None:
    for image in ({"url": "https://a/b.png"}, "https://a/b.png", {}, None):
        content = [{"type": "image_url", "image_url": image}]
        refusal({"max_tokens": 9, "messages": [{"role": "user", "content": content}]}, INVOKE, "mistral")


def test_usual_claude_client_fields_are_known() -> None:
    marked = {"type": "ephemeral", "ttl": "1h"}
    body = claude(
        {"type": "text", "text": "a", "cache_control": marked},
        {"type": "thinking", "thinking": "b", "signature": "c"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}},
        {"type": "tool_result", "tool_use_id": "1", "content": "d", "is_error": False, "cache_control": marked},
        anthropic_version="bedrock-2023-05-31",
        anthropic_beta=["interleaved-thinking-2025-05-14"],
        system=[{"type": "text", "text": "e", "cache_control": marked}],
        tools=[{"name": "f", "description": "g", "input_schema": {"type": "object"}, "cache_control": marked}],
        tool_choice={"type": "auto"},
        thinking={"type": "adaptive"},
        metadata={"user_id": "h"},
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        output_config={"effort": "high"},
    )
    assert not asked(body, INVOKE).needs_count


def test_stored_prompt_is_refused() -> None:
    for operation in (CONVERSE, INVOKE):
        model = "arn:aws:bedrock:us-east-1:123456789012:prompt/ABCDEFGHIJ:1"
        assert "stored prompt" in refusal(said({"text": "a"}), operation, model=model)


# ---------------------------------------------------------------- bodies that are none


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"a"', b"1", b"{}}", b"\xef\xbb\xbf{}", b"{'a':1}", b'{"a":1,}', b'{"a":"\xff"}',
        '{"messages":[]}'.encode("utf-16"), b'{"messages":[{"role":"user","content":[{"text":"\\ud800"}]}]}',
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"messages":' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"messages":"a"}', b'{"messages":[1]}', b'{"messages":{}}', b'{"messages":[{"content":1}]}',
        b'{"inferenceConfig":[]}', b'{"inferenceConfig":"maxTokens"}', b'{"system":"a"}', b'{"toolConfig":[]}',
    ],
)  # fmt: skip
def test_body_without_messages_is_refused(body: bytes) -> None:
    refusal(body)


@pytest.mark.parametrize("depth", range(4))
def test_duplicate_key_is_refused(depth: int) -> None:
    hidden = '"a":{"image":1},"\\u0061":{"text":"b"}'
    for _ in range(depth):
        hidden = f'"x":[{{{hidden}}}]'
    assert "more than once" in refusal(f"{{{hidden}}}".encode())


def test_too_many_values_are_refused_without_building_objects() -> None:
    many = json.dumps(said({"text": "a"})).encode()
    for filler in (b"[],", b"{},", b"1,", b'"",'):
        values = many[:-1] + b',"x":[' + filler * (strict_json.MAX_VALUES + 1) + b"1]}"
        assert f"at most {strict_json.MAX_VALUES} values" in refusal(values)
    strings = many[:-1] + b',"x":[' + b'"",' * 500_000 + b"1]}"
    tracemalloc.start()
    refusal(strings)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * len(strings)
    text = ', [{"\\' * strict_json.MAX_VALUES
    assert asked(said({"text": text})).input_tokens > len(text)


# ---------------------------------------------------------------- guardrails, jobs, and what is free

UNITS = {"topicPolicyUnits": 150, "contentPolicyUnits": 150, "contentPolicyImageUnits": 750, "wordPolicyUnits": 0,
         "automatedReasoningPolicyUnits": 170, "contextualGroundingPolicyUnits": 100, "promptAttack": 80}  # fmt: skip
GUARDED = PRICES._replace(unit_prices=UNITS)


def test_guardrail_in_model_call_is_refused() -> None:
    named = {**said({"text": "a"}), "guardrailConfig": {"guardrailIdentifier": "g", "guardrailVersion": "1"}}
    header = {b"x-amzn-bedrock-guardrailidentifier": b"g"}
    for message in (
        refusal(named, prices=GUARDED),
        refusal(claude({"type": "text", "text": "a"}), INVOKE, prices=GUARDED, headers=header),
        refusal({"model": "x", "messages": []}, CHAT, "openai", headers=header),
        refusal(json.dumps(named).replace("guardrailConfig", "\\u0067uardrailConfig").encode()),
    ):
        assert "ApplyGuardrail" in message
    assert asked({**said({"text": "a"}), "guardrailConfig": None}).pico


def test_applied_guardrail_is_bounded_by_bytes_of_text() -> None:
    texts = ["a" * 999, "é" * 2001, "b"]
    body = {"source": "INPUT", "content": [{"text": {"text": text}} for text in texts]}
    found = asked(body, Operation.APPLY_GUARDRAIL, prices=GUARDED)
    units = dict.fromkeys(UNITS, 1 + 3 + 1)  # each block counted by itself
    assert found.pico >= price_guardrail(UNITS, {**units, "automatedReasoningPolicies": 2}).pico
    alone = asked(
        body, Operation.APPLY_GUARDRAIL, prices=PRICES._replace(unit_prices={"automatedReasoningPolicyUnits": 170})
    )
    most = {"automatedReasoningPolicyUnits": 5, "automatedReasoningPolicies": cost_ceiling.MAX_REASONING_POLICIES}
    assert alone.pico >= price_guardrail({"automatedReasoningPolicyUnits": 170}, most).pico
    assert found.body == json.dumps(body).encode()
    refusal(body, Operation.APPLY_GUARDRAIL)
    refusal({"content": 5}, Operation.APPLY_GUARDRAIL, prices=GUARDED)


def test_applied_guardrail_checks_are_bounded() -> None:
    body = {"messages": [{"role": "user", "content": [{"text": "a" * 1001}] * 3}], "checks": {}}
    found = asked(body, Operation.CHECK_GUARDRAILS, prices=GUARDED)
    assert found.pico >= price_guardrail(UNITS, dict.fromkeys(UNITS, 6)).pico
    for corrupted in ({"messages": 5}, {"messages": [5]}, {"messages": [{"content": 5}]}):
        refusal(corrupted, Operation.CHECK_GUARDRAILS, prices=GUARDED)


def test_asynchronous_job_costs_its_fixed_price() -> None:
    assert asked(b"anything", Operation.ASYNC_INVOKES, prices=PRICES._replace(job_price=7)).pico == 7
    assert "price_usd_per_async_job" in refusal(b"{}", Operation.ASYNC_INVOKES)


@pytest.mark.parametrize("operation", [Operation.COUNT_TOKENS, Operation.ASYNC_INVOKE])
def test_free_operation_needs_no_ceiling(operation: Operation) -> None:
    assert asked(b"anything", operation) == CostCeiling(0, 0, 0, b"anything")


TIERED = replace(
    PLAIN,
    service_tiers={"priority": TierPrices(Decimal(9), Decimal(40))},
    latency_optimized=TierPrices(Decimal(4), Decimal(20)),
)


@pytest.mark.parametrize(
    ("operation", "more", "headers"),
    [
        (CONVERSE, {"serviceTier": {"type": "priority"}}, {}),
        (CONVERSE, {"serviceTier": "priority"}, {}),
        (CONVERSE, {"performanceConfig": {"latency": "optimized"}}, {}),
        (CONVERSE, {}, {b"x-amzn-bedrock-service-tier": b"Priority"}),
        (CONVERSE, {"serviceTier": {"type": "priority"}}, {b"x-amzn-bedrock-service-tier": b"default"}),
        (CONVERSE, {}, {b"x-amzn-bedrock-performanceconfig-latency": b"optimized"}),
        (CHAT, {"service_tier": "priority"}, {}),
    ],
)
def test_requested_tier_or_mode_without_a_price_is_refused(
    operation: Operation, more: dict[str, Any], headers: dict[bytes, bytes]
) -> None:
    """Its answer would be charged at the dearest known price, and AWS may ask for more."""
    body = said({"text": "a"}) if operation is CONVERSE else {"messages": [{"role": "user", "content": "a"}]}
    price_tables = [build_price_table(TIERED), build_price_table(PLAIN)]
    assert "has no price here" in refusal(
        body | more, operation, "openai", cost_ceiling.CallPrices(price_tables), headers=headers
    )
    assert asked(body | more, operation, "openai", cost_ceiling.CallPrices(price_tables[:1]), headers=headers).pico


@pytest.mark.parametrize(
    ("operation", "more"),
    [
        (CHAT, {"service_tier": ["priority"]}),
        (CHAT, {"service_tier": {"type": "priority"}}),
        (CHAT, {"service_tier": 1}),
        (CONVERSE, {"serviceTier": ["priority"]}),
        (CONVERSE, {"serviceTier": [{"type": "priority"}]}),
        (CONVERSE, {"serviceTier": 1}),
        (CONVERSE, {"serviceTier": True}),
        (CONVERSE, {"serviceTier": {"type": ["priority"]}}),
        (CONVERSE, {"performanceConfig": {"latency": ["optimized"]}}),
        (CONVERSE, {"performanceConfig": ["optimized"]}),
    ],
)
def test_tier_or_mode_that_is_no_name_is_refused(operation: Operation, more: dict[str, Any]) -> None:
    """It would count as the default, and what Bedrock makes of it is not known."""
    body = said({"text": "a"}) if operation is CONVERSE else {"messages": [{"role": "user", "content": "a"}]}
    assert "is text or left out; found" in refusal(body | more, operation, "openai")
    assert asked(body | dict.fromkeys(more), operation, "openai").pico


@pytest.mark.parametrize("tier", ["default", "standard", "auto", ""])
def test_ordinary_tier_needs_no_price_of_its_own(tier: str) -> None:
    assert asked(said({"text": "a"}) | {"serviceTier": {"type": tier}}).pico


def test_priced_tier_in_a_priced_mode_has_no_price_together() -> None:
    more = {"serviceTier": {"type": "priority"}, "performanceConfig": {"latency": "optimized"}}
    message = refusal(said({"text": "a"}) | more, prices=cost_ceiling.CallPrices([build_price_table(TIERED)]))
    assert "service tier 'priority' with latency mode 'optimized'" in message


def test_usage_kind_known_only_from_response_is_within_ceiling() -> None:
    """Charged at the dearest there is, which the bound has to know."""
    for more in ({"cache_write_1h": None}, {"cache_read": None, "cache_write_5m": Decimal(0)}):
        tariff = build_price_table(replace(PLAIN, **more))  # type: ignore[arg-type]
        found = asked(said({"text": "a"}), prices=cost_ceiling.CallPrices([tariff]))
        for kind in ("input", "cache_read", "cache_write_5m", "cache_write_1h"):
            for tier in ("", "reserved", "unheard of"):
                usage = Usage(output=100, tier=tier)._replace(**{kind: found.input_tokens})
                assert price_usage(tariff, usage).pico <= found.pico


# ---------------------------------------------------------------- what is sold by the piece

FREE_TOKENS = build_price_table(PricesConfig(Decimal(0), Decimal(0)))
PIECES = cost_ceiling.CallPrices(
    [FREE_TOKENS], piece_prices={"search_unit": 2, "image": 70, "image_1024_standard": 40, "video_second": 8}
)
PICTURES = {"taskType": "TEXT_IMAGE", "textToImageParams": {"text": "a fox"}}


@pytest.mark.parametrize(
    ("body", "format", "pico"),
    [
        ({"query": "a", "documents": ["b"] * 101}, "cohere", 4),
        ({"query": "a", "documents": ["b" * 500] * 99}, "titan", 4),
        (PICTURES | {"imageGenerationConfig": {"numberOfImages": 5}}, "nova", 200),
        (PICTURES | {"imageGenerationConfig": {"numberOfImages": 5, "quality": "premium"}}, "titan", 350),
        ({"taskType": "INPAINTING", "inPaintingParams": {"image": "aGk="}}, "nova", 70),
    ],
)
def test_ceiling_has_every_piece_that_is_asked_for(body: dict[str, Any], format: str, pico: int) -> None:
    assert asked(body, INVOKE, format, PIECES).pico == pico


def test_ceiling_of_piece_of_unknown_size_is_the_dearest_of_its_kind() -> None:
    prices = PIECES._replace(piece_prices={"image": 40, "image_2048_premium": 80})
    edited = {"taskType": "INPAINTING", "imageGenerationConfig": {"quality": "premium"}}
    assert asked(edited, INVOKE, "nova", prices).pico == 80


def test_pieces_in_a_number_that_is_not_understood_are_refused() -> None:
    body = PICTURES | {"imageGenerationConfig": {"numberOfImages": "five"}}
    assert "numberOfImages" in refusal(body, INVOKE, "nova", prices=PIECES)
    length = {"modelInput": {"videoGenerationConfig": {"durationSeconds": "120.0"}}}
    assert "durationSeconds" in refusal(length, Operation.ASYNC_INVOKES, prices=PIECES._replace(job_price=9))


def test_request_in_unknown_form_is_refused_where_tokens_are_free() -> None:
    assert "pieces" in refusal({"messages": []}, INVOKE, "nova", prices=PIECES._replace(piece_prices={"image": 7}))


def test_ceiling_of_job_has_no_routers_fee() -> None:
    prices = PIECES._replace(piece_prices={"routed_request": 1}, job_price=9)
    assert asked({"modelId": "m"}, Operation.ASYNC_INVOKES, prices=prices).pico == 9


def test_pieces_without_a_price_are_refused() -> None:
    assert "prices_usd_per_unit" in refusal(PICTURES, INVOKE, "nova")
    assert "prices_usd_per_unit" in refusal({"query": "a", "documents": ["b"]}, INVOKE, "cohere")


def test_search_whose_query_is_too_long_to_bound_is_refused() -> None:
    assert "query" in refusal({"query": "a" * 300, "documents": ["b" * 500]}, INVOKE, "cohere", prices=PIECES)


def test_ceiling_of_job_is_its_seconds_or_its_one_price() -> None:
    seconds = {"modelId": "m", "modelInput": {"videoGenerationConfig": {"durationSeconds": 6}}}
    assert asked(seconds, Operation.ASYNC_INVOKES, prices=PIECES).pico == 48
    assert asked({"modelId": "m"}, Operation.ASYNC_INVOKES, prices=PIECES._replace(job_price=9)).pico == 9
    assert "price" in refusal({"modelId": "m"}, Operation.ASYNC_INVOKES, prices=PIECES)
