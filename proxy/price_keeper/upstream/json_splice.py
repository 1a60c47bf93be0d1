"""Find members of a JSON object in its bytes, so that one can be replaced while all others stay as they are. Pure.

START HERE: `find_members`. The input is validated against RFC 8259: whatever two parsers could read differently is
rejected. Small input is parsed. Large input is never made into objects, because 25 MB may hold millions of values,
which would take thirty times their size in memory. There, escaped quotes and backslashes are first masked in a copy of
the same length; then each quote begins or ends a string, a regular expression consumes a run of values in one step,
and only nesting needs a Python step per level.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection
from functools import cached_property
from typing import NamedTuple

import orjson

SMALL_BYTES = 128 * 1024  # up to here input is parsed, which takes 4 MB at most for a moment
MAX_NESTED = 250_000  # a context of a million tokens holds fewer, and so many steps take a quarter of a second
MAX_MEMBERS = 1000  # of the object itself; no operation has a tenth of that
MAX_RUN_VALUES = 250  # values in one step: the expression keeps a little state for each until the step is over
MAX_FLAT_VALUES = 40  # values of a container that counts as one value of a run
WINDOW_BYTES = 64 * 1024  # decoded at once to validate UTF-8

_MAX_NAME_BYTES = 256  # with quotes and escapes; every name that is looked for is shorter
_BAD_ESCAPE = re.compile(rb"\\(?![/bfnrt]|u[0-9A-Fa-f]{4})")
_NO_CONTROLS = bytes(range(0x20, 0x100))

_SPACE = rb"[ \t\n\r]*+"
_NUMBER = rb"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+"
_OBJECT_START = re.compile(rb"%b\{(?:%b(\}))?" % (_SPACE, _SPACE))
_AFTER_VALUE = re.compile(rb"%b(?:,|(\}))" % _SPACE)
_TRAILING_SPACE = re.compile(_SPACE)


class InvalidJsonObject(ValueError):
    """The input is not valid. The message continues a sentence that begins with its name, such as "the body"."""


class Members(NamedTuple):
    spans: dict[str, tuple[int, int]]  # of the values of the members that were looked for
    end: int  # position of the closing brace
    is_empty: bool


_VALUE, _OPENED_ARRAY = 2, 3  # groups of the expression for a member

# What ended a step: the end of the container, or the start of a nested array or object.
_END, _ARRAY, _OBJECT = 1, 2, 3


class _ScanStep(NamedTuple):
    pattern: re.Pattern[bytes]
    stops: tuple[int, ...]  # what ended the step, by the number of the last group that matched; 0 if none did


class _ContainerPatterns(NamedTuple):
    """The steps in a container: after its opening bracket, and after one of its values."""

    first: _ScanStep
    next: _ScanStep


class _Grammar:
    """The expressions for one form of string. The quick one is only correct for data without control characters.

    Each is compiled when it is first needed, as that takes milliseconds which most processes never need.
    """

    def __init__(self, string: bytes) -> None:
        self._string = string
        self._name = rb"%b%b:%b" % (string, _SPACE, _SPACE)

    @cached_property
    def array(self) -> _ContainerPatterns:
        return _build_container_patterns(b"", self._value, rb"\]")

    @cached_property
    def object(self) -> _ContainerPatterns:
        return _build_container_patterns(self._name, self._value, rb"\}")

    @cached_property
    def member(self) -> re.Pattern[bytes]:
        parts = (_SPACE, self._string, _SPACE, _SPACE, self._value)
        return re.compile(rb"%b(%b)%b:%b(?:(%b)|(\[)|(\{))" % parts)

    @cached_property
    def _value(self) -> bytes:
        plain = rb"%b|true|false|null|%b" % (self._string, _NUMBER)
        member = rb"%b(?:%b)" % (self._name, plain)
        return rb"(?:%b|%b|%b)" % (plain, _flat(rb"\[", plain, rb"\]"), _flat(rb"\{", member, rb"\}"))


def _flat(begin: bytes, member: bytes, end: bytes) -> bytes:
    several = rb"(?:%b)(?:%b,%b(?:%b)){0,%d}%b" % (member, _SPACE, _SPACE, member, MAX_FLAT_VALUES - 1, _SPACE)
    return rb"(?>%b%b(?:%b)?%b)" % (begin, _SPACE, several, end)


def _build_container_patterns(name: bytes, value: bytes, end: bytes) -> _ContainerPatterns:
    opened = rb"(\[)|(\{)"
    run = rb"(?>(?:%b,%b%b%b){0,%d})" % (_SPACE, _SPACE, name, value, MAX_RUN_VALUES)
    value_run = rb"%b%b(?:(%b)|,%b%b(?:%b)|)" % (run, _SPACE, end, _SPACE, name, opened)
    first = rb"%b(?:(%b)|%b(?:%b%b|%b))" % (_SPACE, end, name, value, value_run, opened)
    return _ContainerPatterns(
        _ScanStep(re.compile(first), (0, _END, _END, _ARRAY, _OBJECT, _ARRAY, _OBJECT)),
        _ScanStep(re.compile(value_run), (0, _END, _ARRAY, _OBJECT)),
    )


_QUICK, _CAREFUL = _Grammar(rb'"[^"]*+"'), _Grammar(rb'"[^"\x00-\x1f]*+"')
_UNESCAPED = _Grammar(rb'"[^"\\]*+"')  # for data that is not masked


def find_members(data: bytes, names: Collection[str]) -> Members:
    """Find the members with these names. Raises InvalidJsonObject, also if one of the names occurs twice, because
    parsers differ in which of the two counts."""
    if len(data) <= SMALL_BYTES and (members := _find_in_small(data, names)) is not None:
        return members
    plain = _mask_escapes(data)
    begun = _OBJECT_START.match(plain)
    if begun is None:
        raise InvalidJsonObject("is no JSON object")
    spans: dict[str, tuple[int, int]] = {}
    at, is_empty = begun.end(), begun.lastindex is not None
    if not is_empty:
        at = _scan_members(data, plain, at, names, spans)
    rest = _TRAILING_SPACE.match(plain, at)
    if rest is None or rest.end() != len(plain):
        raise _syntax_error(at)
    return Members(spans, at - 1, is_empty)


def _find_in_small(data: bytes, names: Collection[str]) -> Members | None:
    """Find the members by parsing; None if a name occurs twice or has escapes, which the slow path must decide."""
    if b"\\u00" in data:
        return None
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    spans = {}
    if type(document) is not dict:
        return None
    for name in names:
        quoted = f'"{name}"'.encode()
        if name in document:
            member = _UNESCAPED.member.match(data, data.find(quoted)) if data.count(quoted) == 1 else None
            if member is None or member.lastindex != _VALUE:
                return None
            spans[name] = member.span(_VALUE)
    return Members(spans, data.rindex(b"}"), not document)


def replace_span(data: bytes, span: tuple[int, int], value: bytes) -> bytes:
    whole = memoryview(data)
    return b"".join((whole[: span[0]], value, whole[span[1] :]))


def remove_member(data: bytes, span: tuple[int, int]) -> bytes:
    """Remove the member whose value has this span, its name and one comma included."""
    start = data.rindex(b'"', 0, data.rindex(b'"', 0, span[0]))  # no name that is looked for contains a quote
    after = _AFTER_VALUE.match(data, span[1])
    assert after is not None, "the data was validated by find_members"
    if after.lastindex is None:
        return replace_span(data, (start, after.end()), b"")
    before = data[:start].rstrip()
    return before.removesuffix(b",") + data[span[1] :]


def add_member(data: bytes, members: Members, name: str, value: bytes) -> bytes:
    comma = b"" if members.is_empty else b","
    return replace_span(data, (members.end, members.end), b"%b%b:%b" % (comma, json.dumps(name).encode(), value))


def _scan_members(data: bytes, plain: bytes, at: int, names: Collection[str], spans: dict[str, tuple[int, int]]) -> int:
    """Add the members found to `spans`, and return where the object ends."""
    grammar = _CAREFUL if plain.translate(None, _NO_CONTROLS) else _QUICK
    nested = 0
    for _ in range(MAX_MEMBERS):
        member = grammar.member.match(plain, at)
        if member is None:
            raise _syntax_error(at)
        at, group = member.end(), member.lastindex or 0
        if group != _VALUE:
            at, nested = _skip_container(plain, at, grammar, group == _OPENED_ARRAY, nested)
        name = _decode_name(data, *member.span(1))
        if name in names:
            if name in spans:
                raise InvalidJsonObject(f"has {name!r} more than once")
            spans[name] = (member.start(group), at)
        behind = _AFTER_VALUE.match(plain, at)
        if behind is None:
            raise _syntax_error(at)
        at = behind.end()
        if behind.lastindex:
            return at
    raise InvalidJsonObject(f"has more than {MAX_MEMBERS} members")


def _decode_name(data: bytes, start: int, end: int) -> str:
    """Decode a member's name. A name too long to be looked for is not decoded and counts as empty."""
    if end - start > _MAX_NAME_BYTES:
        return ""
    name = data[start + 1 : end - 1].decode()
    return str(json.loads(f'"{name}"')) if "\\" in name else name


def _skip_container(plain: bytes, at: int, grammar: _Grammar, is_array: bool, nested: int) -> tuple[int, int]:
    """Skip from after an opening bracket to after the one that closes it. Counts nested containers."""
    outer: list[_ContainerPatterns] = []
    inside = grammar.array if is_array else grammar.object
    step = inside.first
    while True:
        match = step.pattern.match(plain, at)
        if match is None or match.end() == at:
            raise _syntax_error(at)
        at, stop = match.end(), step.stops[match.lastindex or 0]
        if stop in (_ARRAY, _OBJECT):
            nested += 1
            if nested > MAX_NESTED:
                raise InvalidJsonObject(f"has more than {MAX_NESTED} arrays and objects in others")
            outer.append(inside)
            inside = grammar.array if stop == _ARRAY else grammar.object
            step = inside.first
            continue
        if stop == _END:
            if not outer:
                return at, nested
            inside = outer.pop()
        step = inside.next


def _mask_escapes(data: bytes) -> bytes:
    _check_encoding(data)
    if b"\\" not in data:
        return data
    # `replace` works from the left, so the first backslash of a run is taken as the beginning of an escape.
    plain = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    bad = _BAD_ESCAPE.search(plain)
    if bad is not None:
        raise _syntax_error(bad.start())
    return plain


def _check_encoding(data: bytes) -> None:
    """Reject invalid UTF-8: a lenient parser could take such bytes for letters of a name."""
    if data.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), WINDOW_BYTES):
            decoder.decode(data[start : start + WINDOW_BYTES], start + WINDOW_BYTES >= len(data))
    except UnicodeDecodeError:
        raise InvalidJsonObject("is no UTF-8") from None


def _syntax_error(at: int) -> InvalidJsonObject:
    return InvalidJsonObject(f"is no JSON from byte {at} on")
