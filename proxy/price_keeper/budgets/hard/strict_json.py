"""Parse a request body that every JSON reader understands in the same way. Pure.

A cost ceiling must also hold for the service that reads the body next. So a body is refused that two readers could
interpret differently: a name that occurs twice in one object, however it is escaped, bytes that are not UTF-8,
malformed numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

import orjson

from price_keeper.errors import InvalidRequest

# A parsed value takes about a hundred bytes where its JSON takes two. Text may be of any length.
MAX_VALUES = 200_000
SMALL_BODY_BYTES = 128 * 1024  # a smaller body cannot have too many values


class StrictBody(NamedTuple):
    """A parsed body."""

    document: dict[str, Any]
    canonical: bytes  # the same JSON without spaces and without unnecessary escapes


class _DuplicateName(ValueError):
    pass


def parse_strict(body: bytes) -> StrictBody:
    """Raises InvalidRequest for a body that is no JSON object or that is ambiguous."""
    if len(body) > SMALL_BODY_BYTES:
        _check_values(body)
    try:
        document = orjson.loads(body)
        text = orjson.dumps(document)
    except orjson.JSONDecodeError as failure:
        raise InvalidRequest(f"the body is no JSON: {failure.msg}") from None
    except (orjson.JSONEncodeError, RecursionError):
        raise _build_too_deep() from None
    if type(document) is not dict:
        raise InvalidRequest("the body is no JSON object")
    if text != body:  # an identical text has lost nothing, so no name occurred twice
        _check_names(body)
    return StrictBody(document, text)


def _check_names(body: bytes) -> None:
    try:
        _decode_checked(body.decode())
    except _DuplicateName as duplicate:
        raise InvalidRequest(f"the body has {duplicate} more than once in one object") from None
    except RecursionError:
        raise _build_too_deep() from None
    except ValueError:
        raise InvalidRequest("the body is not JSON that all readers understand in the same way") from None


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _DuplicateName(ascii(duplicate[:100]))
    return members


_decode_checked = json.JSONDecoder(object_pairs_hook=_reject_duplicates).decode


def _build_too_deep() -> InvalidRequest:
    return InvalidRequest("arrays and objects in the body are nested too deeply")


def _check_values(body: bytes) -> None:
    """Count the separators outside of strings. The count is meaningless for invalid JSON, which is refused later."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') <= 2 * MAX_VALUES:
        outside = b"".join(unescaped.split(b'"')[::2])
        if sum(map(outside.count, (b",", b"[", b"{"))) <= MAX_VALUES:
            return
    raise InvalidRequest(f"under a hard budget a body has at most {MAX_VALUES} values")
