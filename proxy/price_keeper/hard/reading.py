"""Reads a body of which a bound is to hold, whoever reads it after us. Pure.

What two readers could take for two things is refused: a name that comes twice, however it is spelt, bytes that are no
UTF-8, numbers that are none.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

import orjson

from price_keeper.errors import InvalidRequest

# Values become objects of ours, which take a hundred bytes each where their JSON takes two. Text may be any length.
MOST_VALUES = 200_000
SMALL_BYTES = 128 * 1024  # with less there are not too many, whatever it holds


class Read(NamedTuple):
    document: dict[str, Any]
    text: bytes  # the same, without spaces and with no escape that it can do without


class _Twice(ValueError):
    pass


def read(body: bytes) -> Read:
    """Raises InvalidRequest."""
    if len(body) > SMALL_BYTES:
        _check_values(body)
    try:
        document = orjson.loads(body)
        text = orjson.dumps(document)
    except orjson.JSONDecodeError as failure:
        raise InvalidRequest(f"the body is no JSON: {failure.msg}") from None
    except (orjson.JSONEncodeError, RecursionError):
        raise _too_deep() from None
    if type(document) is not dict:
        raise InvalidRequest("the body is no JSON object")
    if text != body:  # else nothing was lost of it, and so no name came twice
        _check_names(body)
    return Read(document, text)


def _check_names(body: bytes) -> None:
    try:
        _with_names(body.decode())
    except _Twice as twice:
        raise InvalidRequest(f"the body has {twice} more than once in one object") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise InvalidRequest("the body is no JSON that is read in one way only") from None


def _unlike(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _Twice(ascii(twice[:100]))
    return members


_with_names = json.JSONDecoder(object_pairs_hook=_unlike).decode


def _too_deep() -> InvalidRequest:
    return InvalidRequest("the body has too many arrays and objects in others")


def _check_values(body: bytes) -> None:
    """Counts the marks between values, outside of strings. What is no JSON is counted somehow, and refused later."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') <= 2 * MOST_VALUES:
        outside = b"".join(plain.split(b'"')[::2])
        if sum(map(outside.count, (b",", b"[", b"{"))) <= MOST_VALUES:
            return
    raise InvalidRequest(f"under a hard budget a body has at most {MOST_VALUES} values")
