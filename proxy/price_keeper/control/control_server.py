"""The HTTP server of the control port, over aiohttp: connections, dispatch to handlers, and responses.

`open_control_port` and `open_control_socket` listen; `ControlDispatcher` finds the route, authenticates the caller,
applies rate and body limits, calls the handler and turns every failure into an `ApiError` response. Request bytes may
hold keys or tokens, so they are never logged or echoed.
"""

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

from price_keeper.auth.throttles import network_of
from price_keeper.clock import Clock
from price_keeper.config import Address
from price_keeper.config.config_problems import limit_guesses
from price_keeper.control import control_access
from price_keeper.control.api_errors import ERROR_CODES, ApiError, to_api_error, too_many_requests
from price_keeper.control.api_rate_limits import ANONYMOUS_PREFIX, ApiRateDecision
from price_keeper.control.api_types import (
    NO_STORE,
    AccessLevel,
    ApiRequest,
    ApiResponse,
    ApiRoute,
    Principal,
    StreamingResponse,
    dump_json,
    matches_etag,
)
from price_keeper.control.control_connections import (
    DEFAULT_PORT_LIMITS,
    ConditionTimer,
    ConnectionRegistry,
    ControlPortLimits,
    SlotClass,
    check_request_target,
    is_loopback,
    is_not_http,
)
from price_keeper.control.control_requests import (
    BodyBudgets,
    check_path_ids,
    check_transfer_encoding,
    parse_query,
    read_headers,
    read_json_body,
)
from price_keeper.control.control_services import ControlServices
from price_keeper.control.router import Router
from price_keeper.errors import Busy, ListenFailed, TooManyRequests
from price_keeper.server.sockets import bind_sockets
from price_keeper.telemetry.logs import build_request_extra

SHUTDOWN_SECONDS = 2.0  # for requests that are under way
KEEP_ALIVE_SECONDS = 75.0
LINGER_SECONDS = 2.0  # what still comes of a body that nobody reads: closing at once could lose the answer on its way

MAX_LINE_BYTES = 8192  # of a first line; aiohttp takes 8190
READ_BUFFER_BYTES = 16 * 1024  # of a body that nobody reads yet, for each connection

# Of those who show nothing but a secret; what is wrong with the secret itself is counted where that is found.
_MALFORMED_STATUSES = frozenset({400, 408, 413, 415, 417})
_ANONYMOUS = Principal("anybody")
_COMMON_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Vary": "Authorization, X-API-Key, Cookie",
    "Server": "price-keeper",
}

_log = logging.getLogger("price_keeper.control")


class ControlDispatcher:
    """Answers requests by a table of routes; those that need the parts, once it has been given them."""

    def __init__(self, routes: Sequence[ApiRoute], now: Callable[[], float]) -> None:
        self._router = Router(routes)
        self._now = now
        self._services: ControlServices | None = None
        self._body_budgets = BodyBudgets()

    def start(self, services: ControlServices) -> None:
        self._services = services

    def stop(self) -> None:
        """Nothing more is changed while the process drains, and nobody is waited for who only listens."""
        if self._services is not None:
            self._services.page.close()
        self._services = None

    async def handle(self, request: web.BaseRequest, is_for_loopback: bool = False) -> web.StreamResponse:
        request_id, headers = str(uuid4()), dict[str, str]()
        try:
            check_request_target(request.version, request.raw_path, request.headers.getall("Host", []), is_for_loopback)
            check_transfer_encoding(request.headers.getall("Transfer-Encoding", []))
            response = await self._route_request(request, request_id, headers)
            if isinstance(response, StreamingResponse):
                return await _send_stream(request, response, {**_COMMON_HEADERS, "X-Request-Id": request_id, **headers})
        except asyncio.CancelledError:
            raise
        except Exception as failure:
            response = self.render_error(to_api_error(failure, request_id), request_id)
        finally:
            _get_connection(request).release_slot()
        return _build_response(response, {**_COMMON_HEADERS, "X-Request-Id": request_id, **headers})

    def render_error(self, error: ApiError, request_id: str) -> ApiResponse:
        return ApiResponse(error.to_json(request_id, self._now()), error.status, headers=error.headers)

    async def _route_request(
        self, request: web.BaseRequest, request_id: str, headers: dict[str, str]
    ) -> ApiResponse | StreamingResponse:
        route, path = self._router.match(request.method, request.rel_url.raw_path)
        if route.group == "probes":
            return await route.handler(self._services, _build_probe_request(request_id, request))  # type: ignore[arg-type]
        services = self._services
        if services is None:
            raise ApiError(503, ERROR_CODES[503], "this process starts or stops", retry_after=1)
        try:
            return await self._handle_route(services, request, route, path, request_id, headers)
        except ApiError as failure:
            if route.is_authenticated_by_secret and failure.status in _MALFORMED_STATUSES:
                _count_malformed_request(services, request.remote or "")
            raise

    async def _handle_route(
        self,
        services: ControlServices,
        request: web.BaseRequest,
        route: ApiRoute,
        path: Mapping[str, str],
        request_id: str,
        headers: dict[str, str],
    ) -> ApiResponse | StreamingResponse:
        address = request.remote or ""
        principal = _ANONYMOUS
        if route.access_level is not AccessLevel.PUBLIC:
            principal = await services.authenticator.authenticate(request.headers, address, is_change=not route.is_read)
        # Whoever shares an address with a client could otherwise keep it from its tokens.
        if not (route.is_authenticated_by_secret or route.is_rate_limit_exempt):
            caller = principal.name if principal is not _ANONYMOUS else ""
            network = "" if principal.org else f"{ANONYMOUS_PREFIX}{network_of(address)}"
            decision = await services.rate_limiter.take(f"{caller}{network}")
            headers |= decision.headers
            _check_rate(decision)
        control_access.authorize(principal, route, path)
        check_path_ids(path)
        api_request = ApiRequest(
            request_id, principal, address, path, parse_query(request, route), read_headers(request)
        )
        connection = _get_connection(request)
        if route.body_schema is not None:
            budgets = self._body_budgets
            client_budget = budgets.clients if principal.org else budgets.anonymous
            byte_budget = budgets.admin if principal.is_admin else client_budget
            if principal is not _ANONYMOUS:
                connection.acquire_slot(SlotClass.ADMIN if principal.is_admin else SlotClass.RECEIVING_BODY)
            api_request.body = await read_json_body(request, route.max_body_bytes, byte_budget, principal.name)
        if not connection.acquire_slot(_classify_request(principal, route, services, api_request)):
            raise Busy("too many requests are being answered; try again", retry_after=1)
        with limit_guesses():
            return _apply_if_none_match(request, route, await route.handler(services, api_request))


def _get_connection(request: web.BaseRequest) -> _ControlConnection:
    return cast("_ControlConnection", request.protocol)


def _classify_request(
    principal: Principal, route: ApiRoute, services: ControlServices, request: ApiRequest
) -> SlotClass:
    if principal.is_admin:
        return SlotClass.ADMIN
    return SlotClass.UNVERIFIED if route.may_be_forged(services, request) else SlotClass.CLIENT


def _build_probe_request(request_id: str, request: web.BaseRequest) -> ApiRequest:
    return ApiRequest(request_id, _ANONYMOUS, request.remote or "", {}, {}, request.headers)


def _count_malformed_request(services: ControlServices, address: str) -> None:
    """Of somebody who has shown nothing: it costs us as much as a wrong secret. Raises Problem for too many."""
    try:
        services.login_throttle.count_malformed(address)
    except TooManyRequests as failure:
        error = too_many_requests(failure.message, failure.retry_after or 1.0)
        error.headers["Connection"] = "close"  # what is still to come of a body is not read
        raise error from None


def _check_rate(decision: ApiRateDecision) -> None:
    if decision.wait_seconds:
        raise too_many_requests("too many requests", decision.wait_seconds)


def _apply_if_none_match(
    request: web.BaseRequest, route: ApiRoute, response: ApiResponse | StreamingResponse
) -> ApiResponse | StreamingResponse:
    if_none_match = request.headers.get("If-None-Match")
    if isinstance(response, StreamingResponse) or not route.is_read or if_none_match is None or response.etag is None:
        return response
    if not matches_etag(if_none_match.replace("W/", ""), response.etag):
        return response
    return ApiResponse(None, 304, response.cache_control, response.etag)


def _build_response(api_response: ApiResponse, headers: Mapping[str, str]) -> web.Response:
    content = api_response.body
    body = content if isinstance(content, bytes) or content is None else dump_json(content)
    all_headers = {**headers, "Cache-Control": api_response.cache_control, **api_response.headers}
    if api_response.etag is not None:
        all_headers["ETag"] = api_response.etag
    if body is not None:
        all_headers["Content-Type"] = api_response.content_type
    response = web.Response(status=api_response.status, body=body, headers=all_headers)
    if all_headers.get("Connection") == "close":
        response.force_close()
    return response


async def _send_stream(
    request: web.BaseRequest, stream: StreamingResponse, headers: Mapping[str, str]
) -> web.StreamResponse:
    """What goes wrong before its first part is raised, and answered as any failure; after that it just ends."""
    stream_headers = {"Cache-Control": NO_STORE, "Content-Type": stream.content_type, "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers={**headers, **stream_headers})
    response.force_close()
    if request.method == "HEAD":
        await response.prepare(request)
        return response
    async with aclosing(stream.chunks()) as chunks:
        chunk = await anext(chunks)
        await response.prepare(request)
        try:
            while request.transport is not None and not request.transport.is_closing():
                if chunk:
                    await response.write(chunk)
                chunk = await anext(chunks)
        except (StopAsyncIteration, ConnectionError):
            pass
        except Exception as failure:
            _log.error("request %s ended early", headers["X-Request-Id"], exc_info=failure)
    return response


class _ControlServer(web.Server):
    """One that answers also what is no HTTP in the form of all problems."""

    def __init__(self, dispatcher: ControlDispatcher, registry: ConnectionRegistry, is_for_loopback: bool) -> None:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await dispatcher.handle(request, is_for_loopback)

        super().__init__(
            handle,
            request_factory=_create_request,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
        )
        self.dispatcher = dispatcher
        self.registry = registry

    def __call__(self) -> web.RequestHandler:
        return _ControlConnection(self, self._loop, self._kwargs)


class _ControlConnection(web.RequestHandler):
    """What it was sent may hold a key or a token, so nothing of that is told or logged."""

    _open_transport: asyncio.Transport | None = (
        None  # kept also while it closes, since a buffer may keep it from closing
    )

    def __init__(self, server: _ControlServer, loop: asyncio.AbstractEventLoop, settings: Mapping[str, Any]) -> None:
        super().__init__(server, loop=loop, **settings)
        self._dispatcher, self._registry = server.dispatcher, server.registry
        self._head_timer, self._stall_timer = ConditionTimer(), ConditionTimer()
        self._ignores_input = False
        self._first_line = b""  # of a head that is awaited, as far as it is here
        self._has_head_begun = True  # a head: the first is awaited from the start, a further one from its first byte

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        open_transport = cast("asyncio.Transport", transport)
        if not self._registry.add(self, (open_transport.get_extra_info("peername") or ("",))[0]):
            open_transport.abort()
            return
        self._open_transport = open_transport
        super().connection_made(transport)
        self.check_timeouts(self._registry.clock.monotonic())

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._open_transport is not None:
            self._open_transport = None
            self._registry.remove(self)
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        requests_before = self._request_count
        if self._awaits_head and b"\n" not in self._first_line:
            self._first_line = (self._first_line + data).lstrip(b"\r\n")[:MAX_LINE_BYTES]
        is_foreign = self._awaits_head and is_not_http(self._first_line)
        super().data_received(b"\0" if is_foreign else data)  # which is no HTTP, and answered as such
        # Behind what is no HTTP each further piece would be a mistake of its own, and kept until that is answered.
        self._ignores_input = bool(self._messages) and isinstance(self._messages[-1][0], _ErrInfo)
        self._has_head_begun = True
        if self._request_count > requests_before:
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
        if is_last and self._open_transport is not None and not self._open_transport.is_closing():
            self._open_transport.write_eof()
        return finished

    def abort(self) -> None:
        if self._open_transport is not None:
            self._open_transport.abort()

    def check_timeouts(self, now: float) -> None:
        if self._open_transport is None:
            return
        self._has_head_begun = self._has_head_begun and self._awaits_head
        head_age = self._head_timer.update(self._has_head_begun, now)
        stall_age = self._stall_timer.update(self._open_transport.get_write_buffer_size() > 0, now)
        limits = self._registry.limits
        if head_age > limits.head_timeout_seconds or stall_age > limits.write_stall_seconds:
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
        status = status if status in ERROR_CODES else 400
        text = "a mistake of ours" if status >= 500 else "this is not HTTP as it is understood here"
        error = self._dispatcher.render_error(ApiError(status, ERROR_CODES[status], text), request_id)
        response = _build_response(error, {**_COMMON_HEADERS, "X-Request-Id": request_id})
        response.force_close()
        return response


def _create_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop)


@asynccontextmanager
async def open_control_port(
    dispatcher: ControlDispatcher, address: Address, clock: Clock, limits: ControlPortLimits = DEFAULT_PORT_LIMITS
) -> AsyncIterator[Address]:
    sockets = await bind_sockets(address.host, address.port)
    is_for_loopback = all(is_loopback(each.getsockname()[0]) for each in sockets)
    async with _serve(dispatcher, sockets, clock, limits, is_for_loopback):
        yield Address(address.host, sockets[0].getsockname()[1])


@asynccontextmanager
async def open_control_socket(dispatcher: ControlDispatcher, path: Path, clock: Clock) -> AsyncIterator[None]:
    """For other processes of this sidecar, which have the folder to themselves."""
    async with _serve(dispatcher, [_bind_unix_socket(path)], clock, DEFAULT_PORT_LIMITS, is_for_loopback=False):
        yield
    _unlink_socket(path)


def _bind_unix_socket(path: Path) -> socket.socket:
    _unlink_socket(path)  # that of a process that was killed
    unix_socket = socket.socket(socket.AF_UNIX)
    try:
        unix_socket.bind(str(path))
    except OSError as failure:
        unix_socket.close()
        raise ListenFailed(f"cannot listen on {path}: {failure.strerror or failure}") from None
    return unix_socket


def _unlink_socket(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@asynccontextmanager
async def _serve(
    dispatcher: ControlDispatcher,
    sockets: Sequence[socket.socket],
    clock: Clock,
    limits: ControlPortLimits,
    is_for_loopback: bool,
) -> AsyncIterator[None]:
    registry = ConnectionRegistry(clock, limits)
    runner = web.ServerRunner(_ControlServer(dispatcher, registry, is_for_loopback), shutdown_timeout=SHUTDOWN_SECONDS)
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
