"""Faults within a body: pieces in, pieces and breaks out."""

from __future__ import annotations

import pytest
from bedrock_simulator import event_frames
from bedrock_simulator.fault_injection import ConnectionFault, FaultInjector
from bedrock_simulator.fault_spec import parse_fault_spec
from bedrock_simulator.simulated_call import EVENT_STREAM, JSON, SERVER_SENT_EVENTS
from botocore.eventstream import EventStreamBuffer
from hypothesis import given
from hypothesis import strategies as some

THREE = [b"one", b"two", b"three"]


def spoiled(source, content_type=EVENT_STREAM, **wishes):
    spoiler = FaultInjector(parse_fault_spec(wishes), content_type)
    return list(spoiler.apply(source)), spoiler.is_damaged


@pytest.mark.parametrize("fault", ["stall", "cut", "reset"])
def test_a_break_comes_after_the_frames_that_are_to_pass(fault):
    assert spoiled(THREE, fault=fault, after_frames=2) == ([b"one", b"two", ConnectionFault(fault), b"three"], False)


def test_bytes_are_counted_across_pieces_and_may_end_within_one():
    pieces, _ = spoiled(THREE, fault="cut", after_bytes=4)
    assert pieces[:3] == [b"one", b"t", ConnectionFault.CUT]


def test_what_follows_a_break_is_there_for_a_stall_that_ends():
    pieces, _ = spoiled(THREE, fault="stall", after_bytes=4)
    assert b"".join(piece for piece in pieces if isinstance(piece, bytes)) == b"onetwothree"


@pytest.mark.parametrize("fault", ["stall", "cut", "reset", "bad-crc", "exception-frame"])
def test_unless_it_is_said_where_a_fault_strikes_after_the_first_frame(fault):
    pieces, _ = spoiled(THREE, fault=fault)
    assert pieces[0] == b"one"
    assert pieces[1] != b"two"


def test_a_stream_may_break_behind_its_last_frame():
    assert spoiled(THREE, fault="cut", after_frames=3) == ([*THREE, ConnectionFault.CUT], False)


def test_a_body_of_stated_length_has_no_such_place():
    assert spoiled(THREE, JSON, fault="cut", after_frames=3) == (THREE, False)


def test_a_fault_beyond_the_end_does_not_strike():
    assert spoiled(THREE, fault="cut", after_frames=4) == (THREE, False)
    assert spoiled(THREE, fault="cut", after_bytes=12) == (THREE, False)


def test_a_wrong_check_sum_damages_one_frame_and_lets_the_rest_pass():
    whole = [event_frames.encode_event("chunk", {"bytes": text}) for text in ("YQ==", "Yg==", "Yw==")]
    pieces, is_damaged = spoiled(whole, fault="bad-crc", after_frames=1)
    assert is_damaged
    assert pieces == [whole[0], event_frames.corrupt_checksum(whole[1]), whole[2]]


def test_an_exception_ends_the_stream():
    pieces, is_damaged = spoiled(THREE, fault="exception-frame", exception="throttlingException", after_frames=1)
    assert is_damaged
    assert pieces[0] == b"one"
    buffer = EventStreamBuffer()
    buffer.add_data(pieces[1])
    assert next(iter(buffer)).headers[":exception-type"] == "throttlingException"
    assert len(pieces) == 2


def test_server_sent_events_tell_an_exception_in_their_own_form():
    pieces, _ = spoiled(THREE, SERVER_SENT_EVENTS, fault="exception-frame", exception="throttlingException")
    assert pieces[1].startswith(b'data: {"error":')


@given(some.lists(some.binary(min_size=1), max_size=6), some.integers(0, 40))
def test_after_bytes_passes_exactly_so_many_bytes(source, limit):
    pieces, _ = spoiled(source, fault="cut", after_bytes=limit)
    whole = b"".join(source)
    assert (ConnectionFault.CUT in pieces) == (limit <= len(whole))
    before = pieces[: pieces.index(ConnectionFault.CUT)] if ConnectionFault.CUT in pieces else pieces
    assert b"".join(before) == whole[:limit]
