"""Every operation of bedrock-runtime by the AWS SDKs themselves, in each way to say who calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.client_stage import BEARER_OVER_HTTPS, ClientStage
from tests.support.clients import (
    AIOBOTO3,
    AWS_CLI,
    BOTO3,
    BOTO3_OLDER,
    JAVASCRIPT,
    JAVASCRIPT_HTTP1,
    CallRound,
    Client,
    ClientCall,
)
from tests.support.simulated import CLAUDE, CLAUDE_BODY, TURN

BODY = {"body": json.dumps(CLAUDE_BODY)}
COUNTED = {"input": {"converse": TURN}}
GUARDED = {
    "guardrailIdentifier": "gr1",
    "guardrailVersion": "DRAFT",
    "source": "INPUT",
    "content": [{"text": {"text": "hello"}}],
}
JOB = {
    "modelId": "film",
    "modelInput": {"prompt": "a sea"},
    "outputDataConfig": {"s3OutputDataConfig": {"s3Uri": "s3://bucket/path"}},
}
# The label by its name, then by the model it stands for.
CALLS = (
    ClientCall("invoke_model", {"modelId": "premium", **BODY}),
    ClientCall("invoke_model_with_response_stream", {"modelId": CLAUDE, **BODY}),
    ClientCall("converse", {"modelId": CLAUDE, **TURN}),
    ClientCall("converse_stream", {"modelId": "premium", **TURN}),
    ClientCall("count_tokens", {"modelId": "premium", **COUNTED}),
    ClientCall("apply_guardrail", GUARDED),
    ClientCall("start_async_invoke", JOB),
)
OPERATIONS = {call.operation: number for number, call in enumerate(CALLS)}
JOB_ARN = "arn:aws:bedrock:us-east-1:123456789012:async-invoke/"

in_each_way = [
    pytest.param(client, way, id=f"{client}-{way}")
    for client in (BOTO3, BOTO3_OLDER, AIOBOTO3, JAVASCRIPT, JAVASCRIPT_HTTP1)
    for way in (*client.auth_methods, BEARER_OVER_HTTPS)
]


def spelled(client: Client, call: ClientCall) -> ClientCall:
    """The operation as this SDK names it."""
    if client.lives_in != "node":
        return call
    return ClientCall("".join(part.capitalize() for part in call.operation.split("_")), call.arguments)


def get_job(client: Client, answer: dict[str, Any]) -> ClientCall:
    return spelled(client, ClientCall("get_async_invoke", {"invocationArn": answer["invocationArn"]}))


@pytest.mark.parametrize(("client", "way"), in_each_way)
def test_every_operation_of_sdk_is_served(staged: ClientStage, client: Client, way: str) -> None:
    environ = staged.environ(client, way)
    answers = client.play(CallRound(environ, [spelled(client, call) for call in CALLS])).answers()
    said = {operation: answers[number] for operation, number in OPERATIONS.items()}
    check_answers(said)
    check_stream(said["invoke_model_with_response_stream"]["body"], said["invoke_model"]["body"])
    (job,) = client.play(CallRound(environ, [get_job(client, said["start_async_invoke"])])).answers()
    assert job["status"] == "InProgress"
    if client.lives_in == "node":
        assert {answer["protocol"] for answer in answers} == {
            "NodeHttpHandler" if client is JAVASCRIPT_HTTP1 else "NodeHttp2Handler"
        }
    else:
        check_headers(said["converse"], CLAUDE)
        check_headers(said["converse_stream"], "premium")


def check_answers(said: dict[str, Any]) -> None:
    used = said["converse"]["usage"]
    assert used["totalTokens"] == used["inputTokens"] + used["outputTokens"] > used["inputTokens"] > 0
    assert said["converse_stream"]["stream"][-1]["metadata"]["usage"] == used
    assert said["count_tokens"]["inputTokens"] == used["inputTokens"]
    assert said["apply_guardrail"]["action"] == "NONE"
    assert said["start_async_invoke"]["invocationArn"].startswith(JOB_ARN)


def check_stream(events: list[dict[str, Any]], whole: str) -> None:
    chunks = [json.loads(event["chunk"]["bytes"]) for event in events]
    text = "".join(chunk["delta"]["text"] for chunk in chunks if chunk["type"] == "content_block_delta")
    assert text == json.loads(whole)["content"][0]["text"]
    metrics = chunks[-1]["amazon-bedrock-invocationMetrics"]
    assert metrics["outputTokenCount"] == json.loads(whole)["usage"]["output_tokens"]


def check_headers(answer: dict[str, Any], requested: str) -> None:
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-price-keeper-requested"] == requested
    assert headers["x-price-keeper-label"] == "premium"
    assert headers["x-price-keeper-model"] == CLAUDE
    assert headers["x-amzn-requestid"]


@pytest.mark.parametrize("way", [*AWS_CLI.auth_methods, BEARER_OVER_HTTPS])
def test_every_operation_of_aws_cli_is_served(staged: ClientStage, way: str) -> None:
    environ = staged.environ(AWS_CLI, way)
    calls = [call for call in CALLS if not call.operation.endswith("stream")]
    answers = AWS_CLI.play(CallRound(environ, calls)).answers()
    said = dict(zip((call.operation for call in calls), answers, strict=True))
    used = said["converse"]["usage"]
    assert used["outputTokens"] > 0
    assert said["count_tokens"]["inputTokens"] == used["inputTokens"]
    assert json.loads(said["invoke_model"]["body"])["usage"]["output_tokens"] > 0
    assert said["apply_guardrail"]["action"] == "NONE"
    assert said["start_async_invoke"]["invocationArn"].startswith(JOB_ARN)
    (job,) = AWS_CLI.play(CallRound(environ, [get_job(AWS_CLI, said["start_async_invoke"])])).answers()
    assert job["status"] == "InProgress"
