"""OpenAI's Responses, Anthropic's Messages, their lists of models and their errors, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from price_keeper.config import Config
from price_keeper.domain import Scope
from price_keeper.ledger.ledger_entries import UsageCounts
from price_keeper.stores import schema
from price_keeper.stores.contract import Put

from tests.flow.test_recording import PICO, of_ledger, sums
from tests.support.data_port import APP, ORG, DataPort, data_port
from tests.support.simulated import CHAT

MESSAGES: dict[str, Any] = {
    "model": "premium",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "How are you?"}],
}
RESPONSE: dict[str, Any] = {"model": "chat", "max_output_tokens": 50, "input": "How are you?"}
MESSAGES_PATH, RESPONSES_PATH = "/anthropic/v1/messages", "/openai/v1/responses"


class Answer:
    def __init__(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.status, self.headers, self.data = status, headers, data

    @property
    def body(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[tuple[str, Any]]:
        """The names and documents of server-sent events."""
        pairs = [event.split("\n") for event in self.data.decode().strip().split("\n\n")]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[DataPort]:
    labels = dict(Config.development().labels)
    labels["chat"] = replace(labels["economy"], model=CHAT["model"], format="openai")
    async with data_port(tmp_path, labels=labels) as opened:
        yield opened


async def ask(
    port: DataPort, path: str, body: Any = None, headers: dict[str, str] | None = None, *, token: str | None = None
) -> Answer:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", "authorization": f"Bearer {token or port.token}"} | (headers or {})
    async with (
        aiohttp.ClientSession() as session,
        session.request("GET" if data is None else "POST", port.url + path, data=data, headers=sent) as answer,
    ):
        return Answer(answer.status, {n.lower(): v for n, v in answer.headers.items()}, await answer.read())


def only_sums(port: DataPort) -> UsageCounts:
    ((_, counts),) = sums(port).items()
    return counts


async def set_hard_budget(port: DataPort, **micros: int) -> None:
    item = {"timezone": "UTC", "model_ordering": [*micros], "quotas": micros, "enforcement": "hard", "version": 1}
    await port.store.put(Put(schema.org_config_key(ORG), item))


# ---------------------------------------------------------------- OpenAI's responses


@pytest.mark.parametrize("path", [RESPONSES_PATH, "/v1/responses"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_response_is_served_and_charged_by_its_usage(port: DataPort, path: str, is_stream: bool) -> None:
    answer = await ask(port, path, RESPONSE | {"stream": is_stream})
    assert answer.status == 200
    final = answer.events[-1][1]["response"] if is_stream else answer.body
    assert final["status"] in ("completed", "incomplete")
    assert answer.headers["x-price-keeper-label"] == "chat"
    assert sums(port) == {"chat": of_ledger(port, "chat", PICO["economy"])}
    assert port.bedrock.ledger[-1].target == RESPONSES_PATH


@pytest.mark.parametrize("is_stream", [False, True])
async def test_cached_tokens_of_a_response_are_part_of_its_input(port: DataPort, is_stream: bool) -> None:
    port.bedrock.always(input_tokens=100, cache_read_tokens=1000)
    await ask(port, RESPONSES_PATH, RESPONSE | {"stream": is_stream})
    counts = only_sums(port)
    assert (counts.input_tokens, counts.cache_read_tokens, counts.estimated_requests) == (100, 1000, 0)


async def test_stream_cut_before_its_end_is_estimated(port: DataPort) -> None:
    port.bedrock.plan({"fault": "cut", "after_frames": 6})
    with pytest.raises(aiohttp.ClientPayloadError):
        await ask(port, RESPONSES_PATH, RESPONSE | {"stream": True})
    counts = only_sums(port)
    assert counts.estimated_requests == 1
    assert counts.output_tokens > 0


@pytest.mark.parametrize("fault", ["none", "zero", "no-output", "negative", "text", "null"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_response_without_credible_usage_is_never_free(port: DataPort, fault: str, is_stream: bool) -> None:
    port.bedrock.always(usage=fault)
    await ask(port, RESPONSES_PATH, RESPONSE | {"stream": is_stream})
    counts = only_sums(port)
    assert counts.estimated_requests == 1
    assert counts.pico > 0


async def test_background_response_is_refused_with_the_reason(port: DataPort) -> None:
    answer = await ask(port, RESPONSES_PATH, RESPONSE | {"background": True})
    assert answer.status == 400
    assert "'background'" in answer.body["error"]["message"]
    assert not port.bedrock.ledger


async def test_hard_budget_bounds_a_response_and_writes_its_limit(port: DataPort) -> None:
    await set_hard_budget(port, chat=1_000_000)
    assert (await ask(port, RESPONSES_PATH, RESPONSE)).status == 200
    unlimited = {name: value for name, value in RESPONSE.items() if name != "max_output_tokens"}
    refused = await ask(port, RESPONSES_PATH, unlimited)
    assert refused.status == 400
    assert "max_output_tokens" in refused.body["error"]["message"]
    earlier = await ask(port, RESPONSES_PATH, RESPONSE | {"previous_response_id": "resp_1"})
    assert earlier.status == 400
    assert "previous_response_id" in earlier.body["error"]["message"]


LONG = "word " * 60_000  # 300 kB, which the last event of a stream repeats


async def test_long_response_stream_is_charged_by_its_usage(port: DataPort) -> None:
    for size in (50_000, 54_000, 60_000, 200_000):
        before = only_sums(port).pico if port.bedrock.ledger else 0
        await ask(port, RESPONSES_PATH, RESPONSE | {"stream": True, "instructions": "word " * size})
        assert only_sums(port).estimated_requests == 0, size
        assert only_sums(port).pico - before == of_ledger(port, "chat", PICO["economy"]).pico


async def test_usage_in_the_callers_own_text_is_not_believed(port: DataPort) -> None:
    """The first events repeat the tools; this one's schema looks like a usage, and the stream is cut."""
    tool = {"type": "function", "name": "x", "parameters": {"usage": {"input_tokens": 1, "output_tokens": 1}}}
    port.bedrock.plan({"fault": "cut", "after_frames": 6})
    with pytest.raises(aiohttp.ClientPayloadError):
        await ask(port, RESPONSES_PATH, RESPONSE | {"stream": True, "instructions": LONG, "tools": [tool]})
    counts = only_sums(port)
    assert counts.estimated_requests == 1
    assert counts.input_tokens > 10_000
    assert counts.output_tokens < 100  # the request that is repeated is no output


async def test_hard_budget_refuses_content_of_a_tool_that_is_stored_elsewhere(port: DataPort) -> None:
    await set_hard_budget(port, chat=1_000_000)
    for block in ({"type": "input_image", "image_url": "https://a/b.png"}, {"type": "input_file", "file_id": "f"}):
        item = {"type": "function_call_output", "call_id": "c", "output": [block]}
        answer = await ask(port, RESPONSES_PATH, RESPONSE | {"input": [item]})
        assert answer.status == 400
        assert block["type"] in answer.body["error"]["message"]
    item = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sunny"}]}
    assert (await ask(port, RESPONSES_PATH, RESPONSE | {"input": [item]})).status == 200


async def test_spent_quota_sends_no_response_to_a_model_of_another_format(port: DataPort) -> None:
    await set_hard_budget(port, chat=1, standard=1_000_000)
    answer = await ask(port, RESPONSES_PATH, RESPONSE)
    assert answer.status == 400
    assert not port.bedrock.ledger


@pytest.mark.parametrize("is_stream", [False, True])
async def test_retried_response_is_paid_once(port: DataPort, is_stream: bool) -> None:
    id = {"amz-sdk-invocation-id": "00000000-0000-4000-8000-000000000001"}
    first = await ask(port, RESPONSES_PATH, RESPONSE | {"stream": is_stream}, id)
    again = await ask(port, RESPONSES_PATH, RESPONSE | {"stream": is_stream}, id)
    assert first.data == again.data
    assert len(port.bedrock.ledger) == 1


async def test_embeddings_are_refused_with_an_alternative(port: DataPort) -> None:
    answer = await ask(port, "/v1/embeddings", {"model": "chat", "input": "hello"})
    assert answer.status == 400
    assert "InvokeModel" in answer.body["error"]["message"]


# ---------------------------------------------------------------- Anthropic's messages


@pytest.mark.parametrize("path", [MESSAGES_PATH, f"{MESSAGES_PATH}?beta=true", "/v1/messages"])
async def test_message_is_served_as_bedrock_answers_it(port: DataPort, path: str) -> None:
    answer = await ask(port, path, MESSAGES, {"anthropic-version": "2023-06-01"})
    assert answer.status == 200
    assert answer.body["type"] == "message"
    assert sums(port) == {"premium": of_ledger(port, "premium", PICO["premium"])}
    sent = port.bedrock.ledger[-1]
    assert sent.target.endswith("/invoke")
    bare = {name: value for name, value in MESSAGES.items() if name != "model"}
    assert json.loads(sent.body) == bare | {"anthropic_version": "bedrock-2023-05-31"}


async def test_message_streams_bedrocks_chunks_as_events(port: DataPort) -> None:
    answer = await ask(port, MESSAGES_PATH, MESSAGES | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    names = [name for name, _ in answer.events]
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    assert all(document["type"] == name for name, document in answer.events)
    assert sums(port) == {"premium": of_ledger(port, "premium", PICO["premium"])}


async def test_body_of_a_message_keeps_every_other_byte(port: DataPort) -> None:
    turn = b'{ "messages" :[{"role":"user","content":"\\u0041 1e3 \xc3\xa9"}],  '
    body = turn + b'"stream":false ,"model":"premium","max_tokens": 50}'
    assert (await ask(port, MESSAGES_PATH, body)).status == 200
    assert port.bedrock.ledger[-1].body == turn + b'"max_tokens": 50,"anthropic_version":"bedrock-2023-05-31"}'


async def test_betas_of_the_header_enter_the_body_but_for_the_clients_own(port: DataPort) -> None:
    betas = {"anthropic-beta": "claude-code-20250219, context-1m-2025-08-07"}
    assert (await ask(port, MESSAGES_PATH, MESSAGES, betas)).status == 200
    assert json.loads(port.bedrock.ledger[-1].body)["anthropic_beta"] == ["context-1m-2025-08-07"]


async def test_tokens_of_a_message_are_counted_for_free(port: DataPort) -> None:
    body = {"model": "premium", "messages": MESSAGES["messages"]}
    counted = await ask(port, f"{MESSAGES_PATH}/count_tokens", body)
    assert counted.status == 200
    message = await ask(port, MESSAGES_PATH, MESSAGES)
    assert counted.body == {"input_tokens": message.body["usage"]["input_tokens"]}
    assert only_sums(port).requests == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_message_for_a_label_of_another_format_is_refused(port: DataPort, is_stream: bool) -> None:
    answer = await ask(port, MESSAGES_PATH, MESSAGES | {"model": "chat", "stream": is_stream})
    assert answer.status == 400
    assert "'chat' is of format 'openai'" in answer.body["error"]["message"]
    assert not port.bedrock.ledger


async def test_repeated_betas_are_refused(port: DataPort) -> None:
    head = f"POST {MESSAGES_PATH} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {port.token}\r\n"
    body = json.dumps(MESSAGES).encode()
    head += f"anthropic-beta: a\r\nanthropic-beta: b\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    host, _, number = port.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert b"anthropic-beta comes only once" in answer


async def test_accept_of_a_streaming_client_does_not_reach_invokemodel(port: DataPort) -> None:
    await ask(port, MESSAGES_PATH, MESSAGES | {"stream": None}, {"accept": "text/event-stream"})
    assert b"accept" not in {name.lower() for name, _ in port.bedrock.ledger[-1].headers}


async def test_stream_broken_by_bedrock_ends_with_an_error_event(port: DataPort) -> None:
    port.bedrock.plan({"fault": "exception-frame", "after_frames": 3, "exception": "throttlingException"})
    answer = await ask(port, MESSAGES_PATH, MESSAGES | {"stream": True})
    name, document = answer.events[-1]
    assert (name, document["error"]["type"]) == ("error", "rate_limit_error")


async def test_stream_cut_within_a_chunk_is_aborted(port: DataPort) -> None:
    port.bedrock.plan({"fault": "cut", "after_bytes": 700})
    with pytest.raises(aiohttp.ClientPayloadError):
        await ask(port, MESSAGES_PATH, MESSAGES | {"stream": True})
    assert only_sums(port).estimated_requests == 1


async def test_key_of_anthropics_clients_is_a_token(port: DataPort) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(port.url + MESSAGES_PATH, json=MESSAGES, headers={"x-api-key": port.token}) as answer,
    ):
        assert answer.status == 200
    sent = dict(port.bedrock.ledger[-1].headers)
    assert not [name for name in sent if name.lower() in (b"x-api-key", b"anthropic-version")]


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"model":"premium","stream":"yes"}', b'{"stream":true}'])
async def test_malformed_message_is_refused_in_anthropics_form(port: DataPort, body: bytes) -> None:
    answer = await ask(port, MESSAGES_PATH, body)
    assert answer.status == 400
    assert answer.body["type"] == "error"
    assert answer.body["error"]["type"] == "invalid_request_error"
    assert not port.bedrock.ledger


# ---------------------------------------------------------------- errors and models


FORMS = {
    "/openai/v1/chat/completions": "openai",
    RESPONSES_PATH: "openai",
    "/openai/v1/nothing": "openai",
    "/v1/nothing": "openai",
    MESSAGES_PATH: "anthropic",
    "/anthropic/v1/nothing": "anthropic",
    "/model/premium/converse": "aws",
}


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("size", [10, 200_000])
async def test_refusal_without_a_valid_token_has_the_form_of_its_api(port: DataPort, path: str, size: int) -> None:
    """A long body is refused by its head alone."""
    answer = await ask(port, path, b"x" * size, token="wrong")
    assert answer.status == 403
    assert _find_form(answer.body) == FORMS[path]


@pytest.mark.parametrize(("version", "form"), [({}, "openai"), ({"anthropic-version": "2023-06-01"}, "anthropic")])
async def test_version_header_decides_about_paths_below_v1(port: DataPort, version: dict[str, str], form: str) -> None:
    assert _find_form((await ask(port, "/v1/nothing", {}, version)).body) == form
    listed = (await ask(port, "/v1/models", None, version)).body
    assert [model["id"] for model in listed["data"]] == [*port.config.labels]
    assert ("has_more" in listed) is (form == "anthropic")
    assert (await ask(port, "/v1/models/economy", None, version)).body["id"] == "economy"
    missing = await ask(port, "/v1/models/nothing", None, version)
    assert (missing.status, _find_form(missing.body)) == (404, form)


def _find_form(body: dict[str, Any]) -> str:
    if body.get("type") == "error":
        return "anthropic"
    return "openai" if "error" in body else "aws"


CALLS = [(MESSAGES_PATH, MESSAGES), (RESPONSES_PATH, RESPONSE)]


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_throttling_is_429_in_the_vendors_form(port: DataPort, path: str, body: dict[str, Any]) -> None:
    port.bedrock.plan({"fault": "throttle"})
    throttled = await ask(port, path, body)
    assert (throttled.status, throttled.body["error"]["type"]) == (429, "rate_limit_error")


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_spent_quota_is_400_in_the_vendors_form(port: DataPort, path: str, body: dict[str, Any]) -> None:
    await set_hard_budget(port, **{body["model"]: 1})
    spent = await ask(port, path, body)
    assert (spent.status, spent.body["error"]["type"]) == (400, "invalid_request_error")
    assert "may cost up to $" in spent.body["error"]["message"]
    assert spent.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/agents/A1/agentAliases/B1/sessions/s/text", "bedrock-agent-runtime"),
        ("/knowledgebases/K1/retrieve", "bedrock-agent-runtime"),
        ("/rerank", "InvokeModel"),
        ("/model-invocation-job", "batch jobs"),
        ("/openai/v1/responses/resp_1", "send the earlier items again"),
    ],
)
async def test_operation_that_is_not_served_says_what_to_do_instead(port: DataPort, path: str, words: str) -> None:
    answer = await ask(port, path, {})
    assert answer.status == 404
    assert words in answer.data.decode()


async def test_scope_of_vendor_calls_is_the_callers(port: DataPort) -> None:
    await ask(port, MESSAGES_PATH, MESSAGES)
    assert {counter.scope for counter in port.counters()} == {Scope(ORG, APP).key}
