"""AI21 Jamba: chat completions, and how long they took."""

from __future__ import annotations

from bedrock_simulator.families import openai
from bedrock_simulator.families.family import Family, Json
from bedrock_simulator.generation import Completion
from bedrock_simulator.models import Model


def _whole(body: Json, said: Completion, model: Model) -> Json:
    answer = openai.FAMILY.whole(body, said, model)
    return {**answer, "meta": {"requestDurationMillis": said.latency_ms}}


FAMILY = Family(openai.FAMILY.read, _whole, openai.chunks)
