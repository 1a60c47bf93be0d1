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
from price_keeper.operations import encode_model_id
from price_keeper.parse_call import require_model
from price_keeper.responder_wrapper import ResponderWrapper
from price_keeper.upstream import json_splice
from price_keeper.upstream.eventstream import EventFrame, FrameWatcher
from price_keeper.usage.usage_reader import EVENT_STREAM
from price_keeper.vendor_apis import COUNT_TOKENS, MESSAGES, ApiForm, build_error_document, read_error

_QUERIES: Final = (b"", b"beta=true")  # of clients; the betas themselves are in a header
_BETA: Final = b"anthropic-beta"
_CLIENTS_OWN_BETAS: Final = ("claude-code-", "oauth-")  # about Anthropic's own service; Bedrock refuses them
_BEDROCK_VERSION: Final = b'"bedrock-2023-05-31"'
_MAX_ERROR_BYTES: Final = 256 * 1024
_MAX_CHUNK_BYTES: Final = 1024 * 1024  # of Claude's chunks the largest holds the input of a tool

_NO_LINE_ENDS: Final = bytes.maketrans(b"\r\n", b"  ")  # between members of JSON they mean nothing
_JSON: Final = (b"content-type", b"application/json")
_SERVER_SENT_EVENTS: Final = (b"content-type", b"text/event-stream; charset=utf-8")
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
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None
    model, is_stream = require_model(body, "model", spans.get("model")), _read_stream(body, spans.get("stream"))
    added = {"anthropic_version": _BEDROCK_VERSION}
    if betas := _read_betas(request):
        added["anthropic_beta"] = orjson.dumps(betas)
    if path == COUNT_TOKENS:
        added["max_tokens"] = b"1"  # InvokeModel needs it, a count does not depend on it
    for span in sorted((spans[name] for name in ("model", "stream") if name in spans), reverse=True):
        body = json_splice.remove_member(body, span)
    body = _add_members(body, {name: value for name, value in added.items() if name not in spans})
    operation = "count-tokens" if path == COUNT_TOKENS else "invoke-with-response-stream" if is_stream else "invoke"
    if path == COUNT_TOKENS:
        body = b'{"input":{"invokeModel":{"body":"%b"}}}' % b64encode(body)
    return Invocation(f"/model/{encode_model_id(model)}/{operation}".encode(), body)


def _add_members(body: bytes, added: dict[str, bytes]) -> bytes:
    """The object with these members at its end. The rest of it was validated when its members were found."""
    end = body.rindex(b"}")
    comma = b"," if added and body[:end].rstrip()[-1:] != b"{" else b""
    members = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in added.items())
    return b"".join((body[:end], comma, members, body[end:]))


def _read_stream(body: bytes, span: tuple[int, int] | None) -> bool:
    value = b"false" if span is None else body[slice(*span)]
    if value not in (b"true", b"false", b"null"):
        raise InvalidRequest("the body's 'stream' is true or false")
    return value == b"true"


def _read_betas(request: Request) -> list[str]:
    if _BETA in request.repeated:
        raise InvalidRequest("the header anthropic-beta comes only once; its values are separated by commas")
    names = request.headers.get(_BETA, b"").decode("latin-1").split(",")
    return [name.strip() for name in names if name.strip() and not name.strip().startswith(_CLIENTS_OWN_BETAS)]


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
        elif content_type.startswith(EVENT_STREAM):
            self._watcher = FrameWatcher({"chunk": _MAX_CHUNK_BYTES})
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
            events = [_build_event(frame) for frame in self._watcher.feed(data)]
            if readable := b"".join(filter(None, events)):
                self._responder.write(readable)
            if None in events or self._watcher.failure is not None:
                self.abort()  # what cannot be turned into an event must not be missing unnoticed

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


def _build_event(frame: EventFrame) -> bytes | None:
    """The server-sent event of a chunk: its type, and its bytes as they are. For an exception, Anthropic's error. None
    for a chunk that is none of Claude's."""
    if frame.kind != "event":
        code, message = frame.name, read_error({}, frame.payload)[1]
        document = build_error_document(ApiForm.ANTHROPIC, _STATUS_BY_EXCEPTION.get(code, 500), code, message)
        return b"event: error\ndata: %b\n\n" % orjson.dumps(document)
    try:
        data = b64decode(orjson.loads(frame.payload)["bytes"])
        name = orjson.loads(data)["type"].encode()
    except (LookupError, TypeError, AttributeError, ValueError):
        return None
    return b"event: %b\ndata: %b\n\n" % (name, data.translate(_NO_LINE_ENDS))
