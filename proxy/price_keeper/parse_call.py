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
from price_keeper.operations import Operation, OperationPath, check_model_id, find_operations, parse_path
from price_keeper.upstream import json_splice

MODEL_PATH_OPERATIONS: Final = frozenset(each for each in find_operations() if each.value.startswith("/model/"))
_MAX_MODEL_NAME_BYTES: Final = 16 * 1024  # of an id of the greatest length with every character escaped in JSON

_FORWARDED_HEADERS: Final = (
    "accept",
    "amz-sdk-invocation-id",
    "amz-sdk-request",
    "content-type",
    "traceparent",
    "tracestate",
    "user-agent",
    "x-amzn-trace-id",
)
# What most clients send besides, which ends here; other names are compared with the prefixes.
_USUAL_HEADERS: Final = ("accept-encoding", "authorization", "connection", "content-length", "host", "x-amz-date",
                         "x-amz-security-token")  # fmt: skip
# By name as it comes: the name that is sent upstream, empty if the header is not.
_KNOWN_HEADERS: Final = {name.encode(): name for name in _FORWARDED_HEADERS} | {
    name.encode(): "" for name in _USUAL_HEADERS
}
_BEDROCK_PREFIX: Final = b"x-amzn-bedrock-"
_TOKEN: Final = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]{1,256}")
_HEADER_NAME_CACHE_SIZE: Final = 256

_INVOCATION_ID: Final = b"amz-sdk-invocation-id"
_MAX_PLAIN_KEY_BYTES: Final = 512  # keys are kept; a longer one is hashed
# Headers that may differ between a call and its retry, or say nothing of the response; all others change it.
_HEADERS_OF_AN_ATTEMPT: Final = frozenset(_FORWARDED_HEADERS) - {"accept", "content-type"}
# What a value may consist of. Deleting it, to see whether anything is left, is the quickest check that Python has.
_PRINTABLE: Final = bytes(range(0x20, 0x7F))

Headers: TypeAlias = "list[tuple[str, str]]"

_BACKGROUND: Final = "background"  # a member of the body of a response
_NO_BACKGROUND: Final = (b"", b"false", b"null")
# Paths of other services of Bedrock that clients may try here: a part of the path, and what to do instead.
_INSTEAD: Final = {
    "/agents/": "call agents at bedrock-agent-runtime itself; the models they call are not metered here",
    "/flows/": "call flows at bedrock-agent-runtime itself; the models they call are not metered here",
    "/knowledgebases/": "call knowledge bases at bedrock-agent-runtime itself",
    "/retrieveAndGenerate": "retrieve at bedrock-agent-runtime, and generate here, with converse",
    "/rerank": "call a reranking model with InvokeModel",
    "/model-invocation-job": "batch jobs are made at the bedrock endpoint itself; use async-invoke for single jobs",
    "/batches": "Bedrock has no batches in this form; use async-invoke for single jobs",
    "/responses/": "responses are not kept here; send the earlier items again",
}

_BIDIRECTIONAL: Final = Operation.INVOKE_BIDIRECTIONAL.value.rpartition("}")[2].encode()


class ParsedCall(NamedTuple):
    """A parsed request. `model` is what the caller named, a label or an id; empty where the operation has no model."""

    operation: Operation
    model: str
    target: OperationPath
    model_span: tuple[int, int] | None = None  # byte offsets of the model's name in the body, if it is there

    def body_with_model(self, model: str, body: bytes) -> bytes:
        """The caller's body with the model's name replaced, and every other byte unchanged."""
        if self.model_span is None or model == self.model:
            return body
        return json_splice.replace_span(body, self.model_span, orjson.dumps(model))


def check_target(target: bytes) -> Refusal | None:
    """The refusal for a target that is not supported for any caller; None for all others. It is checked before the body
    is read, because the body of a bidirectional stream may never end."""
    return _build_bidirectional_refusal() if target.partition(b"?")[0].endswith(_BIDIRECTIONAL) else None


def _build_bidirectional_refusal() -> Refusal:
    return InvalidRequest("bidirectional streams are not supported; use converse-stream or invoke-with-response-stream")


def parse_call(request: Request) -> ParsedCall:
    """Parse a request into a call. Raises a Refusal.

    Reads the body where that names the model, which takes long for a large body.
    """
    path, _, query = request.target.decode("latin-1").partition("?")
    try:
        target = parse_path(path)
    except ValueError as failure:
        raise InvalidRequest(str(failure)) from None
    if target is None or request.method not in target.operation.traits.methods:
        raise _build_unknown_operation(path)
    if target.operation is Operation.EMBEDDINGS:
        raise InvalidRequest(
            "Bedrock has no embeddings in OpenAI's form; call InvokeModel of an embedding model, such as "
            "POST /model/amazon.titan-embed-text-v2:0/invoke"
        )
    if query:
        raise InvalidRequest("no operation takes a query string here; credentials belong in headers")
    operation = target.operation
    if operation in MODEL_PATH_OPERATIONS:
        return ParsedCall(operation, target.id, target)
    if operation is Operation.INVOKE_BIDIRECTIONAL:
        raise _build_bidirectional_refusal()
    if not operation.traits.model_key:
        return ParsedCall(operation, "", target)
    if request.method == b"GET":
        jobs = "the jobs of every app in the account"
        raise AccessDenied(f"a list would show {jobs}; get one job by the ARN that its start returned")
    return _parse_model_in_body(target, request.body)


def _build_unknown_operation(path: str) -> UnknownOperation:
    """The refusal of a path that is not served, with what to do instead."""
    instead = next((instead for part, instead in _INSTEAD.items() if part in path), "")
    return UnknownOperation(
        "this port serves the operations of bedrock-runtime and the APIs of OpenAI and Anthropic that Bedrock has"
        + (f"; {instead}" if instead else "")
    )


def _parse_model_in_body(target: OperationPath, body: bytes) -> ParsedCall:
    key = target.operation.traits.model_key
    try:
        names = (key, _BACKGROUND) if target.operation is Operation.RESPONSES else (key,)
        spans = json_splice.find_members(body, names).spans
        span = spans.get(key)
        start, end = spans.get(_BACKGROUND, (0, 0))
        if body[start:end] not in _NO_BACKGROUND:
            raise InvalidRequest(
                "bedrock-runtime has no responses in the background, whose cost would be known to nobody; leave "
                "'background' out, and stream a long response"
            )
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None
    return ParsedCall(target.operation, require_model(body, key, span), target, span)


def require_model(body: bytes, key: str, span: tuple[int, int] | None) -> str:
    """The model's name in the body, at `span`, where `key` names it. Raises InvalidRequest."""
    model = _read_model_name(body, span)
    if not model:
        raise InvalidRequest(f"the body's {key!r} names the model: a label or a model's id")
    try:
        return check_model_id(model)
    except ValueError as failure:
        raise InvalidRequest(str(failure)) from None


def locate_model(parsed_call: ParsedCall, body: bytes) -> ParsedCall:
    """The same call for a changed body, in which the model's name has other offsets."""
    if parsed_call.model_span is None:
        return parsed_call
    key = parsed_call.operation.traits.model_key
    return parsed_call._replace(model_span=json_splice.find_members(body, (key,)).spans[key])


def _read_model_name(body: bytes, span: tuple[int, int] | None) -> str:
    """The model's name in the body; empty if there is none, or no valid one."""
    if span is None or span[1] - span[0] > _MAX_MODEL_NAME_BYTES:
        return ""
    try:
        value = orjson.loads(body[span[0] : span[1]])
    except orjson.JSONDecodeError:  # half a surrogate pair, which is valid JSON but no valid text
        return ""
    return value if isinstance(value, str) else ""


def select_upstream_headers(request: Request, extra_prefix: bytes | None) -> Headers:
    """The headers of a request that are sent upstream: only those on the allow-list, so the caller's credentials and
    identity end here. `extra_prefix` allows the simulator's headers too. Raises InvalidRequest."""
    prefixes = (_BEDROCK_PREFIX,) if extra_prefix is None else (_BEDROCK_PREFIX, extra_prefix)
    selected, values, repeated = [], [], request.repeated
    for name, value in request.headers.items():
        header_name = _KNOWN_HEADERS.get(name)
        if header_name is None:
            if not name.startswith(prefixes):
                continue
            header_name = _decode_header_name(name)
        elif not header_name:
            continue
        if repeated and name in repeated:
            raise InvalidRequest(f"the header {header_name} comes only once")
        selected.append((header_name, value))
        values.append(value)
    if not b"".join(values).translate(None, _PRINTABLE):  # nothing is left without the characters that are allowed
        return [(name, value.decode()) for name, value in selected]
    return [(name, _require_printable(name, value.decode("latin-1"))) for name, value in selected]


def compute_retry_key(request: Request, caller: Caller, headers: Headers) -> bytes | None:
    """A key that a call and its SDK retries share, and that no call with a possibly different response has. None for a
    call without an invocation id."""
    invocation_id = request.headers.get(_INVOCATION_ID)
    if invocation_id is None:
        return None
    varying = sorted([f"{name}:{value}" for name, value in headers if name not in _HEADERS_OF_AN_ATTEMPT])
    others = f"{caller.client_id}\0{request.hash_body(request.body)}\0" + "\0".join(varying)
    identity = b"%b\0%b\0%b\0%b" % (request.method, request.target, invocation_id, others.encode())
    return identity if len(identity) <= _MAX_PLAIN_KEY_BYTES else sha256(identity).digest()


@lru_cache(_HEADER_NAME_CACHE_SIZE)
def _decode_header_name(name: bytes) -> str:
    if not _TOKEN.fullmatch(name):
        raise InvalidRequest("the name of a header has characters that are not allowed")
    return name.decode()


def _require_printable(name: str, text: str) -> str:
    """The value with tabs as spaces, which mean the same and can be signed. Raises InvalidRequest for other characters
    that are not printable ASCII."""
    text = text.replace("\t", " ")
    if not (text.isascii() and text.isprintable()):
        raise InvalidRequest(f"the header {name} may have only printable ASCII characters")
    return text
