"""AI21 Jamba: chat completions, and how long they took."""

from __future__ import annotations

from proxy.simulator.families import openai
from proxy.simulator.families.family import Family, Json
from proxy.simulator.generation import Completion
from proxy.simulator.models import Model


def _whole(body: Json, said: Completion, model: Model) -> Json:
    answer = openai.FAMILY.whole(body, said, model)
    return {**answer, "meta": {"requestDurationMillis": said.latency_ms}}


FAMILY = Family(openai.FAMILY.read, _whole, openai.chunks)
