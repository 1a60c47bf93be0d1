"""One turn of a simulated model: a prompt in the form that all families share, and what the model says to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import orjson

from bedrock_simulator import speech, tokens
from bedrock_simulator.prompt_cache import Piece
from bedrock_simulator.refusals import validation_error
from bedrock_simulator.usage import Usage
from bedrock_simulator.wishes import FaultSpec

MAX_OUTPUT_TOKENS = 131_072  # the most that any simulated model says, and so the size of the largest answer

_LEAST_TOKENS, _MOST_TOKENS = 24, 120  # of an answer whose length nobody asked for
_TOKENS_EACH = 4  # of a stream's text in one frame
_CALL_TOKENS = 12  # the marks around a call of a tool
_LATENCY_MS, _TOKEN_MS = 180, 7  # what an answer claims to have taken


class Stop(Enum):
    END = "end"
    LENGTH = "length"
    SEQUENCE = "sequence"
    TOOL = "tool"


@dataclass(slots=True)
class Prompt:
    """`tool` is the one the answer has to call, with the JSON schema of its input."""

    pieces: list[Piece]
    max_tokens: int = MAX_OUTPUT_TOKENS
    stop_sequences: Sequence[str] = ()
    tool: tuple[str, dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    input: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model said, and everything an answer tells about how it came to be."""

    text: str
    stop: Stop
    usage: Usage
    seed: bytes
    created: int  # epoch seconds
    latency_ms: int
    stop_sequence: str | None = None
    tool: ToolCall | None = None

    @property
    def id(self) -> str:
        return self.seed.hex()[:24]

    def deltas(self) -> list[str]:
        """The text, or the input of the tool, in the pieces of a stream."""
        whole = self.text if self.tool is None else orjson.dumps(self.tool.input).decode()
        return speech.pieces(whole, _TOKENS_EACH)


def complete(prompt: Prompt, counted: Usage, seed: bytes, spec: FaultSpec, created: int) -> Completion:
    """The same seed gets the same words; a wished length, a stop sequence or the maximum only end them elsewhere."""
    said = _called(prompt, seed) or _spoken(prompt, seed, spec)
    usage = _reported(replace(counted, output_tokens=said.tokens), spec)
    latency = spec.latency_ms if spec.latency_ms is not None else _LATENCY_MS + _TOKEN_MS * said.tokens
    return Completion(said.text, said.stop, usage, seed, created, latency, said.stop_sequence, said.tool)


@dataclass(frozen=True, slots=True)
class _Said:
    text: str
    stop: Stop
    tokens: int
    stop_sequence: str | None = None
    tool: ToolCall | None = None


def _spoken(prompt: Prompt, seed: bytes, spec: FaultSpec) -> _Said:
    wanted = spec.output_tokens
    if wanted is None:
        wanted = _LEAST_TOKENS + seed[0] % (_MOST_TOKENS - _LEAST_TOKENS)
    spoken = min(wanted, prompt.max_tokens)
    text = speech.say(seed, spoken)
    ends = [(text.find(sequence), sequence) for sequence in prompt.stop_sequences if sequence in text]
    if ends:
        at, sequence = min(ends)
        return _Said(text[:at], Stop.SEQUENCE, max(1, tokens.count(text[:at])), sequence)
    return _Said(text, Stop.LENGTH if wanted > spoken else Stop.END, spoken)


def _called(prompt: Prompt, seed: bytes) -> _Said | None:
    """The tool's call; None if none has to be called, or if the maximum leaves no room for the call."""
    if prompt.tool is None:
        return None
    name, schema = prompt.tool
    call = ToolCall(name, _example(schema, seed, depth=0))
    spent = _CALL_TOKENS + tokens.weigh(call.input)
    return _Said("", Stop.TOOL, spent, tool=call) if spent <= prompt.max_tokens else None


def _example(schema: Any, seed: bytes, depth: int) -> Any:
    """A value that the schema allows, as far as plain schemas go."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(schema, dict) and schema.get("enum"):
        return schema["enum"][seed[0] % len(schema["enum"])]
    if depth == 0 or kind == "object":
        properties = (schema.get("properties") or {}) if isinstance(schema, dict) and depth < 8 else {}
        return {name: _example(inner, seed, depth + 1) for name, inner in properties.items()}
    plain = {"integer": seed[1], "number": seed[1] / 4, "boolean": True, "array": [], "null": None}
    return plain[kind] if kind in plain else speech.say(seed, 3)


def _reported(usage: Usage, spec: FaultSpec) -> Usage:
    overrides = {
        name: value
        for name in ("input_tokens", "cache_read_tokens", "cache_write_5m_tokens", "cache_write_1h_tokens")
        if (value := getattr(spec, name)) is not None
    }
    return replace(usage, **overrides) if overrides else usage


def checked_maximum(value: Any, name: str, default: int) -> int:
    """The maximum of output tokens that a request names, or the family's default."""
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise validation_error(f"{name}: Input should be a valid integer")
    if value < 1:
        raise validation_error(f"{name}: Input should be greater than or equal to 1")
    if value > MAX_OUTPUT_TOKENS:
        raise validation_error(
            f"The maximum tokens you requested exceeds the model limit of {MAX_OUTPUT_TOKENS}. "
            f"Try again with a maximum tokens value that is lower than {MAX_OUTPUT_TOKENS}."
        )
    return value
