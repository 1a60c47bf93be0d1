"""HTTP/2 as far as a request follows from its frames: no state of a connection, only what each stream has been sent.

Of RFC 9113 it holds what a request may be made of (8.1 to 8.3), which is what smuggling between versions lives on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpack import Decoder, HPACKError

DATA, HEADERS, PRIORITY_FRAME, RST_STREAM, SETTINGS, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 8, 9
END_STREAM, END_HEADERS, PADDED, PRIORITY = 0x1, 0x4, 0x8, 0x20
INITIAL_WINDOW_SIZE = 4

# What 8.2.1 asks of a name. One that is no token in HTTP/1.1 goes no further: `targets/paths.py` holds that.
_NAME = re.compile(rb"[\x21-\x39\x3b-\x40\x5b-\x7e]+\Z")
_VALUE = re.compile(rb"(?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?\Z")
_OF_CONNECTIONS = {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}


@dataclass
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


@dataclass
class Stream:
    """What was sent on one, until its end."""

    headers: list[tuple[bytes, bytes]] | None = None
    body: bytes = b""
    is_ended: bool = False


@dataclass
class Heard:
    streams: dict[int, Stream] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)

    def window_of(self, stream: int) -> int:
        """At least as much as the client has ever said that it would take."""
        initial = [65_535]
        for each in self.frames:
            if each.kind == SETTINGS and not each.flags & 1:
                initial += [value for name, value in _settings(each.payload) if name == INITIAL_WINDOW_SIZE]
        return max(initial) + self._more(stream)

    @property
    def window(self) -> int:
        return 65_535 + self._more(0)

    def _more(self, stream: int) -> int:
        updates = [each for each in self.frames if each.kind == WINDOW_UPDATE and each.stream == stream]
        return sum(int.from_bytes(each.payload, "big") & 0x7FFFFFFF for each in updates)


def frames(data: bytes) -> Iterator[Frame]:
    """Those that are whole."""
    at = 0
    while at + 9 <= len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        end = at + 9 + size
        if end > len(data):
            return
        stream = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFFFFFF
        yield Frame(data[at + 3], data[at + 4], stream, data[at + 9 : end])
        at = end


def heard(data: bytes) -> Heard:
    """What a client has said, up to where a list of headers cannot be read."""
    found, decoder, block, begun = Heard(), Decoder(), b"", 0
    is_last = False
    for frame in frames(data):
        found.frames.append(frame)
        stream = found.streams.setdefault(frame.stream, Stream())
        if frame.kind == DATA and not stream.is_ended:
            stream.body += _unpadded(frame)
            stream.is_ended = bool(frame.flags & END_STREAM)
        elif frame.kind in (HEADERS, CONTINUATION):
            if frame.kind == HEADERS:
                block, begun, is_last = b"", frame.stream, bool(frame.flags & END_STREAM)
            block += _unpadded(frame) if frame.kind == HEADERS else frame.payload
            if frame.flags & END_HEADERS and frame.stream == begun:
                try:
                    headers = [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
                except (HPACKError, UnicodeDecodeError):
                    return found
                _take(stream, headers, is_last=is_last)
    return found


def _take(stream: Stream, headers: list[tuple[bytes, bytes]], *, is_last: bool) -> None:
    if stream.is_ended:
        return
    if stream.headers is None:
        stream.headers = headers
    stream.is_ended = is_last


def _unpadded(frame: Frame) -> bytes:
    payload = frame.payload
    if frame.flags & PADDED and payload:
        payload = payload[1 : max(1, len(payload) - payload[0])]
    return payload[5:] if frame.kind == HEADERS and frame.flags & PRIORITY else payload


def _settings(payload: bytes) -> list[tuple[int, int]]:
    parts = (payload[at : at + 6] for at in range(0, len(payload) - 5, 6))
    return [(int.from_bytes(part[:2], "big"), int.from_bytes(part[2:], "big")) for part in parts]


def mistakes(stream: Stream) -> list[str]:
    """Why this request is ambiguous."""
    found: list[str] = []
    headers = stream.headers or []
    pseudo = [name for name, _ in headers if name.startswith(b":")]
    plain = [(name, value) for name, value in headers if not name.startswith(b":")]
    if sorted(pseudo) not in ([b":authority", b":method", b":path", b":scheme"], [b":method", b":path", b":scheme"]):
        found.append(f"pseudo-headers {pseudo}")
    if [name for name, _ in headers[: len(pseudo)]] != pseudo:
        found.append("pseudo-headers behind others")
    found += [f"the name {name!r}" for name, _ in plain if not _NAME.match(name)]
    found += [f"the value {value!r}" for _, value in headers if not _VALUE.match(value)]
    found += [f"{name!r}" for name, _ in plain if name in _OF_CONNECTIONS]
    lengths = [value for name, value in plain if name == b"content-length"]
    if len(lengths) > 1 or any(not value.isdigit() or int(value) != len(stream.body) for value in lengths):
        found.append(f"a length of {lengths} for {len(stream.body)} bytes")
    hosts = {value for name, value in headers if name in (b"host", b":authority")}
    if len(hosts) > 1:
        found.append(f"hosts {hosts}")
    line = dict(headers)
    if any(mark in line.get(b":method", b"") + line.get(b":path", b"") for mark in (b" ", b"\t", b"\r", b"\n")):
        found.append("spaces in the first line")
    if not stream.is_ended:
        found.append("no end")
    return found
