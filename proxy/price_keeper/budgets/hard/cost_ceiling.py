"""The cost ceiling of a request in pico-dollars: all its input at the highest price of any kind, and its longest
output. Pure.

What cannot be bounded is refused with InvalidRequest. An answer never costs more than the ceiling, whatever service
tier, latency mode or cache it reports. If a request does not limit its output, the label's `max_output_tokens` is
written into the body; the rest of the body stays as the caller sent it. Start with `compute_ceiling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from price_keeper.budgets.hard.request_forms import MemberPath, RequestForm, find_form
from price_keeper.budgets.hard.strict_json import StrictBody, parse_strict
from price_keeper.budgets.hard.token_bound import (
    REQUEST_TOKENS,
    TokenBound,
    build_unbounded_error,
    quote_name,
    read_members,
    require_list,
    require_object,
)
from price_keeper.domain import CostCeiling
from price_keeper.errors import InvalidRequest
from price_keeper.operations import BodyForm, Charge, Operation, find_operations
from price_keeper.upstream import json_splice
from price_keeper.usage.guardrail_usage import CHARACTERS_PER_UNIT, estimate_request_units
from price_keeper.usage.model_families import LATENCY_HEADER, MAX_TOKENS, TIER_HEADER, normalize_name, normalize_tier
from price_keeper.usage.price_table import PriceTable, price_units
from price_keeper.usage.unit_usage import NO_QUANTITIES, NO_UNITS, read_request

# Stands for a count that CountTokens has yet to return. No budget is that large, so a call whose count was never
# requested is refused.
UNCOUNTED_TOKENS = 10**15
# Bedrock counts what the same input would be charged; Anthropic calls its own count an estimate that differs slightly.
COUNT_MARGIN_SHARE = 50  # one part in so many
# Automated reasoning policies that a guardrail may have, each charged for every unit. AWS allows two.
MAX_REASONING_POLICIES = 4
_REASONING_POLICY = "automatedReasoningPolicyUnits"
LABEL_LIMIT_SETTING = "max_output_tokens"
_THINKING = ("thinking", "reasoning_config")  # the members that limit Claude's thinking within an answer
_THINKING_BUDGET = "budget_tokens"

_FREE_OPERATIONS = find_operations(charge=Charge.NOTHING)
_COUNTABLE_OPERATIONS = find_operations(BodyForm.CONVERSE) | find_operations(BodyForm.INVOKE)
_TOKEN_OPERATIONS = find_operations(charge=Charge.TOKENS)


class CallPrices(NamedTuple):
    """The prices that a call of a label may be charged at: the price tables of all its targets, the units of
    guardrails, an asynchronous job, what the label sells by the piece."""

    price_tables: Sequence[PriceTable]
    unit_prices: Mapping[str, int] | None = None
    job_price: int | None = None
    piece_prices: Mapping[str, int] = NO_QUANTITIES


def compute_ceiling(
    operation: Operation,
    format: str,
    body: bytes,
    headers: Mapping[bytes, bytes],
    prices: CallPrices,
    label_max_output: int | None,
    model: str = "",
) -> CostCeiling:
    """The cost ceiling of a request. `model` is the id that is called. Raises InvalidRequest."""
    if operation in _TOKEN_OPERATIONS:
        return _bound_tokens(operation, format, body, headers, prices, label_max_output, model)
    if operation in _FREE_OPERATIONS:
        return CostCeiling(0, 0, 0, body)
    if operation is Operation.ASYNC_INVOKES:
        pieces = _bound_pieces(operation, parse_strict(body), prices) if prices.piece_prices else 0
        if not pieces and prices.job_price is None:
            raise InvalidRequest("asynchronous jobs have no price here: price_usd_per_async_job in config.yaml")
        return CostCeiling(pieces or prices.job_price or 0, 0, 0, body)
    if operation is Operation.APPLY_GUARDRAIL:
        return _bound_units(body, _count_applied_blocks, prices)
    if operation is Operation.CHECK_GUARDRAILS:
        return _bound_units(body, _count_checked_blocks, prices)
    raise build_unbounded_error(f"the operation {operation.value}")


def apply_count(ceiling: CostCeiling, prices: CallPrices, tokens: int) -> CostCeiling:
    """The ceiling with the input tokens that CountTokens returned, which may be lower than a bound computed without
    them."""
    if type(tokens) is not int or tokens < 0:
        raise build_unbounded_error("the input", "Bedrock's count of it is no number")
    input_tokens = tokens + tokens // COUNT_MARGIN_SHARE + REQUEST_TOKENS
    pico = compute_max_cost(prices.price_tables, input_tokens, ceiling.output_tokens) + ceiling.piece_pico
    return ceiling._replace(pico=pico, input_tokens=input_tokens, needs_count=False)


def compute_max_cost(price_tables: Sequence[PriceTable], input_tokens: int, output_tokens: int) -> int:
    """A token of input is charged once: as new, as read from a cache, or as written to one."""
    if not price_tables:
        raise ValueError("no price tables: a label has at least one target")
    return max(_compute_cost(table.highest_prices, input_tokens, output_tokens) for table in price_tables)


def _compute_cost(prices: tuple[int, ...], input_tokens: int, output_tokens: int) -> int:
    new, output, *cached = prices
    return input_tokens * max(new, *cached) + output_tokens * output


def _bound_tokens(
    operation: Operation,
    format: str,
    body: bytes,
    headers: Mapping[bytes, bytes],
    prices: CallPrices,
    label_max_output: int | None,
    model: str,
) -> CostCeiling:
    if estimate_request_units(operation, headers, body):
        why = "its units depend on the characters of the answer, which no maximum of tokens limits; use ApplyGuardrail"
        raise build_unbounded_error("a guardrail in a call of a model", why)
    parsed = parse_strict(body)
    form = find_form(operation, format, model, parsed.document)
    bound = measure_input(form, parsed)
    _check_requested_prices(parsed.document, headers, prices.price_tables)
    output_tokens, body = cap_output(form, parsed.document, body, label_max_output)
    input_tokens, needs_count = bound.tokens, bool(bound.uncounted)
    if needs_count:
        if operation not in _COUNTABLE_OPERATIONS or not form.caps:
            raise build_unbounded_error(
                bound.uncounted, "only text is known by its bytes, and CountTokens has no form for this call"
            )
        input_tokens = UNCOUNTED_TOKENS
    pico = compute_max_cost(prices.price_tables, input_tokens, output_tokens)
    piece_pico = _bound_pieces(operation, parsed, prices, is_required=form.is_sold_by_piece)
    piece_pico += prices.piece_prices.get("routed_request", 0)
    return CostCeiling(pico + piece_pico, input_tokens, output_tokens, body, needs_count, piece_pico)


def _bound_pieces(operation: Operation, parsed: StrictBody, prices: CallPrices, *, is_required: bool = False) -> int:
    """The cost of what the request asks for of what is sold by the piece."""
    requested = NO_UNITS
    if prices.piece_prices:
        are_tokens_free = operation in _TOKEN_OPERATIONS and not any(
            any(each.highest_prices) for each in prices.price_tables
        )
        requested = read_request(operation, parsed.canonical, prices.piece_prices, are_tokens_free=are_tokens_free)
    if is_required and not requested.quantities:
        raise build_unbounded_error("this call", "it is sold by the piece and has no price here: prices_usd_per_unit")
    if not requested.is_bounded:
        why = "how many pieces it uses is not known: its form is not known here, or its query is too long"
        raise build_unbounded_error("this call", why)
    return price_units(prices.piece_prices, requested.quantities).pico


def _check_requested_prices(
    document: Mapping[str, Any], headers: Mapping[bytes, bytes], price_tables: Sequence[PriceTable]
) -> None:
    """Refuse a request for a service tier or latency mode without a price. Its answer would be charged at the dearest
    known price, and AWS may ask for more."""
    tiers = (
        headers.get(TIER_HEADER),
        _require_name(document.get("service_tier"), "service_tier"),
        _read_inner_name(document, "serviceTier", "type"),
    )
    latencies = (headers.get(LATENCY_HEADER), _read_inner_name(document, "performanceConfig", "latency"))
    for tier in map(normalize_tier, tiers):
        for latency in map(normalize_name, latencies):
            if any(table.prices_for(tier, latency) is None for table in price_tables):
                asked = [("service tier", tier), ("latency mode", latency)]
                what = " with ".join(f"{kind} {quote_name(name)}" for kind, name in asked if name)
                raise build_unbounded_error(what, "it has no price here")


def _read_inner_name(document: Mapping[str, Any], name: str, inner_name: str) -> str | None:
    value = document.get(name)
    if type(value) is dict:
        return _require_name(value.get(inner_name), f"{name}.{inner_name}")
    return _require_name(value, name)


def _require_name(value: Any, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise InvalidRequest(f"this budget is hard: {name} is text or left out; found {_quote_value(value)}")


# Units of guardrails.


def _bound_units(body: bytes, count_blocks: Any, prices: CallPrices) -> CostCeiling:
    """Each block may begin a unit, and each policy may be charged for all units."""
    if not prices.unit_prices:
        raise InvalidRequest("guardrails have no prices here: guardrails.prices_usd_per_1000_units in config.yaml")
    parsed = parse_strict(body)
    units = len(parsed.canonical) // CHARACTERS_PER_UNIT + 1 + count_blocks(parsed)
    dearest = max(prices.unit_prices.values())
    unit_price = sum(prices.unit_prices.values()) + (MAX_REASONING_POLICIES - 1) * prices.unit_prices.get(
        _REASONING_POLICY, dearest
    )
    return CostCeiling(units * unit_price, 0, 0, body)


def _count_applied_blocks(parsed: StrictBody) -> int:
    return len(require_list(parsed.document.get("content"), "blocks"))


def _count_checked_blocks(parsed: StrictBody) -> int:
    messages = require_list(parsed.document.get("messages"), "messages")
    contents = (require_object(message, "a message").get("content") for message in messages)
    return sum(len(require_list(content, "blocks")) for content in contents)


def measure_input(form: RequestForm, parsed: StrictBody) -> TokenBound:
    """The bound of the input's tokens. Raises InvalidRequest for content that is not known to be bounded."""
    bound = TokenBound(parsed.canonical)
    read_members(bound, parsed.document, form.members, "the body")
    return bound


Json = Mapping[str, Any]


class CappedBody(NamedTuple):
    """The most output tokens of all answers, and the body that limits them."""

    tokens: int
    body: bytes


def cap_output(form: RequestForm, document: Json, body: bytes, label_max: int | None) -> CappedBody:
    """Limit the output: by the request's own limit, or by the label's, written into the body. `document` is the parsed
    body, and has passed `measure_input`. Raises InvalidRequest."""
    if not form.caps:
        return CappedBody(0, body)
    limits, null_paths = _read_limits(form.caps, document)
    if limits:
        limit = max(limits)
    else:
        limit = _require_label_limit(form, label_max)
        null_paths = null_paths or [form.caps[0]]
    for path in null_paths:
        body = _write_limit(body, path, limit)
    answer_count = _count_answers(form, document)
    _check_thinking(document, limit)
    if form.inner_form is not None and document.get(form.additional_member):
        additional: Json = document[form.additional_member]
        _check_thinking(additional, limit)
        limit = max(limit, _read_additional_limit(form.inner_form, additional))
        answer_count *= _count_answers(form.inner_form, additional)
    return CappedBody(limit * answer_count, body)


def _read_limits(caps: tuple[MemberPath, ...], document: Json) -> tuple[list[int], list[MemberPath]]:
    """The limits in the document, and the paths with null in the place of a limit, which a model may take for no
    limit."""
    limits, null_paths = [], []
    for path in caps:
        place: Any = document
        for name in path[:-1]:
            place = place.get(name) or {}
        if path[-1] in place:
            value = place[path[-1]]
            if value is None:
                null_paths.append(path)
            else:
                limits.append(_require_whole(value, ".".join(path)))
    return limits, null_paths


def _read_additional_limit(form: RequestForm, additional: Json) -> int:
    """The limit of the additional fields. Which of two limits a model applies is unknown, so the caller takes the
    larger one."""
    limits, null_paths = _read_limits(form.caps, additional)
    if null_paths:
        raise InvalidRequest(f"{'.'.join(null_paths[0])} is a whole number of at least 1, or left out; found null")
    return max(limits, default=0)


def _count_answers(form: RequestForm, document: Json) -> int:
    """How many answers the request asks for."""
    count = 1
    for name in form.answer_counts:
        if document.get(name) is not None:
            count *= _require_whole(document[name], name)
    return count


def _check_thinking(document: Json, limit: int) -> None:
    """Thinking is part of the answer. With a thinking budget above the limit, the limit might not hold."""
    for name in _THINKING:
        thinking = document.get(name)
        if thinking is None:
            continue
        if type(thinking) is not dict:
            raise InvalidRequest(f"{name} in the body is no object")
        if thinking.get(_THINKING_BUDGET) is not None:
            budget = _require_whole(thinking[_THINKING_BUDGET], f"{name}.{_THINKING_BUDGET}")
            if budget >= limit:
                raise InvalidRequest(
                    f"this budget is hard: {name}.{_THINKING_BUDGET} has to be less than the most tokens of the "
                    f"answer, which are {limit} here; found {budget}"
                )


def _require_whole(value: Any, name: str) -> int:
    if type(value) is int and 1 <= value <= MAX_TOKENS:
        return value
    raise InvalidRequest(
        f"this budget is hard: {name} is a whole number of 1 to {MAX_TOKENS}, found {_quote_value(value)}"
    )


def _quote_value(value: Any) -> str:
    return quote_name(value) if isinstance(value, str) else quote_name(orjson.dumps(value).decode())


def _require_label_limit(form: RequestForm, label_max: int | None) -> int:
    if label_max is None:
        name = ".".join(form.caps[0])
        raise InvalidRequest(
            f"this budget is hard, so a request has to say how long its answer may be: add {name} to it, "
            f"or have {LABEL_LIMIT_SETTING} set for the label in config.yaml, which is put in where it is left out"
        )
    return label_max


def _write_limit(body: bytes, path: MemberPath, limit: int) -> bytes:
    try:
        return _set_member(body, path, b"%d" % limit)
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None


def _set_member(data: bytes, path: MemberPath, value: bytes) -> bytes:
    name = path[0]
    splice = json_splice.find_members(data, (name,))
    span = splice.spans.get(name)
    if len(path) > 1:
        inner = b"{}" if span is None or data[slice(*span)] == b"null" else data[slice(*span)]
        value = _set_member(inner, path[1:], value)
    return (
        json_splice.add_member(data, splice, name, value)
        if span is None
        else json_splice.replace_span(data, span, value)
    )
