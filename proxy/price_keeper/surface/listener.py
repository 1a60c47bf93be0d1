"""The data port: takes connections, counts and times them and what they bring, and drains."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final, Protocol

from price_keeper.answers import answer_failure, refuse
from price_keeper.clock import Clock
from price_keeper.errors import Busy, Refusal
from price_keeper.exchange import Handler, Request, Responder, request_ids
from price_keeper.surface.doors import Acceptor, PlainAcceptor, TlsAcceptor
from price_keeper.surface.limits import DEFAULT, Limits
from price_keeper.surface.outbox import BATCHING_THRESHOLD, WriteBatcher
from price_keeper.surface.sockets import bound, elsewhere
from price_keeper.tasks import Tasks

TIMEOUT_CHECK_SECONDS = 1.0  # how often waits are looked at: limits are in tens of seconds
ABORT_SECONDS: Final = 1.0  # what a connection gets to close after it was cut

# Answers in one turn of the loop that wait for nobody. Somebody who sends ever more to be refused must leave others
# their turn, so behind these each request has a task, and those behind it on its connection wait for that.
MOST_AT_ONCE: Final = 32

REQUEST_ID: Final = b"x-price-keeper-request-id"
FULL: Final = "the requests under way fill the memory set aside for them"

_log = logging.getLogger("price_keeper.surface")


class ServerConnection(Protocol):
    protocol: str

    @property
    def open_streams(self) -> int:
        """Of HTTP/2."""

    def check_timeouts(self, now: float) -> None: ...

    def drain(self) -> None: ...

    def abort(self) -> None: ...


def _is_none_refused(_: Request) -> None:
    pass


class Listener:
    """`refused_at_head` says of a request whose body is long, or has no announced end, whether it is any use to hear
    that."""

    def __init__(
        self,
        handler: Handler,
        clock: Clock,
        tasks: Tasks,
        limits: Limits = DEFAULT,
        *,
        refused_at_head: Callable[[Request], Refusal | None] = _is_none_refused,
        new_request_id: Callable[[], bytes] | None = None,
        write_batcher: WriteBatcher | None = None,
        refuses: Callable[[Refusal], None] = lambda _: None,
    ) -> None:
        """`refuses` hears of what does not come to the handler."""
        self._handler = handler
        self.write_batcher = write_batcher or WriteBatcher()
        self._refuses = refuses
        self._clock = clock
        self._tasks = tasks
        self.limits = limits
        self.refused_at_head = refused_at_head
        self._new_request_id = new_request_id or request_ids()
        self.now: Callable[[], float] = clock.monotonic
        self.is_draining = False
        self._connections: set[ServerConnection] = set()
        self._networks: dict[ServerConnection, Hashable] = {}  # of those that are not from this machine
        self._of: Counter[Hashable] = Counter()
        self._acceptors: list[Acceptor] = []
        self._is_full_told = False
        self.under_way = 0  # requests that are handled, whether or not their callers still wait
        self._answered_at_once = 0  # in this turn
        self.held_bytes = 0  # of all requests that are coming in, waiting or under way
        told = f"there are {limits.connections} connections already, or {limits.of_one} from one address elsewhere"
        self.too_many = Busy(told, retry_after=1)
        self._too_busy = Busy(f"there are {limits.requests} requests under way already", retry_after=1)
        self.full = Busy(FULL, retry_after=1)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None, *, is_shared: bool = False) -> int:
        """The port, which is a free one if 0 was asked for. `is_shared`: other processes may listen on it too."""
        sockets = await bound(host, port, is_shared=is_shared)
        for listening_socket in sockets:
            acceptor: Acceptor = PlainAcceptor(self, listening_socket) if tls is None else TlsAcceptor(self, listening_socket, tls, self._tasks)
            self._acceptors.append(acceptor)
            await acceptor.open()
        self._tasks.every("time of connections", TIMEOUT_CHECK_SECONDS, self._check_timeouts)
        bound_port: int = sockets[0].getsockname()[1]
        return bound_port

    async def drain(self, seconds: float, give_up: Callable[[], None] | None = None) -> None:
        """Takes no more, lets what is under way end, and cuts what has not after so many seconds.

        That an answer's caller has left does not end it, as its usage comes last; `give_up` does, at the end.
        """
        self.is_draining = True
        for acceptor in self._acceptors:
            acceptor.close()
        for connection in tuple(self._connections):
            connection.drain()
        await self._emptied(seconds)
        for connection in tuple(self._connections):
            connection.abort()
        if give_up is not None:
            give_up()
        await self._emptied(ABORT_SECONDS)

    async def _emptied(self, seconds: float) -> None:
        deadline = self.now() + seconds
        while (self._connections or self.under_way) and self.now() < deadline:
            await self._clock.sleep(0.05)

    @property
    def connections(self) -> Counter[str]:
        """By protocol."""
        return Counter(connection.protocol for connection in self._connections)

    @property
    def open_streams(self) -> int:
        return sum(connection.open_streams for connection in self._connections)

    # What connections call.

    def joined(self, connection: ServerConnection, peer: str) -> None:
        self._connections.add(connection)
        network = elsewhere(peer)
        if network is not None:
            self._networks[connection] = network
            self._of[network] += 1

    def left(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        network = self._networks.pop(connection, None)
        if network is not None:
            self._of[network] -= 1
            if not self._of[network]:
                del self._of[network]

    def surplus(self, peer: str) -> int:
        """How many connections there are too many, with one more from there."""
        in_all = len(self._connections) + 1 - self.limits.connections
        of_one = self._of[elsewhere(peer)] + 1 - self.limits.of_one
        surplus = max(in_all, of_one)
        if surplus > 0 and not self._is_full_told:
            self._is_full_told = True
            what = f"{self.limits.connections} connections" if in_all > 0 else f"{self.limits.of_one} from one address"
            _log.warning("there are %s, as many as are taken; more are refused", what)
        return surplus

    def holds(self, more: int) -> bool:
        """Counts so much more of a request; whether there is room for it."""
        self.held_bytes += more
        return self.held_bytes <= self.limits.requests_bytes

    def let_go(self, size: int) -> None:
        self.held_bytes -= size

    def grow(self, request: Request, more: int) -> None:
        """Raises Busy."""
        if not self.holds(more):
            self.let_go(more)
            raise Busy(FULL, retry_after=1)
        request.weight += more

    def begin(self, request: Request, responder: Responder, weight: int) -> None:
        """`weight` is what it was counted with."""
        if self.under_way >= self.limits.requests:
            self.held_bytes -= weight
            self.refuse(responder, self._too_busy)
            return
        before = self.under_way
        self.under_way = before + 1
        self.write_batcher.is_busy = before + 1 >= BATCHING_THRESHOLD
        request.taken_at = self.now()
        request.room, request.weight = self, weight
        if self._answered_at_once >= MOST_AT_ONCE:
            self._tasks.once(self._handled(request, responder))
            return
        self._tasks.begin(self._handled(request, responder))
        if self.under_way <= before:  # that was its answer
            if not self._answered_at_once:
                asyncio.get_running_loop().call_soon(self._turn_ends)
            self._answered_at_once += 1

    def refuse(self, responder: Responder, refusal: Refusal) -> None:
        self._refuses(refusal)
        refuse(responder, refusal, ((REQUEST_ID, self._new_request_id()),))

    async def _handled(self, request: Request, responder: Responder) -> None:
        try:
            await self._handler(request, responder)
        except Refusal as refusal:
            self.refuse(responder, refusal)
        except Exception as failure:
            self._refuses(answer_failure(responder, ((REQUEST_ID, self._new_request_id()),), failure))
        finally:
            self._over(request)

    def _turn_ends(self) -> None:
        self._answered_at_once = 0

    def _over(self, request: Request) -> None:
        self.under_way -= 1
        self.held_bytes -= request.weight

    async def _check_timeouts(self) -> None:
        now = self.now()
        if len(self._connections) < self.limits.connections // 2:
            self._is_full_told = False
        for connection in tuple(self._connections):
            connection.check_timeouts(now)
