"""A client of ours, where wrk cannot do it: calls over HTTP/2, and calls at a pace over HTTP/1.1 or HTTP/2.

    python -m bench.speed.client < PLAN

It imports nothing of the product, so that it starts at once. PLAN is one line of JSON, the fields of `Plan`; what it
prints is another, the fields of `Outcome`. With `per_second` the calls are open-loop: each has its time, whether or
not those before it are answered, and waiting for a free connection counts. Without it they are closed-loop: each
connection calls again as soon as it is answered. With `is_new` each call opens a connection of its own, as the AWS
SDK for JavaScript does over HTTP/2.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass
from itertools import count

from hpack import Encoder

from bench.speed.figures import percentile

PATIENCE = 30.0  # for the last answers
MOST_WAITING = 2000  # calls without a free connection: more means that the pace cannot be kept
ID_DIGITS = 12  # at the end of the invocation id: the call's number
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_DEFAULT_WINDOW, _MAX_WINDOW = 65_535, 2**31 - 1
_STATUS_200 = 0x88  # in HPACK's static table
_ROOM = 32_768  # bytes read at once; much more would be mapped and unmapped by the allocator each time
_HTTP1_HEAD_END = b"\r\n\r\n"


class Refused(Exception):
    """Answered with something other than what was asked for."""


@dataclass(frozen=True)
class Plan:
    protocol: str  # http1 or http2
    port: int
    path: str
    headers: Sequence[tuple[str, str]]
    body: str
    connections: int
    seconds: float
    invocation: str = ""  # amz-sdk-invocation-id without its last digits, the call's number; empty: no such header
    per_second: float = 0.0
    is_new: bool = False


@dataclass(frozen=True)
class Outcome:
    per_second: float
    median_us: float
    p99_us: float
    p999_us: float
    requests: int  # answered in all, those before the measurement among them


class Http1:
    """One connection. `request` makes the next call's bytes; `feed` takes what came, and returns whether the answer is
    whole."""

    def __init__(self, plan: Plan) -> None:
        names = [("host", f"127.0.0.1:{plan.port}"), *plan.headers, ("content-length", str(len(plan.body.encode())))]
        lines = "".join(f"{name}: {value}\r\n" for name, value in names)
        self._head = f"POST {plan.path} HTTP/1.1\r\n{lines}".encode()
        if plan.invocation:
            self._head += f"amz-sdk-invocation-id: {plan.invocation}".encode()
        self._has_id = bool(plan.invocation)
        self._body = plan.body.encode()
        self.is_over = False
        self._answer = b""

    def request(self, number: int) -> bytes:
        self._answer = b""
        ident = b"%0*x\r\n" % (ID_DIGITS, number) if self._has_id else b""
        return self._head + ident + b"\r\n" + self._body

    def feed(self, data: bytes) -> bool:
        self._answer += data
        head, end, body = self._answer.partition(_HTTP1_HEAD_END)
        if not end:
            return False
        if not head.startswith(b"HTTP/1.1 200"):
            raise Refused(repr(self._answer[:300]))
        head = head.lower()
        self.is_over = b"connection: close" in head
        length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
        return len(body) >= int(length) if length else body.endswith(b"0\r\n\r\n")


class Http2:
    """One connection with one stream at a time. Static headers enter HPACK's table with the first call, as clients
    do; the invocation id stays out of it."""

    def __init__(self, plan: Plan) -> None:
        names = {":method": "POST", ":scheme": "http", ":path": plan.path, ":authority": f"127.0.0.1:{plan.port}"}
        body = plan.body.encode()
        fields = [*names.items(), *plan.headers, ("content-length", str(len(body)))]
        encoder = Encoder()
        name = b"amz-sdk-invocation-id"
        literal = b""  # without indexing, not Huffman-coded
        if plan.invocation:
            ident = plan.invocation.encode()
            literal = bytes((0, len(name))) + name + bytes((len(ident) + ID_DIGITS,)) + ident
        self._digits = ID_DIGITS if plan.invocation else 0
        self._first, self._again = (self._head(encoder.encode(fields) + literal) for _ in range(2))
        self._data = len(body).to_bytes(3, "big") + bytes((_DATA, _END_STREAM)), body
        self._owed = _PREFACE + _frame(_SETTINGS, 0, 0, b"")  # sent with the next call
        self._owed += _frame(_WINDOW_UPDATE, 0, 0, (_MAX_WINDOW - _DEFAULT_WINDOW).to_bytes(4, "big"))
        self._stream, self._window, self._rest = 1, _DEFAULT_WINDOW, b""
        self.is_over = False

    def _head(self, block: bytes) -> tuple[bytes, bytes]:
        return (len(block) + self._digits).to_bytes(3, "big") + bytes((_HEADERS, _END_HEADERS)), block

    def request(self, number: int) -> bytes:
        (head, block), (data, body) = self._first if self._stream == 1 else self._again, self._data
        self._window -= len(body)
        if self._window < 0:
            raise Refused("the server opens no window for the next body")
        stream = self._stream.to_bytes(4, "big")
        self._stream += 2
        ident = b"%0*x" % (ID_DIGITS, number) if self._digits else b""
        owed, self._owed = self._owed, b""
        return b"".join((owed, head, stream, block, ident, data, stream, body))

    def feed(self, data: bytes) -> bool:
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, size, is_whole = 0, len(data), False
        while at + 9 <= size:
            end = at + 9 + (data[at] << 16 | data[at + 1] << 8 | data[at + 2])
            if end > size:
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == _DATA:
                pass
            elif kind == _HEADERS:
                if data[at + 9] != _STATUS_200:
                    _check_status(data[at + 9 : end])
            elif kind == _SETTINGS and not flags & _ACK:
                self._owed += _frame(_SETTINGS, _ACK, 0, b"")
            elif kind == _WINDOW_UPDATE and data[at + 5 : at + 9] == bytes(4):
                self._window += int.from_bytes(data[at + 9 : end], "big")
            elif kind == _GOAWAY:
                self.is_over = True
            elif kind == _RST_STREAM and any(data[at + 9 : end]):  # no error: the body is not wanted after the answer
                raise Refused(f"stream reset with error {int.from_bytes(data[at + 9 : end], 'big')}")
            if kind <= _HEADERS and flags & _END_STREAM:
                is_whole = True
            at = end
        self._rest = data[at:]
        return is_whole


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _check_status(block: bytes) -> None:
    """Status 200 is one byte; a change of the table's size may stand before it."""
    at = 0
    while block[at] & 0xE0 == 0x20:
        if block[at] & 0x1F == 0x1F:
            at += 1
            while block[at] & 0x80:
                at += 1
        at += 1
    if block[at] != _STATUS_200:
        raise Refused(f"a head that does not begin with status 200: {block[:60]!r}")


class Caller:
    """A connection and the call under way on it."""

    def __init__(self, plan: Plan, codec: Http1 | Http2, epoll: select.epoll) -> None:
        self._plan, self._fresh_codec, self._epoll = plan, codec, epoll
        self.due = 0.0
        self.socket: socket.socket | None = None

    def open(self) -> None:
        self.close()
        self.socket = socket.create_connection(("127.0.0.1", self._plan.port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._epoll.register(self.socket, select.EPOLLIN)
        self.codec = copy(self._fresh_codec)

    def call(self, number: int, due: float) -> None:
        self.due = due
        if self.socket is None or self._plan.is_new or self.codec.is_over:
            self.open()
        assert self.socket is not None
        self.socket.sendall(self.codec.request(number))

    def read(self) -> bool:
        """Whether the answer is whole."""
        assert self.socket is not None
        data = self.socket.recv(_ROOM)
        if not data:
            raise Refused("the connection was closed before the answer was whole")
        is_whole = self.codec.feed(data)
        if is_whole and self._plan.is_new:
            self.close()
        return is_whole

    def close(self) -> None:
        if self.socket is not None:
            self._epoll.unregister(self.socket)
            self.socket.close()
            self.socket = None


class Load:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._epoll = select.epoll()
        self._numbers = count()
        codec = (Http1 if plan.protocol == "http1" else Http2)(plan)
        self._callers = [Caller(plan, codec, self._epoll) for _ in range(plan.connections)]
        self._busy: dict[int, Caller] = {}
        self.answered = 0

    def run(self) -> Outcome:
        for caller in self._callers:  # once each, so that every connection is open
            self._call(caller, 0.0)
            while not self._answered(0.1):
                pass
        began = time.perf_counter()
        took = self._at_a_pace(began) if self.plan.per_second else self._flat_out(began)
        elapsed = time.perf_counter() - began
        for caller in self._callers:
            caller.close()
        median, p99, p999 = (percentile(took, share) * 1e6 for share in (0.5, 0.99, 0.999))
        return Outcome(len(took) / elapsed, median, p99, p999, self.answered)

    def _call(self, caller: Caller, due: float) -> None:
        caller.call(next(self._numbers), due)
        assert caller.socket is not None
        self._busy[caller.socket.fileno()] = caller

    def _answered(self, timeout: float) -> list[Caller]:
        """Those whose answer is whole now."""
        done = []
        for descriptor, _ in self._epoll.poll(timeout):
            caller = self._busy.get(descriptor)
            if caller is None:  # an idle connection of which something comes, its end for example
                self._look_at_idle(descriptor)
            elif caller.read():
                del self._busy[descriptor]
                done.append(caller)
        self.answered += len(done)
        return done

    def _look_at_idle(self, descriptor: int) -> None:
        for caller in self._callers:
            if caller.socket is not None and caller.socket.fileno() == descriptor:
                data = caller.socket.recv(_ROOM)
                if data:
                    caller.codec.feed(data)
                else:
                    caller.close()

    def _flat_out(self, began: float) -> list[float]:
        took, end = [], began + self.plan.seconds
        for caller in self._callers:
            self._call(caller, time.perf_counter())
        while self._busy:
            for caller in self._answered(PATIENCE):
                now = time.perf_counter()
                took.append(now - caller.due)
                if now < end:
                    self._call(caller, now)
            if time.perf_counter() > end + PATIENCE:
                raise Refused(f"{len(self._busy)} calls are not answered")
        return took

    def _at_a_pace(self, began: float) -> list[float]:
        free, waiting, took = deque(self._callers), deque[float](), list[float]()
        planned = deque(began + number / self.plan.per_second for number in range(self._count()))
        while planned or waiting or self._busy:
            now = time.perf_counter()
            while planned and planned[0] <= now:
                waiting.append(planned.popleft())
            while waiting and free:
                self._call(free.popleft(), waiting.popleft())
            if len(waiting) > MOST_WAITING or now > began + self.plan.seconds + PATIENCE:
                raise Refused(f"{self.plan.per_second:g} calls a second are more than it can answer")
            self._wait(planned[0] - time.perf_counter() if planned else PATIENCE)
            for caller in self._answered(0):
                took.append(time.perf_counter() - caller.due)
                free.append(caller)
        return took

    def _wait(self, seconds: float) -> None:
        """By select, since epoll's timeout has steps of a millisecond, as long as a pause between two calls."""
        if seconds > 0:
            select.select([self._epoll.fileno()], [], [], seconds)

    def _count(self) -> int:
        return max(1, int(self.plan.seconds * self.plan.per_second))


def main() -> int:
    try:
        print(json.dumps(asdict(Load(Plan(**json.load(sys.stdin))).run())))
    except (Refused, OSError) as failed:
        print(f"{type(failed).__name__}: {failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
