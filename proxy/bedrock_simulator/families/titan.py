"""Amazon Titan Text: one text in, one out."""

from __future__ import annotations

from collections.abc import Iterator

from bedrock_simulator.families.family import Family, Json, plain, required, stops
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model

_DEFAULT_MAX_TOKENS = 512

_REASONS = {StopReason.END: "FINISH", StopReason.LENGTH: "LENGTH", StopReason.SEQUENCE: "STOP_CRITERIA_MET", StopReason.TOOL: "FINISH"}


def _read(body: Json) -> Prompt:
    config = body.get("textGenerationConfig") or {}
    return Prompt(
        plain(required(body, "inputText", str)),
        check_max_tokens(config.get("maxTokenCount"), "maxTokenCount", _DEFAULT_MAX_TOKENS),
        stops(config, "stopSequences"),
    )


def _whole(_: Json, said: Completion, __: Model) -> Json:
    result = {
        "tokenCount": said.usage.output_tokens,
        "outputText": said.text,
        "completionReason": _REASONS[said.stop],
    }
    return {"inputTextTokenCount": said.usage.input_tokens, "results": [result]}


def _chunks(_: Json, said: Completion, __: Model) -> Iterator[Json]:
    *earlier, last = said.split_deltas()
    for text in earlier:
        yield _chunk(text, None, None, None)
    yield _chunk(last, said.usage.input_tokens, said.usage.output_tokens, _REASONS[said.stop])


def _chunk(text: str, read: int | None, written: int | None, reason: str | None) -> Json:
    return {
        "outputText": text,
        "index": 0,
        "inputTextTokenCount": read,
        "totalOutputTextTokenCount": written,
        "completionReason": reason,
    }


FAMILY = Family(_read, _whole, _chunks)
