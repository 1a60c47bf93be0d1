"""Connections of the data port without sockets: input is given, output is kept."""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from price_keeper.errors import Refusal
from price_keeper.exchange import Request, Responder
from price_keeper.parse_call import check_target
from price_keeper.server.acceptors import ProtocolDetector
from price_keeper.server.listener import Listener
from price_keeper.server.server_limits import ServerLimits
from price_keeper.tasks import Tasks

from tests.fuzz.oracle import same
from tests.support.clock import ManualClock

TURNS = 4  # of the loop: what one puts off, a later one does


class Wire(asyncio.Transport):
    """Takes everything at once, in the order of its writing."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.protocol: Any = None
        self.is_closed = False
        self.is_reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closed:
            self.written += data

    def write_eof(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 40_000) if name == "peername" else default

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    async def hear(self, *data: bytes) -> None:
        """As far as it is read: data behind a close, or while reading is paused, is not."""
        for each in data:
            for _ in range(TURNS):
                if self.is_reading or self.is_closed:
                    break
                await asyncio.sleep(0)
            if self.is_closed:
                return
            self.protocol.data_received(each)

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)


class Complaints(logging.Handler):
    """What is logged as a warning or worse is nothing that a stranger may bring about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """On one loop for all, as to make one takes longer than what is done on it."""
    heard, loggers = Complaints(), [logging.getLogger(name) for name in ("price_keeper", "asyncio")]
    for logger in loggers:
        logger.addHandler(heard)
    try:
        found = _loop().run_until_complete(work)
    finally:
        for logger in loggers:
            logger.removeHandler(heard)
    same(heard.lines, [], "what was complained of")
    return found


Answers = Callable[[Request, Responder], None]


def _refused_at_head(request: Request) -> Refusal | None:
    return check_target(request.target)


@asynccontextmanager
async def connection(answers: Answers, limits: ServerLimits) -> AsyncIterator[Wire]:
    """To a port that answers at once. Nothing of it may be left at the end."""

    async def handler(request: Request, responder: Responder) -> None:
        answers(request, responder)

    clock = ManualClock()
    async with Tasks(clock) as tasks:
        listener = Listener(handler, clock, tasks, limits, check_head=_refused_at_head, new_request_id=lambda: b"1")
        wire = Wire()
        wire.protocol = ProtocolDetector(listener)
        wire.protocol.connection_made(wire)
        yield wire
        await wire.settle()
        wire.is_closed = True
        wire.protocol.connection_lost(None)
        await wire.settle()
        same((listener.reserved_bytes, listener.active_requests, len(listener._connections)), (0, 0, 0), "what is left")
