"""The simulated Bedrock for tests: in the test's own process, or as one of its own that outlives a killed sidecar."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from proxy.simulator import DEFAULT_KEYS, Keys, simulated_bedrock

__all__ = ["CLAUDE", "NOVA", "BedrockProcess", "bedrock_process", "boto_client", "read_ledger", "simulated_bedrock"]

CLAUDE = "anthropic.claude-sonnet-4-5-20250929-v1:0"
NOVA = "amazon.nova-lite-v1:0"

_ANNOUNCEMENT = "simulated Bedrock on "


@cache
def _session() -> boto3.Session:
    """One for all clients: the service's model is read once."""
    return boto3.Session()


def boto_client(url: str, keys: Keys = DEFAULT_KEYS, region: str = "us-east-1", **config: Any) -> Any:
    """A bedrock-runtime client as applications make it, that does not retry unless told to. Close it after use."""
    settings: dict[str, Any] = {"retries": {"total_max_attempts": 1}, "read_timeout": 30, "connect_timeout": 5} | config
    return _session().client(
        "bedrock-runtime",
        endpoint_url=url,
        region_name=region,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        aws_session_token=keys.session_token,
        config=Config(**settings),
    )


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

    def clear_plan(self) -> None:
        self._ask("DELETE", "plan")

    def _ask(self, method: str, path: str, document: dict[str, Any] | None = None) -> dict[str, Any]:
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(f"{self.url}/_simulator/{path}", data=body, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return dict(json.load(answer))


@contextmanager
def bedrock_process(*options: str, port: int = 0) -> Iterator[BedrockProcess]:
    """`options` are those of `python -m proxy.simulator`, such as "--no-auth" or "--ledger", "file"."""
    command = [sys.executable, "-m", "proxy.simulator", "--port", str(port), *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(_ANNOUNCEMENT):
                raise RuntimeError("the simulator ended at its start")
            yield BedrockProcess(line.removeprefix(_ANNOUNCEMENT).strip(), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def read_ledger(file: Path) -> list[dict[str, Any]]:
    """The entries of a `--ledger` file, in the order of their arrival, each with its outcome if it has one."""
    entries: dict[int, dict[str, Any]] = {}
    for line in file.read_text().splitlines():
        noted = json.loads(line)
        noted.pop("event")
        entries.setdefault(noted["sequence"], {}).update(noted)
    return list(entries.values())
