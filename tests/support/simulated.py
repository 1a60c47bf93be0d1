"""The simulated Bedrock for tests: in the test's own process, or as one of its own that outlives a killed sidecar."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import boto3
from bedrock_simulator import DEFAULT_KEYS, Keys, simulated_bedrock
from bedrock_simulator.guardrails import BLOCKED_TEXT
from botocore.config import Config

from tests.support.preloaded_cli import SIMULATOR, start_preloaded

__all__ = [
    "CALLING",
    "CHAT",
    "CHAT_PATH",
    "CLAUDE",
    "CLAUDE_BODY",
    "EVERYTHING",
    "GUARDED",
    "JOB",
    "LONG",
    "NOVA",
    "TURN",
    "BedrockProcess",
    "BotoCaller",
    "bedrock_process",
    "boto_client",
    "open_caller",
    "post",
    "read_ledger",
    "simulated_bedrock",
]

CLAUDE = "global.anthropic.claude-sonnet-4-5-20250929-v1:0"
NOVA = "amazon.nova-lite-v1:0"

# A conversation's turn, and everything else it can have; the same for the other operations.
TURN: dict[str, Any] = {"messages": [{"role": "user", "content": [{"text": "hello there"}]}]}
CLAUDE_BODY: dict[str, Any] = {
    "anthropic_version": "bedrock-2023-05-31",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hi"}],
}
CHAT: dict[str, Any] = {
    "model": "openai.gpt-oss-120b-1:0",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 9,
}
CHAT_PATH = "/openai/v1/chat/completions"
LONG = "word " * 2000  # 2,500 tokens: enough to be cached

EVERYTHING = TURN | {
    "system": [{"text": LONG}, {"cachePoint": {"type": "default", "ttl": "1h"}}],
    "serviceTier": {"type": "flex"},
    "performanceConfig": {"latency": "optimized"},
    "guardrailConfig": {"guardrailIdentifier": "gr1", "guardrailVersion": "1", "trace": "enabled"},
}
TOOL = {"toolSpec": {"name": "weather", "inputSchema": {"json": {"properties": {"city": {"type": "string"}}}}}}
CALLING = TURN | {"toolConfig": {"tools": [TOOL], "toolChoice": {"any": {}}}}
GUARDED = {"source": "INPUT", "content": [{"text": {"text": f"{BLOCKED_TEXT} " * 50}}]}
JOB = {
    "modelId": "amazon.nova-reel-v1:0",
    "modelInput": {"prompt": "a sea"},
    "outputDataConfig": {"s3OutputDataConfig": {"s3Uri": "s3://bucket/path"}},
}

_STARTUP_LINE = "simulated Bedrock on "


@cache
def _session() -> boto3.Session:
    """One for all clients: the service's model is read once."""
    return boto3.Session()


def boto_client(
    url: str, keys: Keys = DEFAULT_KEYS, region: str = "us-east-1", service: str = "bedrock-runtime", **config: Any
) -> Any:
    """A client as applications make it, that does not retry unless told to. Close it after use."""
    settings: dict[str, Any] = {"retries": {"total_max_attempts": 1}, "read_timeout": 30, "connect_timeout": 5} | config
    return _session().client(
        service,
        endpoint_url=url,
        region_name=region,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        aws_session_token=keys.session_token,
        config=Config(**settings),
    )


class BotoCaller:
    """A boto3 client whose blocking calls leave the test's loop free, and whose requests carry wishes."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.client = boto_client(url, **settings)
        self.fault_headers: dict[str, str] = {}
        self.client.meta.events.register("before-sign.bedrock-runtime.*", self._add_fault_headers)

    def _add_fault_headers(self, request: Any, **_: Any) -> None:
        for name, value in self.fault_headers.items():
            request.headers[f"x-simulate-{name}"] = value

    def set_faults(self, **wishes: object) -> None:
        self.fault_headers = {name.replace("_", "-"): str(value) for name, value in wishes.items()}

    async def __call__(self, operation: str, **arguments: Any) -> Any:
        return await asyncio.to_thread(self.call_blocking, operation, arguments)

    def call_blocking(self, operation: str, arguments: dict[str, Any]) -> Any:
        """The answer; a stream's as the list of its events."""
        answer = getattr(self.client, operation)(**arguments)
        for name in ("stream", "body"):
            if hasattr(answer.get(name), "_raw_stream"):
                with closing(answer[name]) as events:
                    answer[name] = list(events) if name == "stream" or "stream" in operation else events.read()
        return answer


@asynccontextmanager
async def open_caller(url: str, **settings: Any) -> AsyncIterator[BotoCaller]:
    caller = BotoCaller(url, **settings)
    try:
        yield caller
    finally:
        caller.client.close()


async def post(http: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, Any, bytes]:
    """Status, headers and body of a plain HTTP answer. A body that is no bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(url, data=data, headers={"Content-Type": "application/json"} | headers) as answer:
        return answer.status, answer.headers, await answer.read()


@dataclass(frozen=True)
class BedrockProcess:
    """A simulator in a process of its own; what its ledger and its script are asked goes over HTTP."""

    url: str
    pid: int

    def ledger(self, after: int = 0) -> dict[str, Any]:
        return self._ask("GET", f"ledger?after={after}")

    def clear_ledger(self) -> None:
        self._ask("DELETE", "ledger")

    def plan(self, *following: dict[str, Any], always: dict[str, Any] | None = None) -> None:
        """How the next requests are treated, one each; `always` replaces what holds for all of them."""
        document: dict[str, Any] = {"next": list(following)}
        self._ask("PUT", "plan", document if always is None else document | {"always": always})

    def create_profile(self, source: str) -> str:
        """Create an application inference profile of a model or profile; returns its ARN."""
        body = {"inferenceProfileName": "shop", "modelSource": {"copyFrom": source}}
        headers = {"authorization": f"Bearer {DEFAULT_KEYS.bearer}", "content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/inference-profiles", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(json.load(answer)["inferenceProfileArn"])

    def clear_plan(self) -> None:
        self._ask("DELETE", "plan")

    def _ask(self, method: str, path: str, document: dict[str, Any] | None = None) -> dict[str, Any]:
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(f"{self.url}/_simulator/{path}", data=body, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return dict(json.load(answer))


@contextmanager
def bedrock_process(*options: str, port: int = 0) -> Iterator[BedrockProcess]:
    """`options` of `python -m bedrock_simulator`, such as "--no-auth" or "--ledger", "file"."""
    arguments, (read, write) = ["--port", str(port), *options], os.pipe()
    with open(read) as output, open(os.devnull) as nothing, open(write) as written:
        files = [nothing.fileno(), written.fileno(), sys.__stderr__.fileno()]
        process = start_preloaded(SIMULATOR, arguments, folder=Path.cwd(), environ=dict(os.environ), files=files)
        written.close()  # so that its end ends the output
        try:
            line = output.readline()
            if not line.startswith(_STARTUP_LINE):
                raise RuntimeError("the simulator ended at its start")
            yield BedrockProcess(line.removeprefix(_STARTUP_LINE).strip(), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def read_ledger(file: Path) -> list[dict[str, Any]]:
    """The entries of a `--ledger` file, in the order of their arrival, each with its outcome if it has one."""
    entries: list[dict[str, Any]] = []
    under_way: dict[int, dict[str, Any]] = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        if record.pop("event") == "arrived":  # sequence numbers start again with each simulator that writes here
            under_way[record["sequence"]] = record
            entries.append(record)
        else:
            under_way[record["sequence"]].update(record)
    return entries
