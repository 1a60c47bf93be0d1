"""The usage of a call, in one form for all operations, and the faults of a reported usage. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """`input_tokens` exclude tokens that are read from or written to a cache, as Bedrock counts them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    guardrail_units: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Usage) -> Usage:
        units = dict(Counter(self.guardrail_units) + Counter(other.guardrail_units)) if other.guardrail_units else {}
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cache_read_tokens + other.cache_read_tokens,
            self.cache_write_5m_tokens + other.cache_write_5m_tokens,
            self.cache_write_1h_tokens + other.cache_write_1h_tokens,
            units or self.guardrail_units,
        )

    @property
    def cache_write_tokens(self) -> int:
        return self.cache_write_5m_tokens + self.cache_write_1h_tokens

    @property
    def total_input_tokens(self) -> int:
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens


# Every member of a response that reports usage, for all operations and families.
_USAGE_MEMBERS = frozenset(
    (
        "amazon-bedrock-invocationMetrics",
        "generation_token_count",
        "inputTextTokenCount",
        "prompt_token_count",
        "tokenCount",
        "totalOutputTextTokenCount",
        "usage",
    )
)


# Those members, and members below them, that count output.
_OUTPUT_MEMBERS = frozenset(
    (
        "completion_tokens",
        "generation_token_count",
        "output_tokens",
        "outputTokenCount",
        "outputTokens",
        "tokenCount",
        "totalOutputTextTokenCount",
    )
)

USAGE_FAULTS = ("none", "null", "zero", "negative", "text", "doubled", "no-output", "zero-output")


def corrupt_usage(document: Any, fault: str) -> Any:
    """The response with each usage count omitted, or replaced by a wrong one."""
    if isinstance(document, dict):
        kept = {name: value for name, value in document.items() if not _is_left_out(name, fault)}
        return {name: _corrupt_member(name, value, fault) for name, value in kept.items()}
    if isinstance(document, list):
        return [corrupt_usage(value, fault) for value in document]
    return document


def _is_left_out(name: str, fault: str) -> bool:
    return (fault == "none" and name in _USAGE_MEMBERS) or (fault == "no-output" and name in _OUTPUT_MEMBERS)


def _corrupt_member(name: str, value: Any, fault: str) -> Any:
    return _corrupt_counts(name, value, fault) if name in _USAGE_MEMBERS else corrupt_usage(value, fault)


def _corrupt_counts(name: str, value: Any, fault: str) -> Any:
    if isinstance(value, dict):
        return {
            inner: _corrupt_counts(inner, item, fault)
            for inner, item in value.items()
            if not _is_left_out(inner, fault)
        }
    if isinstance(value, list):
        return [_corrupt_counts(name, item, fault) for item in value]
    return corrupt_count(value, fault, is_output=name in _OUTPUT_MEMBERS) if type(value) is int else value


def corrupt_count(count: int, fault: str, *, is_output: bool) -> Any:
    if fault == "zero-output":
        return 0 if is_output else count
    return {"null": None, "zero": 0, "negative": -count - 1, "text": "many", "doubled": 2 * count}.get(fault, count)
