"""Amazon Nova: Converse's format, with other names for cached tokens."""

from __future__ import annotations

from collections.abc import Iterator

from bedrock_simulator import converse_format
from bedrock_simulator.families.family import Family, Json
from bedrock_simulator.generation import Completion, Prompt
from bedrock_simulator.models import Model
from bedrock_simulator.usage import Usage

_DEFAULT_MAX_TOKENS = 4096


def _parse_prompt(body: Json) -> Prompt:
    config = body.get("inferenceConfig")
    if isinstance(config, dict) and "max_new_tokens" in config:  # its name before Nova adopted Converse's
        config = {**config, "maxTokens": config["max_new_tokens"]}
        body = {**body, "inferenceConfig": config}
    return converse_format.parse_prompt(body, _DEFAULT_MAX_TOKENS)


def _build_usage(usage: Usage) -> Json:
    return {
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "totalTokens": usage.total_input_tokens + usage.output_tokens,
        "cacheReadInputTokenCount": usage.cache_read_tokens,
        "cacheWriteInputTokenCount": usage.cache_write_tokens,
    }


def _build_body(_: Json, completion: Completion, __: Model) -> Json:
    return {
        "output": {"message": {"content": [converse_format.build_block(completion)], "role": "assistant"}},
        "stopReason": converse_format.STOP_REASONS[completion.stop],
        "usage": _build_usage(completion.usage),
    }


def _build_chunks(_: Json, completion: Completion, __: Model) -> Iterator[Json]:
    for kind, event in converse_format.build_events(completion):
        yield {kind: event}
    yield {"metadata": {"usage": _build_usage(completion.usage), "metrics": {}, "trace": {}}}


FAMILY = Family(_parse_prompt, _build_body, _build_chunks)
