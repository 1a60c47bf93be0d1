"""The two ends of an event stream, as the driver has them: Bedrock's connection, and a caller's. One piece of memory is
read into by all of them, since they take turns."""

from __future__ import annotations

import socket
from collections import deque

from bench.speed.frames import END, FRAMES, SIZE, answer, chunk, numbered, unchunked

_FRAMES = answer()
_BODY = b"".join(_FRAMES)
WIRE = [*(chunk(frame) for frame in _FRAMES[:-1]), chunk(_FRAMES[-1]) + END]

PATIENCE = 60.0
_BUFFER = bytearray(2**20)


class Refused(Exception):
    """The proxy answers something else than what was sent."""


class Stream:
    """One connection that the proxy has made to Bedrock."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.inbox = bytearray()
        self.at = 0  # which frame is next
        self.rest = b""  # of a frame of which only a part went out
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
        """How many frames came, as far as that can be told from their length."""
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
        """All that came so far; of the stream under way by its length, since nobody looks into it."""
        return self.finished * FRAMES + (min(FRAMES, self.got // len(WIRE[0])) if self.is_waiting else 0)
