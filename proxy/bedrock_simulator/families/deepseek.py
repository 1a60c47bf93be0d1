"""DeepSeek: R1 continues a prompt and its body tells no tokens; V3 gives chat completions."""

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
    return "length" if said.stop is StopReason.LENGTH else "stop"


def _whole(body: Json, said: Completion, model: Model) -> Json:
    if "messages" in body:
        return openai.FAMILY.whole(body, said, model)
    return {"choices": [{"text": said.text, "stop_reason": _reason(said)}]}


def _chunks(body: Json, said: Completion, model: Model) -> Iterator[Json]:
    if "messages" in body:
        yield from openai.chunks(body, said, model)
        return
    deltas = said.split_deltas()
    for index, text in enumerate(deltas):
        yield {"choices": [{"text": text, "stop_reason": _reason(said) if index == len(deltas) - 1 else None}]}


FAMILY = Family(_read, _whole, _chunks)
