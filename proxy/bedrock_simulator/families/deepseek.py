"""DeepSeek: R1 continues a prompt and reports no tokens in its body; V3 uses chat completions."""

from __future__ import annotations

from collections.abc import Iterator

from bedrock_simulator.families import openai
from bedrock_simulator.families.family import Family, Json, build_text_pieces, get_required, parse_stop_sequences
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model

_DEFAULT_MAX_TOKENS = 8192


def _parse_prompt(body: Json) -> Prompt:
    if "messages" in body:
        return openai.FAMILY.parse_prompt(body)
    maximum = check_max_tokens(body.get("max_tokens"), "max_tokens", _DEFAULT_MAX_TOKENS)
    return Prompt(build_text_pieces(get_required(body, "prompt", str)), maximum, parse_stop_sequences(body, "stop"))


def _map_stop_reason(completion: Completion) -> str:
    return "length" if completion.stop is StopReason.LENGTH else "stop"


def _build_body(body: Json, completion: Completion, model: Model) -> Json:
    if "messages" in body:
        return openai.FAMILY.build_body(body, completion, model)
    return {"choices": [{"text": completion.text, "stop_reason": _map_stop_reason(completion)}]}


def _build_chunks(body: Json, completion: Completion, model: Model) -> Iterator[Json]:
    if "messages" in body:
        yield from openai.build_chunks(body, completion, model)
        return
    deltas = completion.split_deltas()
    for index, text in enumerate(deltas):
        yield {
            "choices": [
                {"text": text, "stop_reason": _map_stop_reason(completion) if index == len(deltas) - 1 else None}
            ]
        }


FAMILY = Family(_parse_prompt, _build_body, _build_chunks)
