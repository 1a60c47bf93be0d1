"""One small request over a connection of its own, and at which stage it failed."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from dataclasses import dataclass
from enum import Enum

from price_keeper.clock import Clock
from price_keeper.errors import PriceKeeperError
from price_keeper.forwarding.upstream import Endpoint

ASK_SECONDS = 4.0  # less than a check has, so that it can tell how far it came
MOST_BYTES = 64 * 1024  # of an answer: none of those asked for here has a kilobyte

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")


class Stage(Enum):
    NAME = "its name"
    CONNECTION = "the connection"
    TLS = "TLS"
    ANSWER = "the answer"


class Unreached(PriceKeeperError):
    def __init__(self, stage: Stage, why: str) -> None:
        self.stage = stage
        super().__init__(why)


@dataclass(frozen=True, slots=True)
class Answered:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    at: float  # by our clock, half-way between question and answer


def host_of(endpoint: Endpoint) -> str:
    """As it stands in the host header."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    is_usual = endpoint.port == (443 if endpoint.is_tls else 80)
    return host if is_usual else f"{host}:{endpoint.port}"


def plain_get(endpoint: Endpoint, path: str = "/", lines: bytes = b"") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: {host_of(endpoint)}\r\n".encode() + lines + b"connection: close\r\n\r\n"


async def ask(
    endpoint: Endpoint,
    request: bytes,
    clock: Clock,
    tls: ssl.SSLContext | None = None,
    seconds: float | None = None,
) -> Answered:
    """Raises Unreached."""
    seconds = ASK_SECONDS if seconds is None else seconds
    stage = Stage.NAME
    place = f"{endpoint.host}:{endpoint.port}"
    try:
        async with asyncio.timeout(seconds):
            await _resolved(endpoint)
            stage = Stage.CONNECTION
            reader, writer = await _connected(endpoint, tls)
            stage = Stage.ANSWER
            try:
                return await _exchanged(reader, writer, request, clock)
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise Unreached(stage, f"{place}: no answer in {seconds:g} seconds") from None
    except (OSError, EOFError, asyncio.LimitOverrunError) as failure:
        raise Unreached(stage, f"{place}: {_why(failure)}") from None


async def _resolved(endpoint: Endpoint) -> None:
    try:
        await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise Unreached(Stage.NAME, f"{endpoint.host}: the name does not resolve") from None


async def _connected(
    endpoint: Endpoint, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = (tls or ssl.create_default_context()) if endpoint.is_tls else None
    try:
        return await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context, limit=MOST_BYTES)
    except ssl.SSLError as failure:
        why = getattr(failure, "verify_message", None) or failure.reason or "no TLS"
        raise Unreached(Stage.TLS, f"{endpoint.host}:{endpoint.port}: {why}") from None


async def _exchanged(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, clock: Clock
) -> Answered:
    began = clock.now()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    at = (began + clock.now()) / 2
    status = _STATUS.match(head)
    if status is None:
        raise OSError("the answer is no HTTP")
    pairs = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:] if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    length = headers.get("content-length", "")
    size = min(int(length), MOST_BYTES) if length.isdecimal() else 0
    return Answered(int(status[1]), headers, await reader.readexactly(size), at)


def _why(failure: BaseException) -> str:
    if isinstance(failure, OSError):
        return os.strerror(failure.errno) if failure.errno else str(failure) or type(failure).__name__
    return "the connection ends before the answer does"
