"""Cohere Command R: a message and its history in. Token counts are in the headers only."""

from __future__ import annotations

from collections.abc import Iterator

from bedrock_simulator import tokens
from bedrock_simulator.families.family import Family, Json, build_text_pieces, get_required, parse_stop_sequences
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece

_DEFAULT_MAX_TOKENS = 4096

_CONTEXT_MEMBERS = ("preamble", "chat_history", "documents", "tools", "tool_results")


def _parse_prompt(body: Json) -> Prompt:
    context = [Piece(tokens.count_block_tokens(body[name]), body[name]) for name in _CONTEXT_MEMBERS if body.get(name)]
    return Prompt(
        [*context, *build_text_pieces(get_required(body, "message", str))],
        check_max_tokens(body.get("max_tokens"), "max_tokens", _DEFAULT_MAX_TOKENS),
        parse_stop_sequences(body, "stop_sequences"),
    )


def _map_stop_reason(completion: Completion) -> str:
    return "MAX_TOKENS" if completion.stop is StopReason.LENGTH else "COMPLETE"


def _build_body(body: Json, completion: Completion, _: Model) -> Json:
    user_turn = {"role": "USER", "message": body["message"]}
    return {
        "response_id": f"resp-{completion.id}",
        "text": completion.text,
        "generation_id": f"gen-{completion.id}",
        "chat_history": [*(body.get("chat_history") or []), user_turn, {"role": "CHATBOT", "message": completion.text}],
        "finish_reason": _map_stop_reason(completion),
    }


def _build_chunks(body: Json, completion: Completion, model: Model) -> Iterator[Json]:
    yield {"is_finished": False, "event_type": "stream-start", "generation_id": f"gen-{completion.id}"}
    for text in completion.split_deltas():
        yield {"is_finished": False, "event_type": "text-generation", "text": text}
    yield {
        "is_finished": True,
        "event_type": "stream-end",
        "response": _build_body(body, completion, model),
        "finish_reason": _map_stop_reason(completion),
    }


FAMILY = Family(_parse_prompt, _build_body, _build_chunks)
