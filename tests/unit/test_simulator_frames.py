"""The simulator's event-stream frames, read by botocore."""

from __future__ import annotations

import json

import pytest
from bedrock_simulator import event_frames
from botocore.eventstream import ChecksumMismatch, EventStreamBuffer
from hypothesis import given
from hypothesis import strategies as some


def read(raw: bytes) -> tuple[dict[str, str], dict[str, object]]:
    buffer = EventStreamBuffer()
    buffer.add_data(raw)
    (message,) = list(buffer)
    return message.headers, json.loads(message.payload)


@given(some.dictionaries(some.text(min_size=1), some.text(), min_size=1))
def test_event_has_type_content_and_padding(content: dict[str, str]) -> None:
    headers, payload = read(event_frames.encode_event("metadata", content))
    assert headers == {":event-type": "metadata", ":content-type": "application/json", ":message-type": "event"}
    padding = payload.pop("p") if "p" not in content else content["p"]
    assert padding is not None
    assert payload | {"p": 0} == content | {"p": 0}


def test_exception_has_type_and_message():
    headers, payload = read(event_frames.encode_exception("throttlingException", "slow down"))
    assert headers[":message-type"] == "exception"
    assert headers[":exception-type"] == "throttlingException"
    assert payload == {"message": "slow down"}


def test_same_event_has_same_bytes():
    assert event_frames.encode_event("chunk", {"bytes": "eA=="}) == event_frames.encode_event(
        "chunk", {"bytes": "eA=="}
    )


def test_damaged_frame_keeps_length_and_is_refused():
    whole = event_frames.encode_event("chunk", {"bytes": "eA=="})
    damaged = event_frames.corrupt_checksum(whole)
    assert len(damaged) == len(whole)
    with pytest.raises(ChecksumMismatch):
        read(damaged)
