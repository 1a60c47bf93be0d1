"""Cohere Command R: a message and its history in. Its body does not tell tokens; the headers do."""

from __future__ import annotations

from collections.abc import Iterator

from bedrock_simulator import tokens
from bedrock_simulator.families.family import Family, Json, plain, required, stops
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece

_DEFAULT_MAX_TOKENS = 4096

_CONTEXT = ("preamble", "chat_history", "documents", "tools", "tool_results")


def _read(body: Json) -> Prompt:
    context = [Piece(tokens.count_block_tokens(body[name]), body[name]) for name in _CONTEXT if body.get(name)]
    return Prompt(
        [*context, *plain(required(body, "message", str))],
        check_max_tokens(body.get("max_tokens"), "max_tokens", _DEFAULT_MAX_TOKENS),
        stops(body, "stop_sequences"),
    )


def _reason(said: Completion) -> str:
    return "MAX_TOKENS" if said.stop is StopReason.LENGTH else "COMPLETE"


def _whole(body: Json, said: Completion, _: Model) -> Json:
    asked = {"role": "USER", "message": body["message"]}
    return {
        "response_id": f"resp-{said.id}",
        "text": said.text,
        "generation_id": f"gen-{said.id}",
        "chat_history": [*(body.get("chat_history") or []), asked, {"role": "CHATBOT", "message": said.text}],
        "finish_reason": _reason(said),
    }


def _chunks(body: Json, said: Completion, model: Model) -> Iterator[Json]:
    yield {"is_finished": False, "event_type": "stream-start", "generation_id": f"gen-{said.id}"}
    for text in said.split_deltas():
        yield {"is_finished": False, "event_type": "text-generation", "text": text}
    yield {
        "is_finished": True,
        "event_type": "stream-end",
        "response": _whole(body, said, model),
        "finish_reason": _reason(said),
    }


FAMILY = Family(_read, _whole, _chunks)
