"""Sends one small HTTP request over a new connection, and reports the stage at which it failed.

`send_probe` raises EndpointUnreachable with the stage: DNS, connection, TLS or response.
`build_unreachable_finding` adds a remedy for each stage.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from dataclasses import dataclass
from enum import Enum

from price_keeper.clock import Clock
from price_keeper.doctor.doctor_checks import Finding, trouble
from price_keeper.errors import PriceKeeperError
from price_keeper.upstream.connection_pool import UpstreamEndpoint

PROBE_TIMEOUT_SECONDS = 4.0  # less than the deadline of a check, so that the probe can report its stage
MAX_RESPONSE_BYTES = 64 * 1024  # the expected responses are below 1 KiB

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")


class ProbeStage(Enum):
    NAME = "its name"
    CONNECTION = "the connection"
    TLS = "TLS"
    ANSWER = "the answer"


class EndpointUnreachable(PriceKeeperError):
    def __init__(self, stage: ProbeStage, reason: str) -> None:
        self.stage = stage
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    answered_at: float  # by the local clock, half-way between request and response


def build_host_header(endpoint: UpstreamEndpoint) -> str:
    """The value of the Host header."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    is_usual = endpoint.port == (443 if endpoint.is_tls else 80)
    return host if is_usual else f"{host}:{endpoint.port}"


def build_get_request(endpoint: UpstreamEndpoint, path: str = "/", header_lines: bytes = b"") -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nhost: {build_host_header(endpoint)}\r\n".encode()
        + header_lines
        + b"connection: close\r\n\r\n"
    )


async def send_probe(
    endpoint: UpstreamEndpoint,
    request: bytes,
    clock: Clock,
    tls: ssl.SSLContext | None = None,
    seconds: float | None = None,
) -> ProbeResponse:
    """Send a request and read its response. Raises EndpointUnreachable."""
    seconds = PROBE_TIMEOUT_SECONDS if seconds is None else seconds
    stage = ProbeStage.NAME
    host_and_port = f"{endpoint.host}:{endpoint.port}"
    try:
        async with asyncio.timeout(seconds):
            await _resolve_host(endpoint)
            stage = ProbeStage.CONNECTION
            reader, writer = await _connect(endpoint, tls)
            stage = ProbeStage.ANSWER
            try:
                return await _exchange(reader, writer, request, clock)
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise EndpointUnreachable(stage, f"{host_and_port}: no answer in {seconds:g} seconds") from None
    except (OSError, EOFError, asyncio.LimitOverrunError) as failure:
        raise EndpointUnreachable(stage, f"{host_and_port}: {_describe_failure(failure)}") from None


async def _resolve_host(endpoint: UpstreamEndpoint) -> None:
    try:
        await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise EndpointUnreachable(ProbeStage.NAME, f"{endpoint.host}: the name does not resolve") from None


async def _connect(
    endpoint: UpstreamEndpoint, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = (tls or ssl.create_default_context()) if endpoint.is_tls else None
    try:
        return await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context, limit=MAX_RESPONSE_BYTES)
    except ssl.SSLError as failure:
        why = getattr(failure, "verify_message", None) or failure.reason or "no TLS"
        raise EndpointUnreachable(ProbeStage.TLS, f"{endpoint.host}:{endpoint.port}: {why}") from None


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, clock: Clock
) -> ProbeResponse:
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
    size = min(int(length), MAX_RESPONSE_BYTES) if length.isdecimal() else 0
    return ProbeResponse(int(status[1]), headers, await reader.readexactly(size), at)


def _describe_failure(failure: BaseException) -> str:
    if isinstance(failure, OSError):
        return os.strerror(failure.errno) if failure.errno else str(failure) or type(failure).__name__
    return "the connection ends before the answer does"


def build_unreachable_finding(failure: EndpointUnreachable, endpoint: UpstreamEndpoint, keys: str) -> Finding:
    """A finding with a remedy for the stage. `keys` names the configuration keys of the endpoint's address."""
    return trouble(str(failure), _build_remedy(failure.stage, endpoint, keys))


def _build_remedy(stage: ProbeStage, endpoint: UpstreamEndpoint, keys: str) -> str:
    match stage:
        case ProbeStage.NAME:
            return f"correct {keys}, or let this machine resolve the name: getent hosts {endpoint.host}"
        case ProbeStage.CONNECTION:
            way = "security group, firewall, NAT or VPC endpoint"
            return f"let this machine out to port {endpoint.port} of {endpoint.host} ({way}), or correct {keys}"
        case ProbeStage.TLS:
            return f"trust its authority (SSL_CERT_FILE, or install ca-certificates), or correct {keys}"
        case ProbeStage.ANSWER:
            return f"find out what listens there, or correct {keys}"
