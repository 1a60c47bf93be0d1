"""Paths, ids and headers: what goes upstream is what was asked for, in its one spelling, and nothing else."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from price_keeper.control import api
from price_keeper.control.api_errors import ApiError
from price_keeper.control.control_requests import read_path_parameters
from price_keeper.control.control_server import ControlDispatcher
from price_keeper.errors import Refusal
from price_keeper.exchange import Request
from price_keeper.operations import Operation, OperationPath, parse_path
from price_keeper.parse_call import parse_call, select_upstream_headers
from yarl import URL

from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader

METHODS = (b"POST", b"GET", b"PUT", b"HEAD", b"DELETE")  # fmt: skip
PARTS = (b"/model/", b"/invoke", b"/converse",
           b"/converse-stream", b"/invoke-with-response-stream", b"/count-tokens", b"/guardrail/", b"/version/",
           b"/apply", b"/async-invoke", b"/guardrail-checks/invoke", b"%2F", b"%25", b"%3A",
           b"/openai/v1/chat/completions", b"arn:aws:bedrock:us-east-1:123456789012:inference-profile/a", b"..",
           b"%2e", b"?", b"/api/v1/orgs/", b"/apps/", b"DRAFT", b"/invoke-with-bidirectional-stream", b"%c3%a4",
           b"\xc3\xa4", b"#", b".", b"//", b"anthropic.claude-v2:1")  # fmt: skip
NAMES = (b"content-type", b"authorization", b"x-amz-security-token", b"x-amzn-bedrock-a", b"x-amzn-bedrock-\r\n",
         b"accept", b"amz-sdk-invocation-id", b"x-amz-date", b"host", b"x-amzn-bedrock- b", b"user-agent",
         b"x-simulate")  # fmt: skip
ALLOWED = re.compile(r"(?:accept|amz-sdk-invocation-id|amz-sdk-request|content-type|traceparent|tracestate|user-agent|"
                     r"x-amzn-trace-id|x-amzn-bedrock-[a-z0-9!#$%&'*+.^_`|~-]*)\Z")  # fmt: skip
ID = re.compile(r"[A-Za-z0-9.:_/-]+\Z")
WORDS = (*PARTS, *NAMES)
ROUTING = ControlDispatcher([route for table in api._ROUTE_TABLES for route in table], lambda: 0.0).router


def _path(reader: Reader) -> bytes:
    path = b""
    for _ in range(reader.byte() % 10):
        how = reader.byte()
        path += PARTS[how % len(PARTS)] if how < 192 else reader.some()
    return path


def one(data: bytes) -> None:
    reader = Reader(data)
    method, path = reader.pick(METHODS), _path(reader)
    headers = {}
    for _ in range(reader.byte() % 4):
        headers[reader.pick(NAMES)] = reader.some()
    request = Request(method, path, headers, frozenset())
    request.body = b'{"model":"premium","modelId":"premium"}'
    _forwarded(request)
    _passed_on(request)
    _on_the_control_port(method.decode(), path.decode("latin-1"))


def _forwarded(request: Request) -> None:
    try:
        asked = parse_call(request)
    except Refusal:
        return
    target = asked.target
    sent = target.path
    holds(sent.isascii() and sent.isprintable() and not set(sent) & set("?# \\"), f"a path to be sent: {sent!r}")
    same(parse_path(sent), target, "the path that is sent, read again")
    same(sent.count("/"), target.operation.value.count("/"), "its parts")
    if target.id:
        holds(ID.match(target.id) and ".." not in target.id and "/./" not in target.id, f"an id: {target.id!r}")
        _means(request.target.decode("latin-1").partition("?")[0], target)


def _means(path: str, target: OperationPath) -> None:
    """The caller's own spelling holds this id, decoded at most twice."""
    start = path.index("/", 1) + 1
    end = len(path) if target.operation is Operation.ASYNC_INVOKE else path.rindex("/")
    if target.operation is Operation.APPLY_GUARDRAIL:
        end = path.rindex("/version/")
    raw = path[start:end]
    holds(target.id in (raw, unquote(raw), unquote(unquote(raw))), f"{raw!r} is taken for {target.id!r}")


def _passed_on(request: Request) -> None:
    try:
        sent = select_upstream_headers(request, None)
    except Refusal:
        return
    for name, value in sent:
        holds(ALLOWED.match(name), f"the header {name!r} goes upstream")
        holds(value.isascii() and (value.isprintable() or not value), f"the value {value!r} goes upstream")
        same(value, request.headers[name.encode()].decode("latin-1").replace("\t", " "), "what goes upstream")


def _on_the_control_port(method: str, path: str) -> None:
    try:
        url = URL.build(path=path, encoded=True)
    except ValueError:
        return
    match = _finished(ROUTING.resolve(SimpleNamespace(method=method, rel_url=url)))  # type: ignore[arg-type]
    if match.http_exception is not None:
        return
    template = match.route.resource.canonical
    try:
        values = read_path_parameters(template, url.raw_path)
    except ApiError:
        return
    segments, expected_segments = url.raw_path.split("/"), template.split("/")
    same(len(segments), len(expected_segments), "segments")
    for segment, expected in zip(segments, expected_segments, strict=True):
        if expected.startswith("{"):
            same(values[expected[1:-1]], unquote(segment, errors="strict"), "a name in a path")
        else:
            same(segment, expected, "a segment")


def _finished(coroutine: Any) -> Any:
    """What a coroutine returns that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")
