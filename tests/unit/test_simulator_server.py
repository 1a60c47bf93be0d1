"""The simulator refuses what Bedrock refuses, and keeps its books where tests can read them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import closing
from typing import Any

import aiohttp
import pytest
from bedrock_simulator import DEFAULT_KEYS, Keys
from botocore.exceptions import ClientError

from tests.support.clock import settle
from tests.support.simulated import (
    CHAT_PATH,
    CLAUDE,
    CLAUDE_BODY,
    LONG,
    TURN,
    bedrock_process,
    boto_client,
    open_caller,
    post,
    read_ledger,
    simulated_bedrock,
)

# Refusals.


async def test_unknown_operation_is_refused(simulator, simulator_session):
    for method, path in (("POST", "/model/x/explain"), ("GET", "/"), ("GET", "/foundation-models")):
        async with simulator_session.request(method, simulator.url + path) as answer:
            assert answer.status == 404
            assert answer.headers["x-amzn-errortype"] == "UnknownOperationException"
            body = json.loads(await answer.read())
            assert body["Output"]["__type"] == "com.amazon.coral.service#UnknownOperationException"
    assert [entry.operation for entry in simulator.ledger] == [""] * 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"modelId": "nobody.model-v1"}, "The provided model identifier is invalid"),
        ({"modelId": CLAUDE, "messages": []}, "messages field is required"),
        (
            {"modelId": CLAUDE, "messages": [{"role": "assistant", "content": [{"text": "x"}]}]},
            "start with a user message",
        ),
        ({"modelId": CLAUDE, "messages": [{"role": "user", "content": []}]}, "is empty"),
        ({"modelId": "cohere.embed-english-v3"}, "doesn't support the model"),
        ({"modelId": CLAUDE, "performanceConfig": {"latency": "slow"}}, "performanceConfig.latency"),
        ({"modelId": CLAUDE, "inferenceConfig": {"maxTokens": 10**6}}, "exceeds the model limit"),
    ],
)
async def test_invalid_conversation_is_refused(ask_simulator, arguments, complaint):
    with pytest.raises(ask_simulator.client.exceptions.ValidationException, match=complaint):
        await ask_simulator("converse", **TURN | arguments)


async def test_cache_point_requires_caching_model(ask_simulator):
    system = [{"text": LONG}, {"cachePoint": {"type": "default"}}]
    with pytest.raises(ask_simulator.client.exceptions.AccessDeniedException, match="prompt caching"):
        await ask_simulator("converse", modelId="meta.llama3-70b-instruct-v1:0", system=system, **TURN)


@pytest.mark.parametrize("path", [f"/model/{CLAUDE}/converse", f"/model/{CLAUDE}/invoke", "/async-invoke", CHAT_PATH])
@pytest.mark.parametrize(
    ("body", "headers"),
    [(b"{", {}), (b"[]", {}), (b"", {}), (b"{}", {}), (b"{}", {"Content-Type": "text/plain"})],
)
async def test_malformed_body_is_refused(simulator, simulator_session, path, body, headers):
    status, answered, raw = await post(simulator_session, simulator.url + path, body, **headers)
    assert status == 400
    assert answered["x-amzn-errortype"] == "ValidationException:http://internal.amazon.com/coral/com.amazon.bedrock/"
    assert "message" in (json.loads(raw).get("error") or json.loads(raw))


async def test_oversized_body_is_refused(simulator, simulator_session, monkeypatch):
    monkeypatch.setattr("bedrock_simulator.server.MAX_BODY_BYTES", 1000)
    url = f"{simulator.url}/model/{CLAUDE}/invoke"
    assert (await post(simulator_session, url, b"x" * 1000))[0] == 400
    status, headers, _ = await post(simulator_session, url, b"x" * 1001)
    assert status == 413
    assert headers["x-amzn-errortype"].startswith("RequestEntityTooLargeException")


BAD_METADATA = [{}, {"a": 1}, {"": "x"}, {"a": "<"}, {"a": "x" * 257}, {str(n): "" for n in range(17)}, [1]]


@pytest.mark.parametrize("bad", BAD_METADATA)
async def test_invalid_metadata_is_refused(simulator, simulator_session, bad):
    header = {"X-Amzn-Bedrock-Request-Metadata": json.dumps(bad)}
    assert (await post(simulator_session, f"{simulator.url}/model/{CLAUDE}/invoke", CLAUDE_BODY, **header))[0] == 400
    assert (await post(simulator_session, f"{simulator.url}/model/{CLAUDE}/converse", TURN | {"requestMetadata": bad}))[
        0
    ] == 400


@pytest.mark.parametrize("text", ["nonsense", "", "{" + " " * 8500 + "}"])
async def test_metadata_header_must_be_json_of_bounded_length(simulator, simulator_session, text):
    header = {"X-Amzn-Bedrock-Request-Metadata": text}
    assert (await post(simulator_session, f"{simulator.url}/model/{CLAUDE}/invoke", CLAUDE_BODY, **header))[0] == 400


async def test_valid_metadata_is_in_ledger(simulator, simulator_session):
    good = {"org": "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b", "app:a_@$#=/+,-.": ""} | {
        str(n): "x" * 256 for n in range(14)
    }
    header = {"X-Amzn-Bedrock-Request-Metadata": json.dumps(good)}
    assert (await post(simulator_session, f"{simulator.url}/model/{CLAUDE}/invoke", CLAUDE_BODY, **header))[0] == 200
    assert (
        await post(simulator_session, f"{simulator.url}/model/{CLAUDE}/converse", TURN | {"requestMetadata": good})
    )[0] == 200
    assert [entry.metadata for entry in simulator.ledger] == [good, good]


# Who may ask.


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        (Keys("SOMEONEELSE", "x"), "UnrecognizedClientException"),
        (Keys(DEFAULT_KEYS.access_key, "wrong"), "InvalidSignatureException"),
    ],
)
async def test_wrong_keys_are_refused(simulator, keys, code):
    async with open_caller(simulator.url, keys=keys) as ask_simulator:
        with pytest.raises(ClientError) as refused:
            await ask_simulator("converse", modelId=CLAUDE, **TURN)
    assert refused.value.response["Error"]["Code"] == code
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    assert simulator.ledger[-1].usage is None


async def test_temporary_keys_are_accepted_with_session_token():
    keys = Keys("ASIATEMPORARY", "secret", session_token="x" * 10_000)
    async with simulated_bedrock(keys=keys) as simulator, open_caller(simulator.url, keys=keys) as ask_simulator:
        assert (await ask_simulator("converse", modelId=CLAUDE, **TURN))["stopReason"] == "end_turn"


async def test_wrong_api_key_is_refused_like_bedrock(simulator):
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer wrong"}) as session:
        status, headers, raw = await post(session, f"{simulator.url}/model/{CLAUDE}/converse", TURN)
    assert (status, headers["x-amzn-errortype"]) == (403, "AccessDeniedException")
    assert json.loads(raw) == {"Message": "Authentication failed: Please make sure your API Key is valid."}


async def test_missing_keys_are_refused_unless_checks_are_off(simulator):
    async with simulated_bedrock(require_auth=False) as open_to_all, aiohttp.ClientSession() as anyone:
        path = f"/model/{CLAUDE}/converse"
        status, headers, _ = await post(anyone, simulator.url + path, TURN)
        assert (status, headers["x-amzn-errortype"]) == (403, "MissingAuthenticationTokenException")
        assert (await post(anyone, open_to_all.url + path, TURN))[0] == 200


async def test_changed_body_breaks_signature(simulator, ask_simulator):
    def change(request: Any, **_: Any) -> None:
        request.body = request.body.replace(b"hello", b"HELLO")

    ask_simulator.client.meta.events.register("before-send.bedrock-runtime.*", change)
    with pytest.raises(ClientError, match="InvalidSignatureException"):
        await ask_simulator("converse", modelId=CLAUDE, **TURN)


# The books.


async def test_ledger_has_exactly_what_arrived(simulator, ask_simulator):
    def add_metadata(request: Any, **_: Any) -> None:
        request.headers["X-Amzn-Bedrock-Request-Metadata"] = '{"org":"o"}'

    ask_simulator.client.meta.events.register("before-sign.bedrock-runtime.*", add_metadata)
    answer = await ask_simulator("converse", modelId=CLAUDE, **TURN)
    (entry,) = simulator.ledger
    assert (entry.operation, entry.model, entry.method) == ("Converse", CLAUDE, "POST")
    assert entry.target == f"/model/{CLAUDE.replace(':', '%3A')}/converse"
    assert json.loads(entry.body) == TURN
    assert entry.body_size == len(entry.body)
    assert entry.metadata == {"org": "o"}
    assert entry.header("authorization").startswith("AWS4-HMAC-SHA256 Credential=")
    assert entry.invocation_id == entry.header("amz-sdk-invocation-id") != ""
    assert (b"Content-Type", b"application/json") in entry.headers
    assert (entry.status, entry.is_whole, entry.is_done, entry.fault) == (200, True, True, "")
    assert (entry.usage.input_tokens, entry.usage.output_tokens) == (
        answer["usage"]["inputTokens"],
        answer["usage"]["outputTokens"],
    )
    assert entry.request_id == answer["ResponseMetadata"]["RequestId"]
    assert simulator.ledger.totals == {CLAUDE: entry.usage}


async def test_long_body_is_truncated_in_ledger(simulator, simulator_session, monkeypatch):
    monkeypatch.setattr("bedrock_simulator.server.MAX_ENTRY_BODY_BYTES", 10)
    await post(simulator_session, f"{simulator.url}/model/{CLAUDE}/invoke", CLAUDE_BODY)
    (entry,) = simulator.ledger
    assert entry.body == json.dumps(CLAUDE_BODY).encode()[:10]
    assert entry.body_size == len(json.dumps(CLAUDE_BODY))


async def test_concurrent_requests_have_own_entries(simulator, simulator_session):
    bodies = [CLAUDE_BODY | {"max_tokens": length} for length in range(1, 51)]
    await asyncio.gather(*(post(simulator_session, f"{simulator.url}/model/{CLAUDE}/invoke", body) for body in bodies))
    assert sorted(entry.sequence for entry in simulator.ledger) == list(range(1, 51))
    assert {json.loads(entry.body)["max_tokens"] for entry in simulator.ledger} == set(range(1, 51))
    assert all(entry.is_whole for entry in simulator.ledger)


async def test_admin_routes_read_ledger_and_are_not_in_it(simulator, simulator_session):
    await post(simulator_session, f"{simulator.url}/model/{CLAUDE}/invoke", CLAUDE_BODY)
    async with simulator_session.get(f"{simulator.url}/_simulator/ledger") as answer:
        report = await answer.json()
    assert report["arrived"] == 1
    assert report["entries"][0]["model"] == CLAUDE
    async with simulator_session.delete(f"{simulator.url}/_simulator/ledger") as answer:
        assert answer.status == 200
    assert (len(simulator.ledger), simulator.ledger.arrived) == (0, 0)


async def test_admin_routes_accept_plan_and_refuse_malformed_one(simulator, simulator_session):
    url, path = f"{simulator.url}/_simulator/plan", f"{simulator.url}/model/{CLAUDE}/invoke"
    async with simulator_session.put(url, json={"next": [{"fault": "nonsense"}]}) as answer:
        assert answer.status == 400
    async with simulator_session.put(
        url, json={"always": {"output-tokens": 2}, "next": [{"fault": "throttle"}]}
    ) as answer:
        assert await answer.json() == {"always": {"output-tokens": 2}, "next": [{"fault": "throttle"}]}
    assert [(await post(simulator_session, path, CLAUDE_BODY))[0] for _ in range(2)] == [429, 200]
    assert simulator.ledger[-1].usage.output_tokens == 2
    async with simulator_session.delete(url) as answer:
        assert await answer.json() == {"always": {}, "next": []}
    async with simulator_session.get(f"{simulator.url}/_simulator/else") as answer:
        assert answer.status == 400


async def test_body_that_never_ends_leaves_no_entry(simulator):
    _, writer = await asyncio.open_connection("127.0.0.1", simulator.port)
    writer.write(b"POST /model/m/invoke HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
    await writer.drain()
    writer.transport.abort()
    await settle()
    assert len(simulator.ledger) == 0


def test_simulator_process_answers_and_writes_ledger_file(tmp_path):
    file = tmp_path / "ledger"
    with bedrock_process("--ledger", str(file)) as simulator, closing(boto_client(simulator.url)) as client:
        simulator.plan({"fault": "throttle"}, always={"output_tokens": 7})
        with pytest.raises(client.exceptions.ThrottlingException):
            client.converse(modelId=CLAUDE, **TURN)
        assert client.converse(modelId=CLAUDE, **TURN)["usage"]["outputTokens"] == 7
        statuses = [429, 200]
        assert [entry["status"] for entry in simulator.ledger()["entries"]] == statuses
        assert [entry["status"] for entry in simulator.ledger(after=1)["entries"]] == [200]
        os.kill(simulator.pid, signal.SIGKILL)  # even its own end takes nothing from the file
    entries = read_ledger(file)
    assert [(entry["status"], entry["is_done"]) for entry in entries] == [(status, True) for status in statuses]
    assert entries[1]["usage"]["output_tokens"] == 7


def test_simulator_process_checks_keys_and_stops_on_signal(tmp_path):
    keys = Keys("OWNKEY", "own-secret")
    with bedrock_process("--access-key", "OWNKEY", "--secret-key", "own-secret") as simulator:
        with closing(boto_client(simulator.url)) as client, pytest.raises(ClientError, match="UnrecognizedClient"):
            client.converse(modelId=CLAUDE, **TURN)
        with closing(boto_client(simulator.url, keys)) as client:
            client.converse(modelId=CLAUDE, **TURN)
    with pytest.raises(OSError, match=r"refused|reset"):
        simulator.ledger()
