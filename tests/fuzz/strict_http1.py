"""HTTP/1.1 as RFC 9112 spells it, tolerating only what is stated here: one reading of each message, or none.

Slow and plain on purpose. What the product takes for a message has to be the same message here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST = re.compile(rb"(%b) ([\x21-\x7e\x80-\xff]+) HTTP/(1\.[01])\Z" % TOKEN)
# Of an answer the version only says whether its connection stays, and its reason says nothing.
_STATUS = re.compile(rb"HTTP/(0\.9|1\.[01]|2\.0) ([1-9][0-9][0-9])(?: [^\r\n]*)?\Z")
_FIELD = re.compile(
    rb"(%b):[ \t]*+((?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?)[ \t]*\Z" % TOKEN
)
_LENGTH = re.compile(rb"[0-9]{1,19}\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\Z")


class NoHttp(ValueError):
    """It can be read in no way, whatever else comes."""


class More(Exception):
    """It is not whole yet."""


@dataclass
class Message:
    """`first` are the parts of its first line: method, target, version; or version, status."""

    first: tuple[bytes, ...]
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    is_chunked: bool = False
    is_last: bool = False  # nothing else comes on this connection

    def all(self, name: bytes) -> list[bytes]:
        return [value for each, value in self.headers if each == name]

    @property
    def version(self) -> bytes:
        return self.first[-1]

    @property
    def connection(self) -> set[bytes]:
        return {part.strip(b" \t").lower() for value in self.all(b"connection") for part in value.split(b",")}


class _Bytes:
    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self.at = at

    def pass_empty_lines(self) -> None:
        """RFC 9112, 2.2: at least one, before a message."""
        while self.data[self.at : self.at + 1] in (b"\r", b"\n"):
            self.at += 1

    def line(self) -> bytes:
        end = self.data.find(b"\r\n", self.at)
        text = self.data[self.at :] if end < 0 else self.data[self.at : end]
        if b"\n" in text or b"\r" in text[:-1]:
            raise NoHttp("an end of a line in a line")
        if end < 0:
            raise More
        self.at = end + 2
        return text

    def take(self, size: int) -> bytes:
        if len(self.data) - self.at < size:
            raise More
        self.at += size
        return self.data[self.at - size : self.at]

    def fields(self) -> list[tuple[bytes, bytes]]:
        found = []
        while line := self.line():
            match = _FIELD.match(line)
            if match is None:
                raise NoHttp("no header")
            found.append((match[1].lower(), match[2]))
        return found


def request(data: bytes, at: int) -> tuple[Message, int]:
    """The next one, and where it ends. Raises NoHttp and More."""
    source = _Bytes(data, at)
    source.pass_empty_lines()
    line = _REQUEST.match(source.line())
    if line is None:
        raise NoHttp("no request line")
    message = Message((line[1], line[2], line[3]), source.fields())
    if len(message.all(b"host")) != 1 and (message.version == b"1.1" or message.all(b"host")):
        raise NoHttp("not one host")
    length = _framing(message)
    if message.is_chunked and message.version != b"1.1":
        raise NoHttp("chunks for an old version")
    message.body = _chunks(source) if message.is_chunked else source.take(length or 0)
    message.is_last = message.version == b"1.0" or b"close" in message.connection
    return message, source.at


def answer(data: bytes, at: int, *, is_over: bool, to_head: bool = False) -> tuple[Message, int]:
    """The next one that is final. `is_over`: the connection ends where the data does. Raises NoHttp and More."""
    source = _Bytes(data, at)
    while True:
        source.pass_empty_lines()
        line = _STATUS.match(source.line())
        if line is None:
            raise NoHttp("no status line")
        message = Message((line[2], line[1]), source.fields())
        length = _framing(message)
        if message.first[0] >= b"200":
            break
    has_body = message.first[0] not in (b"204", b"304") and not to_head
    message.is_last = b"close" in message.connection
    if message.version != b"1.1":
        message.is_last |= b"keep-alive" not in message.connection
    if not has_body:
        return message, source.at
    if message.is_chunked:
        message.body = _chunks(source)
    elif length is not None:
        message.body = source.take(length)
    else:
        message.is_last = True
        message.body = data[source.at :]
        source.at = len(data)
        if not is_over:
            raise More
    return message, source.at


def _framing(message: Message) -> int | None:
    lengths, codings = message.all(b"content-length"), message.all(b"transfer-encoding")
    if len(lengths) > 1 or len(codings) > 1 or (lengths and codings):
        raise NoHttp("framed twice")
    if lengths and not _LENGTH.match(lengths[0]):
        raise NoHttp("no length")
    if codings and codings[0].lower() != b"chunked":
        raise NoHttp("another coding")
    message.is_chunked = bool(codings)
    return int(lengths[0]) if lengths else None


def _chunks(source: _Bytes) -> bytes:
    body = b""
    while True:
        match = _CHUNK.match(source.line())
        if match is None:
            raise NoHttp("no size of a chunk")
        size = int(match[1], 16)
        if not size:
            source.fields()
            return body
        body += source.take(size)
        end = source.data[source.at : source.at + 2]
        if not b"\r\n".startswith(end):
            raise NoHttp("no end of a chunk")
        source.take(2)
