"""Parse the bytes of an HTTP/1.1 connection into complete requests, with llhttp (httptools).

Adds the checks that llhttp does not make: the request line, the host, transfer codings, lengths, and the limits on size
and memory. llhttp does not tell where in its input a request begins, so that is counted along, for the request line.
Start with `Http1RequestParser.feed`; llhttp calls the `on_...` methods from within it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import httptools

from price_keeper.errors import InvalidRequest, Refusal, RequestTooLarge
from price_keeper.exchange import Request
from price_keeper.local_responses import OUT_OF_MEMORY
from price_keeper.server.request_building import (
    HEADER_OVERHEAD_BYTES,
    Body,
    append_to_body,
    find_host_error,
    find_target_error,
    finish_body,
    measure_head,
)

if TYPE_CHECKING:
    from price_keeper.server.http1 import Http1Connection
    from price_keeper.server.listener import Listener

_DETACHED_PARSER: Final = httptools.HttpRequestParser(object())
_SPACES: Final = b" \t"
_LINE_END: Final = b"\r\n"
_HEAD_END: Final = b"\r\n\r\n"


class Http1RequestParser:
    """Calls the connection's `on_request` for each complete request, or its `stop_reading`, once, for invalid input."""

    __deletable__ = ("_connection",)  # lets code compiled by mypyc delete the attribute in `detach`

    def __init__(self, connection: Http1Connection, listener: Listener) -> None:
        self._connection = connection
        self._listener = listener
        self._limits = listener.limits
        self._parser = httptools.HttpRequestParser(self)
        self._is_upgrading = False
        self._is_last = False  # the request that offers an upgrade also has `Connection: close`
        self._version = ""
        self._host = b""  # the last valid Host header; usually the same again, and then not checked again
        self._data = b""  # the present input
        self._head_at = 0  # where in it the next head begins
        self._body_at = 0  # where in it the present body began; less than 0 in an earlier input
        self._begun_line = bytearray()  # of a head that began in an earlier input, as far as its request line
        self._is_line_whole = False  # the request line has its end
        self._last_bytes = b""  # the end of the earlier input, which may hold a part of the end of a head
        self._chunks: _ChunkCounter | None = None  # of a body in chunks
        self._refusal: Refusal | None = None
        self._begin_head()

    def _begin_head(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._repeated: set[bytes] = set()
        self._body: Body = b""
        self._body_bytes = 0
        self._weight = 0  # memory reserved for this request
        self.head_bytes = 0  # bytes received of a head that is still incomplete
        self.is_in_body = False
        self._has_read_head = True
        self.is_continue_due = False

    @property
    def has_begun(self) -> bool:
        """Whether a part of a request has been received; blank lines before it do not count."""
        return bool(self.is_in_body or self._target or self._headers)

    def read_begun_head(self) -> Request | None:
        """As much of the head as has been received, so that a refusal gets the form of the API that is called."""
        if not self._target:
            return None
        return Request(b"", self._target, self._headers, frozenset(self._repeated))

    def max_feed_bytes(self, slice_bytes: int) -> int:
        """The most bytes that may be fed at once; 0 when the head exceeds its limit."""
        if self.head_bytes:
            return min(slice_bytes, self._limits.head_bytes - self.head_bytes)
        if self.is_in_body:
            # The announced length is within the limit, so the rest of this body needs no slicing.
            return max(slice_bytes, int(self._headers.get(b"content-length", b"0")) - self._body_bytes)
        return slice_bytes

    def feed(self, data: bytes) -> None:
        """Parses the next bytes. Reports requests and errors to the connection, and never raises."""
        was_in_body, body_bytes = self.is_in_body, self._body_bytes
        self._data, self._head_at = data, 0
        self._has_read_head = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as failure:
            refusal = OUT_OF_MEMORY if isinstance(failure.__context__, MemoryError) else None
            self._connection.stop_reading(
                self._refusal or refusal or InvalidRequest(f"this is not a valid HTTP request: {failure}")
            )
            return
        if self.is_in_body:
            if not was_in_body:
                self._connection.restart_wait_timer()
            elif self._body_bytes == body_bytes:
                self._count_trailers(len(data))
            else:
                self._trailer_bytes = 0
        elif not self._has_read_head:
            if not self.head_bytes:
                self._connection.restart_wait_timer()
            self._count_head(self.head_bytes + len(data))
        elif self._target or self._headers:  # this data ended one request and began the head of the next
            self._connection.restart_wait_timer()
            self._count_head(1)
        if self.is_in_body or self._head_at < len(data):
            self._note_place(self._data)
        self._data = b""

    def _note_place(self, data: bytes) -> None:
        """Prepares for the next input, which continues the present body or head."""
        if self.is_in_body:
            self._body_at -= len(data)
            if self._chunks is not None:
                self._chunks.count(data)
        elif self._head_at < len(data):
            if not self._begun_line:
                self._begun_line += data[self._head_at :].lstrip(_LINE_END)  # blank lines may precede a head
                self._is_line_whole = _LINE_END in self._begun_line
            elif not self._is_line_whole:
                self._begun_line += data
                self._is_line_whole = _LINE_END in self._last_bytes[-1:] + data
            self._last_bytes = (self._last_bytes + data)[-3:]

    def discard_request(self) -> None:
        """Drops the incomplete request and releases its memory."""
        self._listener.release_memory(self._weight)
        self._data, self._begun_line = b"", bytearray()  # a refused connection may live on for a while
        self._chunks = None
        self._begin_head()

    def detach(self) -> None:
        """Called when the connection ends. Breaks the reference cycles with connection and parser: the garbage
        collector runs seldom, so they would hold memory for long."""
        self.discard_request()
        self._parser = _DETACHED_PARSER
        del self._connection

    def find_timeout(self, waited: float) -> str | None:
        """The message for a client that has been sending this request for too long; None while it is in time."""
        if self.is_in_body and waited > self._limits.body_seconds:
            return f"the body took more than {self._limits.body_seconds:g} seconds"
        if not self.is_in_body and waited > self._limits.head_seconds:
            return f"the head took more than {self._limits.head_seconds:g} seconds"
        return None

    # Called by llhttp.

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_body:
            return  # trailers are ignored
        name = name.lower()
        if name in self._headers:
            self._repeated.add(name)
        else:
            self._headers[name] = value.rstrip(_SPACES)  # llhttp leaves trailing white space in the value

    def on_headers_complete(self) -> None:
        self.is_in_body = True
        self.head_bytes = 0
        self._trailer_bytes = 0
        self._is_upgrading = self._parser.should_upgrade()
        self._version = version = self._parser.get_http_version()
        headers = self._headers
        weight = measure_head(self._target, headers)
        is_room = self._listener.reserve_memory(weight - self._weight)
        self._weight = weight
        # llhttp also accepts other protocols, as in "RTSP/1.0", and reports their version as HTTP's.
        line = b"%b %b HTTP/%b" % (self._parser.get_method(), self._target, version.encode())
        if not self._passes_line(line):
            self._raise_refusal(
                InvalidRequest("this port speaks only HTTP, with one space between the parts of the request line")
            )
        if version != "1.1":
            if version != "1.0":
                self._raise_refusal(
                    InvalidRequest("this port speaks HTTP/1.1, HTTP/1.0, and HTTP/2 with prior knowledge")
                )
        elif b"host" not in headers:
            self._raise_refusal(InvalidRequest("a request needs a Host header"))
        if b"host" in self._repeated:
            self._raise_refusal(InvalidRequest("a request has one Host header"))
        host = headers.get(b"host", b"")
        if host != self._host:
            self._refuse_if_invalid(find_host_error(host))
            self._host = host
        if not self._target.startswith(b"/"):
            self._refuse_if_invalid(find_target_error(self._target, host))
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            self._check_transfer_coding(coding)
        length = int(headers.get(b"content-length", b"0"))
        if length > self._limits.body_bytes:
            self._raise_refusal(self._build_too_large_refusal())
        if length > self._limits.unchecked_body_bytes:
            self._check_head()
        if not is_room:
            self._raise_refusal(self._listener.memory_full)
        if self._is_upgrading:
            self._is_last = not self._parser.should_keep_alive()
        elif b"expect" in headers and version == "1.1":
            self.is_continue_due = headers[b"expect"].strip().lower() == b"100-continue"
            self._connection.send_continue_if_due()

    def on_body(self, data: bytes) -> None:
        self._body = append_to_body(self._body, data)
        self._body_bytes += len(data)
        self._weight += len(data)
        is_room = self._listener.reserve_memory(len(data))
        if self._body_bytes > self._limits.body_bytes:
            self._raise_refusal(self._build_too_large_refusal())
        if not is_room:
            self._raise_refusal(self._listener.memory_full)

    def on_message_complete(self) -> None:
        if self._is_upgrading:
            return
        request = Request(self._parser.get_method(), self._target, self._headers, frozenset(self._repeated))
        request.body = finish_body(self._body)
        is_modern = self._version == "1.1"
        keeps_alive, weight = is_modern and self._parser.should_keep_alive(), self._weight
        if self._chunks is None:
            self._head_at = self._body_at + self._body_bytes
        else:
            self._head_at, self._chunks = self._chunks.count(self._data), None
        self._begin_head()
        self._connection.on_request(request, keeps_alive, is_modern, weight)

    def _passes_line(self, line: bytes) -> bool:
        """Whether the present head begins with this request line. Finds where its body begins, too."""
        data, at = self._data, self._head_at
        if self._begun_line:
            is_right = (self._begun_line + data[: len(line)]).startswith(line)
            last = self._last_bytes
            self._body_at = (last + data).find(_HEAD_END) + len(_HEAD_END) - len(last)
            self._begun_line = bytearray()
            return is_right
        while at < len(data) and data[at] in _LINE_END:
            at += 1
        self._body_at = data.find(_HEAD_END, at) + len(_HEAD_END)
        return data.startswith(line, at)

    def _refuse_if_invalid(self, error: str | None) -> None:
        if error is not None:
            self._raise_refusal(InvalidRequest(error))

    def _check_transfer_coding(self, coding: bytes) -> None:
        if coding.lower() != b"chunked" or self._version != "1.1":
            self._raise_refusal(InvalidRequest("a body needs a Content-Length or chunked transfer coding"))
        self._chunks = _ChunkCounter(self._body_at)
        self._check_head()  # a chunked body may never end, so the head is checked before the body is read

    def _check_head(self) -> None:
        request = Request(self._parser.get_method(), self._target, self._headers, frozenset(self._repeated))
        refusal = self._listener.check_head(request)
        if refusal is not None:
            self._raise_refusal(refusal)

    # Memory of incomplete requests.

    def _count_head(self, size: int) -> None:
        """Reserves memory for an incomplete head of which `size` bytes have been received."""
        self.head_bytes = size
        weight = size + HEADER_OVERHEAD_BYTES * len(self._headers)
        is_room = self._listener.reserve_memory(weight - self._weight)
        self._weight = weight
        if not is_room:
            self._connection.stop_reading(self._listener.memory_full)

    def _count_trailers(self, more: int) -> None:
        """Reserves memory for trailers, chunk extensions and the like, which llhttp reports only at their end."""
        self._trailer_bytes += more
        self._weight += more
        if not self._listener.reserve_memory(more):
            self._connection.stop_reading(self._listener.memory_full)
        elif self._trailer_bytes > self._limits.head_bytes:
            what = f"a request's trailers have at most {self._limits.head_bytes} bytes"
            self._connection.stop_reading(InvalidRequest(what))

    # Refusals.

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parses a request that offers an upgrade as if it did not. llhttp takes the bytes after its head for another
        protocol, so a new parser gets the head without its upgrade headers, and then the rest.

        Some clients, including Java's built-in one, offer to upgrade with every first request.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._connection.stop_reading(InvalidRequest("CONNECT is not supported"))
            return
        dropped_names = (b"connection", b"upgrade", b"http2-settings")
        kept = [(name, value) for name, value in self._headers.items() if name not in dropped_names]
        kept += [(name, b"") for name in self._repeated if name not in dropped_names]
        if self._is_last:
            kept.append((b"connection", b"close"))
        head = b"%b %b HTTP/%b\r\n" % (method, self._target, self._version.encode())
        head += b"".join(b"%b: %b\r\n" % header for header in kept) + b"\r\n"
        self._parser = httptools.HttpRequestParser(self)
        self.discard_request()
        self.feed(head + rest)

    def _raise_refusal(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise ValueError  # stops llhttp, which wraps it in an error of its own; `feed` reads `_refusal`

    def _build_too_large_refusal(self) -> Refusal:
        return RequestTooLarge(f"a request's body has at most {self._limits.body_bytes} bytes")


class _ChunkCounter:
    """Finds where a body in chunks ends. llhttp has parsed and checked all that is counted here."""

    def __init__(self, at: int) -> None:
        """`at` is where in the first input the body begins."""
        self._at = at
        self._line = b""  # the begun size of a chunk, or the begun trailer
        self._is_in_trailers = False

    def count(self, data: bytes) -> int:
        """Returns the offset at which the body ends in this input; the input's length if the body continues."""
        at = self._at
        while at < len(data):
            end = data.find(b"\n", at) + 1
            if not end:
                self._line += data[at:]
                at = len(data)
                break
            line, self._line, at = self._line + data[at:end], b"", end
            if self._is_in_trailers:
                if line == _LINE_END:
                    return at
            elif size := int(line.partition(b";")[0], 16):
                at += size + len(_LINE_END)
            else:
                self._is_in_trailers = True
        self._at = at - len(data)
        return len(data)
