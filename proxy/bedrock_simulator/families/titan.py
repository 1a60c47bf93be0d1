"""Amazon Titan Text: one text in, one out."""

from __future__ import annotations

from collections.abc import Iterator

from bedrock_simulator.families.family import Family, Json, build_text_pieces, get_required, parse_stop_sequences
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model

_DEFAULT_MAX_TOKENS = 512

_STOP_REASONS = {
    StopReason.END: "FINISH",
    StopReason.LENGTH: "LENGTH",
    StopReason.SEQUENCE: "STOP_CRITERIA_MET",
    StopReason.TOOL: "FINISH",
}


def _parse_prompt(body: Json) -> Prompt:
    config = body.get("textGenerationConfig") or {}
    return Prompt(
        build_text_pieces(get_required(body, "inputText", str)),
        check_max_tokens(config.get("maxTokenCount"), "maxTokenCount", _DEFAULT_MAX_TOKENS),
        parse_stop_sequences(config, "stopSequences"),
    )


def _build_body(_: Json, completion: Completion, __: Model) -> Json:
    result = {
        "tokenCount": completion.usage.output_tokens,
        "outputText": completion.text,
        "completionReason": _STOP_REASONS[completion.stop],
    }
    return {"inputTextTokenCount": completion.usage.input_tokens, "results": [result]}


def _build_chunks(_: Json, completion: Completion, __: Model) -> Iterator[Json]:
    *earlier, last = completion.split_deltas()
    for text in earlier:
        yield _build_chunk(text, None, None, None)
    yield _build_chunk(
        last, completion.usage.input_tokens, completion.usage.output_tokens, _STOP_REASONS[completion.stop]
    )


def _build_chunk(text: str, input_tokens: int | None, output_tokens: int | None, reason: str | None) -> Json:
    return {
        "outputText": text,
        "index": 0,
        "inputTextTokenCount": input_tokens,
        "totalOutputTextTokenCount": output_tokens,
        "completionReason": reason,
    }


FAMILY = Family(_parse_prompt, _build_body, _build_chunks)
