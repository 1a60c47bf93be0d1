"""Both ends of event streams in one process: Bedrock, which sends frames, and the callers, who take them.

A proxy stands between the two, or none. One process knows without asking when a frame was sent and when it came, and
no second one competes for the core. It is told what to do by lines of JSON, and answers each with one.

    flow     streams for some seconds, 4,000 frames a second over all; each starts again at its end
    hold     streams of which only the beginning comes, until `release`
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from bench.speed.figures import percentile
from bench.speed.frames import END, FRAMES, HEAD, SIZE, answer, chunk, number_of, numbered, unchunked
from bench.speed.machine import cpu_seconds
from bench.speed.upstream import ANSWER

_UNARY = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(ANSWER)}\r\n\r\n".encode() + ANSWER

_TURN = 0.002  # seconds between two looks at who has asked or can read, when frames go as fast as they are taken
PER_SECOND = 4000  # frames over all streams, at a pace
_WARM = 0.3  # of the time, before anything is counted
_AT_ONCE = 100  # streams that are opened together
PATIENCE = 60.0
_FRAMES = answer()
_BODY = b"".join(_FRAMES)
WIRE = [*(chunk(frame) for frame in _FRAMES[:-1]), chunk(_FRAMES[-1]) + END]

_BUFFER = bytearray(2**20)  # read into by all of them, since they take turns


class Refused(Exception):
    """The proxy answers something else than what was sent."""


class Stream:
    """One connection that the proxy has made to Bedrock."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.inbox = bytearray()
        self.at = 0  # which frame is next
        self.rest = b""  # of a frame that was sent in part
        self.number = -1

    def request(self) -> tuple[bytes, bytes] | None:
        """The head and body of a whole request, if one has come."""
        end = self.inbox.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self.inbox[:end])
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        whole = end + 4 + length
        if len(self.inbox) < whole:
            return None
        body = bytes(self.inbox[end + 4 : whole])
        del self.inbox[:whole]
        return head, body

    def send(self) -> bool:
        """The next frame, by a send of its own; False if there is no room for it."""
        data = self.rest or WIRE[self.at]
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            return False
        if sent < len(data):
            self.rest = data[sent:]
            return False
        self.rest = b""
        self.at += 1
        return True


class Caller:
    def __init__(self, port: int, request: bytes, number: int) -> None:
        self.number = number
        head, _, body = request.partition(b"\r\n\r\n")
        assert len(body) == len(numbered(number))
        self.request = head + b"\r\n\r\n" + numbered(number)
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.finished = 0  # streams
        self.kept: list[bytes] | None = []  # all of the first stream, to be looked at
        self.begin()

    def begin(self) -> None:
        self.got = 0  # bytes of this stream, without its head
        self.carry = 0
        self.tail = b""
        self.is_waiting = False
        self.sent_at: deque[float] = deque()
        self.has_head = False
        self.socket.setblocking(True)
        self.socket.sendall(self.request)
        self.socket.setblocking(False)
        self.is_waiting = True

    def read(self) -> int:
        """How many frames came, by their length."""
        try:
            size = self.socket.recv_into(_BUFFER)
        except BlockingIOError:
            return 0
        if size == 0:
            raise Refused("a caller's connection was closed")
        piece = bytes(_BUFFER[:size]) if self.kept is not None or not self.has_head or size < 8 else None
        if self.kept is not None and piece is not None:
            self.kept.append(piece)
        if not self.has_head:
            size = self._without_head(piece or b"")
        self.got += size
        self._see_end(bytes(_BUFFER[max(0, size - 7) : size]) if piece is None else piece[-7:])
        self.carry += size
        frames = self.carry // SIZE
        self.carry = max(0, self.carry - frames * len(WIRE[0]))
        return frames

    def _without_head(self, piece: bytes) -> int:
        if not piece.startswith(b"HTTP/1.1 200"):
            raise Refused(f"answered with {piece[:300]!r}")
        _, _, rest = piece.partition(b"\r\n\r\n")
        self.has_head = True
        return len(rest)

    def _see_end(self, tail: bytes) -> None:
        self.tail = (self.tail + tail)[-7:]
        if self.tail != b"\r\n" + END:
            return
        self.is_waiting = False
        self.finished += 1
        if self.kept is not None:
            if unchunked(b"".join(self.kept).partition(b"\r\n\r\n")[2]) != _BODY:
                raise Refused("not what was sent")
            self.kept = None

    @property
    def frames(self) -> int:
        """All that came so far; those of the current stream are counted by its length."""
        return self.finished * FRAMES + (min(FRAMES, self.got // len(WIRE[0])) if self.is_waiting else 0)


class Driver:
    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setblocking(False)
        self.epoll = select.epoll()
        self.epoll.register(self.listener, select.EPOLLIN)
        self.streams: dict[int, Stream] = {}
        self.active: list[Stream] = []
        self.callers: list[Caller] = []
        self.readers: dict[int, Caller] = {}  # those whom epoll tells of
        self.of_caller: dict[int, Stream] = {}
        self.is_holding = False

    # ------------------------------------------------------------ Bedrock's side

    def poll(self, seconds: float) -> list[Caller]:
        """Accept and hear what is asked; whoever of the callers can read is returned."""
        readable = []
        for descriptor, _ in self.epoll.poll(seconds):
            if descriptor in self.readers:
                readable.append(self.readers[descriptor])
            elif descriptor in self.streams:
                self._hear(self.streams[descriptor])
            elif descriptor == self.listener.fileno():
                self._accept()
        return readable

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.streams[connection.fileno()] = Stream(connection)
            self.epoll.register(connection, select.EPOLLIN)

    def _hear(self, stream: Stream) -> None:
        try:
            data = stream.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(stream)
            return
        stream.inbox += data
        asked = stream.request()
        if asked is not None:
            self._answer(stream, *asked)

    def _answer(self, stream: Stream, head: bytes, body: bytes) -> None:
        if b"converse-stream" not in head.partition(b"\r\n")[0]:
            stream.socket.send(_UNARY)
            return
        stream.number, stream.at, stream.rest = number_of(body), 0, b""
        stream.socket.send(HEAD)
        if self.is_holding:
            stream.socket.send(WIRE[0])
            stream.socket.send(WIRE[1])
        else:
            self.of_caller[stream.number] = stream
            self.active.append(stream)

    def _drop(self, stream: Stream) -> None:
        self.streams.pop(stream.socket.fileno())
        stream.socket.close()
        if stream in self.active:
            self.active.remove(stream)

    # ------------------------------------------------------------ streams that flow

    def flow(self, told: dict[str, Any]) -> dict[str, Any]:
        request = told["request"].encode("latin-1")
        self.callers = [Caller(told["port"], request, number) for number in range(told["streams"])]
        taken: list[float] = []
        self._at_a_pace(_WARM * told["seconds"], [])
        before, began = self._standing(told["pid"]), time.monotonic()
        self._at_a_pace(told["seconds"], taken)
        seconds, after = time.monotonic() - began, self._standing(told["pid"])
        self._finish()
        found: dict[str, Any] = {"frames": after[0] - before[0], "seconds": seconds, "cpu": after[1] - before[1]}
        if taken:
            found |= {"median_us": median(taken) * 1e6}
            found |= {f"{name}_us": percentile(taken, share) * 1e6 for name, share in (("p99", 0.99), ("p999", 0.999))}
        return found

    def _standing(self, pid: int | None) -> tuple[int, float]:
        return sum(caller.frames for caller in self.callers), 0.0 if pid is None else cpu_seconds(pid)

    def _turn(self, until: float) -> None:
        """Frames for each stream in turn; one that has no room is left alone until the next turn."""
        self.poll(0 if self.active else _TURN)
        open_to = list(self.active)
        while open_to and time.monotonic() < until:
            open_to = [stream for stream in open_to if stream.send() and self._has_more(stream)]

    def _has_more(self, stream: Stream) -> bool:
        if stream.at < FRAMES:
            return True
        self.active.remove(stream)
        return False

    def _at_a_pace(self, seconds: float, taken: list[float]) -> None:
        with self._reading():
            began = time.monotonic()
            sent = 0
            while (now := time.monotonic()) < began + seconds:
                if now >= began + sent / PER_SECOND:
                    sent += 1
                    self._send_one()
                self._take(self.poll(0), taken)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self.readers = {caller.socket.fileno(): caller for caller in self.callers}
        for descriptor in self.readers:
            self.epoll.register(descriptor, select.EPOLLIN)
        try:
            yield
        finally:
            for descriptor in self.readers:
                self.epoll.unregister(descriptor)
            self.readers = {}

    def _send_one(self) -> None:
        """To whoever has waited longest."""
        if not self.active:
            return
        stream = self.active.pop(0)
        self.callers[stream.number].sent_at.append(time.perf_counter())
        stream.send()
        if stream.at < FRAMES:
            self.active.append(stream)

    def _take(self, readable: list[Caller], taken: list[float]) -> None:
        for caller in readable:
            frames, now = caller.read(), time.perf_counter()
            taken += [now - caller.sent_at.popleft() for _ in range(min(frames, len(caller.sent_at)))]
            if not caller.is_waiting:
                caller.begin()

    def _finish(self) -> None:
        """Every stream to its end, so that nobody is left in the middle of one."""
        deadline = time.monotonic() + PATIENCE
        while any(caller.is_waiting for caller in self.callers):
            self._turn(time.monotonic() + _TURN)
            for caller in self.callers:
                if caller.is_waiting:
                    caller.read()
            if time.monotonic() > deadline:
                raise Refused("streams do not come to their end")
        self.leave()

    def leave(self) -> None:
        for stream in list(self.streams.values()) if self.is_holding else list(self.active):
            self._drop(stream)
        for caller in self.callers:
            caller.socket.close()
        self.callers, self.active, self.readers, self.is_holding = [], [], {}, False

    # ------------------------------------------------------------ streams that rest

    def hold(self, told: dict[str, Any]) -> dict[str, Any]:
        self.is_holding = True
        request = told["request"].encode("latin-1")
        while len(self.callers) < told["streams"]:
            begun = min(_AT_ONCE, told["streams"] - len(self.callers))
            batch = [Caller(told["port"], request, len(self.callers) + each) for each in range(begun)]
            self.callers += batch
            self._until_begun(batch)
        return {"held": len(self.callers)}

    def _until_begun(self, callers: list[Caller]) -> None:
        deadline = time.monotonic() + PATIENCE
        while any(caller.got < 2 * SIZE for caller in callers):
            self.poll(_TURN)
            for caller in callers:
                caller.read()
            if time.monotonic() > deadline:
                raise Refused("streams do not begin")

    def release(self, _: dict[str, Any]) -> dict[str, Any]:
        self.leave()
        return {}

    # ------------------------------------------------------------ what it is told

    def serve(self) -> None:
        self.epoll.register(sys.stdin.fileno(), select.EPOLLIN)
        known: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            each.__name__: each for each in (self.flow, self.hold, self.release)
        }
        while True:
            self.poll(1)
            if not select.select([sys.stdin], [], [], 0)[0]:
                continue
            line = os.read(sys.stdin.fileno(), 65536)
            if not line:
                return
            told = json.loads(line)
            try:
                found = known[told["do"]](told)
            except (Refused, OSError) as failed:
                self.leave()
                found = {"refused": str(failed)}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Driver(int(sys.argv[1])).serve()
