"""The interface of a model family for InvokeModel: parse its requests, build its response bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bedrock_simulator import tokens
from bedrock_simulator.aws_errors import malformed_request
from bedrock_simulator.generation import Completion, Prompt
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece

Json = dict[str, Any]

ParsePrompt = Callable[[Json], Prompt]
BuildBody = Callable[[Json, Completion, Model], Json]  # gets the request's body, the completion and the model
BuildChunks = Callable[[Json, Completion, Model], Iterator[Json]]


@dataclass(frozen=True, slots=True)
class Family:
    """A family without chunks does not stream. One without text output, such as embeddings, only counts input."""

    parse_prompt: ParsePrompt
    build_body: BuildBody
    build_chunks: BuildChunks | None = None
    has_output: bool = True


def get_required(body: Json, name: str, kind: type | tuple[type, ...]) -> Any:
    value = body.get(name)
    if value is None:
        raise malformed_request(f"#: required key [{name}] not found")
    if not isinstance(value, kind):
        wanted = kind if isinstance(kind, tuple) else (kind,)
        raise malformed_request(f"#/{name}: expected type: {' or '.join(t.__name__ for t in wanted)}")
    return value


def parse_stop_sequences(body: Json, name: str) -> list[str]:
    """The stop sequences: the member is a list, a single string, or missing."""
    value = body.get(name) or []
    sequences = [value] if isinstance(value, str) else value
    if not isinstance(sequences, list) or not all(isinstance(each, str) and each for each in sequences):
        raise malformed_request(f"#/{name}: expected type: list of str")
    return sequences


def build_text_pieces(text: str) -> list[Piece]:
    """The prompt of a family with a single text and without cache points."""
    return [Piece(tokens.count_tokens(text), text)]


def parse_chat_message(message: Any) -> list[Piece]:
    """One message of chat completions: its content is a text or a list of blocks; tool calls are a separate member."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise malformed_request("#/messages: each message has a role")
    content = message.get("content")
    blocks = content if isinstance(content, list) else [content] if content else []
    pieces = [Piece(tokens.count_block_tokens(block), (message["role"], block)) for block in blocks]
    if message.get("tool_calls"):
        pieces.append(Piece(tokens.count_block_tokens(message["tool_calls"]), message["tool_calls"]))
    return [Piece(tokens.MESSAGE_TOKENS, message["role"]), *pieces]
