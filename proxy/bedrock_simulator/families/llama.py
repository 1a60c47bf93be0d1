"""Meta Llama: continues a prompt."""

from __future__ import annotations

from collections.abc import Iterator

from bedrock_simulator.families.family import Family, Json, build_text_pieces, get_required
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model

_DEFAULT_MAX_TOKENS = 512


def _parse_prompt(body: Json) -> Prompt:
    maximum = check_max_tokens(body.get("max_gen_len"), "max_gen_len", _DEFAULT_MAX_TOKENS)
    return Prompt(build_text_pieces(get_required(body, "prompt", str)), maximum)


def _map_stop_reason(completion: Completion) -> str:
    return "length" if completion.stop is StopReason.LENGTH else "stop"


def _build_body(_: Json, completion: Completion, __: Model) -> Json:
    return {
        "generation": completion.text,
        "prompt_token_count": completion.usage.input_tokens,
        "generation_token_count": completion.usage.output_tokens,
        "stop_reason": _map_stop_reason(completion),
    }


def _build_chunks(_: Json, completion: Completion, __: Model) -> Iterator[Json]:
    """The first chunk has the count of the prompt; each chunk has the count of the output so far."""
    deltas, total = completion.split_deltas(), completion.usage.output_tokens
    for index, text in enumerate(deltas):
        is_last = index == len(deltas) - 1
        yield {
            "generation": text,
            "prompt_token_count": completion.usage.input_tokens if index == 0 else None,
            "generation_token_count": total if is_last else total * (index + 1) // len(deltas),
            "stop_reason": _map_stop_reason(completion) if is_last else None,
        }


FAMILY = Family(_parse_prompt, _build_body, _build_chunks)
