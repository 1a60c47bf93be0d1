"""HTTP/1.1 on the data port: an asyncio protocol over llhttp's parser, one request after another on a connection."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, cast

import httptools

from proxy.answers import refuse
from proxy.errors import InvalidRequest, Refusal, TooLarge
from proxy.exchange import Request
from proxy.surface.bodies import add_part, joined
from proxy.surface.http1_answer import Answer, BodilessAnswer
from proxy.surface.reset import reset

if TYPE_CHECKING:
    from proxy.surface.listener import Listener

SLICE_BYTES = 16 * 1024  # what arrives in one piece is parsed in such slices, so that limits are seen to in between

# A request, whether the connection lives on after it, and whether its client understands chunks; or why there is none.
_Entry: TypeAlias = "tuple[Request, bool, bool] | Refusal"


class Http1Connection(asyncio.Protocol):
    """Reads requests and answers them in their order; those sent ahead wait their turn."""

    def __init__(self, listener: Listener, is_surplus: bool = False) -> None:
        self._listener = listener
        self._limits = listener.limits
        self._is_surplus = is_surplus
        self._parser = httptools.HttpRequestParser(self)
        self._slice = min(SLICE_BYTES, self._limits.head_bytes)
        self._answer: Answer | None = None  # to the request under way
        self._waiting: deque[_Entry] = deque()
        self._unread = b""  # what came in behind more requests than may wait
        self._is_reading_paused = False
        self._is_deaf = False  # what still comes in is thrown away
        self._is_cut_short = False  # the client was stopped in the middle of what it had to say
        self._is_closed = False
        self.is_write_paused = False
        self._is_upgrading = False
        self._version = ""
        self._refusal: Refusal | None = None
        self.since = listener.now()  # when the present wait began: for a head, a body, the next request, a reader
        self._begin_head()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
        self._transport.set_write_buffer_limits(self._limits.write_buffer_bytes)
        self._listener.joined(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._is_closed = True
        self._listener.left(self)
        self._hear_no_more()
        if self._answer is not None:
            self._answer.left()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if len(data) <= self._slice and not self._head_bytes and not self._unread:
            self._feed(data)
        else:
            self._unread += data
            self._read_on()

    def eof_received(self) -> bool:
        # A client may close its half after its last request and still wait for the answer; not so over TLS.
        self._drop_body()
        self._is_deaf = True
        self._is_cut_short = False
        return self._answer is not None and self._transport.can_write_eof()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self.since = self._listener.now()
        if self._answer is not None and self._answer.flow is not None:
            self._answer.flow.pause()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self._answer is None:
            if not self._is_closed:
                self.since = self._listener.now()
                self._next()
        elif self._answer.flow is not None:
            self._answer.flow.resume()

    def check_time(self, now: float) -> None:
        """Called every second or so: ends what has waited too long."""
        waited = now - self.since
        if self._is_closed or self.is_write_paused:
            is_lingering = self._is_closed and not self._transport.is_closing()
            if waited > (self._limits.lingering_seconds if is_lingering else self._limits.stalled_seconds):
                reset(self._transport)
            elif self._answer is not None and self._answer.flow is not None:
                self._answer.flow.waits(waited)
        elif self._answer is not None:
            return
        elif self._is_in_body:
            if waited > self._limits.body_seconds:
                self._stop_hearing(InvalidRequest(f"the body took more than {self._limits.body_seconds:g} seconds"))
        elif self._head_bytes and (self._target or self._headers):
            if waited > self._limits.head_seconds:
                self._stop_hearing(InvalidRequest(f"the head took more than {self._limits.head_seconds:g} seconds"))
        elif waited > (self._limits.head_seconds if self._head_bytes else self._limits.idle_seconds):
            self._close()

    def drain(self) -> None:
        """Finishes the request under way, or the one that has half come, and takes no other."""
        if self._answer is not None:
            self._hear_no_more()
            self._answer.keeps_alive = False
        elif not (self._is_in_body or self._head_bytes):
            self._close()

    def cut(self) -> None:
        reset(self._transport)

    # What the parser calls.

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_body:
            return  # a trailer, which nothing here has a use for
        name = name.lower()
        if name in self._headers:
            self._repeated.add(name)
        else:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        self._head_bytes = 0
        self._quiet_bytes = 0
        self._is_upgrading = self._parser.should_upgrade()
        self._version = version = self._parser.get_http_version()
        headers = self._headers
        if version != "1.1":
            if version != "1.0":
                self._refuse_now(InvalidRequest("this port speaks HTTP/1.1, HTTP/1.0, and HTTP/2 with prior knowledge"))
        elif b"host" not in headers:
            self._refuse_now(InvalidRequest("a request needs a Host header"))
        if b"host" in self._repeated:
            self._refuse_now(InvalidRequest("a request has one Host header"))
        coding = headers.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or version != "1.1"):
            self._refuse_now(InvalidRequest("a body comes with a Content-Length, or in chunks alone"))
        if int(headers.get(b"content-length", b"0")) > self._limits.body_bytes:
            self._refuse_now(self._too_large())
        if b"expect" in headers and not self._is_upgrading and version == "1.1":
            self._owes_continue = headers[b"expect"].strip().lower() == b"100-continue"
            self._encourage()

    def on_body(self, data: bytes) -> None:
        if self._body:
            add_part(self._body, data)
        else:
            self._body.append(data)
        self._body_bytes += len(data)
        is_room = self._listener.holds(len(data))
        if self._body_bytes > self._limits.body_bytes:
            self._refuse_now(self._too_large())
        if not is_room:
            self._refuse_now(self._listener.full)

    def on_message_complete(self) -> None:
        if self._is_upgrading:
            return
        request = Request(self._parser.get_method(), self._target, self._headers, frozenset(self._repeated))
        request.body = joined(self._body)
        is_modern = self._version == "1.1"
        keeps_alive = is_modern and self._parser.should_keep_alive()
        self._begin_head()
        self._take((request, keeps_alive, is_modern))

    def _begin_head(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._repeated: set[bytes] = set()
        self._body: list[bytes | bytearray] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._is_in_body = False
        self._has_read_head = True
        self._owes_continue = False

    # From bytes to requests.

    def _read_on(self) -> None:
        while self._unread and not (self._is_deaf or self._is_reading_paused):
            room = self._slice
            if self._head_bytes:
                room = min(room, self._limits.head_bytes - self._head_bytes)
                if not room:
                    what = f"a request's head has at most {self._limits.head_bytes} bytes"
                    self._stop_hearing(InvalidRequest(what))
                    return
            elif self._is_in_body:
                # The length is known to be within the limit, so what belongs to this body needs no slices.
                room = max(room, int(self._headers.get(b"content-length", b"0")) - self._body_bytes)
            piece, self._unread = self._unread[:room], self._unread[room:]
            self._feed(piece)

    def _feed(self, data: bytes) -> None:
        was_in_body, body_bytes = self._is_in_body, self._body_bytes
        self._has_read_head = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as failure:
            self._stop_hearing(self._refusal or InvalidRequest(f"this is no HTTP request: {failure}"))
            return
        if self._is_in_body:
            if not was_in_body:
                self.since = self._listener.now()
            elif self._body_bytes == body_bytes:
                self._count_quiet(len(data))
            else:
                self._quiet_bytes = 0
        elif not self._has_read_head:
            if not self._head_bytes:
                self.since = self._listener.now()
            self._head_bytes += len(data)
        elif self._target or self._headers:  # of one head with the end of another's request
            self.since = self._listener.now()
            self._head_bytes = 1

    def _count_quiet(self, more: int) -> None:
        """Trailers and the like, in which the parser sees no body for long."""
        self._quiet_bytes += more
        if self._quiet_bytes > self._limits.head_bytes:
            self._stop_hearing(InvalidRequest(f"a request's trailers have at most {self._limits.head_bytes} bytes"))

    def _decline_upgrade(self, rest: bytes) -> None:
        """The parser takes what follows for another protocol; a new one reads it as if nobody had asked for that.

        Some clients, Java's own among them, offer to upgrade with every first request.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._stop_hearing(InvalidRequest("this is no proxy for tunnels"))
            return
        tokens = [token.strip() for token in self._headers.pop(b"connection").lower().split(b",")]
        kept = [(name, value) for name, value in self._headers.items() if name not in (b"upgrade", b"http2-settings")]
        kept += [(name, b"") for name in self._repeated]
        if b"close" in tokens:
            kept.append((b"connection", b"close"))
        head = b"%b %b HTTP/%b\r\n" % (method, self._target, self._version.encode())
        head += b"".join(b"%b: %b\r\n" % header for header in kept) + b"\r\n"
        self._parser = httptools.HttpRequestParser(self)
        self._begin_head()
        self._feed(head + rest)

    def _encourage(self) -> None:
        if self._owes_continue and self._answer is None and not self._waiting and not self.is_write_paused:
            self._owes_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse_now(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise ValueError  # stops the parser, which wraps it in an error of its own

    def _too_large(self) -> Refusal:
        return TooLarge(f"a request's body has at most {self._limits.body_bytes} bytes")

    # From a request to its answer.

    def _stop_hearing(self, refusal: Refusal) -> None:
        """The connection cannot be read any further: answers what was understood, then says why, then closes."""
        self._is_deaf = self._is_cut_short = True
        self._drop_body()
        self._take(refusal)

    def _take(self, entry: _Entry) -> None:
        if self._is_closed:
            self._drop(entry)
        elif self._answer is None and not self.is_write_paused and not self._waiting:
            self._serve(entry)
        else:
            self._waiting.append(entry)
            if len(self._waiting) >= self._limits.pipelined and not self._is_reading_paused:
                self._is_reading_paused = True
                self._transport.pause_reading()

    def _serve(self, entry: _Entry) -> None:
        if isinstance(entry, Refusal):
            self._answer = Answer(self, self._transport, False, False)
            refuse(self._answer, entry)
        elif self._is_surplus:
            self._drop(entry)
            self._serve(self._listener.too_many)
        else:
            request, keeps_alive, takes_chunks = entry
            make = BodilessAnswer if request.method == b"HEAD" else Answer
            self._answer = make(self, self._transport, keeps_alive and not self._listener.is_draining, takes_chunks)
            self._listener.begin(request, self._answer)

    def _drop(self, entry: _Entry) -> None:
        if not isinstance(entry, Refusal):
            self._listener.let_go(len(entry[0].body))

    def answered(self, keeps_alive: bool) -> None:
        self._answer = None
        self.since = self._listener.now()
        if not keeps_alive:
            self._close()
        elif not self.is_write_paused:
            self._next()

    def _next(self) -> None:
        """Serves what waits, reads what could not even wait; if nothing more can come, that was all."""
        if self._waiting:
            self._serve(self._waiting.popleft())
        elif self._is_deaf:
            self._close()
        if self._is_reading_paused and len(self._waiting) < self._limits.pipelined and not self._is_closed:
            self._is_reading_paused = False
            self._transport.resume_reading()
            self._read_on()
        if self._owes_continue:
            self._encourage()

    def break_off(self) -> None:
        self._answer = None
        self._is_closed = True
        self._hear_no_more()
        reset(self._transport)

    def _close(self) -> None:
        self._is_closed = True
        self._hear_no_more()
        if self._is_cut_short and self._transport.can_write_eof():
            # It may still be sending, and closing now would destroy the answer on its way to it.
            with suppress(OSError):  # the client may just have gone
                self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()

    def _hear_no_more(self) -> None:
        self._is_deaf = True
        self._drop_body()
        self._unread = b""
        while self._waiting:
            self._drop(self._waiting.popleft())

    def _drop_body(self) -> None:
        self._listener.let_go(self._body_bytes)
        self._begin_head()
