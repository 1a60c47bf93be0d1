"""langchain-aws: ChatBedrockConverse, invoked and streamed, with a tool that it must call, and with structure."""

from __future__ import annotations

from functools import reduce
from importlib.metadata import version
from operator import add
from typing import Any

from langchain_aws import ChatBedrockConverse
from pydantic import BaseModel
from telling import Call, summary, tell


class Weather(BaseModel):
    """The weather in a city."""

    city: str


def opened(settings: dict[str, Any]) -> Call:
    def call(operation: str, arguments: dict[str, Any]) -> Any:
        if operation in ("tool", "structured"):
            # What it may ask of a model it knows from the model's id alone.
            model = ChatBedrockConverse(**arguments["model"], max_tokens=400, **settings)
            if operation == "structured":
                return model.with_structured_output(Weather).invoke(arguments["text"]).model_dump()
            return model.bind_tools([Weather], tool_choice="any").invoke(arguments["text"]).tool_calls
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
