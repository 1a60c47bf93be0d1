"""A caller of chat completions who did not ask for the usage gets every event but that one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.errors import InvalidRequest
from price_keeper.exchange import FlowControl, Header
from price_keeper.upstream.chat_stream_usage import UsageEventFilter, add_usage_option, needs_usage_option
from price_keeper.usage.stream_usage import is_usage_only_event

from tests.support.effort import tries


class Heard:
    has_started = is_disconnected = False

    def __init__(self) -> None:
        self.on_data = b""
        self.length: int | None = -1
        self.is_finished = self.is_aborted = False

    def attach(self, flow: FlowControl) -> None: ...

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self.length = length

    def write(self, data: bytes) -> None:
        assert data
        self.on_data += data

    def flush(self) -> None: ...

    def finish(self) -> None:
        self.is_finished = True

    def abort(self) -> None:
        self.is_aborted = True


def passed(stream: bytes, cuts: Sequence[int] = (), kind: bytes = b"text/event-stream", status: int = 200) -> Heard:
    heard = Heard()
    responder = UsageEventFilter(heard, is_usage_only_event)
    responder.start(status, [(b"content-type", kind)], len(stream))
    at = sorted({cut % (len(stream) + 1) for cut in cuts} | {0, len(stream)})
    for start, end in pairwise(at):
        responder.write(stream[start:end])
    responder.finish()
    return heard


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}


def test_event_in_tiny_pieces_takes_linear_time() -> None:
    """Each byte of it is looked at once, and not again with every piece."""
    event = b'data: {"choices": [{"delta": {"content": "' + b"x" * 100_000 + b'"}}]}\n\n'
    began = process_time()
    assert passed(event, range(len(event))).on_data == event
    assert process_time() - began < 4


texts = st.text(max_size=20) | st.sampled_from(['"usage"', '{"usage": {}}', "data: x", "\n\n", "\r\n\r\n"])
said = st.builds(lambda text: {"choices": [{"index": 0, "delta": {"content": text}}], "usage": None}, texts)
documents = st.lists(said, max_size=6)


@settings(max_examples=tries(300))
@given(documents, st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(0, 5000), max_size=12), st.booleans())
def test_other_events_pass_byte_for_byte(events: list[Any], line: str, cuts: list[int], is_last: bool) -> None:
    def framed(document: Any) -> bytes:
        return f"data: {json.dumps(document)}{line}{line}".encode()

    shown = b"".join(map(framed, events))
    done = f"data: [DONE]{line}{line}".encode()
    stream = shown + done + framed(USAGE) if is_last else shown + framed(USAGE) + done
    heard = passed(stream, cuts)
    assert heard.on_data == shown + done
    assert heard.is_finished
    assert heard.length is None


def test_response_without_stream_passes_unchanged() -> None:
    whole = json.dumps(USAGE).encode()
    for kind, status in ((b"application/json", 200), (b"text/event-stream", 429)):
        heard = passed(whole, (3,), kind, status)
        assert (heard.on_data, heard.length) == (whole, len(whole))


def test_event_stream_is_filtered_however_its_content_type_is_spelled() -> None:
    stream = b'data: {"choices": [1]}\n\n'
    heard = passed(stream + f"data: {json.dumps(USAGE)}\n\n".encode(), kind=b"Text/Event-Stream; charset=UTF-8")
    assert (heard.on_data, heard.length) == (stream, None)


def test_endless_event_is_not_buffered_forever() -> None:
    heard = Heard()
    responder = UsageEventFilter(heard, is_usage_only_event)
    responder.start(200, [(b"content-type", b"text/event-stream")], None)
    for _ in range(100):
        responder.write(b"data: " + b"x" * 10_000)
    assert len(heard.on_data) > 500_000
    responder.abort()
    assert heard.is_aborted


def test_last_event_without_blank_line_passes_unless_usage_only() -> None:
    assert passed(b'data: {"a": 1}').on_data == b'data: {"a": 1}'
    assert passed(f"data: {json.dumps(USAGE)}".encode()).on_data == b""


@pytest.mark.parametrize(
    ("body", "asks", "sent"),
    [
        ('{"model": "x"}', True, None),
        ('{"stream": false}', True, None),
        ('{"stream": true, "stream_options": {"include_usage": true}}', True, None),
        ('{"stream": true}', False, '{"stream": true,"stream_options":{"include_usage":true}}'),
        (
            '{"stream_options": {"a": 1, "include_usage": false}, "stream": true, "seed": 123456789012345678901}',
            False,
            '{"stream_options": {"a": 1, "include_usage": true}, "stream": true, "seed": 123456789012345678901}',
        ),
        (
            '{"stream": true, "stream_options": {"a": 1e999, "b": 12345678901234567890123}}',
            False,
            '{"stream": true, "stream_options": {"a": 1e999, "b": 12345678901234567890123,"include_usage":true}}',
        ),
        ('{"stream": true, "stream_options": {}}', False, '{"stream": true, "stream_options": {"include_usage":true}}'),
        (
            '{"stream": true, "stream_options": 1e999}',
            False,
            '{"stream": true, "stream_options": {"include_usage":true}}',
        ),
        ('{"stream": true, "stream_options": {"include_usage": true, "a": "\\ud800"}}', True, None),
        (
            '{"stream": true, "stream_options": null}',
            False,
            '{"stream": true, "stream_options": {"include_usage":true}}',
        ),
    ],
)
def test_usage_option_is_added_only_if_absent(body: str, asks: bool, sent: str | None) -> None:
    assert needs_usage_option(body.encode()) is not asks
    if sent is not None:
        assert add_usage_option(body.encode()) == sent.encode()


@pytest.mark.parametrize("name", ["include_usage", "include\\u005fusage"])
def test_duplicate_stream_options_are_rejected(name: str) -> None:
    """Or the sidecar reads the second, Bedrock the first, and the usage is in neither answer."""
    body = f'{{"stream": true, "stream_options": {{"include_usage": false, "{name}": true}}}}'
    with pytest.raises(InvalidRequest, match="stream_options"):
        needs_usage_option(body.encode())
