"""What a call used, in one form for all operations. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """`input_tokens` are neither read from a cache nor written to it, as Bedrock counts them."""

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
    def whole_input_tokens(self) -> int:
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens


# Every member of an answer that tells what was used, whatever the operation and the family.
_TELLING = frozenset(
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


# Those among them, and below them, that count what the model said.
_OUTPUTS = frozenset(
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

SPOILINGS = ("none", "null", "zero", "negative", "text", "doubled", "no-output", "zero-output")


def spoilt(document: Any, how: str) -> Any:
    """An answer with each count of its usage left out, or made one that cannot be right."""
    if isinstance(document, dict):
        kept = {name: value for name, value in document.items() if not _is_left_out(name, how)}
        return {name: _spoilt_below(name, value, how) for name, value in kept.items()}
    if isinstance(document, list):
        return [spoilt(value, how) for value in document]
    return document


def _is_left_out(name: str, how: str) -> bool:
    return (how == "none" and name in _TELLING) or (how == "no-output" and name in _OUTPUTS)


def _spoilt_below(name: str, value: Any, how: str) -> Any:
    return _spoilt_counts(name, value, how) if name in _TELLING else spoilt(value, how)


def _spoilt_counts(name: str, value: Any, how: str) -> Any:
    if isinstance(value, dict):
        return {
            inner: _spoilt_counts(inner, each, how) for inner, each in value.items() if not _is_left_out(inner, how)
        }
    if isinstance(value, list):
        return [_spoilt_counts(name, each, how) for each in value]
    return spoilt_count(value, how, is_output=name in _OUTPUTS) if type(value) is int else value


def spoilt_count(count: int, how: str, *, is_output: bool) -> Any:
    if how == "zero-output":
        return 0 if is_output else count
    return {"null": None, "zero": 0, "negative": -count - 1, "text": "many", "doubled": 2 * count}.get(how, count)
