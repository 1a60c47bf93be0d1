"""Add the caller's identity to a request, for Bedrock's invocation logs.

It goes into a header of invoke operations and into the body of converse operations. The caller's own entries stay, but
cannot replace Price Keeper's. Nothing else in the body changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import orjson

from price_keeper.errors import InvalidRequest
from price_keeper.operations import BodyForm, Operation, find_operations
from price_keeper.upstream import json_splice

HEADER = "x-amzn-bedrock-request-metadata"
BODY_KEY = "requestMetadata"
PREFIX = "price-keeper-"
MAX_ENTRIES = 16  # that Bedrock accepts
MAX_METADATA_BYTES = 32 * 1024  # above Bedrock's own limit of 256 characters for each name and value

_IN_HEADER, _IN_BODY = find_operations(BodyForm.INVOKE), find_operations(BodyForm.CONVERSE)

Headers = list[tuple[str, str]]


def build_identity(org: str, app: str | None, label: str) -> dict[str, str]:
    entries = {f"{PREFIX}org": org, f"{PREFIX}label": label}
    return entries if app is None else entries | {f"{PREFIX}app": app}


def add_metadata(operation: Operation, ours: Mapping[str, str], headers: Headers, body: bytes) -> tuple[Headers, bytes]:
    """Return the headers and the body to send instead of the given ones."""
    given = next((value for name, value in headers if name == HEADER), None)
    headers = [header for header in headers if header[0] != HEADER]
    if operation in _IN_HEADER:
        theirs = _parse_entries(given.encode(), f"the header {HEADER}") if given is not None else {}
        headers.append((HEADER, _encode_entries(theirs, ours)))
    elif operation in _IN_BODY:
        body = _add_to_body(ours, body)
    return headers, body


def _add_to_body(ours: Mapping[str, str], body: bytes) -> bytes:
    try:
        found = json_splice.find_members(body, (BODY_KEY,))
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None
    span = found.spans.get(BODY_KEY)
    if span is None:
        return json_splice.add_member(body, found, BODY_KEY, _encode_entries({}, ours).encode())
    given = body[span[0] : span[1]]
    theirs = _parse_entries(given, f"the body's {BODY_KEY!r}") if given != b"null" else {}
    return json_splice.replace_span(body, span, _encode_entries(theirs, ours).encode())


def _encode_entries(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Encode as printable ASCII, so that it can stand in a header."""
    kept = {name: value for name, value in theirs.items() if not name.lower().startswith(PREFIX)}
    if len(kept) + len(ours) > MAX_ENTRIES:
        raise InvalidRequest(
            f"{BODY_KEY} has at most {MAX_ENTRIES - len(ours)} entries here: {len(ours)} of {MAX_ENTRIES} say who calls"
        )
    return json.dumps(kept | dict(ours), separators=(",", ":")).replace("\x7f", "\\u007f")


def _parse_entries(data: bytes, where: str) -> dict[str, str]:
    if len(data) > MAX_METADATA_BYTES:
        raise InvalidRequest(f"{where} has at most {MAX_METADATA_BYTES} bytes")
    try:
        entries = orjson.loads(data)
    except orjson.JSONDecodeError as failure:
        raise InvalidRequest(f"{where} is no JSON: {failure.msg}") from None
    if not isinstance(entries, dict):
        raise InvalidRequest(f"{where} is no JSON object")
    if not all(isinstance(value, str) for value in entries.values()):
        raise InvalidRequest(f"{where} has strings as its values")
    return entries
