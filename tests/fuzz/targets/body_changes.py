"""What is inserted into callers' bodies is seen by every parser, and nothing else of them changes."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any
from unittest import mock

import orjson
from price_keeper.errors import InvalidRequest
from price_keeper.exchange import Request
from price_keeper.operations import Operation
from price_keeper.parse_call import parse_call
from price_keeper.upstream import chat_stream_usage, json_splice
from price_keeper.upstream.json_splice import InvalidJsonObject
from price_keeper.upstream.json_splice import Members as Spans
from price_keeper.upstream.request_metadata import BODY_KEY, add_metadata, build_identity

from tests.fuzz.documents import Members, document, pairs, views
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader

NAMES = (
    "model",
    "requestMetadata",
    "stream",
    "stream_options",
    "include_usage",
    "messages",
    "price-keeper-org",
    "a",
    "modell",
    "",
)
TEXTS = ("premium", "text", "anthropic.claude-v2:1", "..", "true", 'a"b', "x" * 40)
OURS = build_identity("c0000000-0000-4000-8000-00000000000d", "shop", "premium")
KEYS = ("model", "requestMetadata")
WORDS = (*(b'"%b":' % name.encode() for name in NAMES), b'{"stream":true', b'"include_usage":true', b"\\u006d", b'\\"')


def one(data: bytes) -> None:
    body = document(Reader(data), NAMES, TEXTS)
    try:
        members = pairs(body)
    except (ValueError, RecursionError):
        members = None
    _found(body, members)
    _metadata(body, members)
    _usage_asked(body, members)
    _model_named(body, members)


def _found(body: bytes, members: Any) -> None:
    """By the parser for small bodies and by the one for large ones, at the same places; or refused by both."""
    quick = _members(body)
    with mock.patch.object(json_splice, "SMALL_BYTES", -1):
        slow = _members(body)
    same(quick, slow, "members of a small body and of a large one")
    is_good = isinstance(members, Members) and all(len(members.all(name)) < 2 for name in KEYS)
    same(slow is not None, is_good, "whether it is an object with each name once")
    if slow is None:
        return
    same(slow.spans.keys(), {name for name in KEYS if members.all(name)}, "names")
    for name, span in slow.spans.items():
        same(pairs(body[slice(*span)]), members.all(name)[0], f"the value of {name}")


def _members(body: bytes) -> Spans | None:
    try:
        return json_splice.find_members(body, KEYS)
    except InvalidJsonObject:
        return None


def _metadata(body: bytes, members: Any) -> None:
    try:
        _, changed = add_metadata(Operation.CONVERSE, OURS, [], body)
    except InvalidRequest:
        return
    same(pairs(changed).but(BODY_KEY), members.but(BODY_KEY), "what is not ours")
    for view in views(changed):
        entries = view[BODY_KEY]
        same({name: entries.get(name) for name in OURS}, OURS, "who calls")
        holds(all(isinstance(value, str) for value in entries.values()), "entries that are no text")
        given = members.all(BODY_KEY)
        theirs = dict(given[0]) if given and isinstance(given[0], Members) else {}
        kept = {name: value for name, value in theirs.items() if not name.lower().startswith("price-keeper-")}
        same(entries, kept | OURS, "the caller's own entries")


def _usage_asked(body: bytes, members: Any) -> None:
    try:
        is_to_be_asked = chat_stream_usage.needs_usage_option(body)
    except InvalidRequest:
        return
    if not is_to_be_asked:
        streams = [view.get("stream") is True for view in views(body)]
        options = [view.get("stream_options") for view in views(body)]
        asked = [isinstance(each, dict) and each.get("include_usage") is True for each in options]
        holds(not any(streams) or all(asked), "a stream without the usage option")
        return
    changed = chat_stream_usage.add_usage_option(body)
    same(pairs(changed).but("stream_options"), members.but("stream_options"), "what is not ours")
    for view in views(changed):
        same(view["stream_options"]["include_usage"], True, "what is asked")


def _model_named(body: bytes, members: Any) -> None:
    request = Request(b"POST", b"/openai/v1/chat/completions", {}, frozenset())
    request.body = body
    try:
        asked = parse_call(request)
    except InvalidRequest:
        return
    same([view["model"] for view in views(body)], [asked.model] * 2, "the model that is named")
    with suppress(orjson.JSONDecodeError):  # half a character somewhere else, which only some readers take
        same(orjson.loads(body)["model"], asked.model, "the model that is named, to another reader")
    changed = asked.body_with_model("another", body)
    same(pairs(changed).but("model"), members.but("model"), "what is not ours")
    same(
        [json.loads(changed)["model"], *(view["model"] for view in views(changed))], ["another"] * 3, "the model put in"
    )
