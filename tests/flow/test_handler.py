"""The whole handler by hand, byte for byte: refusals, what goes upstream, and that every caller gets an answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from price_keeper import handler
from price_keeper.auth.client_secrets import hash_secret, make_secret
from price_keeper.budgets.label_selector import LARGE_BODY_BYTES
from price_keeper.config import Config
from price_keeper.config.config_sections import EndpointConfig, UpstreamConfig
from price_keeper.stores import schema
from price_keeper.stores.contract import Put
from price_keeper.stores.sqlite import SqliteStore

from tests.support.budget_fleet import put_item
from tests.support.connection_interception import Connect, intercept_connections
from tests.support.data_port import APP, ORG, DataPort, data_port
from tests.support.ports import free_port
from tests.support.raw_clients import (
    ConnectionCut,
    Http2TestClient,
    RawConnection,
    WireResponse,
    ask,
    read_error_message,
    wait_quietly,
)
from tests.support.simulated import CHAT_PATH

CONVERSE = b"/model/premium/converse"
BODY = b'{"messages":[{"role":"user","content":[{"text":"a prompt, XYZZY"}]}]}'
JSON = b"content-type: application/json\r\n"
RETRIED = b"amz-sdk-invocation-id: one\r\n"
OURS = "gpt"
MODEL = "openai.gpt-oss-120b-1:0"


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[DataPort]:
    async with data_port(tmp_path) as opened:
        yield opened


def number_of(port: DataPort) -> int:
    return port_of(port.url)


def bedrocks(port: DataPort) -> int:
    return port_of(port.bedrock.url)


def port_of(url: str) -> int:
    found = urlsplit(url).port
    assert found
    return found


async def asked(
    port: DataPort,
    path: bytes = CONVERSE,
    body: bytes = BODY,
    more: bytes = JSON,
    method: bytes = b"POST",
    token: str | None = None,
) -> WireResponse:
    wire = await RawConnection.connect(number_of(port))
    try:
        who = f"authorization: Bearer {port.token if token is None else token}\r\n".encode()
        await wire.send(ask(body, who + more, path=path, method=method))
        return await wire.answer()
    finally:
        wire.close()


async def asked2(port: DataPort, path: bytes, body: bytes, more: list[tuple[bytes, bytes]]) -> WireResponse:
    client = await Http2TestClient.connect(number_of(port))
    client.h2.config.validate_outbound_headers = False
    try:
        number = client.open(path, [(b"authorization", b"Bearer " + port.token.encode()), *more], ends=False)
        await client.body(number, body)
        return await client.answer(number)
    finally:
        client.connection.close()


def decision(heard: WireResponse) -> list[bytes]:
    return [
        heard[b"x-price-keeper-" + name]
        for name in (b"requested", b"label", b"model")
        if b"x-price-keeper-" + name in heard
    ]


# Whatever fails, every caller gets an answer, and so does its retry.


async def test_internal_error_is_answered_and_not_joined_by_retry(
    port: DataPort, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_: Connect) -> None:
        raise RuntimeError(BODY)

    with intercept_connections(bedrocks(port), broken):
        for _ in range(2):
            heard = await asked(port, more=JSON + RETRIED)
            assert (
                read_error_message(heard, 500, "InternalServerException")
                == "an internal error; the sidecar's log has its cause"
            )
            assert heard[b"x-price-keeper-request-id"].decode() in caplog.text
            assert decision(heard)[:2] == [b"premium", b"premium"]
    assert "RuntimeError" in caplog.text
    causes = "".join(getattr(record, "where", "") for record in caplog.records)
    assert "handler.py" in causes
    assert "XYZZY" not in caplog.text + causes
    assert (await asked(port, more=JSON + RETRIED)).status == 200


async def test_handler_without_response_closes_connection(port: DataPort) -> None:
    async def cancelled(_: Connect) -> None:
        raise asyncio.CancelledError

    with intercept_connections(bedrocks(port), cancelled):
        for _ in range(2):
            with pytest.raises(ConnectionCut):
                await asked(port, more=JSON + RETRIED)
    assert (await asked(port, more=JSON + RETRIED)).status == 200


async def test_joined_callers_get_internal_error_too(port: DataPort) -> None:
    go_on = asyncio.Event()

    async def broken(_: Connect) -> None:
        await go_on.wait()
        raise RuntimeError

    with intercept_connections(bedrocks(port), broken):
        waiting = [asyncio.create_task(asked(port, more=JSON + RETRIED)) for _ in range(3)]
        await asyncio.sleep(0.1)
        go_on.set()
        assert [(await each).status for each in waiting] == [500] * 3


# Headers.


async def test_tab_in_header_becomes_space(port: DataPort) -> None:
    more = b"content-type: application/json;\tcharset=utf-8\r\nx-amzn-bedrock-trace: \tENABLED\r\n"
    assert (await asked(port, more=more)).status == 200
    sent = {name.lower(): value for name, value in port.bedrock.ledger[-1].headers}
    assert sent[b"content-type"] == b"application/json; charset=utf-8"
    assert sent[b"x-amzn-bedrock-trace"] == b"ENABLED"


@pytest.mark.parametrize("value", [b"a\x7fb", b"caf\xc3\xa9", b"\xff"])
async def test_other_control_characters_are_refused(port: DataPort, value: bytes) -> None:
    for _ in range(2):
        heard = await asked(port, more=JSON + RETRIED + b"x-amzn-bedrock-trace: %b\r\n" % value)
        assert heard.status == 400
    assert len(port.bedrock.ledger) == 0


@pytest.mark.parametrize("name", [b'x-amzn-bedrock-a"(b', b"x-amzn-bedrock-a b", b"x-amzn-bedrock-\xe9"])
async def test_invalid_http2_header_name_is_refused(port: DataPort, name: bytes) -> None:
    for _ in range(2):
        try:
            heard = await asked2(port, CONVERSE, BODY, [(name, b"v"), (b"amz-sdk-invocation-id", b"one")])
        except ConnectionCut:  # refused by the protocol already
            continue
        assert heard.status == 400
    assert len(port.bedrock.ledger) == 0


# Who calls comes first.


@pytest.mark.parametrize(
    ("path", "method", "body"),
    [
        (CHAT_PATH.encode(), b"POST", b'{"model":'),
        (CHAT_PATH.encode(), b"POST", b"{}"),
        (b"/model/a..b/converse", b"POST", b""),
        (b"/model/premium/converse?X-Amz-Signature=1", b"POST", b""),
        (b"/async-invoke", b"GET", b""),
        (b"/nothing", b"GET", b""),
    ],
)
async def test_unauthenticated_caller_learns_nothing(port: DataPort, path: bytes, method: bytes, body: bytes) -> None:
    heard = await asked(port, path, body, method=method, token="nobody")
    read_error_message(heard, 403, "AccessDeniedException")
    assert (await asked(port, path, body, method=method)).status in (400, 403, 404)


async def test_body_of_unauthenticated_caller_is_not_parsed(port: DataPort, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("the body was looked into")

    monkeypatch.setattr(handler, "parse_call", read)
    read_error_message(await asked(port, CHAT_PATH.encode(), b"{}", token="nobody"), 403, "AccessDeniedException")


async def test_large_body_is_parsed_in_thread(port: DataPort, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    real = asyncio.to_thread

    async def noted(work: Any, *arguments: Any) -> Any:
        threads.append(arguments[0].__name__)
        return await real(work, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    for padding, seen in ((10, []), (LARGE_BODY_BYTES, ["parse_call"])):
        body = b'{"model":"nothing","messages":[],"x":"%b"}' % (b"y" * padding)
        assert (await asked(port, CHAT_PATH.encode(), body)).status == 400
        assert threads == seen


async def test_unreachable_endpoint_keeps_sidecar_ready_for_other_labels(tmp_path: Path) -> None:
    """Though it is the first to be called, and with no other label anybody knows yet whether Bedrock is there."""
    labels, place = Config.development().labels, EndpointConfig("us-west-2", endpoint=f"http://127.0.0.1:{free_port()}")
    async with data_port(
        tmp_path, labels={**labels, "premium": replace(labels["premium"], endpoints=(place,))}
    ) as port:
        assert (await asked(port, CONVERSE, BODY)).status == 503
        trouble = await port.forwarder.health.check()
        assert trouble == "1 of 2 endpoints of Bedrock cannot be reached; the log says why"


# Bodies that name a model.


@pytest.fixture
async def chat(tmp_path: Path) -> AsyncIterator[DataPort]:
    premium = replace(Config.development().labels["premium"], price_usd_per_async_job=Decimal(1))
    async with data_port(
        tmp_path, labels={OURS: premium}, unlabelled="meter", default_price=premium.prices_usd_per_1m
    ) as opened:
        yield opened


@pytest.mark.parametrize(
    "model",
    [
        "m\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 OK\r\nx-evil: 1",
        "a b",
        "\u00e4",
        "a/b",
        "..",
        "a..b",
        "m\x00",
        "",
        "x" * 3000,
    ],
)
async def test_invalid_model_name_in_body_is_refused(chat: DataPort, model: str) -> None:
    body = orjson.dumps({"model": model, "messages": []})
    for path in (CHAT_PATH.encode(), b"/async-invoke"):
        heard = await asked(chat, path, body.replace(b'"model"', b'"modelId"') if path == b"/async-invoke" else body)
        read_error_message(heard, 400, "ValidationException")
        assert decision(heard) == []
    assert len(chat.bedrock.ledger) == 0


ODD = b'{ "seed" : 123456789012345678901,"model": "%b" ,"x":1.0,"y":1e5,"logit_bias":{"1":1,"1":2}, "messages":[]}\n'


async def test_only_model_name_changes_in_body(chat: DataPort) -> None:
    premium = Config.development().labels["premium"].model
    for named, sent in ((OURS, premium), (premium, premium), (MODEL, MODEL)):
        await asked(chat, CHAT_PATH.encode(), ODD % named.encode())
        assert chat.bedrock.ledger[-1].body == ODD % sent.encode()
    deep = b'{"mod\\u0065l":"gpt","messages":[],"x":%b}' % (b"[" * 3000 + b"]" * 3000)
    await asked(chat, CHAT_PATH.encode(), deep, more=JSON + RETRIED)
    assert chat.bedrock.ledger[-1].body == deep.replace(b'"gpt"', json.dumps(premium).encode())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model":"gpt","model":"gpt"}', "the body has 'model' more than once"),
        (b'{"model":"gpt","mod\\u0065l":"gpt"}', "the body has 'model' more than once"),
        (b'{"model":"gpt",}', "the body is no JSON from byte 15 on"),
        (b'["gpt"]', "the body is no JSON object"),
        (b'{"model":"\xff"}', "the body is no UTF-8"),
        (b'{"model":7}', "the body's 'model' names the model: a label or a model's id"),
        (b'{"model":"\\ud800"}', "the body's 'model' names the model: a label or a model's id"),
        (b'{"messages":[]}', "the body's 'model' names the model: a label or a model's id"),
    ],
)
async def test_ambiguous_body_is_refused(chat: DataPort, body: bytes, words: str) -> None:
    assert read_error_message(await asked(chat, CHAT_PATH.encode(), body), 400, "ValidationException") == words
    assert len(chat.bedrock.ledger) == 0


# What goes upstream identifies the caller to no one else.


@pytest.mark.parametrize(
    "query", [b"X-Amz-Security-Token=abc&X-Amz-Date=1", b"x-amz-signature=abc", b"anything", b"%zz"]
)
async def test_query_is_refused(port: DataPort, query: bytes) -> None:
    heard = await asked(port, CONVERSE + b"?" + query)
    assert "takes a query" in read_error_message(heard, 400, "ValidationException")
    assert len(port.bedrock.ledger) == 0
    assert (await asked(port, CONVERSE + b"?")).status == 200


async def test_listing_jobs_is_refused(chat: DataPort) -> None:
    read_error_message(await asked(chat, b"/async-invoke", b"", method=b"GET"), 403, "AccessDeniedException")
    read_error_message(await asked(chat, b"/async-invoke?maxResults=1", b"", method=b"GET"), 400, "ValidationException")
    assert len(chat.bedrock.ledger) == 0
    job = {"modelId": OURS, "modelInput": {}, "outputDataConfig": {"s3OutputDataConfig": {"s3Uri": "s3://b/p"}}}
    arn = orjson.loads((await asked(chat, b"/async-invoke", orjson.dumps(job))).body)["invocationArn"]
    heard = await asked(chat, b"/async-invoke/" + arn.replace("/", "%2F").encode(), b"", method=b"GET")
    assert orjson.loads(heard.body)["status"] == "InProgress"


# What every answer carries.


async def test_inference_profiles_are_listed_with_get_only(port: DataPort) -> None:
    for path in (b"/inference-profiles", b"/inference-profiles?type=SYSTEM_DEFINED"):
        heard = await asked(port, path, b"", method=b"GET")
        assert orjson.loads(heard.body) == {"inferenceProfileSummaries": []}
        assert heard[b"x-price-keeper-request-id"]
        for method in (b"DELETE", b"POST"):
            read_error_message(await asked(port, path, b"", method=method), 404, "UnknownOperationException")
        read_error_message(await asked(port, path, b"", method=b"GET", token="nobody"), 403, "AccessDeniedException")
    for path in (b"/inference-profilesX", b"/inference-profiles/../anything"):
        read_error_message(await asked(port, path, b"", method=b"GET"), 404, "UnknownOperationException")


async def test_refusals_have_request_id_and_decision_headers(tmp_path: Path) -> None:
    async with data_port(tmp_path, upstream=UpstreamConfig(endpoint="simulated", request_metadata=True)) as port:
        seen = set()
        for path, body, decided in (
            (b"/nothing", b"", 0),
            (b"/model/nothing/converse", BODY, 0),
            (CONVERSE, b"no JSON", 3),
        ):
            for more in (JSON, JSON + RETRIED):
                heard = await asked(port, path, body, more)
                assert 400 <= heard.status < 500
                assert len(decision(heard)) == decided
                assert heard[b"x-should-retry"] == b"false"
                seen.add(heard[b"x-price-keeper-request-id"])
        assert len(seen) == 6


async def registered(folder: Path) -> str:
    """The secret of the app."""
    secret = make_secret()
    store = await SqliteStore(folder / "store.db", lambda: 0.0).open()
    await store.put(Put(schema.app_config_key(ORG, APP), {"client_secret_hash": hash_secret(secret).decode()}))
    await store.close()
    return secret


@pytest.mark.parametrize("ending", ["its head", "a frame without data", "trailers"])
async def test_credentials_are_issued_however_request_without_body_ends(
    port: DataPort, tmp_path: Path, ending: str
) -> None:
    who = (b"authorization", f"org-{ORG}-app-{APP}:{await registered(tmp_path)}".encode())
    client = await Http2TestClient.connect(number_of(port))
    try:
        number = client.open(b"/credentials", [who], ends=ending == "its head", method=b"GET")
        await client.flush()
        if ending != "its head":
            await wait_quietly()  # so that the end comes by itself
            if ending == "trailers":
                client.h2.send_headers(number, [(b"x", b"y")], end_stream=True)
            else:
                client.h2.send_data(number, b"", end_stream=True)
            await client.flush()
        heard = await client.answer(number)
    finally:
        client.connection.close()
    assert heard.status == 200
    assert orjson.loads(heard.body)["Token"]


async def test_credentials_response_has_request_id(port: DataPort, tmp_path: Path) -> None:
    secret = await registered(tmp_path)
    for given, status in ((secret, 200), (make_secret(), 403), ("\xe9" * 44, 403), ("short", 403)):
        wire = await RawConnection.connect(number_of(port))
        who = b"authorization: org-%b-app-%b:%b\r\n" % (ORG.encode(), APP.encode(), given.encode("latin-1"))
        await wire.send(ask(b"", who, path=b"/credentials", method=b"GET"))
        heard = await wire.answer()
        assert heard.status == status
        assert heard[b"x-price-keeper-request-id"]
        wire.close()
    heard = await asked(port, b"/credentials", b"", method=b"POST")
    assert (heard.status, heard[b"x-should-retry"]) == (404, b"false")


@pytest.mark.parametrize("name", ["x-amzn-bedrock-trace", "accept"])
async def test_headers_that_change_response_prevent_joining(
    port: DataPort, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await put_item(port.store, schema.org_config_key(ORG), org_name="Acme")  # so that nothing is logged of that
    for value in (b"", b"a: ENABLED", b"a: ENABLED", b"a: DISABLED"):
        more = b"%b%b\r\n" % (name.encode(), value[1:]) if value else b""
        assert (
            await asked(port, more=JSON + RETRIED + more + b"amz-sdk-request: attempt=%d\r\n" % len(value))
        ).status == 200
    assert len(port.bedrock.ledger) == 3
    assert caplog.get_records("call") == [] or all(record.levelno < logging.WARNING for record in caplog.records)
