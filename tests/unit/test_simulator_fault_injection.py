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
def test_cut_comes_after_given_frames(fault):
    assert spoiled(THREE, fault=fault, after_frames=2) == ([b"one", b"two", ConnectionFault(fault), b"three"], False)


def test_bytes_are_counted_across_pieces():
    pieces, _ = spoiled(THREE, fault="cut", after_bytes=4)
    assert pieces[:3] == [b"one", b"t", ConnectionFault.CUT]


def test_data_after_stall_is_kept():
    pieces, _ = spoiled(THREE, fault="stall", after_bytes=4)
    assert b"".join(piece for piece in pieces if isinstance(piece, bytes)) == b"onetwothree"


@pytest.mark.parametrize("fault", ["stall", "cut", "reset", "bad-crc", "exception-frame"])
def test_fault_strikes_after_first_frame_by_default(fault):
    pieces, _ = spoiled(THREE, fault=fault)
    assert pieces[0] == b"one"
    assert pieces[1] != b"two"


def test_stream_may_be_cut_after_last_frame():
    assert spoiled(THREE, fault="cut", after_frames=3) == ([*THREE, ConnectionFault.CUT], False)


def test_body_of_known_length_cannot_be_cut_after_its_end():
    assert spoiled(THREE, JSON, fault="cut", after_frames=3) == (THREE, False)


def test_fault_beyond_end_does_not_strike():
    assert spoiled(THREE, fault="cut", after_frames=4) == (THREE, False)
    assert spoiled(THREE, fault="cut", after_bytes=12) == (THREE, False)


def test_wrong_checksum_damages_one_frame_only():
    whole = [event_frames.encode_event("chunk", {"bytes": text}) for text in ("YQ==", "Yg==", "Yw==")]
    pieces, is_damaged = spoiled(whole, fault="bad-crc", after_frames=1)
    assert is_damaged
    assert pieces == [whole[0], event_frames.corrupt_checksum(whole[1]), whole[2]]


def test_exception_ends_stream():
    pieces, is_damaged = spoiled(THREE, fault="exception-frame", exception="throttlingException", after_frames=1)
    assert is_damaged
    assert pieces[0] == b"one"
    buffer = EventStreamBuffer()
    buffer.add_data(pieces[1])
    assert next(iter(buffer)).headers[":exception-type"] == "throttlingException"
    assert len(pieces) == 2


def test_server_sent_events_have_exceptions_in_their_form():
    pieces, _ = spoiled(THREE, SERVER_SENT_EVENTS, fault="exception-frame", exception="throttlingException")
    assert pieces[1].startswith(b'data: {"error":')


@given(some.lists(some.binary(min_size=1), max_size=6), some.integers(0, 40))
def test_after_bytes_passes_exactly_so_many_bytes(source, limit):
    pieces, _ = spoiled(source, fault="cut", after_bytes=limit)
    whole = b"".join(source)
    assert (ConnectionFault.CUT in pieces) == (limit <= len(whole))
    before = pieces[: pieces.index(ConnectionFault.CUT)] if ConnectionFault.CUT in pieces else pieces
    assert b"".join(before) == whole[:limit]
