"""The control port: finds the route of a request, asks whether it may, and puts what comes of it into an answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from aiohttp import web
from aiohttp.web_protocol import _ErrInfo

from price_keeper.auth.failures import network_of
from price_keeper.clock import Clock
from price_keeper.config import Address
from price_keeper.config.problems import limit_guesses
from price_keeper.control import access
from price_keeper.control.bodies import Budgets, body_of
from price_keeper.control.calls import NO_STORE, ApiResponse, ApiRequest, Principal, ApiRoute, StreamingResponse, AccessLevel, dump_json, matches_etag
from price_keeper.control.connections import (
    DEFAULT_PORT_LIMITS,
    ConnectionRegistry,
    ControlPortLimits,
    SlotClass,
    ConditionTimer,
    check_request_target,
    is_loopback,
    is_not_http,
)
from price_keeper.control.parts import ControlServices
from price_keeper.control.problems import ERRORS, Problem, problem_of, too_many
from price_keeper.control.rates import ANONYMOUS_PREFIX, ApiRateDecision
from price_keeper.control.requests import check_coding, check_ids, headers_of, query_of
from price_keeper.control.routing import Routing
from price_keeper.errors import Busy, ListenFailed, TooManyRequests
from price_keeper.logs import build_request_extra
from price_keeper.surface.sockets import bind_sockets

SHUTDOWN_SECONDS = 2.0  # for requests that are under way
KEEP_ALIVE_SECONDS = 75.0
LINGER_SECONDS = 2.0  # what still comes of a body that nobody reads: closing at once could lose the answer on its way

LINE_BYTES = 8192  # of a first line; aiohttp takes 8190
BUFFER_BYTES = 16 * 1024  # of a body that nobody reads yet, for each connection

# Of those who show nothing but a secret; what is wrong with the secret itself is counted where that is found.
_MISTAKES = frozenset({400, 408, 413, 415, 417})
_NOBODY = Principal("anybody")
_ALWAYS = {"X-Content-Type-Options": "nosniff", "Vary": "Authorization, X-API-Key, Cookie", "Server": "price-keeper"}

_log = logging.getLogger("price_keeper.control")


class Control:
    """Answers requests by a table of routes; those that need the parts, once it has been given them."""

    def __init__(self, routes: Sequence[ApiRoute], now: Callable[[], float]) -> None:
        self._routing = Routing(routes)
        self._now = now
        self._services: ControlServices | None = None
        self._bodies = Budgets()

    def started(self, services: ControlServices) -> None:
        self._services = services

    def stop(self) -> None:
        """Nothing more is changed while the process drains, and nobody is waited for who only listens."""
        if self._services is not None:
            self._services.page.close()
        self._services = None

    async def answer(self, request: web.BaseRequest, is_for_loopback: bool = False) -> web.StreamResponse:
        request_id, headers = str(uuid4()), dict[str, str]()
        try:
            check_request_target(request.version, request.raw_path, request.headers.getall("Host", []), is_for_loopback)
            check_coding(request.headers.getall("Transfer-Encoding", []))
            answer = await self._answer(request, request_id, headers)
            if isinstance(answer, StreamingResponse):
                return await _streamed(request, answer, {**_ALWAYS, "X-Request-Id": request_id, **headers})
        except asyncio.CancelledError:
            raise
        except Exception as failure:
            answer = self.refused(problem_of(failure, request_id), request_id)
        finally:
            _connection(request).release_slot()
        return _response(answer, {**_ALWAYS, "X-Request-Id": request_id, **headers})

    def refused(self, problem: Problem, request_id: str) -> ApiResponse:
        return ApiResponse(problem.body(request_id, self._now()), problem.status, headers=problem.headers)

    async def _answer(self, request: web.BaseRequest, request_id: str, headers: dict[str, str]) -> ApiResponse | StreamingResponse:
        route, path = self._routing.found(request.method, request.rel_url.raw_path)
        if route.group == "probes":
            return await route.handler(self._services, _probe(request_id, request))  # type: ignore[arg-type]
        services = self._services
        if services is None:
            raise Problem(503, ERRORS[503], "this process starts or stops", wait=1)
        try:
            return await self._handled(services, request, route, path, request_id, headers)
        except Problem as failure:
            if route.is_authenticated_by_secret and failure.status in _MISTAKES:
                _count_mistake(services, request.remote or "")
            raise

    async def _handled(
        self,
        services: ControlServices,
        request: web.BaseRequest,
        route: ApiRoute,
        path: Mapping[str, str],
        request_id: str,
        headers: dict[str, str],
    ) -> ApiResponse | StreamingResponse:
        address = request.remote or ""
        principal = _NOBODY
        if route.access_level is not AccessLevel.PUBLIC:
            principal = await services.authenticator.authenticate(request.headers, address, is_change=not route.is_read)
        # Whoever shares an address with a client could otherwise keep it from its tokens.
        if not (route.is_authenticated_by_secret or route.is_rate_limit_exempt):
            caller = principal.name if principal is not _NOBODY else ""
            network = "" if principal.org else f"{ANONYMOUS_PREFIX}{network_of(address)}"
            taken = await services.rate_limiter.take(f"{caller}{network}")
            headers |= taken.headers
            _check_rate(taken)
        access.authorize(principal, route, path)
        check_ids(path)
        call = ApiRequest(request_id, principal, address, path, query_of(request, route), headers_of(request))
        connection = _connection(request)
        if route.body_schema is not None:
            bodies = self._bodies
            known = bodies.known if principal.org else bodies.strangers
            budget = bodies.admin if principal.is_admin else known
            if principal is not _NOBODY:
                connection.acquire_slot(SlotClass.ADMIN if principal.is_admin else SlotClass.RECEIVING_BODY)
            call.body = await body_of(request, route.max_body_bytes, budget, principal.name)
        if not connection.acquire_slot(_classify_request(principal, route, services, call)):
            raise Busy("too many requests are being answered; try again", retry_after=1)
        with limit_guesses():
            return _unless_known(request, route, await route.handler(services, call))


def _connection(request: web.BaseRequest) -> _Connection:
    return cast("_Connection", request.protocol)


def _classify_request(principal: Principal, route: ApiRoute, services: ControlServices, request: ApiRequest) -> SlotClass:
    if principal.is_admin:
        return SlotClass.ADMIN
    return SlotClass.UNVERIFIED if route.may_be_forged(services, request) else SlotClass.CLIENT


def _probe(request_id: str, request: web.BaseRequest) -> ApiRequest:
    return ApiRequest(request_id, _NOBODY, request.remote or "", {}, {}, request.headers)


def _count_mistake(services: ControlServices, address: str) -> None:
    """Of somebody who has shown nothing: it costs us as much as a wrong secret. Raises Problem for too many."""
    try:
        services.login_throttle.count_malformed(address)
    except TooManyRequests as failure:
        problem = too_many(failure.message, failure.retry_after or 1.0)
        problem.headers["Connection"] = "close"  # what is still to come of a body is not read
        raise problem from None


def _check_rate(taken: ApiRateDecision) -> None:
    if taken.wait_seconds:
        raise too_many("too many requests", taken.wait_seconds)


def _unless_known(request: web.BaseRequest, route: ApiRoute, answer: ApiResponse | StreamingResponse) -> ApiResponse | StreamingResponse:
    wanted = request.headers.get("If-None-Match")
    if isinstance(answer, StreamingResponse) or not route.is_read or wanted is None or answer.etag is None:
        return answer
    if not matches_etag(wanted.replace("W/", ""), answer.etag):
        return answer
    return ApiResponse(None, 304, answer.cache_control, answer.etag)


def _response(answer: ApiResponse, headers: Mapping[str, str]) -> web.Response:
    value = answer.body
    body = value if isinstance(value, bytes) or value is None else dump_json(value)
    told = {**headers, "Cache-Control": answer.cache_control, **answer.headers}
    if answer.etag is not None:
        told["ETag"] = answer.etag
    if body is not None:
        told["Content-Type"] = answer.content_type
    response = web.Response(status=answer.status, body=body, headers=told)
    if told.get("Connection") == "close":
        response.force_close()
    return response


async def _streamed(request: web.BaseRequest, stream: StreamingResponse, headers: Mapping[str, str]) -> web.StreamResponse:
    """What goes wrong before its first part is raised, and answered as any failure; after that it just ends."""
    told = {"Cache-Control": NO_STORE, "Content-Type": stream.content_type, "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers={**headers, **told})
    response.force_close()
    if request.method == "HEAD":
        await response.prepare(request)
        return response
    async with aclosing(stream.chunks()) as parts:
        part = await anext(parts)
        await response.prepare(request)
        try:
            while request.transport is not None and not request.transport.is_closing():
                if part:
                    await response.write(part)
                part = await anext(parts)
        except (StopAsyncIteration, ConnectionError):
            pass
        except Exception as failure:
            _log.error("request %s ended early", headers["X-Request-Id"], exc_info=failure)
    return response


class _Server(web.Server):
    """One that answers also what is no HTTP in the form of all problems."""

    def __init__(self, control: Control, registry: ConnectionRegistry, is_for_loopback: bool) -> None:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            return await control.answer(request, is_for_loopback)

        super().__init__(
            answer,
            request_factory=_request,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
            read_bufsize=BUFFER_BYTES,
        )
        self.control = control
        self.registry = registry

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._loop, self._kwargs)


class _Connection(web.RequestHandler):
    """What it was sent may hold a key or a token, so nothing of that is told or logged."""

    _wire: asyncio.Transport | None = None  # kept also while it closes, since a buffer may keep it from closing

    def __init__(self, server: _Server, loop: asyncio.AbstractEventLoop, settings: Mapping[str, Any]) -> None:
        super().__init__(server, loop=loop, **settings)
        self._control, self._registry = server.control, server.registry
        self._headless, self._stalled = ConditionTimer(), ConditionTimer()
        self._is_deaf = False
        self._first_line = b""  # of a head that is awaited, as far as it is here
        self._has_begun = True  # a head: the first is awaited from the start, a further one from its first byte

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast("asyncio.Transport", transport)
        if not self._registry.add(self, (wire.get_extra_info("peername") or ("",))[0]):
            wire.abort()
            return
        self._wire = wire
        super().connection_made(transport)
        self.check_timeouts(self._registry.clock.monotonic())

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._wire is not None:
            self._wire = None
            self._registry.remove(self)
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        before = self._request_count
        if self._awaits_head and b"\n" not in self._first_line:
            self._first_line = (self._first_line + data).lstrip(b"\r\n")[:LINE_BYTES]
        is_odd = self._awaits_head and is_not_http(self._first_line)
        super().data_received(b"\0" if is_odd else data)  # which is no HTTP, and answered as such
        # Behind what is no HTTP each further piece would be a mistake of its own, and kept until that is answered.
        self._is_deaf = bool(self._messages) and isinstance(self._messages[-1][0], _ErrInfo)
        self._has_begun = True
        if self._request_count > before:
            self._first_line = b""
            self._registry.mark_active(self)
        self.check_timeouts(self._registry.clock.monotonic())

    def acquire_slot(self, slot_class: SlotClass) -> bool:
        return self._registry.acquire_slot(self, slot_class)

    def release_slot(self) -> None:
        self._registry.release_slot(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Nobody reads what is still to come of the body, so behind the answer the connection ends."""
        is_last = not request.content.is_eof()
        if is_last:
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        if is_last and self._wire is not None and not self._wire.is_closing():
            self._wire.write_eof()
        return finished

    def abort(self) -> None:
        if self._wire is not None:
            self._wire.abort()

    def check_timeouts(self, now: float) -> None:
        if self._wire is None:
            return
        self._has_begun = self._has_begun and self._awaits_head
        headless = self._headless.update(self._has_begun, now)
        stalled = self._stalled.update(self._wire.get_write_buffer_size() > 0, now)
        limits = self._registry.limits
        if headless > limits.head_timeout_seconds or stalled > limits.write_stall_seconds:
            self.abort()

    @property
    def _awaits_head(self) -> bool:
        return not self._request_count or (self._waiter is not None and not self._waiter.done())

    def handle_error(
        self,
        request: Any,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        request_id = str(uuid4())
        if status >= 500:
            _log.error("request %s failed: %s", request_id, type(exc).__name__, extra=build_request_extra(request_id))
        status = status if status in ERRORS else 400
        text = "a mistake of ours" if status >= 500 else "this is not HTTP as it is understood here"
        answer = self._control.refused(Problem(status, ERRORS[status], text), request_id)
        response = _response(answer, {**_ALWAYS, "X-Request-Id": request_id})
        response.force_close()
        return response


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop)


@asynccontextmanager
async def listening(
    control: Control, address: Address, clock: Clock, limits: ControlPortLimits = DEFAULT_PORT_LIMITS
) -> AsyncIterator[Address]:
    sockets = await bind_sockets(address.host, address.port)
    is_for_loopback = all(is_loopback(each.getsockname()[0]) for each in sockets)
    async with _served(control, sockets, clock, limits, is_for_loopback):
        yield Address(address.host, sockets[0].getsockname()[1])


@asynccontextmanager
async def listening_within(control: Control, path: Path, clock: Clock) -> AsyncIterator[None]:
    """For other processes of this sidecar, which have the folder to themselves."""
    async with _served(control, [_bound_within(path)], clock, DEFAULT_PORT_LIMITS, is_for_loopback=False):
        yield
    _remove(path)


def _bound_within(path: Path) -> socket.socket:
    _remove(path)  # that of a process that was killed
    kernel = socket.socket(socket.AF_UNIX)
    try:
        kernel.bind(str(path))
    except OSError as failure:
        kernel.close()
        raise ListenFailed(f"cannot listen on {path}: {failure.strerror or failure}") from None
    return kernel


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@asynccontextmanager
async def _served(
    control: Control, sockets: Sequence[socket.socket], clock: Clock, limits: ControlPortLimits, is_for_loopback: bool
) -> AsyncIterator[None]:
    registry = ConnectionRegistry(clock, limits)
    runner = web.ServerRunner(_Server(control, registry, is_for_loopback), shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    timeout_checks = asyncio.create_task(registry.run_timeout_checks())
    try:
        for each in sockets:
            await web.SockSite(runner, each).start()
        yield
    finally:
        timeout_checks.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await runner.cleanup()
