"""What every client's program does around its calls: rounds come from standard input, one line tells their outcome.

A round has an environment, settings, and calls, each an operation with its arguments. Rounds run at once, each in a
fork of its own, so that a client finds its environment as in a process that has just begun.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from typing import Any

Call = Callable[[str, dict[str, Any]], Any]
Describe = Callable[[BaseException], dict[str, Any]]

LONG = re.compile(r"long (\d+)")  # a text that is too long to be handed over


def tell(version: str, opened: Callable[[dict[str, Any]], Call], describe: Describe | None = None) -> None:
    """`opened` makes a client from settings, and returns what carries out its calls."""
    rounds = json.load(sys.stdin)
    with get_context("fork").Pool(len(rounds), maxtasksperchild=1) as pool:
        outcomes = pool.map(partial(_play, opened, describe or described), rounds, chunksize=1)
    print(json.dumps({"version": version, "rounds": outcomes}, default=_readable))


def _play(opened: Callable[[dict[str, Any]], Call], describe: Describe, play: dict[str, Any]) -> list[dict[str, Any]]:
    os.environ.update(play["environ"])
    outcomes = []
    call = None
    for operation, arguments in play["calls"]:
        try:
            call = call or opened(play["settings"])
            outcomes.append({"answer": call(operation, _lengthened(arguments))})
        except Exception as failure:
            outcomes.append({"error": describe(failure)})
    return outcomes


def _lengthened(arguments: dict[str, Any]) -> dict[str, Any]:
    text = arguments.get("text")
    long = LONG.fullmatch(text) if isinstance(text, str) else None
    return arguments | {"text": "x" * int(long[1])} if long else arguments


def described(failure: BaseException) -> dict[str, Any]:
    """An error of AWS's may stand behind what a library on top of an SDK raises."""
    found: BaseException | None = failure
    while found is not None and not hasattr(found, "response"):
        found = found.__cause__
    kind = type(failure).__name__
    response = getattr(found, "response", None)
    if isinstance(response, dict):
        error, metadata = response["Error"], response.get("ResponseMetadata", {})
        summary = {"code": error["Code"], "message": error["Message"], "status": metadata.get("HTTPStatusCode")}
        return {"kind": kind, **summary, "retries": metadata.get("RetryAttempts")}
    headers = getattr(response, "headers", {})
    status = getattr(failure, "status_code", None)
    return {"kind": kind, "code": headers.get("x-amzn-errortype"), "message": str(failure)[:1000], "status": status}


def _readable(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else str(value)


# What the programs of AWS's own SDKs share.


def turn(arguments: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"text": arguments["text"]}]}]
    return {"modelId": arguments["model"], "messages": messages}


def summary(text: str, input_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {"text": text, "input_tokens": input_tokens, "output_tokens": output_tokens}


def summary_of_whole(answer: dict[str, Any]) -> dict[str, Any]:
    usage = answer["usage"]
    text = "".join(block["text"] for block in answer["output"]["message"]["content"])
    return summary(text, usage["inputTokens"], usage["outputTokens"])


def summary_of_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    usage = events[-1]["metadata"]["usage"]
    text = "".join(event["contentBlockDelta"]["delta"]["text"] for event in events if "contentBlockDelta" in event)
    return summary(text, usage["inputTokens"], usage["outputTokens"])
