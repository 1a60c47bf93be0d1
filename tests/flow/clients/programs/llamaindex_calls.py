"""LlamaIndex: BedrockConverse, which takes only ids of models that it knows, completed and streamed."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from llama_index.llms.bedrock_converse import BedrockConverse
from telling import Call, summary, tell


def opened(settings: dict[str, Any]) -> Call:
    def call(operation: str, arguments: dict[str, Any]) -> Any:
        model = BedrockConverse(model=arguments["model"], max_tokens=40, **settings)
        if operation == "ask":
            answer = model.complete(arguments["text"])
        else:
            *_, answer = model.stream_complete(arguments["text"])
        usage = answer.additional_kwargs
        return summary(answer.text, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))

    return call


if __name__ == "__main__":
    tell(version("llama-index-llms-bedrock-converse"), opened)
