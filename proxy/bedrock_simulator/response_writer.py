"""Writes a response to the socket, with the pacing and the faults that the request specifies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator
from struct import pack

from aiohttp import web

from bedrock_simulator.clock import Clock
from bedrock_simulator.fault_injection import ConnectionFault, FaultInjector
from bedrock_simulator.fault_spec import CONNECTION_FAULTS, FaultSpec
from bedrock_simulator.simulated_call import SimulatedResponse

# It announces a body: Python's own client takes an unfinished head without one for a complete response.
_HALF_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\nContent-Type: appl"
_BATCH_BYTES = 16 * 1024
_MS = 1000
_NO_LINGER = pack("ii", 1, 0)  # makes close() send an RST instead of a FIN


class ConnectionEnded(Exception):
    """The simulator has closed the connection on purpose, so nothing more can be sent."""


async def apply_faults_before_response(request: web.BaseRequest, spec: FaultSpec, clock: Clock) -> None:
    """Apply latency, and the faults before a response: a stall, or the end of the connection."""
    if spec.latency_ms:
        await clock.sleep(spec.latency_ms / _MS)
    if spec.fault == "half-head":
        if request.transport is not None:
            request.transport.write(_HALF_HEAD)
        _end_connection(request, ConnectionFault.CUT)
    elif spec.fault in CONNECTION_FAULTS and not spec.is_body_fault:
        await _apply_connection_fault(request, ConnectionFault(spec.fault), spec, clock)


async def send_response(
    request: web.BaseRequest, content: SimulatedResponse, spec: FaultSpec, clock: Clock
) -> tuple[web.StreamResponse, bool]:
    """Send a response. Returns it, and whether it was sent completely and undamaged."""
    has_body_fault = _has_body_fault(content, spec)
    if content.frames is None and not has_body_fault and spec.fault != "slow-first-byte":
        response: web.StreamResponse = web.Response(status=content.status, headers=content.headers, body=content.body)
        await response.prepare(request)
        await response.write_eof()
        return response, True
    return await _send_in_pieces_with_faults(request, content, spec, clock, has_body_fault)


async def _send_in_pieces_with_faults(
    request: web.BaseRequest, content: SimulatedResponse, spec: FaultSpec, clock: Clock, has_body_fault: bool
) -> tuple[web.StreamResponse, bool]:
    response = web.StreamResponse(status=content.status, headers=content.headers)
    if content.frames is None:
        response.content_length = len(content.body)
    await response.prepare(request)
    if spec.fault == "slow-first-byte":
        await clock.sleep((spec.delay_ms or 0) / _MS)
    injector = FaultInjector(spec, content.headers["Content-Type"])
    source = _split_in_half(content.body) if content.frames is None else content.frames
    pieces: Iterable[bytes | ConnectionFault] = source
    if has_body_fault:
        pieces = injector.apply(source)
    elif not spec.frame_ms:
        pieces = _batch_frames(source)
    is_first = True
    for piece in pieces:
        if isinstance(piece, ConnectionFault):
            await _apply_connection_fault(request, piece, spec, clock)
            continue
        if spec.frame_ms and not is_first:
            await clock.sleep(spec.frame_ms / _MS)
        await response.write(piece)
        is_first = False
    await response.write_eof()
    return response, not injector.is_damaged


def _has_body_fault(content: SimulatedResponse, spec: FaultSpec) -> bool:
    """Faults of frames do not apply to a body without frames."""
    return spec.is_body_fault and (content.frames is not None or spec.fault in CONNECTION_FAULTS)


def _batch_frames(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Join frames without pacing into few writes: a write costs more than encoding many frames."""
    batch, size = [], 0
    for frame in frames:
        batch.append(frame)
        size += len(frame)
        if size >= _BATCH_BYTES:
            yield b"".join(batch)
            batch, size = [], 0
    if batch:
        yield b"".join(batch)


def _split_in_half(body: bytes) -> list[bytes]:
    """Split a plain body, so that "after one frame" has a meaning for it."""
    middle = len(body) // 2
    return [body[:middle], body[middle:]]


async def _apply_connection_fault(
    request: web.BaseRequest, fault: ConnectionFault, spec: FaultSpec, clock: Clock
) -> None:
    if fault is not ConnectionFault.STALL:
        _end_connection(request, fault)
    elif spec.delay_ms is not None:
        await clock.sleep(spec.delay_ms / _MS)
    else:
        await asyncio.get_running_loop().create_future()  # until the caller disconnects, or the simulator stops


def _end_connection(request: web.BaseRequest, fault: ConnectionFault) -> None:
    transport = request.transport
    if transport is not None:
        if fault is ConnectionFault.RESET:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            transport.abort()
        else:
            transport.close()
    raise ConnectionEnded
