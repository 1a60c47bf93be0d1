"""Tells Bedrock who calls, for its invocation logs: in a header of invocations, in the body of conversations.

What the caller says there stays, but never in place of what the sidecar knows. Where it says nothing, its body is not
parsed into another: the entry is put in before the last brace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.errors import InvalidRequest
from proxy.forwarding.model_path import Operation

HEADER = "x-amzn-bedrock-request-metadata"
KEY = "requestMetadata"
PREFIX = "price-keeper-"
MOST = 16  # entries that Bedrock takes

_IN_HEADER = frozenset({Operation.INVOKE, Operation.INVOKE_STREAM})
_IN_BODY = frozenset({Operation.CONVERSE, Operation.CONVERSE_STREAM})

Headers = list[tuple[str, str]]


def identity(org: str, app: str | None, label: str) -> dict[str, str]:
    known = {f"{PREFIX}org": org, f"{PREFIX}label": label}
    return known if app is None else known | {f"{PREFIX}app": app}


def tell(operation: Operation, ours: Mapping[str, str], headers: Headers, body: bytes) -> tuple[Headers, bytes]:
    """What goes upstream instead of these headers and this body."""
    given = next((value for name, value in headers if name == HEADER), None)
    headers = [header for header in headers if header[0] != HEADER]
    if operation in _IN_HEADER:
        theirs = _document(given.encode(), f"the header {HEADER}") if given is not None else {}
        headers.append((HEADER, orjson.dumps(_joined(theirs, ours)).decode()))
    elif operation in _IN_BODY:
        body = _told_in_body(ours, body)
    return headers, body


def _told_in_body(ours: Mapping[str, str], body: bytes) -> bytes:
    document = _document(body, "the body")
    theirs = document.get(KEY)
    if theirs is not None:
        if not isinstance(theirs, dict):
            raise InvalidRequest(f"the body's {KEY!r} is no JSON object")
        return orjson.dumps(document | {KEY: _joined(theirs, ours)})
    if not document or KEY in document:
        return orjson.dumps(document | {KEY: dict(ours)})
    end = body.rindex(b"}")
    return b'%b,"%b":%b%b' % (body[:end], KEY.encode(), orjson.dumps(ours), body[end:])


def _joined(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    kept = {name: value for name, value in theirs.items() if not name.lower().startswith(PREFIX)}
    if len(kept) + len(ours) > MOST:
        raise InvalidRequest(f"{KEY} has at most {MOST - len(ours)} entries here: {len(ours)} of {MOST} say who calls")
    return kept | dict(ours)


def _document(data: bytes, where: str) -> dict[str, Any]:
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as failure:
        raise InvalidRequest(f"{where} is no JSON: {failure.msg}") from None
    if not isinstance(document, dict):
        raise InvalidRequest(f"{where} is no JSON object")
    return document
