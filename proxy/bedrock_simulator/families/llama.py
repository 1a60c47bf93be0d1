"""Meta Llama: a prompt in, its continuation out."""

from __future__ import annotations

from collections.abc import Iterator

from bedrock_simulator.families.family import Family, Json, plain, required
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model

_DEFAULT_MAX_TOKENS = 512


def _read(body: Json) -> Prompt:
    maximum = check_max_tokens(body.get("max_gen_len"), "max_gen_len", _DEFAULT_MAX_TOKENS)
    return Prompt(plain(required(body, "prompt", str)), maximum)


def _reason(said: Completion) -> str:
    return "length" if said.stop is StopReason.LENGTH else "stop"


def _whole(_: Json, said: Completion, __: Model) -> Json:
    return {
        "generation": said.text,
        "prompt_token_count": said.usage.input_tokens,
        "generation_token_count": said.usage.output_tokens,
        "stop_reason": _reason(said),
    }


def _chunks(_: Json, said: Completion, __: Model) -> Iterator[Json]:
    """The prompt is counted in the first chunk; each counts what has been generated so far."""
    deltas, total = said.split_deltas(), said.usage.output_tokens
    for index, text in enumerate(deltas):
        is_last = index == len(deltas) - 1
        yield {
            "generation": text,
            "prompt_token_count": said.usage.input_tokens if index == 0 else None,
            "generation_token_count": total if is_last else total * (index + 1) // len(deltas),
            "stop_reason": _reason(said) if is_last else None,
        }


FAMILY = Family(_read, _whole, _chunks)
