"""One turn of a simulated model: a prompt in the form that all families share, and its completion.

`ModelRunner.run` counts the prompt against the prompt cache and completes it. The same request always gets the same
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import orjson

from bedrock_simulator import replies, tokens
from bedrock_simulator.aws_errors import AwsError, validation_error
from bedrock_simulator.clock import Clock
from bedrock_simulator.fault_spec import FaultSpec
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece, PromptCache
from bedrock_simulator.simulated_call import SimulatedCall
from bedrock_simulator.usage import Usage

MAX_OUTPUT_TOKENS = 131_072  # the limit of every simulated model, which bounds the largest response

_MIN_TOKENS, _MAX_TOKENS = 24, 120  # of a response whose length the request does not set
_TOKENS_PER_FRAME = 4  # of the text in one frame of a stream
_CALL_TOKENS = 12  # the overhead of a tool call
_LATENCY_MS, _TOKEN_MS = 180, 7  # the latency that a response reports


class StopReason(Enum):
    END = "end"
    LENGTH = "length"
    SEQUENCE = "sequence"
    TOOL = "tool"


@dataclass(slots=True)
class Prompt:
    """`tool` is the tool that the response must call, with the JSON schema of its input."""

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
    """The output of the model, with the usage, stop reason and latency that a response reports."""

    text: str
    stop: StopReason
    usage: Usage
    seed: bytes
    created: int  # epoch seconds
    latency_ms: int
    stop_sequence: str | None = None
    tool: ToolCall | None = None

    @property
    def id(self) -> str:
        return self.seed.hex()[:24]

    def split_deltas(self) -> list[str]:
        """The text, or the input of the tool call, split as in a stream."""
        text = self.text if self.tool is None else orjson.dumps(self.tool.input).decode()
        return replies.split_text(text, _TOKENS_PER_FRAME)


def complete(prompt: Prompt, prompt_usage: Usage, seed: bytes, spec: FaultSpec, created: int) -> Completion:
    """The same seed gives the same text; a requested length, a stop sequence or the maximum only truncate it."""
    output = _generate_tool_call(prompt, seed) or _generate_text(prompt, seed, spec)
    usage = _apply_usage_overrides(replace(prompt_usage, output_tokens=output.tokens), spec)
    latency = spec.latency_ms if spec.latency_ms is not None else _LATENCY_MS + _TOKEN_MS * output.tokens
    return Completion(output.text, output.stop, usage, seed, created, latency, output.stop_sequence, output.tool)


@dataclass(frozen=True, slots=True)
class _Output:
    text: str
    stop: StopReason
    tokens: int
    stop_sequence: str | None = None
    tool: ToolCall | None = None


def _generate_text(prompt: Prompt, seed: bytes, spec: FaultSpec) -> _Output:
    requested_tokens = spec.output_tokens
    if requested_tokens is None:
        requested_tokens = _MIN_TOKENS + seed[0] % (_MAX_TOKENS - _MIN_TOKENS)
    output_tokens = min(requested_tokens, prompt.max_tokens)
    text = replies.generate_words(seed, output_tokens)
    matches = [(text.find(sequence), sequence) for sequence in prompt.stop_sequences if sequence in text]
    if matches:
        position, sequence = min(matches)
        return _Output(text[:position], StopReason.SEQUENCE, max(1, tokens.count_tokens(text[:position])), sequence)
    return _Output(text, StopReason.LENGTH if requested_tokens > output_tokens else StopReason.END, output_tokens)


def _generate_tool_call(prompt: Prompt, seed: bytes) -> _Output | None:
    """The tool call; None if no tool must be called, or if the maximum leaves no room for it."""
    if prompt.tool is None:
        return None
    name, schema = prompt.tool
    call = ToolCall(name, _build_example(schema, seed, depth=0))
    token_count = _CALL_TOKENS + tokens.count_block_tokens(call.input)
    return _Output("", StopReason.TOOL, token_count, tool=call) if token_count <= prompt.max_tokens else None


def _build_example(schema: Any, seed: bytes, depth: int) -> Any:
    """A value that the schema allows, for the common keywords of JSON Schema."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(schema, dict) and schema.get("enum"):
        return schema["enum"][seed[0] % len(schema["enum"])]
    if depth == 0 or kind == "object":
        properties = (schema.get("properties") or {}) if isinstance(schema, dict) and depth < 8 else {}
        return {name: _build_example(inner, seed, depth + 1) for name, inner in properties.items()}
    plain = {"integer": seed[1], "number": seed[1] / 4, "boolean": True, "array": [], "null": None}
    return plain[kind] if kind in plain else replies.generate_words(seed, 3)


def _apply_usage_overrides(usage: Usage, spec: FaultSpec) -> Usage:
    overrides = {
        name: value
        for name in ("input_tokens", "cache_read_tokens", "cache_write_5m_tokens", "cache_write_1h_tokens")
        if (value := getattr(spec, name)) is not None
    }
    return replace(usage, **overrides) if overrides else usage


def check_max_tokens(value: Any, name: str, default: int) -> int:
    """The maximum of output tokens in a request, or the family's default."""
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


class ModelRunner:
    def __init__(self, clock: Clock, min_cache_tokens: int) -> None:
        self._clock = clock
        self._cache = PromptCache(clock.monotonic, min_cache_tokens)

    def run(self, call: SimulatedCall, model: Model, prompt: Prompt) -> Completion:
        if not model.can_cache and any(piece.ttl for piece in prompt.pieces):
            raise AwsError(
                "AccessDeniedException",
                "You invoked an unsupported model or your request did not allow prompt caching. See the documentation "
                "for more information.",
            )
        prompt_usage = self._cache.read_and_write(model.id, prompt.pieces)
        return complete(prompt, prompt_usage, call.compute_seed(model), call.fault_spec, int(self._clock.now()))
