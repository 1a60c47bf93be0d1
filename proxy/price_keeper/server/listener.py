"""The data port: limits connections, active requests and their memory, enforces timeouts, and drains at shutdown.

START HERE: `Listener.listen` opens the acceptors; a connection calls `start_request` for each complete request, which
runs the handler.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final, Protocol

from price_keeper.clock import Clock
from price_keeper.errors import Busy, Refusal
from price_keeper.exchange import Handler, Request, Responder, create_request_id_source
from price_keeper.local_responses import send_error, send_refusal
from price_keeper.server.acceptors import Acceptor, PlainAcceptor, TlsAcceptor
from price_keeper.server.server_limits import DEFAULT_LIMITS, ServerLimits
from price_keeper.server.sockets import bind_sockets, find_remote_network
from price_keeper.server.write_batcher import BATCHING_THRESHOLD, WriteBatcher
from price_keeper.tasks import Tasks
from price_keeper.vendor_apis import ApiForm, find_form

TIMEOUT_CHECK_SECONDS = 1.0  # between checks of timeouts, which are tens of seconds long
ABORT_SECONDS: Final = 1.0  # for aborted connections to close

# Requests of one loop iteration that may be answered without a task. A client that keeps sending requests which are
# refused at once could otherwise monopolise the loop. After these each request runs in a task, and later requests of
# its connection wait for it.
MAX_IMMEDIATE_ANSWERS: Final = 32

REQUEST_ID: Final = b"x-price-keeper-request-id"
MEMORY_FULL_MESSAGE: Final = "the requests under way fill the memory set aside for them"

_log = logging.getLogger("price_keeper.surface")


class ServerConnection(Protocol):
    """What the listener needs of a connection: of HTTP/1.1, of HTTP/2, or of a protocol not detected yet."""

    protocol: str

    @property
    def open_streams(self) -> int:
        """Open HTTP/2 streams; 0 for other protocols."""

    def check_timeouts(self, now: float) -> None:
        """Ends the connection, or its request, if it has waited too long. Called every TIMEOUT_CHECK_SECONDS."""

    def drain(self) -> None:
        """Finishes the request that is active, takes no other, and closes."""

    def abort(self) -> None: ...


def _accept_every_head(_: Request) -> None:
    pass


class Listener:
    """All connections of the data port, and the limits that they share."""

    def __init__(
        self,
        handler: Handler,
        clock: Clock,
        tasks: Tasks,
        limits: ServerLimits = DEFAULT_LIMITS,
        *,
        check_head: Callable[[Request], Refusal | None] = _accept_every_head,
        new_request_id: Callable[[], bytes] | None = None,
        write_batcher: WriteBatcher | None = None,
        on_refusal: Callable[[Refusal], None] = lambda _: None,
    ) -> None:
        """`check_head` is called with the head of a request whose body is long or of unknown length, before the body is
        read; a Refusal that it returns spares reading the body. `on_refusal` is called with every error that the
        listener itself responds with."""
        self._handler = handler
        self.write_batcher = write_batcher or WriteBatcher()
        self._on_refusal = on_refusal
        self._clock = clock
        self._tasks = tasks
        self.limits = limits
        self.check_head = check_head
        self._new_request_id = new_request_id or create_request_id_source()
        self.now: Callable[[], float] = clock.monotonic
        self.is_draining = False
        self._connections: set[ServerConnection] = set()
        self._network_by_connection: dict[ServerConnection, Hashable] = {}  # remote connections only
        self._connections_by_network: Counter[Hashable] = Counter()
        self._acceptors: list[Acceptor] = []
        self._has_warned_of_surplus = False
        self.active_requests = 0  # requests in the handler, including those whose caller has disconnected
        self._immediate_answers = 0  # in this iteration of the event loop
        self.reserved_bytes = 0  # memory of all requests that are being received, are queued or are active
        too_many_message = (
            f"there are {limits.connections} connections already, "
            f"or {limits.connections_per_network} from one address elsewhere"
        )
        self.too_many_connections = Busy(too_many_message, retry_after=1)
        self._too_many_requests = Busy(f"there are {limits.requests} requests under way already", retry_after=1)
        self.memory_full = Busy(MEMORY_FULL_MESSAGE, retry_after=1)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None, *, is_shared: bool = False) -> int:
        """Listens at every address of the host and returns the port, which is a free one if `port` is 0.

        `is_shared` lets other processes listen on the same port. Raises ListenFailed."""
        sockets = await bind_sockets(host, port, is_shared=is_shared)
        for listening_socket in sockets:
            acceptor: Acceptor = (
                PlainAcceptor(self, listening_socket)
                if tls is None
                else TlsAcceptor(self, listening_socket, tls, self._tasks)
            )
            self._acceptors.append(acceptor)
            await acceptor.open()
        self._tasks.run_every("time of connections", TIMEOUT_CHECK_SECONDS, self._check_timeouts)
        bound_port: int = sockets[0].getsockname()[1]
        return bound_port

    async def drain(self, seconds: float, on_deadline: Callable[[], None] | None = None) -> None:
        """Graceful shutdown: stops accepting, lets active requests finish, and aborts the rest after `seconds`.

        A request whose caller has disconnected still runs to its end, because Bedrock reports its usage last.
        `on_deadline` is called after the abort, to end those as well.
        """
        self.is_draining = True
        for acceptor in self._acceptors:
            acceptor.close()
        for connection in tuple(self._connections):
            connection.drain()
        await self._wait_until_idle(seconds)
        for connection in tuple(self._connections):
            connection.abort()
        if on_deadline is not None:
            on_deadline()
        await self._wait_until_idle(ABORT_SECONDS)

    async def _wait_until_idle(self, seconds: float) -> None:
        deadline = self.now() + seconds
        while (self._connections or self.active_requests) and self.now() < deadline:
            await self._clock.sleep(0.05)

    @property
    def connections(self) -> Counter[str]:
        """Number of connections by protocol."""
        return Counter(connection.protocol for connection in self._connections)

    @property
    def open_streams(self) -> int:
        return sum(connection.open_streams for connection in self._connections)

    # Called by connections.

    def add_connection(self, connection: ServerConnection, peer: str) -> None:
        self._connections.add(connection)
        network = find_remote_network(peer)
        if network is not None:
            self._network_by_connection[connection] = network
            self._connections_by_network[network] += 1

    def remove_connection(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        network = self._network_by_connection.pop(connection, None)
        if network is not None:
            self._connections_by_network[network] -= 1
            if not self._connections_by_network[network]:
                del self._connections_by_network[network]

    def count_surplus(self, peer: str) -> int:
        """By how many one more connection from this address would exceed a limit; 0 or less if it fits."""
        total_surplus = len(self._connections) + 1 - self.limits.connections
        network_surplus = (
            self._connections_by_network[find_remote_network(peer)] + 1 - self.limits.connections_per_network
        )
        surplus = max(total_surplus, network_surplus)
        if surplus > 0 and not self._has_warned_of_surplus:
            self._has_warned_of_surplus = True
            limit_reached = (
                f"{self.limits.connections} connections"
                if total_surplus > 0
                else f"{self.limits.connections_per_network} from one address"
            )
            _log.warning("connection limit reached (%s); new connections are refused until some close", limit_reached)
        return surplus

    def reserve_memory(self, size: int) -> bool:
        """Adds `size` bytes to the memory of requests, and returns whether the total is within the limit. The caller
        releases them in either case."""
        self.reserved_bytes += size
        return self.reserved_bytes <= self.limits.requests_bytes

    def release_memory(self, size: int) -> None:
        self.reserved_bytes -= size

    def grow_request(self, request: Request, size: int) -> None:
        """Reserves `size` more bytes for an active request, until it ends. Raises Busy if they exceed the limit."""
        if not self.reserve_memory(size):
            self.release_memory(size)
            raise Busy(MEMORY_FULL_MESSAGE, retry_after=1)
        request.memory_bytes += size

    def start_request(self, request: Request, responder: Responder, weight: int) -> None:
        """Runs the handler for a complete request, or refuses it if too many are active. `weight` is the memory already
        reserved for the request; it is released when the request ends."""
        if self.active_requests >= self.limits.requests:
            self.reserved_bytes -= weight
            self.refuse(responder, self._too_many_requests, request)
            return
        before = self.active_requests
        self.active_requests = before + 1
        self.write_batcher.is_busy = before + 1 >= BATCHING_THRESHOLD
        request.received_at = self.now()
        request.memory, request.memory_bytes = self, weight
        if self._immediate_answers >= MAX_IMMEDIATE_ANSWERS:
            self._tasks.spawn(self._handle(request, responder))
            return
        self._tasks.spawn_eager(self._handle(request, responder))
        if self.active_requests <= before:  # the handler has already answered
            if not self._immediate_answers:
                asyncio.get_running_loop().call_soon(self._on_turn_end)
            self._immediate_answers += 1

    def refuse(self, responder: Responder, refusal: Refusal, request: Request | None = None) -> None:
        """Responds with an error of the proxy itself, and counts it. `request` is as much as is known of it."""
        self._on_refusal(refusal)
        form = ApiForm.AWS if request is None else find_form(request)
        send_refusal(responder, refusal, ((REQUEST_ID, self._new_request_id()),), form)

    async def _handle(self, request: Request, responder: Responder) -> None:
        try:
            await self._handler(request, responder)
        except Refusal as refusal:
            self.refuse(responder, refusal, request)
        except Exception as failure:
            headers = ((REQUEST_ID, self._new_request_id()),)
            self._on_refusal(send_error(responder, headers, failure, find_form(request)))
        finally:
            self._finish_request(request)

    def _on_turn_end(self) -> None:
        self._immediate_answers = 0

    def _finish_request(self, request: Request) -> None:
        self.active_requests -= 1
        self.reserved_bytes -= request.memory_bytes

    async def _check_timeouts(self) -> None:
        now = self.now()
        if len(self._connections) < self.limits.connections // 2:
            self._has_warned_of_surplus = False
        for connection in tuple(self._connections):
            connection.check_timeouts(now)
