"""The oracles can fail: with the product spoilt in one place, what is kept is enough to tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from price_keeper import operations, parse_call
from price_keeper.auth import tokens
from price_keeper.budgets import effective_settings, org_settings
from price_keeper.budgets.hard import cost_ceiling, token_bound
from price_keeper.config import config_problems
from price_keeper.control import control_requests as control_bodies
from price_keeper.ledger import recovery, segment
from price_keeper.server import http1_parser, http2, http2_frames, http2_stream
from price_keeper.stores import dynamodb_expressions, item_codec
from price_keeper.upstream import chat_stream_usage, connection_pool, eventstream, json_splice, relay, request_metadata
from price_keeper.usage import fast_parse, guardrail_usage, model_families, price_list, stream_usage

from tests.fuzz.places import played
from tests.fuzz.targets import NAMES, target

Spoils = Callable[[pytest.MonkeyPatch], object]


def puts(place: Any, name: str, value: Any) -> Spoils:
    return lambda patch: patch.setattr(place, name, value)


def wraps(place: Any, name: str, change: Callable[[Any], Any]) -> Spoils:
    """What it comes to is changed."""
    plain = getattr(place, name)
    return puts(place, name, lambda *some, **named: change(plain(*some, **named)))


def _forgets_a_byte(reader: Any, data: bytes) -> None:
    _ON_BODY(reader, data[:-1])


_ON_BODY = http1_parser.Http1RequestParser.on_body
_ENDED = http2_stream.Http2Stream.end_request
_TAKES = http2_stream.Http2Stream.take_data
_END = connection_pool.UpstreamConnection._complete


def _keeps_connection(connection: Any, sink: Any, body: bytes) -> None:
    connection._keeps_alive = True
    _END(connection, sink, body)


def _takes_any_length(stream: Any) -> None:
    stream._announced_bytes = None
    _ENDED(stream)


def _opens_ended_streams() -> dict[http2_frames.StreamState, dict[int, http2_frames.Effect]]:
    ended = http2_frames.FRAME_EFFECTS[http2_frames.StreamState.ENDED]
    opened = {**ended, http2_frames.HEADERS: http2_frames.Effect.APPLY}
    return {**http2_frames.FRAME_EFFECTS, http2_frames.StreamState.ENDED: opened}


MUTATIONS: dict[str, tuple[str, Spoils]] = {
    "a body without its last byte": (
        "http1_requests",
        puts(http1_parser.Http1RequestParser, "on_body", _forgets_a_byte),
    ),
    "the last of two headers": (
        "http1_requests",
        puts(
            http1_parser.Http1RequestParser,
            "on_header",
            lambda reader, name, value: reader._headers.update({name.lower(): value}),
        ),
    ),
    "an answer's last byte": ("http1_answers", puts(relay, "_CONNECTION_HEADERS", frozenset())),
    "a connection that is kept": (
        "http1_answers",
        puts(connection_pool.UpstreamConnection, "_complete", _keeps_connection),
    ),
    "frames with less than they may have": ("event_frames", puts(eventstream, "MAX_HEADERS", 3)),
    "the wrong end of a payload": ("event_frames", puts(eventstream, "MAX_EXCEPTION_PAYLOAD", 3)),
    "events of others": ("chat_events", puts(chat_stream_usage, "_EVENT_ENDS", (b"\n",))),
    "usage by pieces": (
        "chat_events",
        wraps(stream_usage._EventSplitter, "feed", lambda whole: whole[: len(whole) // 2]),
    ),
    "streams that are opened twice": ("http2", puts(http2, "FRAME_EFFECTS", _opens_ended_streams())),
    "a body of any length": ("http2", puts(http2_stream.Http2Stream, "end_request", _takes_any_length)),
    "a body over HTTP/2 without its last byte": (
        "http2",
        puts(http2_stream.Http2Stream, "take_data", lambda stream, data: _TAKES(stream, data[:-1])),
    ),
    "the first of two members": ("body_changes", puts(json_splice, "_decode_name", lambda *_: "")),
    "a member at the wrong place": ("body_changes", wraps(json_splice, "replace_span", lambda data: data + b" ,")),
    "others' entries": ("body_changes", puts(request_metadata, "PREFIX", "price_keeper-")),
    "a bound below the truth": ("worst_case", puts(token_bound, "REQUEST_TOKENS", -100_000)),
    "a limit that is not put in": ("worst_case", puts(cost_ceiling, "_write_limit", lambda body, *_: body)),
    "one answer for many": ("worst_case", puts(cost_ceiling, "_count_answers", lambda *_: 1)),
    "what a cache read": (
        "usage",
        puts(fast_parse, "make_plain_usage", lambda input, output, cached: model_families.Usage(input, output)),
    ),
    "a negative count": (
        "usage",
        puts(model_families, "_check_count", lambda value: value if type(value) is int else 0),
    ),
    "guardrails by their plainest name": ("guardrails", puts(guardrail_usage, "_CONFIG_BYTES", b"no such name")),
    "units of one assessment": ("guardrails", wraps(guardrail_usage, "_read_trace_units", lambda told: told[:1])),
    "ids that are sent raw": ("paths", puts(operations, "encode_model_id", lambda id: id)),
    "every header": ("paths", puts(parse_call, "_BEDROCK_PREFIX", b"x-")),
    "quotas of any value": (
        "control_bodies",
        puts(org_settings._Validator, "_validate_quotas", lambda _, quotas: quotas),
    ),
    "no quota as a quota of zero": (
        "control_bodies",
        wraps(effective_settings, "_read_budget", lambda read: (read[0], dict.fromkeys(read[0], 0) | read[1])),
    ),
    "names that come twice": ("control_bodies", puts(control_bodies, "_reject_duplicate_names", dict)),
    "signatures": ("tokens", puts(tokens, "_JWT_OPTIONS", {"verify_signature": False})),
    "prices below nothing": ("price_list", wraps(price_list, "_read_pico", lambda pico: pico and -pico)),
    "lines that are not there": (
        "config",
        wraps(config_problems.ConfigProblems, "format_lines", lambda told: [f"config.yaml:9999: {told}"]),
    ),
    "words that are none": ("config", puts(config_problems, "escape_line", lambda text: f"{text}\n")),
    "lines without their checksum": (
        "journal",
        puts(segment, "_decode_line", lambda text: orjson.loads(text[9:] or b"[]")),
    ),
    "calls that count twice": ("journal", puts(recovery.RecoveredSegment, "hand_calls_to", lambda *_: None)),
    "numbers that are rounded": ("values", wraps(item_codec, "normalize_number", lambda value: float(value))),
    "an unreadable quota as no limit": (
        "values",
        wraps(effective_settings, "_read_quotas", lambda quotas: {each: pico for each, pico in quotas.items() if pico}),
    ),
    "a kind that is another": ("values", puts(dynamodb_expressions, "normalize_number", str)),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutation_is_detected_by_oracle(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, spoils = MUTATIONS[what]
    one = target(name)
    spoils(monkeypatch)
    assert any(_is_detected(one, path.read_bytes()) for path in played(name))


def _is_detected(one: Callable[[bytes], None], data: bytes) -> bool:
    """By an oracle, or since what is spoilt is raised about."""
    try:
        one(data)
    except Exception:
        return True
    return False


def test_every_target_has_a_mutation() -> None:
    assert {name for name, _ in MUTATIONS.values()} == set(NAMES)
