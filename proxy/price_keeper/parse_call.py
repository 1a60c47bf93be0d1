"""Turns a request into a call: which operation, which model, which headers go upstream, and its retry key.

`parse_call` refuses everything that this port does not serve. Only headers on the allow-list are sent upstream, so
credentials and identity end here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple, TypeAlias

import orjson

from price_keeper.domain import Caller
from price_keeper.errors import AccessDenied, InvalidRequest, Refusal, UnknownOperation
from price_keeper.exchange import Request
from price_keeper.operations import Operation, OperationPath, check_model_id, parse_path
from price_keeper.upstream import json_splice

_LISTABLE: Final = Operation.ASYNC_INVOKES
_READ_ONLY: Final = Operation.ASYNC_INVOKE
MODEL_PATH_OPERATIONS: Final = frozenset(
    {
        Operation.INVOKE,
        Operation.INVOKE_STREAM,
        Operation.CONVERSE,
        Operation.CONVERSE_STREAM,
        Operation.COUNT_TOKENS,
    }
)
# Operations whose model is named in the body, and the key that names it.
_MODEL_KEYS: Final = {Operation.CHAT_COMPLETIONS: "model", Operation.ASYNC_INVOKES: "modelId"}
_MAX_MODEL_NAME_BYTES: Final = 16 * 1024  # bytes: an id of the greatest length, every character escaped

_FORWARDED_HEADERS: Final = {
    name.encode(): name
    for name in (
        "accept",
        "amz-sdk-invocation-id",
        "amz-sdk-request",
        "content-type",
        "traceparent",
        "tracestate",
        "user-agent",
        "x-amzn-trace-id",
    )
}
_BEDROCK_PREFIX: Final = b"x-amzn-bedrock-"
_TOKEN: Final = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]{1,256}")
_HEADER_NAME_CACHE_SIZE: Final = 256

_INVOCATION_ID: Final = b"amz-sdk-invocation-id"
_VARYING_HEADERS: Final = ("accept", "content-type", "x-amzn-bedrock-")  # headers that change the answer

Headers: TypeAlias = "list[tuple[str, str]]"

_BIDIRECTIONAL: Final = Operation.INVOKE_BIDIRECTIONAL.value.rpartition("}")[2].encode()


class ParsedCall(NamedTuple):
    """`model` is what the caller named: a label or an id; empty where the operation has no model."""

    operation: Operation
    model: str
    target: OperationPath
    model_span: tuple[int, int] | None = None  # where the body names the model, if it does

    def body_with_model(self, model: str, body: bytes) -> bytes:
        """The caller's own bytes, but for another model's name in the place of the one they name."""
        if self.model_span is None or model == self.model:
            return body
        return json_splice.replace_span(body, self.model_span, orjson.dumps(model))


def check_target(target: bytes) -> Refusal | None:
    """Why this is refused whoever asks for it. The body of such a request may have no end, so none is waited for."""
    return _build_bidirectional_refusal() if target.partition(b"?")[0].endswith(_BIDIRECTIONAL) else None


def _build_bidirectional_refusal() -> Refusal:
    return InvalidRequest("bidirectional streams are not supported; use converse-stream or invoke-with-response-stream")


def parse_call(request: Request) -> ParsedCall:
    """Raises a Refusal. It reads the body where that names the model, which takes time for a large one."""
    path, _, query = request.target.decode("latin-1").partition("?")
    try:
        target = parse_path(path)
    except ValueError as failure:
        raise InvalidRequest(str(failure)) from None
    if target is None or not _is_method_allowed(target.operation, request.method):
        raise UnknownOperation("this port serves the operations of bedrock-runtime and OpenAI's chat completions")
    if query:
        raise InvalidRequest("no operation takes a query here; who calls is said in headers")
    operation = target.operation
    if operation in MODEL_PATH_OPERATIONS:
        return ParsedCall(operation, target.id, target)
    if operation is Operation.INVOKE_BIDIRECTIONAL:
        raise _build_bidirectional_refusal()
    if operation not in _MODEL_KEYS:
        return ParsedCall(operation, "", target)
    if request.method == b"GET":
        whose = "the jobs of every app in the account"
        raise AccessDenied(f"a list would show {whose}; ask for one job, by the ARN that its start was answered with")
    return _parse_model_in_body(target, request.body)


def _is_method_allowed(operation: Operation, method: bytes) -> bool:
    if method == b"POST":
        return operation is not _READ_ONLY
    return method == b"GET" and operation in (_LISTABLE, _READ_ONLY)


def _parse_model_in_body(target: OperationPath, body: bytes) -> ParsedCall:
    key = _MODEL_KEYS[target.operation]
    try:
        span = json_splice.find_members(body, (key,)).spans.get(key)
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None
    model = _read_model_name(body, span)
    if not model:
        raise InvalidRequest(f"the body's {key!r} names the model: a label or a model's id")
    try:
        return ParsedCall(target.operation, check_model_id(model), target, span)
    except ValueError as failure:
        raise InvalidRequest(str(failure)) from None


def locate_model(parsed_call: ParsedCall, body: bytes) -> ParsedCall:
    """The same in another body, in which the model's name stands elsewhere."""
    if parsed_call.model_span is None:
        return parsed_call
    key = _MODEL_KEYS[parsed_call.operation]
    return parsed_call._replace(model_span=json_splice.find_members(body, (key,)).spans[key])


def _read_model_name(body: bytes, span: tuple[int, int] | None) -> str:
    """Empty where there is none, or none that could be meant."""
    if span is None or span[1] - span[0] > _MAX_MODEL_NAME_BYTES:
        return ""
    try:
        value = orjson.loads(body[span[0] : span[1]])
    except orjson.JSONDecodeError:  # half a surrogate pair, which is JSON and no text
        return ""
    return value if isinstance(value, str) else ""


def select_upstream_headers(request: Request, extra_prefix: bytes | None) -> Headers:
    """Those on the list and no others: what says who calls ends here. `extra_prefix` is the simulator's."""
    prefixes = (_BEDROCK_PREFIX,) if extra_prefix is None else (_BEDROCK_PREFIX, extra_prefix)
    selected = []
    for name, value in request.headers.items():
        header_name = _FORWARDED_HEADERS.get(name)
        if header_name is None:
            if not name.startswith(prefixes):
                continue
            header_name = _decode_header_name(name)
        if name in request.repeated:
            raise InvalidRequest(f"the header {header_name} comes only once")
        text = value.decode("latin-1")
        if not (text.isascii() and text.isprintable()):
            text = _require_printable(header_name, text)
        selected.append((header_name, text))
    return selected


def compute_retry_key(request: Request, caller: Caller, headers: Headers) -> bytes | None:
    """The same for a call sent again, and for no other call whose answer might be another one. None for a call that
    does not say which it is."""
    invocation_id = request.headers.get(_INVOCATION_ID)
    if invocation_id is None:
        return None
    varying = sorted([header for header in headers if header[0].startswith(_VARYING_HEADERS)])
    identity = repr((caller.client_id, request.method, request.target, invocation_id, varying)).encode()
    return sha256(identity + sha256(request.body).digest()).digest()


@lru_cache(_HEADER_NAME_CACHE_SIZE)
def _decode_header_name(name: bytes) -> str:
    if not _TOKEN.fullmatch(name):
        raise InvalidRequest("the name of a header has characters that no name has")
    return name.decode()


def _require_printable(name: str, text: str) -> str:
    """A tab means no more than a space, and only a space can be signed."""
    text = text.replace("\t", " ")
    if not (text.isascii() and text.isprintable()):
        raise InvalidRequest(f"the header {name} has none but printable ASCII characters")
    return text
