"""HTTP/1.1 connections to Bedrock, kept open between calls: one call at a time on each.

START HERE: `ConnectionPool`, which holds the connections to one endpoint. `UpstreamConnection` sends a call and passes
the response to its `ResponseSink` while it arrives. `HostResolver` resolves a host name, at most one lookup at a time.
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
from price_keeper.single_flight import SingleFlight

CONNECT_TIMEOUT_SECONDS = 5.0  # to a region's endpoint this takes milliseconds
FIRST_BYTE_TIMEOUT_SECONDS = 600.0  # a long response without streaming sends nothing until it is complete
READ_TIMEOUT_SECONDS = 300.0  # between the parts of a response that has begun
IDLE_TIMEOUT_SECONDS = 30.0  # shorter than Bedrock keeps an idle connection, so that this side closes first
MAX_IDLE_CONNECTIONS = 512  # kept open for the next call, per endpoint
MAX_JOINED_BODY_BYTES: Final = 64 * 1024  # a body up to this size is sent in one piece with its head
SLICE_BYTES: Final = 256 * 1024  # of a larger body: over TLS a slice is in memory three times while it waits
MAX_HEAD_BYTES: Final = 64 * 1024  # of a response; Bedrock's are under 2 kB
MAX_FRAMING_BYTES: Final = 64 * 1024  # of chunk extensions and trailers without a byte of the body between them


class UpstreamEndpoint(NamedTuple):
    host: str
    port: int
    is_tls: bool


# Keep-alive probes detect a server that vanished while its response is awaited. They also keep a slow response's
# connection alive in NAT gateways, which forget one that is silent for 350 seconds.
KEEPALIVE_IDLE_SECONDS = 60
KEEPALIVE_INTERVAL_SECONDS = 15
KEEPALIVE_PROBES = 4
# Linux ends a connection by this timeout, and not by the number of probes, while data or a probe is unacknowledged.
# With a shorter one, a single lost probe would end a call.
UNACKNOWLEDGED_TIMEOUT_SECONDS = KEEPALIVE_IDLE_SECONDS + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_SECONDS

_DETACHED_PARSER: Final = httptools.HttpResponseParser(object())

ScheduleWrite: TypeAlias = Callable[[Callable[[bytes], None], bytes], None]


class ResponseSink(Protocol):
    """Receives one response. After the last data or `on_broken` nothing more comes."""

    def on_head(self, status: int, headers: list[Header]) -> None: ...

    def on_data(self, data: bytes, is_last: bool) -> None:
        """Called for each arrival with what it holds of the body, which may be nothing."""

    def on_broken(self, reason: str) -> None:
        """Nothing more comes; it is not known whether the call was executed."""


class UpstreamConnection(asyncio.Protocol):
    """One connection: carries one call at a time, and returns itself to its pool after a complete response."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._sink: ResponseSink | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.is_open = False
        # Times of the last activity, of the call, and of the first bytes of its response.
        self.last_active_at = self.called_at = self.answered_at = pool.now()
        self.is_written = True  # False while the call waits to be written together with others
        self._unsent: memoryview | None = None  # the part of a large body that the transport does not have yet
        self._is_write_paused = False
        self._status = 0
        self.deadline: float | None = None  # for the rest of a response whose caller has left
        self._is_paused = False
        self._headers: list[Header] = []
        self._parts: list[bytes] = []
        self._bytes_without_body = 0  # read since the last byte of the body
        self.received_bytes = 0  # over all calls
        self._has_head = False
        self._is_head_delivered = False
        self._is_whole = False
        self._keeps_alive = False
        self._ends_with_connection = False

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's has the interface, but not the class
        self.is_open = True

    def connection_lost(self, _: Exception | None) -> None:
        self.is_open = False
        self._unsent = None
        self._pool.on_lost(self)
        self._parser = _DETACHED_PARSER  # breaks a reference cycle that only the garbage collector would free
        self._fail("Bedrock closed the connection before its answer was whole")

    def eof_received(self) -> None:
        if self._sink is not None and self._ends_with_connection:
            self._complete(self._sink, b"")

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None or not self.is_written:  # no call is in flight, so this connection is out of step
            self.give_up("Bedrock sent data before the call was sent")
            return
        self.last_active_at = self._pool.now()
        self.received_bytes += len(data)
        is_broken = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # A complete response is valid even if unexpected bytes follow it.
            is_broken = not self._is_whole
            self._keeps_alive = False
        if self._has_head:
            if not self._is_head_delivered:
                self._is_head_delivered = True
                self.answered_at = self.last_active_at
                sink.on_head(self._status, self._headers)
                if self._sink is None:  # the sink gave the response up
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
                    self.give_up("Bedrock's answer continues without a byte of its body")
        else:
            self._bytes_without_body += len(data)
            if self._bytes_without_body > MAX_HEAD_BYTES:
                self.give_up("the head of Bedrock's answer has no end")
        if is_broken and self._sink is not None:  # the sink has got everything before the error
            self.give_up("Bedrock's answer is not valid HTTP")

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
        self._headers = []
        self._bytes_without_body = 0
        self._has_head = self._is_head_delivered = self._is_whole = self._ends_with_connection = False
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

    def pause(self) -> None:
        """Stop reading while the caller reads slowly. Read timeouts do not apply until `resume`."""
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
            self.transport.abort()  # the response came before the whole call was read, which may never happen
        elif self._keeps_alive:
            self._pool.release(self)
        else:
            self.close()
        sink.on_data(body, True)

    def _fail(self, reason: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_broken(reason)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise ValueError("an unexpected second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim response; the final one follows
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
    """No connection could be opened, so certainly nothing was sent."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def _enable_keepalive(sock: Any) -> None:
    """Enable TCP keep-alive. `sock` has no common type, because each event loop has its own socket class."""
    with suppress(OSError):  # the socket may be broken already; then its protocol is notified
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
    """The default `schedule_write`: write at once."""
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
        """`schedule_write` writes a call's bytes, for example joined with others of the same loop turn."""
        self.endpoint = endpoint
        self.schedule_write = schedule_write
        self.now = now
        self._tls = tls
        self._resolver = HostResolver(endpoint.host, endpoint.port)
        self._idle: deque[UpstreamConnection] = deque()
        self._busy: set[UpstreamConnection] = set()
        self._connecting = 0

    def take_idle(self) -> UpstreamConnection | None:
        """Return the most recently used idle connection, the least likely to be stale; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                self._busy.add(connection)
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """Open a connection. Raises CannotConnect, or UnicodeError for an impossible host name."""
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
        """Connect to the first address that accepts. Raises OSError; a timeout is one."""
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
        """Numbers of connections that carry a call, and of idle ones."""
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
    """Resolves one host name. Concurrent callers share one lookup."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._is_address = _is_address(host)
        self._single_flight = SingleFlight[None, list[Any]]()

    async def resolve(self) -> list[str]:
        """Return the addresses in the order in which to try them. Raises OSError, or UnicodeError for an impossible
        name."""
        if self._is_address:
            return [self._host]
        infos = await self._single_flight.get_or_load(None, self._look_up)
        return list(dict.fromkeys(address[0] for *_, address in infos))

    async def _look_up(self) -> list[Any]:
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):  # or all later callers would join one that hangs
            return await asyncio.to_thread(socket.getaddrinfo, self._host, self._port, 0, socket.SOCK_STREAM)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
