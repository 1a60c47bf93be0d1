"""The simulated Bedrock over real sockets, as boto3 sees each of its operations."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from tests.support.clock import ManualClock
from tests.support.simulated import (
    CALLING,
    CHAT,
    CHAT_PATH,
    CLAUDE,
    CLAUDE_BODY,
    EVERYTHING,
    GUARDED,
    JOB,
    LONG,
    NOVA,
    TURN,
    boto_client,
    open_caller,
    post,
    simulated_bedrock,
)

# What boto3 sees of each operation.


async def test_converse_returns_text_and_usage(ask_simulator):
    answer = await ask_simulator("converse", modelId=CLAUDE, **TURN, inferenceConfig={"maxTokens": 5})
    assert answer["stopReason"] == "max_tokens"
    assert len(answer["output"]["message"]["content"][0]["text"].split()) == 5
    usage = answer["usage"]
    assert usage["outputTokens"] == 5
    assert usage["totalTokens"] == usage["inputTokens"] + 5


async def test_longer_conversation_has_more_input(ask_simulator):
    answered = {"role": "assistant", "content": [{"text": "hello"}]}
    short = await ask_simulator("converse", modelId=CLAUDE, **TURN)
    longer = await ask_simulator("converse", modelId=CLAUDE, messages=[*TURN["messages"], answered, *TURN["messages"]])
    assert longer["usage"]["inputTokens"] > 2 * short["usage"]["inputTokens"]


async def test_converse_stream_matches_whole_response(ask_simulator):
    whole = await ask_simulator("converse", modelId=CLAUDE, **TURN)
    events = (await ask_simulator("converse_stream", modelId=CLAUDE, **TURN))["stream"]
    kinds = [next(iter(event)) for event in events]
    assert kinds[0] == "messageStart"
    assert kinds[-3:] == ["contentBlockStop", "messageStop", "metadata"]
    assert set(kinds[1:-3]) == {"contentBlockDelta"}
    text = "".join(event["contentBlockDelta"]["delta"]["text"] for event in events[1:-3])
    assert text == whole["output"]["message"]["content"][0]["text"]
    assert events[-1]["metadata"]["usage"] == whole["usage"]


async def test_tool_is_called_whole_and_in_stream(ask_simulator):
    whole = await ask_simulator("converse", modelId=CLAUDE, **CALLING)
    call = whole["output"]["message"]["content"][0]["toolUse"]
    events = (await ask_simulator("converse_stream", modelId=CLAUDE, **CALLING))["stream"]
    assert events[1]["contentBlockStart"]["start"]["toolUse"]["name"] == call["name"] == "weather"
    deltas = [event["contentBlockDelta"]["delta"] for event in events if "contentBlockDelta" in event]
    assert json.loads("".join(delta["toolUse"]["input"] for delta in deltas)) == call["input"]
    assert whole["stopReason"] == events[-2]["messageStop"]["stopReason"] == "tool_use"


async def test_model_is_invoked(ask_simulator):
    answer = await ask_simulator("invoke_model", modelId=CLAUDE, body=json.dumps(CLAUDE_BODY))
    body = json.loads(answer["body"])
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-amzn-bedrock-input-token-count"] == str(body["usage"]["input_tokens"])
    assert headers["x-amzn-bedrock-output-token-count"] == str(body["usage"]["output_tokens"])
    assert headers["x-amzn-bedrock-cache-read-input-token-count"] == "0"
    assert headers["x-amzn-bedrock-cache-write-input-token-count"] == "0"
    assert int(headers["x-amzn-bedrock-invocation-latency"]) > 0
    assert answer["contentType"] == "application/json"
    assert len(headers["x-amzn-requestid"]) == 36


async def test_model_is_invoked_with_stream(ask_simulator):
    whole = json.loads((await ask_simulator("invoke_model", modelId=CLAUDE, body=json.dumps(CLAUDE_BODY)))["body"])
    answer = await ask_simulator("invoke_model_with_response_stream", modelId=CLAUDE, body=json.dumps(CLAUDE_BODY))
    assert answer["contentType"] == "application/json"
    chunks = [json.loads(event["chunk"]["bytes"]) for event in answer["body"]]
    assert [chunks[0]["type"], chunks[-1]["type"]] == ["message_start", "message_stop"]
    assert "".join(chunk["delta"]["text"] for chunk in chunks[2:-3]) == whole["content"][0]["text"]
    assert chunks[-1]["amazon-bedrock-invocationMetrics"]["outputTokenCount"] == whole["usage"]["output_tokens"]


async def test_tier_and_latency_are_in_headers(ask_simulator):
    ask_simulator.set_faults(tier="priority")
    arguments = {"modelId": CLAUDE, "body": json.dumps(CLAUDE_BODY), "performanceConfigLatency": "optimized"}
    for operation in ("invoke_model", "invoke_model_with_response_stream"):
        answer = await ask_simulator(operation, **arguments)
        assert answer["performanceConfigLatency"] == "optimized"
        assert answer["ResponseMetadata"]["HTTPHeaders"]["x-amzn-bedrock-service-tier"] == "priority"


async def test_converse_states_tier_latency_and_guardrail(simulator, simulator_session):
    _, _, raw = await post(simulator_session, f"{simulator.url}/model/{CLAUDE}/converse", EVERYTHING)
    answer = json.loads(raw)
    assert answer["serviceTier"] == {"type": "flex"}
    assert answer["performanceConfig"] == {"latency": "optimized"}
    assert set(answer["trace"]["guardrail"]) == {"inputAssessment", "outputAssessments"}
    wishes = {"x-simulate-tier": "default", "x-simulate-performance": "standard"}
    _, _, raw = await post(simulator_session, f"{simulator.url}/model/{CLAUDE}/converse", EVERYTHING, **wishes)
    assert json.loads(raw)["serviceTier"] == {"type": "default"}
    assert json.loads(raw)["performanceConfig"] == {"latency": "standard"}


async def test_counted_tokens_equal_reported_input(ask_simulator):
    counted = await ask_simulator("count_tokens", modelId=CLAUDE, input={"converse": TURN})
    used = await ask_simulator("converse", modelId=CLAUDE, **TURN)
    assert counted["inputTokens"] == used["usage"]["inputTokens"]
    body = json.dumps(CLAUDE_BODY).encode()
    counted = await ask_simulator("count_tokens", modelId=CLAUDE, input={"invokeModel": {"body": body}})
    used = await ask_simulator("invoke_model", modelId=CLAUDE, body=body)
    headers = used["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-amzn-bedrock-input-token-count"] == str(counted["inputTokens"])


async def test_guardrail_is_applied_and_units_counted(simulator, ask_simulator):
    arguments = {"guardrailIdentifier": "gr1", "guardrailVersion": "DRAFT"}
    fine = await ask_simulator("apply_guardrail", **arguments, source="INPUT", content=[{"text": {"text": "x" * 1001}}])
    assert (fine["action"], fine["outputs"], fine["usage"]["topicPolicyUnits"]) == ("NONE", [], 2)
    blocked = await ask_simulator("apply_guardrail", **arguments, **GUARDED)
    assert blocked["action"] == "GUARDRAIL_INTERVENED"
    assert simulator.ledger[-1].usage.guardrail_units == blocked["usage"]
    assert simulator.ledger[-1].model == ""


async def test_guardrail_checks_are_answered(simulator, simulator_session):
    """The pinned botocore does not know this operation, so plain HTTP asks."""
    messages = [{"role": "user", "content": [{"text": "x" * 2500}]}]
    checks = {"contentFilter": {"categories": [{"category": "HATE"}]}, "sensitiveInformation": {"entities": []}}
    status, _, raw = await post(
        simulator_session, f"{simulator.url}/guardrail-checks/invoke", {"messages": messages, "checks": checks}
    )
    assert status == 200
    assert json.loads(raw) == {
        "results": {
            "contentFilter": {"results": [{"category": "HATE", "severityScore": 0.0}]},
            "sensitiveInformation": {"results": [], "truncated": False},
        },
        "usage": {"contentFilter": {"textUnits": 3}, "sensitiveInformation": {"textUnits": 3}},
    }
    status, _, raw = await post(
        simulator_session, f"{simulator.url}/guardrail-checks/invoke", {"messages": messages, "checks": {}}
    )
    assert status == 400


async def test_async_job_is_started_queried_and_completed():
    clock = ManualClock(datetime.now(UTC).timestamp())  # boto3 signs with the real time
    async with simulated_bedrock(clock=clock) as simulator, open_caller(simulator.url) as ask_simulator:
        arn = (await ask_simulator("start_async_invoke", **JOB, clientRequestToken="once"))["invocationArn"]
        assert (await ask_simulator("start_async_invoke", **JOB, clientRequestToken="once"))["invocationArn"] == arn
        with pytest.raises(ask_simulator.client.exceptions.ConflictException, match="same token"):
            await ask_simulator(
                "start_async_invoke", **JOB | {"modelInput": {"prompt": "else"}}, clientRequestToken="once"
            )
        assert (await ask_simulator("get_async_invoke", invocationArn=arn))["status"] == "InProgress"
        assert [entry.model for entry in simulator.ledger] == [JOB["modelId"]] * 2 + ["", ""]
        await clock.advance(30)
        job = await ask_simulator("get_async_invoke", invocationArn=arn)
        assert (job["status"], job["modelArn"]) == (
            "Completed",
            "arn:aws:bedrock:us-east-1::foundation-model/amazon.nova-reel-v1:0",
        )
        assert (job["endTime"] - job["submitTime"]).total_seconds() == 30


async def test_async_jobs_are_paginated(ask_simulator):
    started = [(await ask_simulator("start_async_invoke", **JOB))["invocationArn"] for _ in range(3)]
    first = await ask_simulator("list_async_invokes", maxResults=2, sortOrder="Ascending")
    second = await ask_simulator(
        "list_async_invokes", maxResults=2, sortOrder="Ascending", nextToken=first["nextToken"]
    )
    listed = [job["invocationArn"] for page in (first, second) for job in page["asyncInvokeSummaries"]]
    assert listed == started
    assert "nextToken" not in second
    newest_first = (await ask_simulator("list_async_invokes"))["asyncInvokeSummaries"]
    assert [job["invocationArn"] for job in newest_first] == started[::-1]
    for filtered in ({"statusEquals": "Completed"}, {"submitTimeBefore": datetime(2020, 1, 1, tzinfo=UTC)}):
        assert (await ask_simulator("list_async_invokes", **filtered))["asyncInvokeSummaries"] == []
    assert (
        len(
            (await ask_simulator("list_async_invokes", submitTimeAfter=datetime(2020, 1, 1, tzinfo=UTC)))[
                "asyncInvokeSummaries"
            ]
        )
        == 3
    )


async def test_model_id_may_be_an_arn(simulator, ask_simulator):
    profile = "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc123def456"
    await ask_simulator("converse", modelId=profile, **TURN)
    await ask_simulator("invoke_model", modelId=profile, body=json.dumps(CLAUDE_BODY))
    assert [entry.model for entry in simulator.ledger] == [profile, profile]
    assert "%2F" in simulator.ledger[0].target


async def test_inference_profiles_are_created_and_described(simulator):
    """By the control plane's own client, whose requests are signed as all others."""
    with closing(boto_client(simulator.url, service="bedrock")) as client:
        ask = partial(asyncio.to_thread, client.get_inference_profile)
        source = {"copyFrom": f"arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.{NOVA}"}
        made = await asyncio.to_thread(client.create_inference_profile, inferenceProfileName="shop", modelSource=source)
        own = await ask(inferenceProfileIdentifier=made["inferenceProfileArn"])
        assert (own["type"], own["inferenceProfileArn"]) == ("APPLICATION", made["inferenceProfileArn"])
        defined = await ask(inferenceProfileIdentifier=f"us.{NOVA}")
        assert (defined["type"], defined["models"]) == ("SYSTEM_DEFINED", own["models"])
        assert {each["modelArn"].rpartition("/")[2] for each in own["models"]} == {NOVA}
        for unknown in (NOVA, made["inferenceProfileArn"] + "0"):
            with pytest.raises(client.exceptions.ResourceNotFoundException):
                await ask(inferenceProfileIdentifier=unknown)
    assert [entry.operation for entry in simulator.ledger][:2] == ["CreateInferenceProfile", "GetInferenceProfile"]


# Chat completions.


async def chat_events(simulator_session, simulator, body, **headers: str) -> list[Any]:
    _, answered, raw = await post(simulator_session, simulator.url + CHAT_PATH, body, **headers)
    assert answered["Content-Type"] == "text/event-stream"
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


async def test_chat_completions_state_usage(simulator, simulator_session):
    status, _, raw = await post(simulator_session, simulator.url + CHAT_PATH, CHAT | {"service_tier": "flex"})
    answer = json.loads(raw)
    assert (status, answer["object"], answer["service_tier"]) == (200, "chat.completion", "flex")
    assert answer["usage"]["completion_tokens"] == 9
    assert simulator.ledger[-1].model == CHAT["model"]


async def test_chat_stream_states_usage_only_on_request(simulator, simulator_session):
    whole = json.loads((await post(simulator_session, simulator.url + CHAT_PATH, CHAT))[2])
    plain = await chat_events(simulator_session, simulator, CHAT | {"stream": True})
    assert not any("usage" in event for event in plain)
    asked = await chat_events(
        simulator_session, simulator, CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert [event["usage"] for event in asked[:-1]] == [None] * (len(asked) - 1)
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"] == whole["usage"] | {"completion_tokens": 9}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in plain)
    assert len(text.split()) == 9


async def test_chat_stream_omits_usage_if_requested(simulator, simulator_session):
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    events = await chat_events(simulator_session, simulator, body, **{"x-simulate-usage": "none"})
    assert not any("usage" in event for event in events)
    assert simulator.ledger[-1].usage.output_tokens == 9


@pytest.mark.parametrize(
    ("wishes", "status", "kind"),
    [
        ({"fault": "throttle"}, 429, "rate_limit_error"),
        ({"fault": "access-denied"}, 403, "permission_error"),
        ({"fault": "5xx"}, 503, "server_error"),
        ({}, 400, "invalid_request_error"),
    ],
)
async def test_chat_errors_have_known_types(simulator, simulator_session, wishes, status, kind):
    headers = {f"x-simulate-{name}": value for name, value in wishes.items()}
    answered, _, raw = await post(
        simulator_session, simulator.url + CHAT_PATH, CHAT | {"service_tier": "gold"}, **headers
    )
    assert (answered, json.loads(raw)["error"]["type"]) == (status, kind)


async def test_chat_errors_have_expected_form(simulator, simulator_session):
    status, headers, raw = await post(simulator_session, simulator.url + CHAT_PATH, CHAT | {"model": "premium"})
    assert status == 400
    assert headers["x-amzn-errortype"].startswith("ValidationException")
    assert json.loads(raw)["error"]["type"] == "invalid_request_error"


# Caching.


async def test_prefix_is_written_once_and_then_read(simulator, simulator_session):
    url = f"{simulator.url}/model/{CLAUDE}/converse"
    body = TURN | {"system": [{"text": LONG}, {"cachePoint": {"type": "default", "ttl": "1h"}}]}
    first, second = [json.loads((await post(simulator_session, url, body))[2])["usage"] for _ in range(2)]
    assert first["cacheWriteInputTokens"] == second["cacheReadInputTokens"] == 2500
    assert first["cacheDetails"] == [{"ttl": "1h", "inputTokens": 2500}]
    assert (first["cacheReadInputTokens"], second["cacheWriteInputTokens"]) == (0, 0)
    assert first["inputTokens"] == second["inputTokens"] < 20
    assert first["totalTokens"] == 2500 + first["inputTokens"] + first["outputTokens"]
    assert [entry.usage.cache_write_1h_tokens for entry in simulator.ledger] == [2500, 0]


async def test_stream_metrics_include_cache(ask_simulator):
    system = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    seen = []
    for _ in range(2):
        body = json.dumps(CLAUDE_BODY | {"system": system})
        events = (await ask_simulator("invoke_model_with_response_stream", modelId=CLAUDE, body=body))["body"]
        chunks = [json.loads(event["chunk"]["bytes"]) for event in events]
        metrics, usage = chunks[-1]["amazon-bedrock-invocationMetrics"], chunks[0]["message"]["usage"]
        assert metrics["cacheReadInputTokenCount"] == usage["cache_read_input_tokens"]
        assert metrics["cacheWriteInputTokenCount"] == usage["cache_creation_input_tokens"]
        seen.append((metrics["cacheWriteInputTokenCount"], metrics["cacheReadInputTokenCount"]))
    assert seen == [(2500, 0), (0, 2500)]


# Wishes that are no faults.


async def test_reported_counts_can_be_requested(ask_simulator):
    ask_simulator.set_faults(
        input_tokens=11, output_tokens=12, cache_read_tokens=13, cache_write_5m_tokens=14, latency_ms=0
    )
    answer = await ask_simulator("converse", modelId=CLAUDE, **TURN)
    usage = answer["usage"]
    assert (usage["inputTokens"], usage["outputTokens"]) == (11, 12)
    assert (usage["cacheReadInputTokens"], usage["cacheWriteInputTokens"], usage["totalTokens"]) == (13, 14, 50)


async def test_response_may_omit_usage(simulator, ask_simulator):
    ask_simulator.set_faults(usage="none")
    assert "usage" not in await ask_simulator("converse", modelId=CLAUDE, **TURN)
    events = (await ask_simulator("converse_stream", modelId=CLAUDE, **TURN))["stream"]
    assert "usage" not in events[-1]["metadata"]
    assert all(entry.usage.output_tokens > 0 and entry.is_whole for entry in simulator.ledger)


async def test_unknown_fault_header_is_refused(ask_simulator):
    ask_simulator.set_faults(falut="cut")
    with pytest.raises(ask_simulator.client.exceptions.ValidationException, match="x-simulate-falut"):
        await ask_simulator("converse", modelId=CLAUDE, **TURN)
