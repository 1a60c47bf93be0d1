"""What the frames of ConverseStream say they used. Pure; read like the other streams of `streams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from price_keeper.metering.json_tail import find_last_object, parse_json
from price_keeper.metering.streams import BYTES_PER_TOKEN, ORDINARY_FRAME_BYTES, TOKENS_PER_FRAME
from price_keeper.upstream.eventstream import Frame
from price_keeper.usage import model_families
from price_keeper.usage.model_families import NO_HEADERS
from price_keeper.usage.token_usage import Usage, sum_tokens

# A guardrail's trace can stand in the metadata. It comes before the usage, so the end is enough, however long it is.
# Of what is said only the length is wanted, for estimates.
CONVERSE_FRAME_LIMITS: Final = {
    "metadata": 64 * 1024,
    "contentBlockDelta": 0,
    "messageStart": 0,
    "contentBlockStart": 0,
}

# OpenAI's models cache prompts in blocks of so many tokens, so less than one block of a cached prompt is plain input.
CACHE_BLOCK_TOKENS: Final = 128


class ConverseStream:
    """Its last event, the metadata, tells everything; before that nothing is known but how much was said."""

    __slots__ = ("_estimated_tokens", "_format", "_has_begun", "_has_block", "_headers", "_metadata")

    def __init__(self, format: str = "", headers: Mapping[bytes, bytes] = NO_HEADERS) -> None:
        self._format = format
        self._headers = headers
        self._metadata: Frame | None = None
        self._estimated_tokens = 0
        self._has_begun = self._has_block = False

    def add_frame(self, frame: Frame) -> None:
        if frame.name == "contentBlockDelta":
            excess = frame.payload_size - ORDINARY_FRAME_BYTES
            self._estimated_tokens += TOKENS_PER_FRAME if excess < 0 else TOKENS_PER_FRAME + excess // BYTES_PER_TOKEN
        elif frame.name == "metadata" and frame.kind == "event":
            if self._metadata is None or sum_tokens(self._parse_metadata(frame)) >= sum_tokens(self.usage()):
                self._metadata = frame
        elif frame.kind == "event":
            self._has_begun = True
            if frame.name == "contentBlockStart":
                self._has_block = True  # such as a tool's name

    def usage(self) -> Usage | None:
        return None if self._metadata is None else self._parse_metadata(self._metadata)

    def partial_usage(self) -> Usage | None:
        return None if self._metadata is None else self._parse_metadata(self._metadata, needs_output=False)

    def estimate_output(self) -> int:
        """A model that began its message has read the whole prompt, and said at least a little."""
        usage = self.usage()
        return (
            (usage.output if usage is not None else 0) or self._estimated_tokens or TOKENS_PER_FRAME * self._has_begun
        )

    def has_output(self) -> bool:
        return self._has_block or self._estimated_tokens > 0

    def _parse_metadata(self, metadata: Frame, *, needs_output: bool = True) -> Usage | None:
        payload, size = metadata.payload, metadata.payload_size
        document = parse_json(payload) if size == len(payload) else _parse_end_of_metadata(payload)
        usage = model_families.read_converse(document, self._headers, needs_output=needs_output)
        return _exclude_cached_input(usage) if usage is not None and self._format == "openai" else usage


def _parse_end_of_metadata(payload: bytes) -> dict[str, Any]:
    members = (("usage", "inputTokens"), ("serviceTier", "type"), ("performanceConfig", "latency"))
    return {name: find_last_object(payload, name, member) for name, member in members}


def _exclude_cached_input(usage: Usage) -> Usage:
    """Some streams of OpenAI's models count cached tokens as input too, and twice in the total (seen with GPT-5.6). A
    total that is documented as such looks the same, so only the seen case is corrected: all input but less than one
    block of the cache is cached. Anything else is taken as documented, which is never too little."""
    cached = usage.cache_read + usage.cache_write_5m + usage.cache_write_1h
    return usage._replace(input=usage.input - cached) if 0 <= usage.input - cached < CACHE_BLOCK_TOKENS else usage
