"""What a call may cost at most: the body that is sent says so to every reader, and no plain count comes to more."""

from __future__ import annotations

from decimal import Decimal
from types import MappingProxyType
from typing import Any

from price_keeper.budgets.hard import cost_ceiling
from price_keeper.budgets.hard.cost_ceiling import apply_count, compute_ceiling
from price_keeper.config.config_sections import LongContext, PricesConfig, TierPrices
from price_keeper.domain import CostCeiling
from price_keeper.errors import InvalidRequest
from price_keeper.operations import Operation
from price_keeper.usage.price_table import build_price_table, price_usage
from price_keeper.usage.token_usage import Usage

from tests.fuzz.documents import document, pairs, views
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader

LABEL = 300
TARIFF = build_price_table(
    PricesConfig(
        *(Decimal(usd) for usd in ("3", "15", "0.3", "3.75")),
        service_tiers=MappingProxyType({"flex": TierPrices(Decimal(1), Decimal(40))}),
        long_context=LongContext(Decimal(6), Decimal(22), above_input_tokens=1000),
    )
)
UNITS = {"topicPolicyUnits": 150, "contentPolicyUnits": 150, "contentPolicyImageUnits": 750}
PRICES = cost_ceiling.CallPrices([TARIFF], UNITS, 7)
OPERATIONS = (Operation.INVOKE, Operation.CONVERSE, Operation.CHAT_COMPLETIONS, Operation.RESPONSES, *Operation)
FORMATS = ("anthropic", "nova", "titan", "llama", "mistral", "cohere", "ai21", "deepseek", "openai", "")
MODELS = ("anthropic.claude-v2:1", "amazon.titan-embed-text-v2:0", "")
OF_TOKENS = (Operation.INVOKE, Operation.INVOKE_STREAM, Operation.CONVERSE, Operation.CONVERSE_STREAM,
             Operation.CHAT_COMPLETIONS, Operation.RESPONSES)  # fmt: skip

CAPS = ("max_tokens", "maxTokens", "max_completion_tokens", "max_gen_len", "maxTokenCount", "max_new_tokens",
        "max_tokens_to_sample", "max_output_tokens")  # fmt: skip
TIMES = ("n", "num_generations", "numResults")  # fmt: skip
PLACES = ("inferenceConfig", "textGenerationConfig",
         "additionalModelRequestFields")  # fmt: skip
NAMES = (*CAPS, *TIMES, *PLACES, "messages", "role", "content", "text",
         "prompt", "inputText", "message", "system", "tools", "toolConfig", "toolSpec", "name", "description",
         "inputSchema", "json", "type", "thinking", "budget_tokens", "image", "source", "bytes", "toolUse",
         "toolResult", "input", "function", "parameters", "texts", "documents", "guardrailConfig", "stop_sequences",
         "anthropic_version", "requestMetadata", "serviceTier", "temperature", "cachePoint", "chat_history",
         "input_schema", "cache_control", "stream", "model", "instructions", "arguments", "output")  # fmt: skip
TEXTS = ("user", "text", "assistant", "a word or two", "function", "image", "custom", "tool_use", "tool_result",
         "default", "flex", "data:image/png;base64,AAAA", "clear_thinking")  # fmt: skip
WORDS = tuple(b'"%b":' % name.encode() for name in NAMES)


def one(data: bytes) -> None:
    reader = Reader(data)
    operation, format, model = reader.pick(OPERATIONS), reader.pick(FORMATS), reader.pick(MODELS)
    label = LABEL if reader.byte() % 2 else None
    body = document(reader, NAMES, TEXTS)
    try:
        found = compute_ceiling(operation, format, body, {}, PRICES, label, model)
    except InvalidRequest:
        return
    holds(found.pico >= 0 and found.output_tokens >= 0, f"less than nothing: {found}")
    if operation not in OF_TOKENS:
        same(found.body, body, "a body that says nothing of an answer's length")
        return
    first, last = views(found.body)
    same(first, last, "the body to two readers")
    _only_caps_differ(body, found)
    _says_its_length(found, first)
    _costs_no_more(found, first)
    again = compute_ceiling(operation, format, found.body, {}, PRICES, None, model)
    same((again.body, again.output_tokens), (found.body, found.output_tokens), "of the body that is sent")


def _only_caps_differ(body: bytes, found: CostCeiling) -> None:
    if found.body != body:
        same(_without_caps(pairs(found.body)), _without_caps(pairs(body)), "what is not ours")


def _without_caps(value: Any) -> Any:
    """At the top and one level below."""
    kept = []
    for name, inner in value:
        if name in PLACES and (inner is None or type(inner) is type(value)):
            inner = [member for member in inner or () if member[0] not in CAPS]
        if name not in CAPS and inner != []:
            kept.append((name, inner))
    return kept


def _says_its_length(found: CostCeiling, body: dict[str, Any]) -> None:
    """Of the limits that stand in it the largest, times the number of answers, is not beyond what is paid for."""
    if not found.output_tokens:
        return
    limits, times = _caps(body, 0), 1
    for name in TIMES:
        for place in (body, body.get(PLACES[2]) or {}):
            times *= place[name] if type(place.get(name)) is int else 1
    holds(limits, f"no limit is stated: {body}")
    holds(max(limits) * times <= found.output_tokens, f"{max(limits)} times {times} is more than {found.output_tokens}")


def _caps(place: dict[str, Any], depth: int) -> list[int]:
    limits = [place[name] for name in CAPS if type(place.get(name)) is int]
    inner = [place[name] for name in PLACES if isinstance(place.get(name), dict)] if depth < 2 else []
    return limits + [each for value in inner for each in _caps(value, depth + 1)]


def _costs_no_more(found: CostCeiling, body: dict[str, Any]) -> None:
    """With a token for each byte of each text, all new, or all read from a cache or written to one."""
    tokens = _text_bytes(body)
    if not found.needs_count:
        holds(tokens <= found.input_tokens, f"{tokens} bytes of text, and at most {found.input_tokens} tokens")
    for whole, pico in ((tokens, found.pico), (tokens, apply_count(found, PRICES, tokens).pico)):
        for tier in ("", "flex", "unheard of"):
            for kind in range(4):
                usage = Usage(*(whole * (each == kind) for each in (0, -1, 1, 2, 3)), tier)._replace(
                    output=found.output_tokens
                )
                holds(price_usage(TARIFF, usage).pico <= pico, f"{usage} costs more than {pico}")


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_text_bytes, inner))
