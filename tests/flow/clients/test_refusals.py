"""What the AWS SDKs raise for calls that are never allowed or do not say who calls: and they do not retry."""

from __future__ import annotations

import pytest

from tests.support.client_stage import ClientStage
from tests.support.clients import (
    AIOBOTO3,
    AWS_CLI,
    BOTO3,
    BOTO3_OLDER,
    JAVASCRIPT,
    JAVASCRIPT_HTTP1,
    SESSION,
    CallRound,
    Client,
    ClientCall,
    ask,
)
from tests.support.counting_proxy import CountingProxies

OF_AWS = (BOTO3, BOTO3_OLDER, AIOBOTO3, AWS_CLI, JAVASCRIPT, JAVASCRIPT_HTTP1)
ILLEGAL = ("..", "a..b", "../control", "premium/../economy", "premium/", "a%25252Fb")


@pytest.mark.parametrize("client", OF_AWS, ids=str)
def test_invalid_model_id_is_refused_once(staged: ClientStage, doors: CountingProxies, client: Client) -> None:
    door = doors.open_proxy(staged.url)
    calls = [ask(each) for each in ILLEGAL]
    errors = client.play(CallRound(staged.environ(client, SESSION, door.url), calls)).errors()
    assert {error["code"] for error in errors} == {"ValidationException"}
    assert all(" is not allowed: an id is 1 to 2048 letters" in error["message"] for error in errors)
    assert door.requests == len(ILLEGAL)


@pytest.mark.parametrize("client", OF_AWS, ids=str)
def test_aws_keys_without_token_are_refused_once(staged: ClientStage, doors: CountingProxies, client: Client) -> None:
    door = doors.open_proxy(staged.url)
    environ = staged.environ(client, SESSION, door.url)
    del environ["AWS_SESSION_TOKEN"]
    (error,) = client.play(CallRound(environ, [ask("premium")])).errors()
    assert error["code"] == "AccessDeniedException"
    assert error["message"].startswith("a token is needed: as AWS session token, ")
    assert door.requests == 1


@pytest.mark.parametrize("client", [BOTO3, BOTO3_OLDER, AIOBOTO3], ids=str)
def test_listing_jobs_is_refused_once(staged: ClientStage, client: Client) -> None:
    calls = [ClientCall("list_async_invokes", {})]
    (error,) = client.play(CallRound(staged.environ(client, SESSION), calls)).errors()
    assert error["code"] == error["kind"] == "AccessDeniedException"
    assert error["retries"] == 0
