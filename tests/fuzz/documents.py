"""JSON from a fuzzer's bytes: nearly what clients send, with duplicate names and odd spellings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.fuzz.reader import Reader

MOST_DEEP = 7
NUMBERS = (b"0", b"1", b"5", b"300", b"-1", b"1.5", b"1e5", b"-0", b"1000000000", b"1000000001",
           b"18446744073709551616", b"1e400", b"0.1e-9", b"007", b"+5")  # fmt: skip
PLAIN = (b"null", b"true", b"false", b'""', b"{}", b"[]", b"[null]")
SPACES = (b"", b"", b"", b" ", b"\n\t\r ", b"\xa0", b"\x0b")
ODD = ("\\ud800", "\\u0000", "é", "\U0001f600", "\ufdfa", '\\"', "\\\\", "\x7f", "word " * 9, "\u3000")


def document(reader: Reader, names: Sequence[str], texts: Sequence[str]) -> bytes:
    """An object of members by these names; of the input's rest, or as it stands where that says so."""
    if reader.byte() == 255:
        return reader.rest()
    return _object(reader, names, texts, 0)


def _object(reader: Reader, names: Sequence[str], texts: Sequence[str], depth: int) -> bytes:
    members = []
    for _ in range(reader.byte() % 8):
        name = _string(reader, names)
        members.append(name + _space(reader) + b":" + _space(reader) + _value(reader, names, texts, depth + 1))
    return b"{" + _space(reader) + b",".join(members) + b"}"


def _value(reader: Reader, names: Sequence[str], texts: Sequence[str], depth: int) -> bytes:
    kind = reader.byte() % 16
    if kind < 5 and depth < MOST_DEEP:
        return _object(reader, names, texts, depth)
    if kind < 8 and depth < MOST_DEEP:
        return b"[" + b",".join(_value(reader, names, texts, depth + 1) for _ in range(reader.byte() % 4)) + b"]"
    if kind < 11:
        return _string(reader, texts)
    if kind < 13:
        return reader.pick(NUMBERS)
    if kind == 13:
        return b"%d" % reader.number(2)
    return reader.pick(PLAIN) if kind == 14 else reader.some()


def _string(reader: Reader, options: Sequence[str]) -> bytes:
    how = reader.byte()
    if how < 192:
        text = options[how % len(options)] if how < 160 else reader.some().decode("utf-8", "replace")
        return json.dumps(text).encode() if how % 2 else json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
    text = reader.pick(options)
    if how < 224 and text:  # its first letter escaped
        return f'"\\u{ord(text[0]):04x}{text[1:]}"'.encode()
    return f'"{text}{reader.pick(ODD)}"'.encode()


def _space(reader: Reader) -> bytes:
    how = reader.byte()
    return SPACES[how % len(SPACES)] if how >= 128 else b""


class Twice(Exception):
    """A name comes twice in one object."""


def views(data: bytes) -> list[Any]:
    """As read by parsers that keep the first of two members of one name, and by those that keep the last.

    Raises ValueError for what is no JSON in UTF-8, by the standard library.
    """
    text = data.decode()
    first = json.loads(text, object_pairs_hook=lambda pairs: dict(reversed(pairs)), parse_constant=_refuse)
    return [first, json.loads(text, parse_constant=_refuse)]


def pairs(data: bytes) -> Any:
    """Objects as lists of their members, in their order, numbers as they are spelt. Raises ValueError."""
    return json.loads(
        data.decode(), object_pairs_hook=Members, parse_constant=_refuse, parse_int=Number, parse_float=Number
    )


class Members(list[Any]):
    def all(self, name: str) -> list[Any]:
        return [value for each, value in self if each == name]

    def but(self, *names: str) -> list[Any]:
        return [member for member in self if member[0] not in names]


class Number(str):
    """As it is spelt."""


def _refuse(constant: str) -> None:
    raise ValueError(constant)
