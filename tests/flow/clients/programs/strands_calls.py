"""strands-agents: an agent asked one thing, by a conversation as a whole and by its stream."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from strands import Agent, ModelRetryStrategy
from strands.models import BedrockModel
from telling import Call, summary, tell


def opened(settings: dict[str, Any]) -> Call:
    def call(operation: str, arguments: dict[str, Any]) -> Any:
        model = BedrockModel(model_id=arguments["model"], streaming=operation == "ask_stream", **settings)
        # As many tries as it makes by itself, without the two minutes that it waits between them.
        patience = ModelRetryStrategy(initial_delay=0)
        result = Agent(model=model, callback_handler=None, retry_strategy=patience)(arguments["text"])
        usage = result.metrics.accumulated_usage
        return summary(str(result), usage["inputTokens"], usage["outputTokens"])

    return call


if __name__ == "__main__":
    tell(version("strands-agents"), opened)
