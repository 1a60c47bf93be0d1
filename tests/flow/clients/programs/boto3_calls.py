"""boto3: every operation by its own name; `ask` and `ask_stream` stand for a conversation."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config
from telling import Call, summary_of_stream, summary_of_whole, tell, turn


def opened(settings: dict[str, Any]) -> Call:
    client = boto3.Session().client("bedrock-runtime", config=Config(**settings))

    def call(operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "ask":
            return summary_of_whole(client.converse(**turn(arguments)))
        if operation == "ask_stream":
            return summary_of_stream(list(client.converse_stream(**turn(arguments))["stream"]))
        return _read(operation, getattr(client, operation)(**arguments))

    return call


def _read(operation: str, answer: dict[str, Any]) -> dict[str, Any]:
    if "stream" in operation:
        name = "stream" if operation == "converse_stream" else "body"
        return answer | {name: list(answer[name])}
    return answer | {"body": answer["body"].read()} if "body" in answer else answer


if __name__ == "__main__":
    tell(boto3.__version__, opened)
