"""Anthropic's Messages API, carried out as InvokeModel of the same model family.

`to_invocation` turns a request for messages, or for a count of their tokens, into one for Bedrock's own operation:
`model` and `stream` leave the body for the path, the version and the betas of the headers enter it, and every other
byte stays. All that follows (budgets, limits, metering) sees that operation. `MessagesResponder` turns the response
back: each chunk of a stream becomes one server-sent event, and errors get Anthropic's form.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Final, NamedTuple

import orjson

from price_keeper.errors import InvalidRequest, UnknownOperation
from price_keeper.exchange import Header, Request, Responder
from price_keeper.operations import check_model_id, encode_model_id
from price_keeper.parse_call import read_model_name
from price_keeper.responder_wrapper import ResponderWrapper
from price_keeper.upstream import json_splice
from price_keeper.upstream.eventstream import MAX_PAYLOAD, EventFrame, FrameWatcher
from price_keeper.vendor_apis import ANTHROPIC_PREFIX, ApiForm, build_error_document, read_error

MESSAGES: Final = ANTHROPIC_PREFIX + b"messages"
COUNT_TOKENS: Final = ANTHROPIC_PREFIX + b"messages/count_tokens"
_QUERIES: Final = (b"", b"beta=true")  # of clients; the betas themselves are in a header
_BETA: Final = b"anthropic-beta"
_CLIENTS_OWN_BETAS: Final = ("claude-code-", "oauth-")  # about Anthropic's own service; Bedrock refuses them
_BEDROCK_VERSION: Final = b'"bedrock-2023-05-31"'
_MAX_ERROR_BYTES: Final = 256 * 1024

_JSON: Final = (b"content-type", b"application/json")
_SERVER_SENT_EVENTS: Final = (b"content-type", b"text/event-stream; charset=utf-8")
_EVENT_STREAM: Final = b"application/vnd.amazon.eventstream"
_REPLACED_HEADERS: Final = frozenset({b"content-type", b"x-amzn-bedrock-content-type"})
_STATUS_BY_EXCEPTION: Final = {
    "throttlingException": 429,
    "serviceUnavailableException": 503,
    "validationException": 400,
}


class Invocation(NamedTuple):
    """Bedrock's request for one of the Messages API."""

    target: bytes
    body: bytes


def is_messages_path(path: bytes) -> bool:
    return path in (MESSAGES, COUNT_TOKENS)


def to_invocation(request: Request) -> Invocation:
    """Raises UnknownOperation and InvalidRequest. Takes long for a large body."""
    path, _, query = request.target.partition(b"?")
    if request.method != b"POST":
        raise UnknownOperation("messages are sent with POST")
    if query not in _QUERIES:
        raise InvalidRequest("the Messages API takes no query here but beta=true")
    body, names = request.body, ("model", "stream", "anthropic_version", "anthropic_beta", "max_tokens")
    try:
        spans = json_splice.find_members(body, names).spans
        model = _read_model(body, spans.get("model"))
        is_stream = _read_stream(body, spans.get("stream"))
        for span in sorted((spans[name] for name in ("model", "stream") if name in spans), reverse=True):
            body = json_splice.remove_member(body, span)
        if "anthropic_version" not in spans:
            body = _add(body, "anthropic_version", _BEDROCK_VERSION)
        betas = _read_betas(request)
        if betas and "anthropic_beta" not in spans:
            body = _add(body, "anthropic_beta", orjson.dumps(betas))
        if path == COUNT_TOKENS and "max_tokens" not in spans:
            body = _add(body, "max_tokens", b"1")  # InvokeModel needs it, a count does not depend on it
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None
    operation = "count-tokens" if path == COUNT_TOKENS else "invoke-with-response-stream" if is_stream else "invoke"
    if path == COUNT_TOKENS:
        body = b'{"input":{"invokeModel":{"body":"%b"}}}' % b64encode(body)
    return Invocation(f"/model/{encode_model_id(model)}/{operation}".encode(), body)


def _read_model(body: bytes, span: tuple[int, int] | None) -> str:
    model = read_model_name(body, span)
    if not model:
        raise InvalidRequest("the body's 'model' names the model: a label or a model's id")
    try:
        return check_model_id(model)
    except ValueError as failure:
        raise InvalidRequest(str(failure)) from None


def _read_stream(body: bytes, span: tuple[int, int] | None) -> bool:
    value = b"false" if span is None else body[slice(*span)]
    if value not in (b"true", b"false"):
        raise InvalidRequest("the body's 'stream' is true or false")
    return value == b"true"


def _read_betas(request: Request) -> list[str]:
    names = request.headers.get(_BETA, b"").decode("latin-1").split(",")
    return [name.strip() for name in names if name.strip() and not name.strip().startswith(_CLIENTS_OWN_BETAS)]


def _add(body: bytes, name: str, value: bytes) -> bytes:
    return json_splice.add_member(body, json_splice.find_members(body, ()), name, value)


class MessagesResponder(ResponderWrapper):
    """Answers in Anthropic's form what Bedrock answers to `Invocation`."""

    def __init__(self, responder: Responder, *, is_count: bool) -> None:
        super().__init__(responder)
        self._is_count = is_count
        self._watcher: FrameWatcher | None = None  # of a response that is a stream
        self._head: tuple[int, Sequence[Header], bytearray] | None = None  # of a response that is changed as a whole
        self._is_over = False

    @property
    def has_started(self) -> bool:
        return self._head is not None or self._responder.has_started

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        content_type = dict(headers).get(b"content-type", b"").lower()
        if status >= 400 or self._is_count:
            self._head = status, headers, bytearray()
        elif content_type.startswith(_EVENT_STREAM):
            self._watcher = FrameWatcher({"chunk": MAX_PAYLOAD})
            self._responder.start(status, _replace_type(headers, _SERVER_SENT_EVENTS), None)
        else:
            self._responder.start(status, headers, length)

    def write(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._head is not None:
            if len(self._head[2]) + len(data) > _MAX_ERROR_BYTES:
                self.abort()
            else:
                self._head[2].extend(data)
        elif self._watcher is None:
            self._responder.write(data)
        else:
            events = b"".join(map(_build_event, self._watcher.feed(data)))
            if events:
                self._responder.write(events)
            if self._watcher.failure is not None:
                self.abort()

    def flush(self) -> None:
        if self._head is None:
            self._responder.flush()

    def finish(self) -> None:
        if self._is_over:
            return
        if self._head is not None:
            status, headers, body = self._head
            document = self._build_document(status, headers, bytes(body))
            self._responder.start(status, _replace_type(headers, _JSON), len(document))
            self._responder.write(document)
        elif self._watcher is not None and self._watcher.unfinished:
            self.abort()
            return
        self._responder.finish()

    def abort(self) -> None:
        self._is_over = True
        self._responder.abort()

    def _build_document(self, status: int, headers: Sequence[Header], body: bytes) -> bytes:
        if status >= 400:
            return orjson.dumps(build_error_document(ApiForm.ANTHROPIC, status, *read_error(dict(headers), body)))
        try:
            return orjson.dumps({"input_tokens": orjson.loads(body)["inputTokens"]})
        except (LookupError, TypeError, orjson.JSONDecodeError):
            return body


def _replace_type(headers: Sequence[Header], content_type: Header) -> list[Header]:
    return [content_type, *(header for header in headers if header[0] not in _REPLACED_HEADERS)]


def _build_event(frame: EventFrame) -> bytes:
    """The server-sent event of a chunk: its type, and its bytes as they are. Of an exception, Anthropic's error."""
    if frame.kind != "event":
        code, message = frame.name, read_error({}, frame.payload)[1]
        document = build_error_document(ApiForm.ANTHROPIC, _STATUS_BY_EXCEPTION.get(code, 500), code, message)
        return b"event: error\ndata: %b\n\n" % orjson.dumps(document)
    try:
        data = b64decode(orjson.loads(frame.payload)["bytes"])
        name = orjson.loads(data)["type"].encode()
    except (LookupError, TypeError, AttributeError, ValueError):
        return b""
    return b"event: %b\ndata: %b\n\n" % (name, data.replace(b"\n", b" "))
