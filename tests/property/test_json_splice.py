"""A member's place in a JSON object's own bytes: as a plain parser sees it, however it is spelled, or refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from price_keeper.upstream import json_splice
from price_keeper.upstream.json_splice import (
    MAX_MEMBERS,
    MAX_NESTED,
    InvalidJsonObject,
    Members,
    add_member,
    find_members,
    replace_span,
)

from tests.support.effort import tries

NAMES = ("model", "requestMetadata")


class Object(list[Any]):
    """Its members in their order, names that come twice among them."""


class Number(str):
    """As it is spelled."""


def parsed(text: str) -> Any:
    """By the standard library, without what only it takes for JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, object_pairs_hook=Object, parse_constant=refuse, parse_int=Number, parse_float=Number)


def scanned(data: bytes) -> Members:
    """By the way that large data takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_splice, "SMALL_BYTES", -1)
        return find_members(data, NAMES)


def check(data: bytes) -> None:
    """Both ways see what the standard library sees."""
    try:
        document = parsed(data.decode())
        is_good = isinstance(document, Object)
    except ValueError:
        is_good = False
    if not is_good or any([name for name, _ in document].count(each) > 1 for each in NAMES):
        for read in (scanned, lambda data: find_members(data, NAMES)):
            with pytest.raises(InvalidJsonObject):
                read(data)
        return
    found = scanned(data)
    assert find_members(data, NAMES) == found
    assert set(found.spans) == {name for name, _ in document if name in NAMES}
    for name, value in document:
        if name in NAMES:
            start, end = found.spans[name]
            assert parsed(data[start:end].decode()) == value
    assert (data[found.end : found.end + 1], found.is_empty) == (b"}", not document)
    check_changes(data, document, found)


def check_changes(data: bytes, document: Object, found: Members) -> None:
    for name in NAMES:
        if name in found.spans:
            changed = replace_span(data, found.spans[name], b'{"new": 1}')
            assert parsed(changed.decode()) == [(each, new(value, each == name)) for each, value in document]
        else:
            assert parsed(add_member(data, found, name, b"7").decode()) == [*document, (name, "7")]


def new(value: Any, is_changed: bool) -> Any:
    return Object([("new", "1")]) if is_changed else value


# Spellings of a document: with any white space, and characters escaped or not.


def spelled(value: Any, chance: random.Random) -> str:
    def space() -> str:
        return chance.choice(("", "", "", " ", "\n", "\t\r\n  "))

    if isinstance(value, Number) or value is None or isinstance(value, bool):
        return str(value) if isinstance(value, Number) else json.dumps(value)
    if isinstance(value, str):
        return '"' + "".join(character(each, chance) for each in value) + '"'
    if isinstance(value, Object):
        pairs = (f"{spelled(name, chance)}{space()}:{space()}{spelled(each, chance)}" for name, each in value)
        return "{" + space() + f"{space()},{space()}".join(pairs) + space() + "}"
    return "[" + space() + f"{space()},{space()}".join(spelled(each, chance) for each in value) + space() + "]"


def character(each: str, chance: random.Random) -> str:
    if chance.random() < 0.1 and each < "\U00010000":
        return f"\\u{ord(each):04x}"
    return (
        "\\/" if each == "/" and chance.random() < 0.5 else json.dumps(each, ensure_ascii=chance.random() < 0.5)[1:-1]
    )


texts = st.text(st.sampled_from('ab"\\/\n\x7f é\U0001f600\ud800{}[]:,model'), max_size=6)
numbers = st.sampled_from(["0", "-0", "12", "-3.50", "1e5", "2E+07", "0.1e-9", "123456789012345678901"]).map(Number)
plain = st.none() | st.booleans() | numbers | texts
names = texts | st.sampled_from([*NAMES, "Model", "models"])
long = st.lists(plain, min_size=1, max_size=1).map(lambda one: one * 300)  # more than one step takes
values = st.recursive(
    plain | long,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(names, inner), max_size=4).map(Object),
    max_leaves=12,
)
objects = st.lists(st.tuples(names, values), max_size=5).map(Object)
seeds = st.integers(0, 2**32)


def encoded(document: Any, seed: int) -> bytes:
    # Half a surrogate pair is JSON when escaped, and no UTF-8 otherwise.
    return spelled(document, random.Random(seed)).encode(errors="surrogatepass")


@settings(max_examples=tries(200))
@given(objects, seeds)
def test_members_are_where_a_parser_finds_them(document: Object, seed: int) -> None:
    check(encoded(document, seed))


BITS = [b'"', b"\\", b"{", b"}", b"[", b"]", b":", b",", b" ", b"\n", b"\x00", b"\x1f", b"\xff", b"\xc1\xad", b"0",
        b"-", b".", b"e", b"+", b"//", b"'", b"nul", b"NaN", b"Infinity", b"true", b"\\u", b"\\u00e", b"\\x",
        b"\xef\xbb\xbf", b'"model"', b'"model":1,', b'"m\\u006fdel":2', b'\\"', b"\\\\", b"/**/", b"\xc2\xa0",
        b"\x0b"]  # fmt: skip
edits = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3), st.sampled_from(BITS)), min_size=1, max_size=3)


@settings(max_examples=tries(300))
@given(objects, seeds, edits)
def test_corrupted_json_is_refused_where_a_parser_refuses_it(document: Object, seed: int, changes: Any) -> None:
    data = encoded(document, seed)
    for at, removed, put in changes:
        at %= len(data) + 1
        data = data[:at] + put + data[at + removed :]
    check(data)


@settings(max_examples=tries(150))
@given(st.lists(st.sampled_from(BITS), max_size=12).map(b"".join))
@example(b"")
@example(b"{")
@example(b"[]")
@example(b'"model"')
@example(b'{"model":"a"}}')
@example(b'{"model":"a"} x')
@example(b'{"model":"a",}')
@example(b'{"model" "a"}')
@example(b'{model:"a"}')
@example(b'{"mod\\u0065l":"a","model":"b"}')
@example(b'{"mod\\u0065l":"a","x":{"model":"b"}}')
@example(b'{"x":"\\"model\\":1","model":"b"}')
@example(b'{"x":"\\\\","model":"b"}')
@example(b'{"x":"\\\\\\",\\"model\\":1","y":1}')
@example(b'{"x":[[1,{"model":"a"}],{}],"model":"b"}')
@example('{"model":"a"}'.encode("utf-16"))
@example(b'{"mod\xc1\xa5l":"a"}')
def test_random_json_fragments_agree_with_parser(data: bytes) -> None:
    check(data)


# What a caller can make large.


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (nested(MAX_NESTED + 3), "more than 250000 arrays and objects"),
        (b"[%b]" % b",".join([b"[[]]"] * (MAX_NESTED + 3)), "more than 250000 arrays and objects"),
        (b"1" + b"".join(b',"%0200d":0' % number for number in range(MAX_MEMBERS)), "more than 1000 members"),
    ],
)
def test_oversized_json_is_refused(value: bytes, words: str) -> None:
    with pytest.raises(InvalidJsonObject, match=words):
        find_members(b'{"model":"premium","x":%b}' % value, NAMES)


@pytest.mark.parametrize(
    "value",
    [
        b"[%b]" % b",".join([b"{}"] * 500_000),
        b"[%b]" % b",".join([b"1"] * 900_000),
        b"{%b}" % b",".join([b'"a":[0]'] * 300_000),
        nested(MAX_NESTED),
        b'"%b"' % (b"\\n" * 900_000),
        b'"%b"' % ("é".encode() * 900_000),
        b'{"model":[%b]}' % (b'{"model":{"a":[]}},' * 50_000 + b"0"),
        b"[%b]" % b",\n".join([b'{"a": "b"}'] * 100_000),
    ],
    ids=["objects", "numbers", "members", "depth", "escapes", "letters", "names", "space"],
)
def test_large_values_are_skipped(value: bytes) -> None:
    data = b' {"x":%b,"model" : "premium" } ' % value
    found = find_members(data, NAMES)
    start, end = found.spans["model"]
    assert data[start:end] == b'"premium"'
    assert replace_span(data, (start, end), b'"economy"') == data.replace(b'"premium"', b'"economy"')
    with pytest.raises(InvalidJsonObject, match="is no JSON from byte"):
        find_members(data.replace(b"}", b",}"), NAMES)
    with pytest.raises(InvalidJsonObject, match="is no JSON from byte"):
        find_members(data[:-3], NAMES)
