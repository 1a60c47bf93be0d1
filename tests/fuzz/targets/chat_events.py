"""The events of chat completions: read for their usage, and relayed without it if the caller did not ask for it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from price_keeper.exchange import FlowControl, Header
from price_keeper.upstream.chat_stream_usage import UsageEventFilter
from price_keeper.usage.stream_usage import ChatStream, is_usage_only_event

from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader, pieces

WORDS = (b"data: ", b"\n\n", b"\r\n\r\n", b"data: [DONE]\n\n",
         b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}', b'"usage":',
         b'"choices":[{"finish_reason":"stop"}]', b'"error":{"message":"x"}', b'"service_tier":"flex"',
         b'{"usage":null}', b": comment\n\n", b"event: x\n")  # fmt: skip


_EVENT = re.compile(rb".+?(?:\n\n|\r\n\r\n|\Z)", re.DOTALL)


class Shown:
    def __init__(self) -> None:
        self.body = b""
        self.is_over = self.has_started = self.is_disconnected = False

    def attach(self, flow: FlowControl) -> None: ...

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None: ...

    def write(self, data: bytes) -> None:
        self.body += data

    def flush(self) -> None: ...

    def finish(self) -> None:
        self.is_over = True

    def abort(self) -> None: ...


def one(data: bytes) -> None:
    reader = Reader(data)
    seed, stream = reader.byte(), reader.rest()
    parts = pieces(stream, seed)
    readings = [_read(each) for each in ([stream], parts)]
    same(readings[1], readings[0], "usage in pieces")
    usage = readings[0][0]
    holds(usage is None or min(usage[:5]) >= 0, f"less than nothing: {usage}")
    shown = [_shown(each) for each in ([stream], parts)]
    same(_plain(shown[1]), _plain(shown[0]), "what is shown in pieces")
    expected = b"".join(event for event in _events(stream) if not _is_ours(event))
    same(_plain(shown[0]), _plain(expected), "what is shown")


def _read(parts: list[bytes]) -> tuple[Any, ...]:
    stream = ChatStream()
    for part in parts:
        stream.feed(part)
    return stream.usage(), stream.partial_usage(), stream.estimate_output(), stream.has_failed


def _shown(parts: list[bytes]) -> bytes:
    shown = Shown()
    responder = UsageEventFilter(shown, is_usage_only_event)
    responder.start(200, ((b"content-type", b"text/event-stream"),), None)
    for part in parts:
        responder.write(part)
    responder.finish()
    holds(shown.is_over, "it has no end")
    return shown.body


def _plain(events: bytes) -> bytes:
    """One empty line between events says as much as many."""
    return re.sub(rb"\n\n+", b"\n\n", events.replace(b"\r\n", b"\n")).strip(b"\n")


def _events(stream: bytes) -> list[bytes]:
    return _EVENT.findall(stream)


def _is_ours(event: bytes) -> bool:
    """An event whose data is an object with usage and an empty list of choices, and no error."""
    lines = [line[5:] for line in event.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data:")]
    try:
        document = json.loads(b"\n".join(lines))
    except ValueError:
        return False
    if not isinstance(document, dict) or "error" in document:
        return False
    return document.get("choices") == [] and isinstance(document.get("usage"), dict)
