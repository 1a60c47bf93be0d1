"""What a request can cost at most, in pico-dollars: all its input at the dearest price of any kind, and all the output
that it may have. Pure.

What cannot be told is refused. An answer never costs more than this, whatever tier, latency mode or cache it tells of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from price_keeper.errors import InvalidRequest
from price_keeper.hard.forms import find_form
from price_keeper.hard.inputs import measure_input
from price_keeper.hard.members import build_unbounded_error, require_list, require_object
from price_keeper.hard.outputs import cap_output
from price_keeper.hard.reading import StrictBody, parse_strict
from price_keeper.hard.tally import REQUEST_TOKENS
from price_keeper.metering.guardrails import CHARACTERS_PER_UNIT, estimate_request_units
from price_keeper.metering.pricing import PriceTable
from price_keeper.operations import Operation

# In the place of a count that is still to be asked for: no budget has as much, should anybody forget to ask.
UNCOUNTED_TOKENS = 10**15
# Bedrock counts what the same input would be charged, Anthropic calls its own count an estimate that differs a little.
COUNT_MARGIN_SHARE = 50  # one part in so many
# Policies of automated reasoning that a guardrail may have, each charged for every unit; AWS allows two.
MAX_REASONING_POLICIES = 4
_REASONING_POLICY = "automatedReasoningPolicyUnits"

_FREE_OPERATIONS = frozenset({Operation.COUNT_TOKENS, Operation.ASYNC_INVOKE})
_CONVERSE_OPERATIONS = frozenset({Operation.CONVERSE, Operation.CONVERSE_STREAM})
_COUNTABLE_OPERATIONS = _CONVERSE_OPERATIONS | {Operation.INVOKE, Operation.INVOKE_STREAM}
_TOKEN_OPERATIONS = _COUNTABLE_OPERATIONS | {Operation.CHAT_COMPLETIONS}


class CallPrices(NamedTuple):
    """What a call of a label may be charged by: the tariffs of all its places, guardrails' units, a job."""

    price_tables: Sequence[PriceTable]
    unit_prices: Mapping[str, int] | None = None
    job_price: int | None = None


class CostCeiling(NamedTuple):
    """`body` is the one that has to be sent. With `needs_count` there is no bound yet: see `counted`."""

    pico: int
    input_tokens: int
    output_tokens: int
    body: bytes
    needs_count: bool = False


def compute_ceiling(
    operation: Operation,
    format: str,
    body: bytes,
    headers: Mapping[bytes, bytes],
    prices: CallPrices,
    label_max_output: int | None,
    model: str = "",
) -> CostCeiling:
    """`model` is the id that is called. Raises InvalidRequest."""
    if operation in _TOKEN_OPERATIONS:
        return _bound_tokens(operation, format, body, headers, prices, label_max_output, model)
    if operation in _FREE_OPERATIONS:
        return CostCeiling(0, 0, 0, body)
    if operation is Operation.ASYNC_INVOKES:
        if prices.job_price is None:
            raise InvalidRequest("asynchronous jobs have no price here: price_usd_per_async_job in config.yaml")
        return CostCeiling(prices.job_price, 0, 0, body)
    if operation is Operation.APPLY_GUARDRAIL:
        return _bound_units(body, _count_applied_blocks, prices)
    if operation is Operation.CHECK_GUARDRAILS:
        return _bound_units(body, _count_checked_blocks, prices)
    raise build_unbounded_error(f"the operation {operation.value}")


def apply_count(ceiling: CostCeiling, prices: CallPrices, tokens: int) -> CostCeiling:
    """With what CountTokens says of the input. Of one that is known without, this may be the lower bound."""
    if type(tokens) is not int or tokens < 0:
        raise build_unbounded_error("the input", "Bedrock's count of it is no number")
    input_tokens = tokens + tokens // COUNT_MARGIN_SHARE + REQUEST_TOKENS
    pico = compute_max_cost(prices.price_tables, input_tokens, ceiling.output_tokens)
    return ceiling._replace(pico=pico, input_tokens=input_tokens, needs_count=False)


def compute_max_cost(price_tables: Sequence[PriceTable], input_tokens: int, output_tokens: int) -> int:
    """A token of input is charged once: as new, or as read from a cache or written to one."""
    if not price_tables:
        raise ValueError("a label is served somewhere")
    return max(_compute_cost(tariff.highest_prices, input_tokens, output_tokens) for tariff in price_tables)


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
    output_tokens, body = cap_output(form, parsed.document, body, label_max_output)
    input_tokens, needs_count = bound.tokens, bool(bound.uncounted)
    if needs_count:
        if operation not in _COUNTABLE_OPERATIONS or not form.caps:
            raise build_unbounded_error(
                bound.uncounted, "only text is known by its bytes, and CountTokens has no form for this call"
            )
        input_tokens = UNCOUNTED_TOKENS
    pico = compute_max_cost(prices.price_tables, input_tokens, output_tokens)
    return CostCeiling(pico, input_tokens, output_tokens, body, needs_count)


# ---------------------------------------------------------------- units of guardrails


def _bound_units(body: bytes, count_blocks: Any, prices: CallPrices) -> CostCeiling:
    """Each block may begin a unit of its own, and each policy may be charged for all of them."""
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
    return sum(len(require_list(require_object(each, "a message").get("content"), "blocks")) for each in messages)
