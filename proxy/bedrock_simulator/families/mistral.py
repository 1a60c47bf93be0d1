"""Mistral: instruct models continue a prompt, the newer ones chat. No body tells tokens, but Pixtral's; headers do."""

from __future__ import annotations

from collections.abc import Iterator

from bedrock_simulator.families import openai
from bedrock_simulator.families.family import Family, Json, plain, required, stops
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model

_DEFAULT_MAX_TOKENS = 8192


def _read(body: Json) -> Prompt:
    if "messages" in body:
        return openai.FAMILY.read(body)
    maximum = check_max_tokens(body.get("max_tokens"), "max_tokens", _DEFAULT_MAX_TOKENS)
    return Prompt(plain(required(body, "prompt", str)), maximum, stops(body, "stop"))


def _reason(said: Completion) -> str:
    return "tool_calls" if said.stop is StopReason.TOOL else "length" if said.stop is StopReason.LENGTH else "stop"


def _whole(body: Json, said: Completion, model: Model) -> Json:
    if _is_completions(model):
        return openai.FAMILY.whole(body, said, model)
    if "prompt" in body:
        return {"outputs": [{"text": said.text, "stop_reason": _reason(said)}]}
    return {"choices": [{"index": 0, "message": openai.message(said), "stop_reason": _reason(said)}]}


def _chunks(body: Json, said: Completion, model: Model) -> Iterator[Json]:
    if _is_completions(model):
        yield from openai.chunks(body, said, model)
        return
    deltas = said.split_deltas()
    for index, text in enumerate(deltas):
        reason = _reason(said) if index == len(deltas) - 1 else None
        if "prompt" in body:
            yield {"outputs": [{"text": text, "stop_reason": reason}]}
        else:
            message = {"role": "assistant", "content": text}
            yield {"choices": [{"index": 0, "message": message, "stop_reason": reason}]}


def _is_completions(model: Model) -> bool:
    return "pixtral" in model.name


FAMILY = Family(_read, _whole, _chunks)
