"""What a request asks for, as far as that follows without knowing the caller."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from price_keeper.errors import AccessDenied, InvalidRequest, UnknownOperation
from price_keeper.exchange import Request
from price_keeper.operations import Operation
from price_keeper.parse_call import ParsedCall, check_target, parse_call, select_upstream_headers

ARN = "arn:aws:bedrock:us-east-1:123456789012:async-invoke/abcdef123456"


def request(target: bytes, body: bytes = b"", method: bytes = b"POST", **headers: bytes) -> Request:
    named = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    made = Request(method, target, named, frozenset())
    made.body = body
    return made


@pytest.mark.parametrize(
    "target",
    [
        b"/model/amazon.nova-sonic-v1%3A0/invoke-with-bidirectional-stream",
        b"/model/a..b/invoke-with-bidirectional-stream?x",
    ],
)
def test_bidirectional_stream_is_refused_at_its_head(target: bytes) -> None:
    refusal = check_target(target)
    assert isinstance(refusal, InvalidRequest)
    assert "bidirectional streams are not supported" in refusal.message
    with pytest.raises(InvalidRequest):
        parse_call(request(target))


@pytest.mark.parametrize("target", [b"/", b"*", b"/model/premium/converse", b"/x?/invoke-with-bidirectional-stream"])
def test_other_targets_pass_head_check(target: bytes) -> None:
    assert check_target(target) is None


@pytest.mark.parametrize(
    ("method", "target", "error"),
    [
        (b"GET", b"/model/premium/converse", UnknownOperation),
        (b"POST", f"/async-invoke/{ARN}".encode(), UnknownOperation),
        (b"DELETE", b"/async-invoke", UnknownOperation),
        (b"GET", b"/async-invoke", AccessDenied),
        (b"GET", b"/async-invoke?maxResults=1", InvalidRequest),
        (b"POST", b"/model/premium/converse?X-Amz-Security-Token=a", InvalidRequest),
    ],
)
def test_unserved_request_is_refused(method: bytes, target: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_call(request(target, method=method))


def test_job_is_requested_by_arn() -> None:
    asked = parse_call(request(f"/async-invoke/{ARN}?".encode(), method=b"GET"))
    assert (asked.operation, asked.target.id, asked.model) == (Operation.ASYNC_INVOKE, ARN, "")


def named(model: str, key: str = "model") -> ParsedCall:
    path = b"/openai/v1/chat/completions" if key == "model" else b"/async-invoke"
    return parse_call(request(path, json.dumps({"x": {key: "y"}, key: model, "z": [1]}).encode()))


@pytest.mark.parametrize("key", ["model", "modelId"])
def test_model_in_body_is_read(key: str) -> None:
    asked = named("premium", key)
    body = json.dumps({"x": {key: "y"}, key: "premium", "z": [1]}).encode()
    assert asked.model == "premium"
    assert asked.body_with_model("premium", body) is body
    assert asked.body_with_model("economy", body) == body.replace(b"premium", b"economy")


@pytest.mark.parametrize("model", ["", "a b", "a\r\nb", "\x00", "..", "a/b", "\u00e9", "x" * 2049, "%61"])
def test_invalid_model_name_is_refused(model: str) -> None:
    for key in ("model", "modelId"):
        with pytest.raises(InvalidRequest):
            named(model, key)


def test_upstream_headers_are_selected() -> None:
    given = request(
        b"/",
        content_type=b"application/json;\tcharset=utf-8",
        authorization=b"secret",
        x_amz_security_token=b"secret",
        x_amzn_bedrock_trace=b"ENABLED",
        x_simulate_fault=b"cut",
        cookie=b"secret",
    )
    passed = [("content-type", "application/json; charset=utf-8"), ("x-amzn-bedrock-trace", "ENABLED")]
    assert select_upstream_headers(given, None) == passed
    assert select_upstream_headers(given, b"x-simulate-") == [*passed, ("x-simulate-fault", "cut")]


@pytest.mark.parametrize(
    "name", [b'x-amzn-bedrock-a"(b', b"x-amzn-bedrock- ", b"x-amzn-bedrock-\xe9", b"x-amzn-bedrock-\r\nx"]
)
def test_invalid_header_name_is_refused(name: bytes) -> None:
    given = request(b"/")
    given.headers[name] = b"v"
    with pytest.raises(InvalidRequest) as refused:
        select_upstream_headers(given, None)
    assert refused.value.message.isprintable()


@pytest.mark.parametrize("value", [b"a\x00b", b"a\x7fb", b"a\r\nb", b"caf\xc3\xa9", b"\xff"])
def test_unsignable_header_value_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest):
        select_upstream_headers(request(b"/", accept=value), None)


def test_duplicate_header_is_refused() -> None:
    given = Request(b"POST", b"/", {b"accept": b"a"}, frozenset({b"accept"}))
    with pytest.raises(InvalidRequest):
        select_upstream_headers(given, None)


def test_body_that_differs_from_the_requests_own_has_its_own_hash() -> None:
    request = Request(b"POST", b"/", {}, frozenset())
    request.body = b"as it came"
    for body in (request.body, b"as it is sent", request.body):
        assert request.hash_body(body) == sha256(body).hexdigest()
