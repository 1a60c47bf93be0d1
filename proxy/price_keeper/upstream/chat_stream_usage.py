"""Usage of streamed chat completions. The API sends it only if the request has an option for it.

`add_usage_option` adds the option where it is missing, and `UsageEventFilter` removes the usage event from the response
again: the caller gets what it would get from Bedrock directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from price_keeper.errors import InvalidRequest
from price_keeper.exchange import Header, Responder
from price_keeper.responder_wrapper import ResponderWrapper
from price_keeper.upstream import json_splice

_STREAM, _OPTIONS, _INCLUDE = "stream", "stream_options", "include_usage"
_USAGE_OPTIONS = b'{"include_usage":true}'
_EVENT_STREAM = b"text/event-stream"
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_MAX_EVENT_END = 4
_MAX_BUFFERED_BYTES = 256 * 1024  # an event longer than this is certainly not the usage event


def needs_usage_option(body: bytes) -> bool:
    """Whether this is a stream without the usage option. Raises InvalidRequest."""
    try:
        spans = json_splice.find_members(body, (_STREAM, _OPTIONS)).spans
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None
    if _STREAM not in spans or body[slice(*spans[_STREAM])] != b"true":
        return False
    return _OPTIONS not in spans or not _includes_usage(body[slice(*spans[_OPTIONS])])


def add_usage_option(body: bytes) -> bytes:
    members = json_splice.find_members(body, (_OPTIONS,))
    span = members.spans.get(_OPTIONS)
    if span is None:
        return json_splice.add_member(body, members, _OPTIONS, _USAGE_OPTIONS)
    return json_splice.replace_span(body, span, _set_include_usage(body[slice(*span)]))


def _includes_usage(options: bytes) -> bool:
    members = _find_option(options)
    span = None if members is None else members.spans.get(_INCLUDE)
    return span is not None and options[slice(*span)] == b"true"


def _set_include_usage(options: bytes) -> bytes:
    """Set the usage option; other options stay as they are."""
    members = _find_option(options)
    if members is None:
        return _USAGE_OPTIONS
    span = members.spans.get(_INCLUDE)
    if span is None:
        return json_splice.add_member(options, members, _INCLUDE, b"true")
    return json_splice.replace_span(options, span, b"true")


def _find_option(options: bytes) -> json_splice.Members | None:
    """Find the usage option; None if the options are not an object. Raises InvalidRequest if it occurs twice, because
    parsers differ in which of the two counts."""
    if not options.startswith(b"{"):
        return None
    try:
        return json_splice.find_members(options, (_INCLUDE,))
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body's {_OPTIONS!r} {failure}") from None


class UsageEventFilter(ResponderWrapper):
    """A responder that leaves out events which, according to `is_usage_only`, hold nothing but the usage."""

    def __init__(self, responder: Responder, is_usage_only: Callable[[bytes], bool]) -> None:
        super().__init__(responder)
        self._is_usage_only = is_usage_only
        self._is_filtering = False
        self._buffer = bytearray()

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        kind = dict(headers).get(b"content-type", b"").lower()
        self._is_filtering = status == 200 and kind.startswith(_EVENT_STREAM)
        self._responder.start(status, headers, None if self._is_filtering else length)

    def write(self, data: bytes) -> None:
        if not self._is_filtering:
            self._responder.write(data)
            return
        searched = max(0, len(self._buffer) - _MAX_EVENT_END + 1)
        self._buffer += data
        end = _find_last_event_end(self._buffer, searched)
        if end:
            whole = bytes(self._buffer[:end])
            del self._buffer[:end]
            self._forward_events(whole)
        if len(self._buffer) > _MAX_BUFFERED_BYTES:
            self._forward_buffer()

    def _forward_events(self, events: bytes) -> None:
        if b'"usage"' in events:
            events = b"".join(event for event in _split_events(events) if not self._is_usage_only(event))
        if events:
            self._responder.write(events)

    def _forward_buffer(self) -> None:
        self._responder.write(bytes(self._buffer))
        self._buffer.clear()

    def finish(self) -> None:
        if self._buffer and not self._is_usage_only(bytes(self._buffer)):
            self._forward_buffer()
        self._responder.finish()


def _find_last_event_end(data: bytearray, start: int) -> int:
    """Return the position after the last empty line at or after `start`, for either line end; 0 if there is none."""
    return max((end + len(mark) for mark in _EVENT_ENDS if (end := data.rfind(mark, start)) >= 0), default=0)


def _split_events(data: bytes) -> list[bytes]:
    events: list[bytes] = []
    at = 0
    while at < len(data):
        ends = [end + len(mark) for mark in _EVENT_ENDS if (end := data.find(mark, at)) >= 0]
        end = min(ends, default=len(data))
        events.append(data[at:end])
        at = end
    return events
