"""What says who calls ends at the sidecar: none of it reaches Bedrock or a log, and a log has no prompt either."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bedrock_simulator import DEFAULT_KEYS

from tests.support.client_stage import (
    BROKEN,
    CALLERS_KEY,
    CALLERS_SECRET,
    CLOSED,
    CUT,
    THROTTLED,
    ClientStage,
    new_marker,
)
from tests.support.clients import (
    AIOBOTO3,
    ANTHROPIC,
    BOTO3,
    BOTO3_OLDER,
    JAVASCRIPT,
    OPENAI,
    CallRound,
    Client,
    ask,
)

ANY_TOKEN = "eyJ"  # as the first part of each begins
BAD_TOKEN = "a-token-that-is-not-good-and-not-for-anybodys-eyes"
NEVER_UPSTREAM = {"x-amz-security-token", "cookie", "x-api-key", "x-amz-content-sha256"}


# Settings that keep a client from trying again.
ONCE: dict[Client, dict[str, Any]] = {
    BOTO3_OLDER: {"retries": {"total_max_attempts": 1}},
    AIOBOTO3: {"retries": {"total_max_attempts": 1}},
    BOTO3: {"retries": {"total_max_attempts": 1}},
    JAVASCRIPT: {"maxAttempts": 1},
    ANTHROPIC: {"max_retries": 0},
    OPENAI: {"max_retries": 0},
}


@pytest.mark.parametrize("client", ONCE, ids=str)
def test_caller_secrets_stay_in_sidecar(staged: ClientStage, client: Client) -> None:
    marker, token = new_marker(), staged.token()
    assert token.startswith(ANY_TOKEN)
    models = ("premium", "profile", CLOSED, THROTTLED, CUT, BROKEN, "unknown")
    calls = [ask(model, marker, stream=stream) for model in models for stream in (False, True)]
    once = ONCE[client]
    rounds = [CallRound(staged.environ(client, way, token=token), calls, once) for way in client.auth_methods]
    rejected = CallRound(
        staged.environ(client, client.auth_methods[0], token=BAD_TOKEN), [ask("premium", marker)], once
    )
    client.play(*rounds, rejected)
    secrets = [ANY_TOKEN, BAD_TOKEN, staged.secret, CALLERS_KEY, CALLERS_SECRET]
    arrived = [entry for bedrock in staged.all_sidecars for entry in bedrock.ledger()["entries"]]
    mine = [entry for entry in arrived if marker in entry["body"]]
    assert len(mine) >= 8 * len(client.auth_methods)
    check_upstream(mine, secrets)
    check_output(staged, [*secrets, DEFAULT_KEYS.secret_key, marker])


def check_upstream(entries: list[dict[str, Any]], secrets: list[str]) -> None:
    for entry in entries:
        names = {name.lower() for name, _ in entry["headers"]}
        assert names & NEVER_UPSTREAM == set()
        text = json.dumps(entry)
        assert [secret for secret in secrets if secret in text] == []
        authorization = next(value for name, value in entry["headers"] if name.lower() == "authorization")
        assert authorization.startswith(f"AWS4-HMAC-SHA256 Credential={DEFAULT_KEYS.access_key}/")


def check_output(staged: ClientStage, secrets: list[str]) -> None:
    said = staged.output
    # It does log something, so that a leak would be seen.
    assert "a response was cut or broken before it stated its usage" in said
    assert [secret for secret in secrets if secret in said] == []
