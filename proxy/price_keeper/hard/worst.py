"""What a request can cost at most, in pico-dollars: all its input at the dearest price of any kind, and all the output
that it may have. Pure.

What cannot be told is refused. An answer never costs more than this, whatever tier, latency mode or cache it tells of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from price_keeper.errors import InvalidRequest
from price_keeper.forwarding.model_path import Operation
from price_keeper.hard.forms import form_of
from price_keeper.hard.inputs import weighed
from price_keeper.hard.members import an_object, listed, unbounded
from price_keeper.hard.outputs import capped
from price_keeper.hard.reading import Read, read
from price_keeper.hard.tally import REQUEST
from price_keeper.metering.guardrails import CHARACTERS_A_UNIT, units_asked
from price_keeper.metering.pricing import Tariff

# In the place of a count that is still to be asked for: no budget has as much, should anybody forget to ask.
UNCOUNTED = 10**15
# Bedrock counts what the same input would be charged, Anthropic calls its own count an estimate that differs a little.
COUNT_MARGIN_SHARE = 50  # one part in so many
# Policies of automated reasoning that a guardrail may have, each charged for every unit; AWS allows two.
REASONING_POLICIES = 4
_REASONING = "automatedReasoningPolicyUnits"

_FREE = frozenset({Operation.COUNT_TOKENS, Operation.ASYNC_INVOKE})
_CONVERSE = frozenset({Operation.CONVERSE, Operation.CONVERSE_STREAM})
_COUNTABLE = _CONVERSE | {Operation.INVOKE, Operation.INVOKE_STREAM}
_OF_TOKENS = _COUNTABLE | {Operation.CHAT_COMPLETIONS}


class Prices(NamedTuple):
    """What a call of a label may be charged by: the tariffs of all its places, guardrails' units, a job."""

    tariffs: Sequence[Tariff]
    units: Mapping[str, int] | None = None
    job: int | None = None


class Worst(NamedTuple):
    """`body` is the one that has to be sent. With `needs_count` there is no bound yet: see `counted`."""

    pico: int
    input_tokens: int
    output_tokens: int
    body: bytes
    needs_count: bool = False


def worst_case(
    operation: Operation,
    format: str,
    body: bytes,
    headers: Mapping[bytes, bytes],
    prices: Prices,
    label_max_output: int | None,
    model: str = "",
) -> Worst:
    """`model` is the id that is called. Raises InvalidRequest."""
    if operation in _OF_TOKENS:
        return _of_tokens(operation, format, body, headers, prices, label_max_output, model)
    if operation in _FREE:
        return Worst(0, 0, 0, body)
    if operation is Operation.ASYNC_INVOKES:
        if prices.job is None:
            raise InvalidRequest("asynchronous jobs have no price here: price_usd_per_async_job in config.yaml")
        return Worst(prices.job, 0, 0, body)
    if operation is Operation.APPLY_GUARDRAIL:
        return _of_units(body, _blocks_applied, prices)
    if operation is Operation.CHECK_GUARDRAILS:
        return _of_units(body, _blocks_checked, prices)
    raise unbounded(f"the operation {operation.value}")


def counted(worst: Worst, prices: Prices, tokens: int) -> Worst:
    """With what CountTokens says of the input. Of one that is known without, this may be the lower bound."""
    if type(tokens) is not int or tokens < 0:
        raise unbounded("the input", "Bedrock's count of it is no number")
    input_tokens = tokens + tokens // COUNT_MARGIN_SHARE + REQUEST
    pico = cost_at_most(prices.tariffs, input_tokens, worst.output_tokens)
    return worst._replace(pico=pico, input_tokens=input_tokens, needs_count=False)


def cost_at_most(tariffs: Sequence[Tariff], input_tokens: int, output_tokens: int) -> int:
    """A token of input is charged once: as new, or as read from a cache or written to one."""
    if not tariffs:
        raise ValueError("a label is served somewhere")
    return max(_at_most(tariff.dearest, input_tokens, output_tokens) for tariff in tariffs)


def _at_most(dearest: tuple[int, ...], input_tokens: int, output_tokens: int) -> int:
    new, output, *cached = dearest
    return input_tokens * max(new, *cached) + output_tokens * output


def _of_tokens(
    operation: Operation,
    format: str,
    body: bytes,
    headers: Mapping[bytes, bytes],
    prices: Prices,
    label_max_output: int | None,
    model: str,
) -> Worst:
    if units_asked(operation, headers, body):
        why = "its units depend on the characters of the answer, which no maximum of tokens limits; use ApplyGuardrail"
        raise unbounded("a guardrail in a call of a model", why)
    found = read(body)
    form = form_of(operation, format, model, found.document)
    tally = weighed(form, found)
    output_tokens, body = capped(form, found.document, body, label_max_output)
    input_tokens, needs_count = tally.tokens, bool(tally.uncounted)
    if needs_count:
        if operation not in _COUNTABLE or not form.caps:
            raise unbounded(
                tally.uncounted, "only text is known by its bytes, and CountTokens has no form for this call"
            )
        input_tokens = UNCOUNTED
    pico = cost_at_most(prices.tariffs, input_tokens, output_tokens)
    return Worst(pico, input_tokens, output_tokens, body, needs_count)


# ---------------------------------------------------------------- units of guardrails


def _of_units(body: bytes, blocks_of: Any, prices: Prices) -> Worst:
    """Each block may begin a unit of its own, and each policy may be charged for all of them."""
    if not prices.units:
        raise InvalidRequest("guardrails have no prices here: guardrails.prices_usd_per_1000_units in config.yaml")
    found = read(body)
    units = len(found.text) // CHARACTERS_A_UNIT + 1 + blocks_of(found)
    dearest = max(prices.units.values())
    a_unit = sum(prices.units.values()) + (REASONING_POLICIES - 1) * prices.units.get(_REASONING, dearest)
    return Worst(units * a_unit, 0, 0, body)


def _blocks_applied(found: Read) -> int:
    return len(listed(found.document.get("content"), "blocks"))


def _blocks_checked(found: Read) -> int:
    messages = listed(found.document.get("messages"), "messages")
    return sum(len(listed(an_object(each, "a message").get("content"), "blocks")) for each in messages)
