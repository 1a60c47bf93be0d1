"""Real clients of Bedrock: who they are, where they are installed, and how a test has them make calls.

Those that need an environment of their own come with `make clients`. Without it their tests are left out, and say so;
with PRICE_KEEPER_TEST_CLIENTS=required, as in continuous integration, they fail instead.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "flow" / "clients" / "programs"
NEWEST = ROOT / ".venv" / "clients" / "bin" / "python"
NODE_MODULES = PROGRAMS / "node_modules" / ".package-lock.json"
REQUIRED = "PRICE_KEEPER_TEST_CLIENTS"
SECONDS = 120

# The ways to say who calls.
SESSION, CONTAINER, BEARER, API_KEY = "session token", "container credentials", "bearer", "API key"

_PASSED_ON = ("LANG", "PATH", "TMPDIR")
_QUIET = {
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REGION": "us-east-1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
}


class ClientCall(NamedTuple):
    operation: str
    arguments: dict[str, Any]


def ask(model: str, text: str = "hello", *, stream: bool = False) -> ClientCall:
    """A conversation of one turn, which every client's program knows."""
    return ClientCall("ask_stream" if stream else "ask", {"model": model, "text": text})


@dataclass(frozen=True)
class CallRound:
    """Calls of one client, made one after the other in a process with this environment."""

    environ: dict[str, str]
    calls: Sequence[ClientCall]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Client:
    name: str
    program: str  # in PROGRAMS
    redirect: str  # the variable that points it at the sidecar
    auth_methods: tuple[str, ...]  # to say who calls, over plain http
    lives_in: str = "main"  # or "newest", "node"
    settings: dict[str, Any] = field(default_factory=dict)
    path: str = ""  # behind the sidecar's address
    streams: bool = True

    def __str__(self) -> str:
        return self.name

    def require_installed(self) -> None:
        """Leaves the test out where this client is not installed."""
        if self.is_installed:
            return
        reason = f"{self.name} is not installed: make clients"
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)

    @property
    def is_installed(self) -> bool:
        if self.lives_in == "node":
            return NODE_MODULES.exists() and shutil.which("node") is not None
        return self.lives_in == "main" or NEWEST.exists()

    def play(self, *rounds: CallRound) -> ClientRun:
        """All rounds at once; skips the test where the client is not installed."""
        self.require_installed()
        rounds_as_json = [
            {
                "environ": each.environ,
                "settings": self.settings | each.settings,
                "calls": [list(call) for call in each.calls],
            }
            for each in rounds
        ]
        done = subprocess.run(
            [self._interpreter(), str(PROGRAMS / self.program)],
            input=json.dumps(rounds_as_json),
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout.splitlines()[-1])
        return ClientRun(
            document["version"], [[ClientOutcome(**outcome) for outcome in each] for each in document["rounds"]]
        )

    def _interpreter(self) -> str:
        if self.lives_in == "node":
            return "node"
        return str(NEWEST) if self.lives_in == "newest" else sys.executable


@dataclass(frozen=True)
class ClientOutcome:
    answer: Any = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class ClientRun:
    version: str
    rounds: list[list[ClientOutcome]]

    def answers(self) -> list[Any]:
        """Of all calls, none of which may have failed."""
        failed = [outcome.error for each in self.rounds for outcome in each if outcome.error is not None]
        assert failed == []
        return [outcome.answer for each in self.rounds for outcome in each]

    def errors(self) -> list[dict[str, Any]]:
        """Of all calls, each of which failed."""
        outcomes = [outcome for each in self.rounds for outcome in each]
        assert [outcome.answer for outcome in outcomes if outcome.error is None] == []
        return [outcome.error for outcome in outcomes if outcome.error is not None]


def _environment() -> dict[str, str]:
    """Nothing of this machine's AWS settings gets in."""
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return passed | _QUIET | {"HOME": "/nonexistent"}


_AWS_URL = "AWS_ENDPOINT_URL_BEDROCK_RUNTIME"
_ALL_AUTH_METHODS = (SESSION, CONTAINER, BEARER)

BOTO3 = Client("boto3", "boto3_calls.py", _AWS_URL, (SESSION, CONTAINER), "newest")
BOTO3_OLDER = Client("boto3 before 1.44", "boto3_calls.py", _AWS_URL, _ALL_AUTH_METHODS)
AIOBOTO3 = Client("aioboto3", "aioboto3_calls.py", _AWS_URL, _ALL_AUTH_METHODS)
AWS_CLI = Client("AWS CLI v1", "aws_cli_calls.py", _AWS_URL, _ALL_AUTH_METHODS, "newest", streams=False)
JAVASCRIPT = Client("AWS SDK for JavaScript", "aws_sdk_calls.mjs", _AWS_URL, _ALL_AUTH_METHODS, "node")
JAVASCRIPT_HTTP1 = Client(
    "AWS SDK for JavaScript, HTTP/1.1", "aws_sdk_calls.mjs", _AWS_URL, _ALL_AUTH_METHODS, "node", {"http1": True}
)
LANGCHAIN = Client("langchain-aws", "langchain_calls.py", _AWS_URL, (SESSION, CONTAINER), "newest")
STRANDS = Client("strands-agents", "strands_calls.py", _AWS_URL, (SESSION, CONTAINER), "newest")
LLAMAINDEX = Client("LlamaIndex", "llamaindex_calls.py", _AWS_URL, (SESSION, CONTAINER), "newest")
LITELLM = Client("LiteLLM SDK", "litellm_calls.py", "AWS_BEDROCK_RUNTIME_ENDPOINT", _ALL_AUTH_METHODS, "newest")
ANTHROPIC = Client("anthropic, Python", "anthropic_calls.py", "ANTHROPIC_BEDROCK_BASE_URL", _ALL_AUTH_METHODS, "newest")
ANTHROPIC_JAVASCRIPT = Client(
    "@anthropic-ai/bedrock-sdk", "anthropic_calls.mjs", "ANTHROPIC_BEDROCK_BASE_URL", _ALL_AUTH_METHODS, "node"
)
OPENAI = Client("openai, Python", "openai_calls.py", "OPENAI_BASE_URL", (API_KEY,), "newest", path="/openai/v1")
OPENAI_JAVASCRIPT = Client(
    "openai, JavaScript", "openai_calls.mjs", "OPENAI_BASE_URL", (API_KEY,), "node", path="/openai/v1"
)

CLIENTS = (
    BOTO3,
    BOTO3_OLDER,
    AIOBOTO3,
    AWS_CLI,
    LANGCHAIN,
    STRANDS,
    LITELLM,
    JAVASCRIPT,
    JAVASCRIPT_HTTP1,
    ANTHROPIC,
    ANTHROPIC_JAVASCRIPT,
    OPENAI,
    OPENAI_JAVASCRIPT,
)
