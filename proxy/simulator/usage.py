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


def without_usage(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: without_usage(value) for name, value in document.items() if name not in _TELLING}
    if isinstance(document, list):
        return [without_usage(value) for value in document]
    return document
