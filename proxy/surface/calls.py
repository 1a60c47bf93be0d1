"""What a request asks for: which operation, of which model, with what to go upstream. All else is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from proxy.errors import InvalidRequest, UnknownOperation
from proxy.exchange import Request
from proxy.forwarding.model_path import Operation, Target, split
from proxy.forwarding.sigv4 import canonical_query

_LISTS_TOO = Operation.ASYNC_INVOKES
_READ_ONLY = Operation.ASYNC_INVOKE
OF_A_MODEL = frozenset(
    {
        Operation.INVOKE,
        Operation.INVOKE_STREAM,
        Operation.CONVERSE,
        Operation.CONVERSE_STREAM,
        Operation.COUNT_TOKENS,
    }
)
# Operations whose model is named in the body, and the key that names it.
_MODEL_KEYS = {Operation.CHAT_COMPLETIONS: "model", Operation.ASYNC_INVOKES: "modelId"}

_PASSED_ON = frozenset(
    {
        b"accept",
        b"amz-sdk-invocation-id",
        b"amz-sdk-request",
        b"content-type",
        b"traceparent",
        b"tracestate",
        b"user-agent",
        b"x-amzn-trace-id",
    }
)
_PASSED_ON_PREFIX = b"x-amzn-bedrock-"


@dataclass(frozen=True, slots=True)
class Asked:
    """`model` is what the caller named: a label or an id; empty where the operation has no model."""

    operation: Operation
    model: str
    target: Target
    query: str
    document: dict[str, Any] | None  # the parsed body, where it names the model

    def body_for(self, model: str, body: bytes) -> bytes:
        """The caller's own bytes, unless they name the model."""
        if self.document is None:
            return body
        return orjson.dumps(self.document | {_MODEL_KEYS[self.operation]: model})


def understood(request: Request) -> Asked:
    path, _, query = request.target.decode("latin-1").partition("?")
    try:
        target = split(path)
        canonical = canonical_query(query) if query else ""
    except ValueError as failure:
        raise InvalidRequest(str(failure)) from None
    if target is None or not _is_method_of(target.operation, request.method):
        raise UnknownOperation("this port serves the operations of bedrock-runtime and OpenAI's chat completions")
    operation = target.operation
    if operation in OF_A_MODEL:
        return Asked(operation, target.id, target, canonical, None)
    if operation is Operation.INVOKE_BIDIRECTIONAL:
        instead = "converse-stream or invoke-with-response-stream"
        raise InvalidRequest(f"bidirectional streams are not supported; use {instead}")
    if operation in _MODEL_KEYS and request.method == b"POST":
        document = _document(request.body)
        return Asked(operation, _named_model(document, _MODEL_KEYS[operation]), target, canonical, document)
    return Asked(operation, "", target, canonical, None)


def _is_method_of(operation: Operation, method: bytes) -> bool:
    if method == b"POST":
        return operation is not _READ_ONLY
    return method == b"GET" and operation in (_LISTS_TOO, _READ_ONLY)


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as failure:
        raise InvalidRequest(f"the body is no JSON: {failure.msg}") from None
    if not isinstance(document, dict):
        raise InvalidRequest("the body is no JSON object")
    return document


def _named_model(document: dict[str, Any], key: str) -> str:
    model = document.get(key)
    if not isinstance(model, str) or not model:
        raise InvalidRequest(f"the body's {key!r} names the model: a label or a model's id")
    return model


def headers_upstream(request: Request, extra_prefix: bytes | None) -> list[tuple[str, str]]:
    """Those on the list and no others: what says who calls ends here. `extra_prefix` is the simulator's."""
    passed = []
    for name, value in request.headers.items():
        is_passed = name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIX)
        if not (is_passed or (extra_prefix is not None and name.startswith(extra_prefix))):
            continue
        if name in request.repeated:
            raise InvalidRequest(f"the header {name.decode()} comes only once")
        if not value.isascii():
            raise InvalidRequest(f"the header {name.decode()} is ASCII alone")
        passed.append((name.decode(), value.decode()))
    return passed
