"""aioboto3: every operation by its own name; `ask` and `ask_stream` stand for a conversation."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import aioboto3
from botocore.config import Config
from telling import Call, summary_of_stream, summary_of_whole, tell, turn


def opened(settings: dict[str, Any]) -> Call:
    def call(operation: str, arguments: dict[str, Any]) -> Any:
        return asyncio.run(_call(settings, operation, arguments))

    return call


async def _call(settings: dict[str, Any], operation: str, arguments: dict[str, Any]) -> Any:
    async with aioboto3.Session().client("bedrock-runtime", config=Config(**settings)) as client:
        if operation == "ask":
            return summary_of_whole(await client.converse(**turn(arguments)))
        if operation == "ask_stream":
            return summary_of_stream(
                [event async for event in (await client.converse_stream(**turn(arguments)))["stream"]]
            )
        return await _read(operation, await getattr(client, operation)(**arguments))


async def _read(operation: str, answer: dict[str, Any]) -> dict[str, Any]:
    if "stream" in operation:
        name = "stream" if operation == "converse_stream" else "body"
        return answer | {name: [event async for event in answer[name]]}
    return answer | {"body": await answer["body"].read()} if "body" in answer else answer


if __name__ == "__main__":
    tell(version("aioboto3"), opened)
