"""HTTP/1.1 connections to Bedrock, kept open between calls: one call at a time on each.

`ConnectionPool` holds the connections to one endpoint. `UpstreamConnection` sends a call and passes the response to
its `ResponseSink` while it arrives. `HostResolver` resolves a host name, at most one lookup at a time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import httptools

from price_keeper.exchange import Header

CONNECT_TIMEOUT_SECONDS = 5.0  # to a region's endpoint this takes milliseconds
FIRST_BYTE_TIMEOUT_SECONDS = 600.0  # a long answer without streaming is silent until it is whole
READ_TIMEOUT_SECONDS = 300.0  # between the parts of an answer that has begun
IDLE_TIMEOUT_SECONDS = 30.0  # shorter than Bedrock keeps an idle connection, so that we close first
MAX_IDLE_CONNECTIONS = 512  # kept open for the next call, for each endpoint
MAX_JOINED_BODY_BYTES: Final = 64 * 1024  # a body up to this size is sent in one piece with its head
SLICE_BYTES: Final = 256 * 1024  # of a larger one: over TLS a slice is in memory three times while it waits
MAX_HEAD_BYTES: Final = 64 * 1024  # of an answer; Bedrock's are under 2 kB
MAX_FRAMING_BYTES: Final = 64 * 1024  # of chunks' extensions and trailers, without a byte of the body between them


class UpstreamEndpoint(NamedTuple):
    host: str
    port: int
    is_tls: bool


# A server that is gone without a word is found out while its answer is awaited; and an answer that takes long is not
# forgotten by what stands in between, as NAT gateways forget a connection that is silent for 350 seconds.
KEEPALIVE_IDLE_SECONDS = 60
KEEPALIVE_INTERVAL_SECONDS = 15
KEEPALIVE_PROBES = 4
# While what we sent is not even acknowledged, a probe too: Linux goes by this instead of the number of probes, so that
# with less one that is lost would end a call.
UNACKNOWLEDGED_TIMEOUT_SECONDS = KEEPALIVE_IDLE_SECONDS + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_SECONDS

_DETACHED_PARSER: Final = httptools.HttpResponseParser(object())

ScheduleWrite: TypeAlias = Callable[[Callable[[bytes], None], bytes], None]


class ResponseSink(Protocol):
    """Takes one answer. After `ended` or `broken` nothing more comes."""

    def on_head(self, status: int, headers: list[Header]) -> None: ...

    def on_data(self, data: bytes, is_last: bool) -> None:
        """At least once for each arrival: what came of the body, which may be nothing yet."""

    def on_broken(self, reason: str) -> None:
        """There will be no more; whether the call was carried out is not known."""


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._sink: ResponseSink | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.is_open = False
        self.last_active_at = self.called_at = self.answered_at = (
            pool.now()
        )  # at last; the call, and its answer's first bytes
        self.is_written = True  # the call, of which nothing waits to be written together with others
        self._unsent: memoryview | None = None  # of a large body, what the transport does not have yet
        self._is_write_paused = False
        self._status = 0
        self.deadline: float | None = None  # for the rest of an answer that nobody waits for any more
        self._is_paused = False
        self._headers: list[Header] = []
        self._parts: list[bytes] = []
        self._bytes_without_body = 0  # read since anything came of the body
        self.received_bytes = 0  # bytes, of all calls together
        self._has_head = False
        self._is_head_delivered = False
        self._is_whole = False
        self._keeps_alive = False
        self._ends_with_connection = False

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
        self.is_open = True

    def connection_lost(self, _: Exception | None) -> None:
        self.is_open = False
        self._unsent = None
        self._pool.on_lost(self)
        self._parser = _DETACHED_PARSER  # its own leads back here, and a circle goes only when the collector comes by
        self._fail("Bedrock closed the connection before its answer was whole")

    def eof_received(self) -> None:
        if self._sink is not None and self._ends_with_connection:
            self._complete(self._sink, b"")

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None or not self.is_written:  # nobody asked: what this connection says cannot be trusted any more
            self.give_up("what came from Bedrock is older than the call")
            return
        self.last_active_at = self._pool.now()
        self.received_bytes += len(data)
        is_broken = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # A whole answer is good, though something follows that nobody asked for.
            is_broken = not self._is_whole
            self._keeps_alive = False
        if self._has_head:
            if not self._is_head_delivered:
                self._is_head_delivered = True
                self.answered_at = self.last_active_at
                sink.on_head(self._status, self._headers)
                if self._sink is None:  # it wants none of it
                    return
            parts = self._parts
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            self._parts = []
            if self._is_whole:
                self._complete(sink, body)
            else:
                sink.on_data(body, False)
                self._bytes_without_body = 0 if body else self._bytes_without_body + len(data)
                if self._bytes_without_body > MAX_FRAMING_BYTES and self._sink is not None:
                    self.give_up("Bedrock's answer goes on without a byte of its body")
        else:
            self._bytes_without_body += len(data)
            if self._bytes_without_body > MAX_HEAD_BYTES:
                self.give_up("the head of Bedrock's answer has no end")
        if is_broken and self._sink is not None:  # it was told what came before that
            self.give_up("Bedrock's answer is no HTTP")

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._write_more()

    # One call.

    @property
    def is_usable(self) -> bool:
        return self.is_open and not self.transport.is_closing()

    def call(self, sink: ResponseSink, head: bytes, body: bytes) -> None:
        self._sink = sink
        self._reset_response()
        self.last_active_at = self.called_at = self._pool.now()
        if len(body) <= MAX_JOINED_BODY_BYTES:
            self.is_written = False
            self._pool.schedule_write(self._write, head + body)
        else:
            self.transport.write(head)
            self._unsent = memoryview(body)
            self._write_more()

    def _write_more(self) -> None:
        while self._unsent is not None and not self._is_write_paused:
            piece, rest = self._unsent[:SLICE_BYTES], self._unsent[SLICE_BYTES:]
            self._unsent = rest if len(rest) else None
            self.transport.write(piece)

    def _write(self, data: bytes) -> None:
        self.is_written = True
        self.transport.write(data)

    def _reset_response(self) -> None:
        self._headers = []
        self._parts = []
        self._bytes_without_body = 0
        self._has_head = False
        self._is_head_delivered = False
        self._is_whole = False
        self._keeps_alive = False
        self._ends_with_connection = False

    def pause(self) -> None:
        """The caller reads slowly; until it has caught up, nothing more is read, and no silence counts."""
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.last_active_at = self._pool.now()
            self.transport.resume_reading()

    def give_up(self, reason: str) -> None:
        self._unsent = None
        self.transport.abort()
        self._fail(reason)

    def close(self) -> None:
        if not self.transport.is_closing():  # over TLS, closing twice is an error
            self.transport.close()

    def check_timeouts(self, now: float) -> None:
        limit = READ_TIMEOUT_SECONDS if self._has_head else FIRST_BYTE_TIMEOUT_SECONDS
        if self.deadline is not None and now > self.deadline:
            self.give_up("the caller left, and the answer did not end in time")
        elif now - self.last_active_at > limit and not self._is_paused:
            self.give_up(f"Bedrock said nothing for {limit:g} seconds")

    def _complete(self, sink: ResponseSink, body: bytes) -> None:
        self._sink = None
        self.deadline = None
        self.resume()
        if self._unsent is not None or self.transport.get_write_buffer_size():
            self._unsent = None
            self.transport.abort()  # the answer came before it had read the call, which it may never do
        elif self._keeps_alive:
            self._pool.release(self)
        else:
            self.close()
        sink.on_data(body, True)

    def _fail(self, reason: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_broken(reason)

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise ValueError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim answer; the real one follows
            self._headers = []
            return
        self._status = status
        self._has_head = True
        self._keeps_alive = self._parser.should_keep_alive()
        if not self._keeps_alive:
            framed = (b"content-length", b"transfer-encoding")
            self._ends_with_connection = not any(name in framed for name, _ in self._headers)

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._is_whole = self._has_head


class CannotConnect(Exception):
    """Surely nothing was sent."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def _enable_keepalive(sock: Any) -> None:
    """Each event loop has a class of its own for a socket."""
    with suppress(OSError):  # of one that is broken already, as its protocol will hear
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
            ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
            ("TCP_KEEPCNT", KEEPALIVE_PROBES),
            ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_TIMEOUT_SECONDS * 1000),
        ):
            if hasattr(socket, name):  # not every system has all of them
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def write_now(write: Callable[[bytes], None], data: bytes) -> None:
    write(data)


class ConnectionPool:
    """The connections to one endpoint."""

    def __init__(
        self,
        endpoint: UpstreamEndpoint,
        now: Callable[[], float],
        tls: ssl.SSLContext | None,
        schedule_write: ScheduleWrite = write_now,
    ) -> None:
        """By `put` calls are written."""
        self.endpoint = endpoint
        self.schedule_write = schedule_write
        self.now = now
        self._tls = tls
        self._resolver = HostResolver(endpoint.host, endpoint.port)
        self._idle: deque[UpstreamConnection] = deque()
        self._busy: set[UpstreamConnection] = set()
        self._connecting = 0

    def take_idle(self) -> UpstreamConnection | None:
        """The connection used last, which is the least likely to be stale."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                self._busy.add(connection)
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """Raises CannotConnect, and UnicodeError of what can be no host's name."""
        where = f"{self.endpoint.host}:{self.endpoint.port}"
        self._connecting += 1
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                connection = await self._open_connection()
        except OSError as failure:
            raise CannotConnect(f"cannot reach {where}: {str(failure) or 'no answer'}") from None
        finally:
            self._connecting -= 1
        if not connection.is_usable:
            raise CannotConnect(f"{where} closes connections at once")
        _enable_keepalive(connection.transport.get_extra_info("socket"))
        self._busy.add(connection)
        return connection

    async def _open_connection(self) -> UpstreamConnection:
        """To the first address that takes it. Raises OSError, of which a time-out is one."""
        loop, (host, port, is_tls) = asyncio.get_running_loop(), self.endpoint
        last_error = OSError("its name has no address")
        for address in await self._resolver.resolve():
            try:
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self),
                    address,
                    port,
                    ssl=self._tls,
                    server_hostname=host if is_tls else None,
                )
            except OSError as failure:
                last_error = failure
            else:
                return connection
        raise last_error

    def release(self, connection: UpstreamConnection) -> None:
        self._busy.discard(connection)
        if len(self._idle) < MAX_IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()

    def on_lost(self, connection: UpstreamConnection) -> None:
        self._busy.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)

    @property
    def counts(self) -> tuple[int, int]:
        """Of connections that carry a call, and of those that wait for one."""
        return len(self._busy), len(self._idle)

    @property
    def is_unused(self) -> bool:
        return not (self._busy or self._idle or self._connecting)

    def check_timeouts(self) -> None:
        now = self.now()
        while self._idle and now - self._idle[0].last_active_at > IDLE_TIMEOUT_SECONDS:
            self._idle.popleft().close()
        for connection in tuple(self._busy):
            connection.check_timeouts(now)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        for connection in tuple(self._busy):
            connection.give_up("the sidecar is stopping")


class HostResolver:
    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._is_address = _is_address(host)
        self._lookup: asyncio.Future[list[Any]] | None = None

    async def resolve(self) -> list[str]:
        """In the order in which they are to be tried. Raises OSError, and UnicodeError of what can be no name."""
        if self._is_address:
            return [self._host]
        lookup = self._lookup
        if lookup is None:
            loop = asyncio.get_running_loop()
            lookup = loop.run_in_executor(None, socket.getaddrinfo, self._host, self._port, 0, socket.SOCK_STREAM)
            self._lookup = lookup
            lookup.add_done_callback(self._on_resolved)
        found = await asyncio.shield(lookup)
        return list(dict.fromkeys(address[0] for *_, address in found))

    def _on_resolved(self, lookup: asyncio.Future[list[Any]]) -> None:
        self._lookup = None
        if not lookup.cancelled():
            lookup.exception()  # perhaps nobody waits for it any more, and then it is nobody's


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
