"""AI21 Jamba: chat completions, with their duration."""

from __future__ import annotations

from bedrock_simulator.families import openai
from bedrock_simulator.families.family import Family, Json
from bedrock_simulator.generation import Completion
from bedrock_simulator.models import Model


def _build_body(body: Json, completion: Completion, model: Model) -> Json:
    answer = openai.FAMILY.build_body(body, completion, model)
    return {**answer, "meta": {"requestDurationMillis": completion.latency_ms}}


FAMILY = Family(openai.FAMILY.parse_prompt, _build_body, openai.build_chunks)
