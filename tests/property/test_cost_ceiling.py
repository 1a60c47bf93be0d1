"""No answer costs more than was set aside for it: random requests of every family, answered and counted by the
simulator and priced as calls are; and whatever a body holds, it is bounded or refused, and nothing else.
"""

from __future__ import annotations

import json
from contextlib import suppress
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import orjson
import pytest
from bedrock_simulator.fault_spec import FaultSpec
from bedrock_simulator.routes import find_route
from bedrock_simulator.service import Service
from bedrock_simulator.simulated_call import SimulatedCall, SimulatedResponse
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict
from price_keeper.budgets.hard import cost_ceiling
from price_keeper.budgets.hard.cost_ceiling import apply_count, compute_ceiling
from price_keeper.config.config_sections import LongContext, PricesConfig, TierPrices
from price_keeper.domain import CostCeiling
from price_keeper.errors import InvalidRequest
from price_keeper.operations import Operation
from price_keeper.usage.guardrail_usage import price_guardrail
from price_keeper.usage.price_table import build_price_table, price_usage
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.usage_reader import build_reader

from tests.support.clock import ManualClock
from tests.support.effort import tries

LABEL = 300
TARIFF = build_price_table(
    PricesConfig(
        *(Decimal(usd) for usd in ("3", "15", "0.3", "3.75")),
        service_tiers=MappingProxyType({"flex": TierPrices(Decimal(1), Decimal(40))}),
        long_context=LongContext(Decimal(6), Decimal(22), above_input_tokens=1000),
    )
)
UNITS = {"topicPolicyUnits": 150, "contentPolicyUnits": 150, "contentPolicyImageUnits": 750, "wordPolicyUnits": 0,
         "sensitiveInformationPolicyUnits": 100, "contentFilter": 70, "promptAttack": 80,
         "sensitiveInformation": 100}  # fmt: skip
PRICES = cost_ceiling.CallPrices([TARIFF], UNITS)
NAMES = {
    Operation.CONVERSE: "converse",
    Operation.CONVERSE_STREAM: "converse-stream",
    Operation.INVOKE: "invoke",
    Operation.INVOKE_STREAM: "invoke-with-response-stream",
}

# ---------------------------------------------------------------- requests

words = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    st.sampled_from(["hello there", "\ufdfa", '{"a": [1, 2]}', '\\"\n', "天地玄黄", "😀"]),
    st.integers(1, 900).map("word ".__mul__),
)
numbers = st.none() | st.integers(1, 500)
free = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
inputs = st.dictionaries(words, free, max_size=3)


def some(**members: Any) -> st.SearchStrategy[dict[str, Any]]:
    """An object with some of these."""
    return st.fixed_dictionaries({}, optional=members)


def turns(user: Any, assistant: Any, role: str = "role", said: str = "content") -> Any:
    pair = st.tuples(
        st.builds(lambda each: {role: "user", said: each}, user),
        st.builds(lambda each: {role: "assistant", said: each}, assistant),
    )
    last = st.builds(lambda each: {role: "user", said: each}, user)
    return st.builds(
        lambda pairs, end: [*(turn for pair in pairs for turn in pair), end], st.lists(pair, max_size=2), last
    )


def converse() -> Any:
    text = st.builds(lambda each: {"text": each}, words)
    mark = st.sampled_from([{"cachePoint": {"type": "default"}}])
    use = st.builds(lambda given: {"toolUse": {"toolUseId": "1", "name": "f", "input": given}}, inputs)
    results = st.lists(text | st.builds(lambda given: {"json": given}, inputs), max_size=2)
    result = st.builds(lambda given: {"toolResult": {"toolUseId": "1", "content": given}}, results)
    thought = st.builds(lambda each: {"reasoningContent": {"reasoningText": {"text": each, "signature": each}}}, words)
    specified = {"name": words, "description": words, "inputSchema": st.fixed_dictionaries({"json": inputs})}
    tool = st.fixed_dictionaries({"toolSpec": st.fixed_dictionaries(specified)})
    choice = st.sampled_from([{"auto": {}}, {"any": {}}])
    tools = st.fixed_dictionaries({"tools": st.lists(tool, min_size=1, max_size=3)}, optional={"toolChoice": choice})
    content = st.lists(text | result, min_size=1, max_size=3)
    messages = turns(
        st.builds(list.__add__, content, st.lists(mark, max_size=1)), st.lists(text | use | thought, min_size=1)
    )
    optional = {
        "system": st.lists(text, max_size=2),
        "toolConfig": tools,
        "inferenceConfig": some(maxTokens=numbers, stopSequences=st.just(["the"])),
        "serviceTier": st.sampled_from([{"type": "flex"}, {"type": "priority"}, {"type": "default"}]),
        "performanceConfig": st.sampled_from([{"latency": "optimized"}, {"latency": "standard"}]),
        "requestMetadata": st.just({"a": "b"}),
    }
    return st.fixed_dictionaries({"messages": messages}, optional=optional)


def claude() -> Any:
    marks = st.none() | st.just({"type": "ephemeral", "ttl": "1h"})
    text = st.builds(lambda each: {"type": "text", "text": each}, words)
    marked = st.builds(lambda each, mark: {"type": "text", "text": each, "cache_control": mark}, words, marks)
    use = st.builds(lambda given: {"type": "tool_use", "id": "1", "name": "f", "input": given}, inputs)
    result = st.builds(lambda each: {"type": "tool_result", "tool_use_id": "1", "content": each}, words)
    tool = st.fixed_dictionaries({"name": words, "description": words, "input_schema": inputs})
    messages = turns(words | st.lists(text | result, min_size=1), words | st.lists(text | use, min_size=1))
    optional = {
        "max_tokens": numbers,
        "system": words | st.lists(marked, min_size=1, max_size=2),
        "tools": st.lists(tool, max_size=2),
        "tool_choice": st.just({"type": "any"}),
    }
    return st.fixed_dictionaries(
        {"anthropic_version": st.just("bedrock-2023-05-31"), "messages": messages}, optional=optional
    )


def nova() -> Any:
    config = some(maxTokens=numbers, max_new_tokens=numbers, topK=st.just(5))
    kept = ("messages", "system", "toolConfig")
    return st.builds(
        lambda body, given: {**{name: body[name] for name in kept if name in body}, **given},
        converse(),
        some(inferenceConfig=config),
    )


def chat(*caps: str) -> Any:
    text = st.builds(lambda each: {"type": "text", "text": each}, words)
    function = st.fixed_dictionaries({"name": words, "parameters": inputs})
    tool = st.fixed_dictionaries({"type": st.just("function"), "function": function})
    messages = turns(words | st.lists(text, min_size=1), words)
    optional = {**dict.fromkeys(caps, numbers), "tools": st.lists(tool, max_size=2), "tool_choice": st.just("required")}
    return st.fixed_dictionaries({"messages": messages}, optional=optional)


def prompt(cap: str, name: str = "prompt") -> Any:
    return st.fixed_dictionaries({name: words}, optional={cap: numbers})


COMMAND = st.fixed_dictionaries(
    {"message": words},
    optional={
        "max_tokens": numbers,
        "chat_history": st.lists(st.fixed_dictionaries({"role": st.just("USER"), "message": words}), max_size=3),
        "documents": st.lists(inputs, max_size=3),
        "tools": st.lists(inputs, max_size=2),
        "preamble": words,
    },
)
TITAN = st.fixed_dictionaries({"inputText": words}, optional={"textGenerationConfig": some(maxTokenCount=numbers)})
EMBED = st.fixed_dictionaries({"texts": st.lists(words, min_size=1, max_size=5), "input_type": st.just("x")})

# The format of a label, its model, and what is sent to it with InvokeModel.
FAMILIES: dict[str, tuple[str, str, Any]] = {
    "claude": ("anthropic", "anthropic.claude-sonnet-4-5-20250929-v1:0", claude()),
    "nova": ("nova", "amazon.nova-lite-v1:0", nova()),
    "titan": ("titan", "amazon.titan-text-express-v1", TITAN),
    "titan embed": ("titan", "amazon.titan-embed-text-v2:0", prompt("dimensions", "inputText")),
    "llama": ("llama", "meta.llama3-70b-instruct-v1:0", prompt("max_gen_len")),
    "mistral": ("mistral", "mistral.mistral-7b-instruct-v0:2", prompt("max_tokens")),
    "pixtral": ("mistral", "us.mistral.pixtral-large-2502-v1:0", chat("max_tokens")),
    "command r": ("cohere", "cohere.command-r-plus-v1:0", COMMAND),
    "cohere embed": ("cohere", "cohere.embed-english-v3", EMBED),
    "jamba": ("ai21", "ai21.jamba-1-5-large-v1:0", chat("max_tokens")),
    "deepseek": ("deepseek", "us.deepseek.r1-v1:0", prompt("max_tokens")),
    "deepseek chat": ("deepseek", "deepseek.v3-v1:0", chat("max_tokens", "max_completion_tokens")),
    "gpt-oss": ("openai", "openai.gpt-oss-120b-1:0", chat("max_tokens", "max_completion_tokens")),
}
SPEAKERS = {name: family for name, family in FAMILIES.items() if "embed" not in name}


# ---------------------------------------------------------------- what the simulator makes of them

wishes = st.builds(
    FaultSpec,
    output_tokens=st.none() | st.just(10**6),
    tier=st.sampled_from(["", "flex", "priority"]),
    performance=st.sampled_from(["", "optimized"]),
)


def answered(path: str, body: bytes, wished: FaultSpec, times: int = 1) -> SimulatedResponse:
    """The last of several answers, when the first wrote what the others read from the cache."""
    route = find_route("POST", path)
    assert route is not None
    service = Service(ManualClock(), "us-east-1", min_cache_tokens=20)
    call = SimulatedCall(route, CIMultiDict({"Content-Type": "application/json"}), body, wished)
    for _ in range(times):
        answer = service.handle(call)
    return answer


def used_by(answer: SimulatedResponse, operation: Operation, format: str) -> Usage:
    """As metering reads it from the answer, where it tells more than nothing."""
    headers = {name.lower().encode(): value.encode() for name, value in answer.headers.items()}
    reader = build_reader(operation, format, answer.headers["Content-Type"].encode(), headers)
    for frame in [answer.body] if answer.frames is None else answer.frames:
        reader.feed(frame)
    usage = reader.usage()
    used = answer.usage
    assert usage is not None
    assert used is not None
    assert usage.output == used.output_tokens
    return usage


def spelt(body: dict[str, Any], way: int) -> bytes:
    return (orjson.dumps(body), json.dumps(body).encode(), json.dumps(body, ensure_ascii=False, indent=2).encode())[way]


def is_unpriced(body: dict[str, Any]) -> bool:
    """Whether it asks for a tier or mode that TARIFF does not have."""
    latency = body.get("performanceConfig", {}).get("latency", "")
    return TARIFF.prices_for(body.get("serviceTier", {}).get("type", ""), latency) is None


def check(operation: Operation, format: str, model: str, path: str, sent: bytes, wished: FaultSpec, times: int) -> None:
    if is_unpriced(json.loads(sent)):
        with pytest.raises(InvalidRequest):
            compute_ceiling(operation, format, sent, {}, PRICES, LABEL, model)
        return
    found = compute_ceiling(operation, format, sent, {}, PRICES, LABEL, model)
    usage = used_by(answered(path, found.body, wished, times), operation, format)
    whole = sum(usage[:5]) - usage.output
    assert whole <= found.input_tokens
    assert usage.output <= found.output_tokens
    assert price_usage(TARIFF, usage).pico <= found.pico
    by_count = apply_count(found, PRICES, whole)
    assert price_usage(TARIFF, usage).pico <= by_count.pico
    again = compute_ceiling(operation, format, found.body, {}, PRICES, None, model)
    assert (again.output_tokens, again.body) == (found.output_tokens, found.body)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("format", "model", "bodies"), FAMILIES.values(), ids=FAMILIES)
@settings(max_examples=tries(15), deadline=None)
@given(data=st.data(), way=st.integers(0, 2), wished=wishes, times=st.integers(1, 2))
def test_invocation_never_costs_more_than_ceiling(
    streams: bool, format: str, model: str, bodies: Any, data: Any, way: int, wished: FaultSpec, times: int
) -> None:
    operation = Operation.INVOKE_STREAM if streams and "embed" not in model else Operation.INVOKE
    body = data.draw(bodies)
    if "titan-embed" in model:
        body.pop("dimensions", None)
    check(operation, format, model, f"/model/{model}/{NAMES[operation]}", spelt(body, way), wished, times)


@pytest.mark.parametrize("operation", [Operation.CONVERSE, Operation.CONVERSE_STREAM])
@settings(max_examples=tries(100), deadline=None)
@given(
    body=converse(),
    family=st.sampled_from(list(SPEAKERS)),
    way=st.integers(0, 2),
    wished=wishes,
    times=st.integers(1, 2),
)
def test_conversation_never_costs_more_than_ceiling(
    operation: Operation, body: dict[str, Any], family: str, way: int, wished: FaultSpec, times: int
) -> None:
    format, model, _ = SPEAKERS[family]
    assume("cachePoint" not in json.dumps(body) or format in ("anthropic", "nova"))
    check(operation, format, model, f"/model/{model}/{NAMES[operation]}", spelt(body, way), wished, times)


@settings(max_examples=tries(60), deadline=None)
@given(chat("max_tokens", "max_completion_tokens"), st.integers(0, 2), wishes, st.booleans())
def test_chat_never_costs_more_than_ceiling(body: dict[str, Any], way: int, wished: FaultSpec, streams: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    sent = spelt({"model": "openai.gpt-oss-120b-1:0", **body, **more}, way)
    check(Operation.CHAT_COMPLETIONS, "openai", "", "/openai/v1/chat/completions", sent, wished, 1)


@settings(max_examples=tries(60), deadline=None)
@given(st.lists(words, min_size=1, max_size=5), st.integers(0, 2))
def test_guardrail_never_costs_more_than_ceiling(texts: list[str], way: int) -> None:
    applied = {"source": "INPUT", "content": [{"text": {"text": text}} for text in texts]}
    checked = {
        "messages": [{"role": "user", "content": [{"text": text} for text in texts]}],
        "checks": {"contentFilter": {"categories": []}, "promptAttack": {"categories": []}},
    }
    for operation, path, body in (
        (Operation.APPLY_GUARDRAIL, "/guardrail/abc/version/1/apply", applied),
        (Operation.CHECK_GUARDRAILS, "/guardrail-checks/invoke", checked),
    ):
        found = compute_ceiling(operation, "", spelt(body, way), {}, PRICES, None)
        used = answered(path, found.body, FaultSpec()).usage
        assert used is not None
        assert used.guardrail_units
        assert price_guardrail(UNITS, used.guardrail_units).pico <= found.pico


# ---------------------------------------------------------------- bodies that are spoilt

EVERY = [*(bodies for _, _, bodies in FAMILIES.values()), converse()]
OPERATIONS = list(Operation)
FORMATS = ("anthropic", "nova", "titan", "llama", "mistral", "cohere", "ai21", "deepseek", "openai", "")


def outcome(operation: Operation, format: str, body: bytes, label: int | None) -> CostCeiling | None:
    with suppress(InvalidRequest):
        return compute_ceiling(operation, format, body, {}, PRICES, label, "amazon.titan-embed-text-v2:0")
    return None


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    within = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for name, inner in within for found in places(inner, (*path, name)))]


def put(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], other)
    return copy


@settings(max_examples=tries(250), deadline=None)
@given(st.data(), st.sampled_from(OPERATIONS), st.sampled_from(FORMATS), st.sampled_from([None, LABEL]))
def test_corrupted_member_is_bounded_or_refused(
    data: Any, operation: Operation, format: str, label: int | None
) -> None:
    body = data.draw(st.one_of(EVERY))
    other = st.sampled_from([None, True, 0, -1, 1.5, "", "text", [], {}, [[]], [{}], {"type": []}, [None]]) | free
    for _ in range(data.draw(st.integers(1, 3))):
        body = put(body, data.draw(st.sampled_from(places(body))), data.draw(other))
    found = outcome(operation, format, json.dumps(body).encode(), label)
    if found is not None:
        assert found.pico >= 0
        assert found.output_tokens >= 0
        json.loads(found.body)


@settings(max_examples=tries(150), deadline=None)
@given(st.data(), st.sampled_from(OPERATIONS), st.sampled_from(FORMATS))
def test_corrupted_bytes_are_bounded_or_refused(data: Any, operation: Operation, format: str) -> None:
    body = bytearray(spelt(data.draw(st.one_of(EVERY)), data.draw(st.integers(0, 2))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b'"', b"\\", b"{"])
        )
    outcome(operation, format, bytes(body), LABEL)


@settings(max_examples=tries(100), deadline=None)
@given(free, st.integers(0, 2))
def test_text_of_body_is_within_counted_size(value: Any, way: int) -> None:
    """Of all strings in it together, and the same however they are spelt."""
    sizes = {cost_ceiling.parse_strict(spelt({"a": value}, each)).canonical for each in range(3)}

    def size(each: Any) -> int:
        if isinstance(each, str):
            return len(each.encode())
        inner = [*each, *each.values()] if isinstance(each, dict) else each if isinstance(each, list) else []
        return sum(map(size, inner))

    assert len(sizes) == 1
    assert size(value) <= len(sizes.pop()) <= len(spelt({"a": value}, way))
