"""langchain-aws: ChatBedrockConverse, invoked and streamed."""

from __future__ import annotations

from functools import reduce
from importlib.metadata import version
from operator import add
from typing import Any

from langchain_aws import ChatBedrockConverse
from telling import Call, summary, tell


def opened(settings: dict[str, Any]) -> Call:
    def call(operation: str, arguments: dict[str, Any]) -> Any:
        # It knows from an id who made the model and whether it streams; for a label both have to be given.
        model = ChatBedrockConverse(
            model=arguments["model"], provider="anthropic", disable_streaming=False, max_tokens=40, **settings
        )
        if operation == "ask":
            message = model.invoke(arguments["text"])
        else:
            message = reduce(add, model.stream(arguments["text"]))
        return summary(message.text, message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"])

    return call


if __name__ == "__main__":
    tell(version("langchain-aws"), opened)
