"""Tells Bedrock who calls, for its invocation logs: in a header of invocations, in the body of conversations.

What the caller says there stays, but never in place of what the sidecar knows. Nothing else of its body changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import orjson

from price_keeper.errors import InvalidRequest
from price_keeper.forwarding import json_splice
from price_keeper.forwarding.model_path import Operation

HEADER = "x-amzn-bedrock-request-metadata"
KEY = "requestMetadata"
PREFIX = "price-keeper-"
MOST = 16  # entries that Bedrock takes
MOST_BYTES = 32 * 1024  # of them: Bedrock's own limit is 256 characters for each name and value

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
        theirs = _entries(given.encode(), f"the header {HEADER}") if given is not None else {}
        headers.append((HEADER, _spelled(theirs, ours)))
    elif operation in _IN_BODY:
        body = _told_in_body(ours, body)
    return headers, body


def _told_in_body(ours: Mapping[str, str], body: bytes) -> bytes:
    try:
        found = json_splice.find_members(body, (KEY,))
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None
    span = found.spans.get(KEY)
    if span is None:
        return json_splice.add_member(body, found, KEY, _spelled({}, ours).encode())
    given = body[span[0] : span[1]]
    theirs = _entries(given, f"the body's {KEY!r}") if given != b"null" else {}
    return json_splice.replace_span(body, span, _spelled(theirs, ours).encode())


def _spelled(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """In printable ASCII, as it may stand in a header."""
    kept = {name: value for name, value in theirs.items() if not name.lower().startswith(PREFIX)}
    if len(kept) + len(ours) > MOST:
        raise InvalidRequest(f"{KEY} has at most {MOST - len(ours)} entries here: {len(ours)} of {MOST} say who calls")
    return json.dumps(kept | dict(ours), separators=(",", ":")).replace("\x7f", "\\u007f")


def _entries(data: bytes, where: str) -> dict[str, str]:
    if len(data) > MOST_BYTES:
        raise InvalidRequest(f"{where} has at most {MOST_BYTES} bytes")
    try:
        entries = orjson.loads(data)
    except orjson.JSONDecodeError as failure:
        raise InvalidRequest(f"{where} is no JSON: {failure.msg}") from None
    if not isinstance(entries, dict):
        raise InvalidRequest(f"{where} is no JSON object")
    if not all(isinstance(value, str) for value in entries.values()):
        raise InvalidRequest(f"{where} has strings as its values")
    return entries
