"""Guardrails: which calls name one, what their units cost, and how many there are where nobody says it. Pure.

Bedrock charges a guardrail by the unit of text and policy, also where a call of a model names it. How many units those
were stands in the answer's trace, if the caller asked for one; else they are estimated, to the dear side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from price_keeper.config.config_sections import GuardrailsConfig
from price_keeper.metering.pricing import PRICE_UNKNOWN, Cost
from price_keeper.operations import Operation
from price_keeper.upstream import json_splice

GUARDRAIL_ESTIMATED: Final = "guardrail_estimated"  # the units were, while the tokens may be exact
ESTIMATED_UNITS: Final = "estimated"  # in the place of a policy's name: each costs as much as the dearest policy's
CHARACTERS_PER_UNIT: Final = 1000
CHARACTERS_PER_TOKEN: Final = 6  # of an answer: more than the mean in any language

GUARDRAIL_HEADER: Final = b"x-amzn-bedrock-guardrailidentifier"
_CONFIG: Final = "guardrailConfig"
_CONFIG_BYTES: Final = b'"guardrailConfig"'
_OPERATIONS_WITH_CONFIG: Final = frozenset({Operation.CONVERSE, Operation.CONVERSE_STREAM})
_OPERATIONS_WITH_HEADER: Final = frozenset(
    {*_OPERATIONS_WITH_CONFIG, Operation.INVOKE, Operation.INVOKE_STREAM, Operation.CHAT_COMPLETIONS}
)

# Letters that are written so come from nobody but who wants them not to be found. Controls, quotes, angle brackets and
# what is beyond ASCII are so written by many encoders.
_ESCAPED: Final = b"\\u00"
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[467]")
_NO_GUARDRAIL: Final = (b"", b"null")
_BYTE_ORDER_MARKS: Final = (b"\xfe", b"\xff")

# An image or a document, and no text. Where a string is text, words without a space between them look no different.
_BASE64: Final = re.compile(rf'"(?:bytes|data)"\s*+:\s*+"([A-Za-z0-9+/_=-]{{{CHARACTERS_PER_UNIT},}}+)"')
_ESCAPE: Final = re.compile(r"\\(?:u[0-9A-Fa-f]{4}|.)")


# ---------------------------------------------------------------- calls that name one


def estimate_request_units(operation: Operation, headers: Mapping[bytes, bytes], body: bytes) -> int:
    """The units that a request is taken for, 0 if it names no guardrail."""
    if may_name_guardrail(operation, headers, body) and (GUARDRAIL_HEADER in headers or _has_guardrail_config(body)):
        return max(1, _round_up_units(_count_characters(body)))
    return 0


def may_name_guardrail(operation: Operation, headers: Mapping[bytes, bytes], body: bytes) -> bool:
    """What every call pays for the question: a search of its bytes."""
    if operation not in _OPERATIONS_WITH_HEADER:
        return False
    if GUARDRAIL_HEADER in headers:
        return True
    if operation not in _OPERATIONS_WITH_CONFIG:
        return False
    if _CONFIG_BYTES in body:
        return True
    if b"\0" in body[:4] or body[:1] in _BYTE_ORDER_MARKS:
        return True  # JSON of wider characters than UTF-8's, of which no search of bytes finds anything
    # Each search is quicker than the next one, and most bodies need no more than the first.
    return b"\\" in body and _ESCAPED in body and _ESCAPED_LETTER.search(body) is not None


def _has_guardrail_config(body: bytes) -> bool:
    try:
        span = json_splice.find_members(body, (_CONFIG,)).spans.get(_CONFIG)
    except json_splice.InvalidJsonObject:
        return True  # or two of them: what Bedrock makes of that is not known, so it must have a price
    return span is not None and body[span[0] : span[1]].strip(b"{} \t\r\n") not in _NO_GUARDRAIL


def _count_characters(body: bytes) -> int:
    """Names and marks of the JSON are counted with the text, as they are few. Of large bodies nothing is parsed."""
    text = body.decode("utf-8", "replace")
    escapes = sum(match.end() - match.start() - 1 for match in _ESCAPE.finditer(text))
    binary = sum(match.end(1) - match.start(1) - CHARACTERS_PER_UNIT for match in _BASE64.finditer(text))
    return len(text) - escapes - binary


def _round_up_units(characters: int) -> int:
    return -(-characters // CHARACTERS_PER_UNIT)


# ---------------------------------------------------------------- units


def estimate_units(request_units: int, output_tokens: int) -> Mapping[str, int]:
    """`asked` is what `units_asked` found; the answer's text is as long as its tokens make it."""
    return {ESTIMATED_UNITS: request_units + _round_up_units(output_tokens * CHARACTERS_PER_TOKEN)}


def add_units(assessments: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    """Units add up; the number of policies that a unit of automated reasoning is sold by does not."""
    total: dict[str, int] = {}
    for units in assessments:
        for name, count in units.items():
            so_far = total.get(name, 0)
            total[name] = max(so_far, count) if name == _REASONING_POLICIES else so_far + count
    return total


# From the names that Bedrock counts units under to the keys of the configuration.
_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "topicPolicyUnits": "topic",
        "contentPolicyUnits": "content",
        "contentPolicyImageUnits": "content_image",
        "wordPolicyUnits": "word",
        "sensitiveInformationPolicyUnits": "sensitive_information",
        "contextualGroundingPolicyUnits": "contextual_grounding",
        "automatedReasoningPolicyUnits": "automated_reasoning",
        "contentFilter": "check_content_filter",
        "promptAttack": "check_prompt_attack",
        "sensitiveInformation": "check_sensitive_information",
    }
)
_FREE_UNITS: Final = "sensitiveInformationPolicyFreeUnits"
_REASONING_UNITS, _REASONING_POLICIES = "automatedReasoningPolicyUnits", "automatedReasoningPolicies"


def build_guardrail_prices(config: GuardrailsConfig) -> Mapping[str, int]:
    """Pico-dollars for one unit, under the names that Bedrock counts units by."""
    return MappingProxyType({name: config.pico_per_unit(policy) for name, policy in _POLICIES.items()})


def price_guardrail(prices: Mapping[str, int], units: Mapping[str, int]) -> Cost:
    """Units of a policy that nobody knows cost as much as the dearest policy's. Free units cost nothing."""
    dearest = max(prices.values())
    pico, flags = 0, set()
    for name, count in units.items():
        if not count or name in (_FREE_UNITS, _REASONING_POLICIES):
            continue
        if name not in prices:
            flags.add(GUARDRAIL_ESTIMATED if name == ESTIMATED_UNITS else PRICE_UNKNOWN)
        factor = (
            max(1, units.get(_REASONING_POLICIES, 1)) if name == _REASONING_UNITS else 1
        )  # it is sold by the policy
        pico += count * factor * prices.get(name, dearest)
    return Cost(pico, frozenset(flags))
