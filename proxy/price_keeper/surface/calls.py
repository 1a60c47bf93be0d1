"""What a request asks for: which operation, of which model, with what to go upstream. All else is refused."""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple, TypeAlias

import orjson

from price_keeper.errors import AccessDenied, InvalidRequest, Refusal, UnknownOperation
from price_keeper.exchange import Request
from price_keeper.forwarding import json_splice
from price_keeper.forwarding.model_path import Operation, OperationPath, check_model_id, parse_path
from price_keeper.model import Caller

_LISTS_TOO: Final = Operation.ASYNC_INVOKES
_READ_ONLY: Final = Operation.ASYNC_INVOKE
OF_A_MODEL: Final = frozenset(
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
_LONGEST_NAMED: Final = 16 * 1024  # bytes: an id of the greatest length, every character escaped

_PASSED_ON: Final = {
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
_OF_BEDROCK: Final = b"x-amzn-bedrock-"
_TOKEN: Final = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]{1,256}")
_NAMES_REMEMBERED: Final = 256

_INVOCATION: Final = b"amz-sdk-invocation-id"
_TELLING: Final = ("accept", "content-type", "x-amzn-bedrock-")  # headers that change the answer

Headers: TypeAlias = "list[tuple[str, str]]"

_BIDIRECTIONAL: Final = Operation.INVOKE_BIDIRECTIONAL.value.rpartition("}")[2].encode()


class Asked(NamedTuple):
    """`model` is what the caller named: a label or an id; empty where the operation has no model."""

    operation: Operation
    model: str
    target: OperationPath
    named_at: tuple[int, int] | None = None  # where the body names the model, if it does

    def body_for(self, model: str, body: bytes) -> bytes:
        """The caller's own bytes, but for another model's name in the place of the one they name."""
        if self.named_at is None or model == self.model:
            return body
        return json_splice.replaced(body, self.named_at, orjson.dumps(model))


def check_target(target: bytes) -> Refusal | None:
    """Why this is refused whoever asks for it. The body of such a request may have no end, so none is waited for."""
    return _no_bidirectional() if target.partition(b"?")[0].endswith(_BIDIRECTIONAL) else None


def _no_bidirectional() -> Refusal:
    return InvalidRequest("bidirectional streams are not supported; use converse-stream or invoke-with-response-stream")


def understood(request: Request) -> Asked:
    """Raises a Refusal. It reads the body where that names the model, which takes time for a large one."""
    path, _, query = request.target.decode("latin-1").partition("?")
    try:
        target = parse_path(path)
    except ValueError as failure:
        raise InvalidRequest(str(failure)) from None
    if target is None or not _is_method_of(target.operation, request.method):
        raise UnknownOperation("this port serves the operations of bedrock-runtime and OpenAI's chat completions")
    if query:
        raise InvalidRequest("no operation takes a query here; who calls is said in headers")
    operation = target.operation
    if operation in OF_A_MODEL:
        return Asked(operation, target.id, target)
    if operation is Operation.INVOKE_BIDIRECTIONAL:
        raise _no_bidirectional()
    if operation not in _MODEL_KEYS:
        return Asked(operation, "", target)
    if request.method == b"GET":
        whose = "the jobs of every app in the account"
        raise AccessDenied(f"a list would show {whose}; ask for one job, by the ARN that its start was answered with")
    return _named_in_body(target, request.body)


def _is_method_of(operation: Operation, method: bytes) -> bool:
    if method == b"POST":
        return operation is not _READ_ONLY
    return method == b"GET" and operation in (_LISTS_TOO, _READ_ONLY)


def _named_in_body(target: OperationPath, body: bytes) -> Asked:
    key = _MODEL_KEYS[target.operation]
    try:
        span = json_splice.members(body, (key,)).spans.get(key)
    except json_splice.NoJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None
    model = _string(body, span)
    if not model:
        raise InvalidRequest(f"the body's {key!r} names the model: a label or a model's id")
    try:
        return Asked(target.operation, check_model_id(model), target, span)
    except ValueError as failure:
        raise InvalidRequest(str(failure)) from None


def located(asked: Asked, body: bytes) -> Asked:
    """The same in another body, in which the model's name stands elsewhere."""
    if asked.named_at is None:
        return asked
    key = _MODEL_KEYS[asked.operation]
    return asked._replace(named_at=json_splice.members(body, (key,)).spans[key])


def _string(body: bytes, span: tuple[int, int] | None) -> str:
    """Empty where there is none, or none that could be meant."""
    if span is None or span[1] - span[0] > _LONGEST_NAMED:
        return ""
    try:
        value = orjson.loads(body[span[0] : span[1]])
    except orjson.JSONDecodeError:  # half a surrogate pair, which is JSON and no text
        return ""
    return value if isinstance(value, str) else ""


def headers_upstream(request: Request, extra_prefix: bytes | None) -> Headers:
    """Those on the list and no others: what says who calls ends here. `extra_prefix` is the simulator's."""
    prefixes = (_OF_BEDROCK,) if extra_prefix is None else (_OF_BEDROCK, extra_prefix)
    passed = []
    for name, value in request.headers.items():
        told = _PASSED_ON.get(name)
        if told is None:
            if not name.startswith(prefixes):
                continue
            told = _token(name)
        if name in request.repeated:
            raise InvalidRequest(f"the header {told} comes only once")
        text = value.decode("latin-1")
        if not (text.isascii() and text.isprintable()):
            text = _printable(told, text)
        passed.append((told, text))
    return passed


def retry_key(request: Request, caller: Caller, headers: Headers) -> bytes | None:
    """The same for a call sent again, and for no other call whose answer might be another one. None for a call that
    does not say which it is."""
    invocation = request.headers.get(_INVOCATION)
    if invocation is None:
        return None
    telling = sorted([header for header in headers if header[0].startswith(_TELLING)])
    whole = repr((caller.client_id, request.method, request.target, invocation, telling)).encode()
    return sha256(whole + sha256(request.body).digest()).digest()


@lru_cache(_NAMES_REMEMBERED)
def _token(name: bytes) -> str:
    if not _TOKEN.fullmatch(name):
        raise InvalidRequest("the name of a header has characters that no name has")
    return name.decode()


def _printable(name: str, text: str) -> str:
    """A tab means no more than a space, and only a space can be signed."""
    text = text.replace("\t", " ")
    if not (text.isascii() and text.isprintable()):
        raise InvalidRequest(f"the header {name} has none but printable ASCII characters")
    return text
