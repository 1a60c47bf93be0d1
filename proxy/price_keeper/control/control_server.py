"""The HTTP server of the control port, over aiohttp: connections, dispatch to handlers, and responses. START HERE.

`open_control_port` and `open_control_socket` listen; `ControlDispatcher` finds the route, authenticates the caller,
applies rate and body limits, calls the handler and turns every failure into an `ApiError` response. Request bytes may
hold keys or tokens, so they are never logged or echoed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from operator import itemgetter
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
from price_keeper.control.api_errors import ERROR_CODES, ApiError, not_found, to_api_error, too_many_requests
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
    ConnectionRegistry,
    ControlPortLimits,
    SlotClass,
)
from price_keeper.control.control_requests import (
    BodyBudgets,
    check_path_ids,
    check_request_target,
    check_transfer_encoding,
    is_not_http,
    parse_query,
    read_body,
    read_headers,
    read_path_parameters,
    require_path,
)
from price_keeper.control.control_services import ControlServices
from price_keeper.errors import Busy, ListenFailed, TooManyRequests
from price_keeper.server.sockets import bind_sockets, is_loopback
from price_keeper.telemetry.logs import build_request_extra

SHUTDOWN_SECONDS = 2.0  # for active requests
KEEP_ALIVE_SECONDS = 75.0
LINGER_SECONDS = 2.0  # to receive the rest of an unread body: closing at once could destroy the response in flight

MAX_PATH_SEGMENTS = 16  # aiohttp's router looks up each prefix of a path: 7 ms for one of 8,000 slashes
MAX_LINE_BYTES = 8192  # of a first line; aiohttp accepts 8190
BACKLOG = 128  # connections that the kernel keeps until they are accepted
READ_BUFFER_BYTES = 16 * 1024  # of an unread body, for each connection

# Statuses that count as a failed login on routes that only a secret protects. A wrong secret is counted by the handler.
_MALFORMED_STATUSES = frozenset({400, 408, 413, 415, 417})
_ANONYMOUS = Principal("anybody")
_COMMON_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Vary": "Authorization, X-API-Key, Cookie",
    "Server": "price-keeper",
}

_RESPONSE_HEADERS = web.RequestKey("response_headers", dict[str, str])

_log = logging.getLogger("price_keeper.control")


class ControlDispatcher:
    """Serves requests by a table of routes. Until `start`, and after `stop`, only probes are served; others get 503."""

    def __init__(self, routes: Sequence[ApiRoute], now: Callable[[], float]) -> None:
        self.router = web.UrlDispatcher()
        # Routes of one path are neighbours, and a fixed segment comes before a parameter: "{" is after all letters.
        by_path = sorted(((path, route) for route in routes for path in route.paths), key=itemgetter(0))
        for path, route in by_path:
            for method in route.methods:
                self.router.add_route(method, path.replace("}", ":[^/]*}"), partial(self._serve, route, path))
        self._templates = {path for path, _ in by_path}
        self._now = now
        self._services: ControlServices | None = None
        self._body_budgets = BodyBudgets()

    def start(self, services: ControlServices) -> None:
        self._services = services

    def stop(self) -> None:
        """Refuse further requests while the process drains, and end the event streams of open status pages."""
        if self._services is not None:
            self._services.page.close()
        self._services = None

    async def handle(self, request: web.BaseRequest, is_for_loopback: bool = False) -> web.StreamResponse:
        """Serve one request. Every failure becomes an error response; only cancellation is raised."""
        request_id = str(uuid4())
        headers = request[_RESPONSE_HEADERS] = {**_COMMON_HEADERS, "X-Request-Id": request_id}
        try:
            check_request_target(request.version, request.raw_path, request.headers.getall("Host", []), is_for_loopback)
            check_transfer_encoding(request.headers.getall("Transfer-Encoding", []))
            if request.rel_url.raw_path.count("/") > MAX_PATH_SEGMENTS:
                raise not_found("there is no such path")
            routable_request = cast("web.Request", request)  # the router reads only its method and its path
            match = await self.router.resolve(routable_request)
            # aiohttp resolves the decoded path, so another spelling of a path has its routes too.
            if isinstance(match.http_exception, web.HTTPMethodNotAllowed):
                require_path(self._templates, request.rel_url.raw_path)
            return await match.handler(routable_request)
        except Exception as failure:
            return _build_response(self.render_error(to_api_error(failure, request_id), request_id), headers)
        finally:
            _get_connection(request).release_slot()

    def render_error(self, error: ApiError, request_id: str) -> ApiResponse:
        return ApiResponse(error.to_json(request_id, self._now()), error.status, headers=error.headers)

    async def _serve(self, route: ApiRoute, template: str, request: web.BaseRequest) -> web.StreamResponse:
        headers, services = request[_RESPONSE_HEADERS], self._services
        path = read_path_parameters(template, request.rel_url.raw_path)
        if route.group == "probes":
            probe_request = ApiRequest(
                headers["X-Request-Id"], _ANONYMOUS, request.remote or "", path, {}, request.headers
            )
            response = await route.handler(services, probe_request)  # type: ignore[arg-type]
        elif services is None:
            raise ApiError(503, ERROR_CODES[503], "this process is starting or stopping", retry_after=1)
        else:
            try:
                response = await self._admit_and_handle(services, route, request, path)
            except ApiError as failure:
                # A refresh token that was good once is refused with 400 by OAuth, and is no malformed request.
                is_malformed = failure.status in _MALFORMED_STATUSES and failure.code == ERROR_CODES[failure.status]
                if route.is_authenticated_by_secret and is_malformed:
                    _count_malformed_request(services, request.remote or "")
                raise
        if isinstance(response, StreamingResponse):
            return await _send_stream(request, response, headers)
        return _build_response(response, headers)

    async def _admit_and_handle(
        self, services: ControlServices, route: ApiRoute, request: web.BaseRequest, path: Mapping[str, str]
    ) -> ApiResponse | StreamingResponse:
        address, headers = request.remote or "", request[_RESPONSE_HEADERS]
        principal = _ANONYMOUS
        if route.access_level is not AccessLevel.PUBLIC:
            if services.authenticator.may_be_forged(request.headers):
                _acquire_slot(_get_connection(request), SlotClass.UNVERIFIED)
            else:  # so that it is not evicted while the store is asked; an administrator may get a slot later
                _get_connection(request).acquire_slot(SlotClass.CLIENT)
            principal = await services.authenticator.authenticate(request.headers, address, is_change=not route.is_read)
        # Logins are exempt: otherwise another client with the same address could use up the limit and block them.
        if not (route.is_authenticated_by_secret or route.is_rate_limit_exempt):
            caller = principal.name if principal is not _ANONYMOUS else ""
            network = "" if principal.org else f"{ANONYMOUS_PREFIX}{network_of(address)}"
            decision = await services.rate_limiter.take(f"{caller}{network}")
            headers |= decision.headers
            _check_rate(decision)
        control_access.authorize(principal, route, path)
        check_path_ids(path)
        query, request_id = parse_query(request, route), headers["X-Request-Id"]
        api_request = ApiRequest(request_id, principal, address, path, query, read_headers(request))
        connection = _get_connection(request)
        if route.body_schema is not None:
            budgets = self._body_budgets
            client_budget = budgets.clients if principal.org else budgets.anonymous
            byte_budget = budgets.admin if principal.is_admin else client_budget
            if principal is not _ANONYMOUS:
                connection.acquire_slot(SlotClass.ADMIN if principal.is_admin else SlotClass.RECEIVING_BODY)
            api_request.body = await read_body(request, route, byte_budget, principal.name)
        _acquire_slot(connection, _classify_request(principal, route, services, api_request))
        with limit_guesses():
            return _apply_if_none_match(request, route, await route.handler(services, api_request))


def _get_connection(request: web.BaseRequest) -> _ControlConnection:
    return cast("_ControlConnection", request.protocol)


def _acquire_slot(connection: _ControlConnection, slot_class: SlotClass) -> None:
    if not connection.acquire_slot(slot_class):
        raise Busy("too many requests are being answered; try again", retry_after=1)


def _classify_request(
    principal: Principal, route: ApiRoute, services: ControlServices, request: ApiRequest
) -> SlotClass:
    if principal.is_admin:
        return SlotClass.ADMIN
    return SlotClass.UNVERIFIED if route.may_be_forged(services, request) else SlotClass.CLIENT


def _count_malformed_request(services: ControlServices, address: str) -> None:
    """Count a malformed request of an unauthenticated caller like a failed login, because it costs as much. Raises
    ApiError (429) if there were too many."""
    try:
        services.login_throttle.count_malformed(address)
    except TooManyRequests as failure:
        error = too_many_requests(failure.message, failure.retry_after or 1.0)
        error.headers["Connection"] = "close"  # the rest of the body is not read
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
    """Send a stream. A failure before its first chunk is raised and becomes an error response; after that it is logged,
    and the stream ends."""
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
            _log.error("event stream of request %s failed and was ended", headers["X-Request-Id"], exc_info=failure)
    return response


class _ControlConnection(web.RequestHandler):
    """A connection with a head timeout, a write-stall timeout and slots. Request bytes may contain a key or a token, so
    they are never logged or echoed."""

    # Kept while it closes too, because unsent data may keep it from closing, and then it has to be aborted.
    _open_transport: asyncio.Transport | None = None

    def __init__(self, server: web.Server, dispatcher: ControlDispatcher, registry: ConnectionRegistry) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
        )
        self._dispatcher, self._registry = dispatcher, registry
        self._head_since = self._stall_since = math.inf  # since when a head, or the client's reading, is awaited
        self._ignores_input = False
        self._first_line = b""  # received so far of the first line of the next head
        self._has_head_begun = True  # the first head is timed from the connection on, a later one from its first byte

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
        super().data_received(b"\0" if is_foreign else data)  # a null byte makes aiohttp respond with an error
        # After invalid input aiohttp would queue an error for each further piece until the first one is answered.
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
        """Close the connection after a response whose request body was not read to its end."""
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
        self._head_since = min(self._head_since, now) if self._has_head_begun else math.inf
        is_stalled = self._open_transport.get_write_buffer_size() > 0
        self._stall_since = min(self._stall_since, now) if is_stalled else math.inf
        limits = self._registry.limits
        if now - self._head_since > limits.head_timeout_seconds or now - self._stall_since > limits.write_stall_seconds:
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
            raise ConnectionError("a response has begun")
        request_id = str(uuid4())
        if status >= 500:
            _log.error("request %s failed: %s", request_id, type(exc).__name__, extra=build_request_extra(request_id))
        status = status if status in ERROR_CODES else 400
        text = "internal error" if status >= 500 else "this is not a valid HTTP request"
        error = self._dispatcher.render_error(ApiError(status, ERROR_CODES[status], text), request_id)
        response = _build_response(error, {**_COMMON_HEADERS, "X-Request-Id": request_id})
        response.force_close()
        return response


@asynccontextmanager
async def open_control_port(
    dispatcher: ControlDispatcher, address: Address, clock: Clock, limits: ControlPortLimits = DEFAULT_PORT_LIMITS
) -> AsyncIterator[Address]:
    sockets = await bind_sockets(address.host, address.port)
    is_for_loopback = all(is_loopback(bound.getsockname()[0]) for bound in sockets)
    async with _listen(dispatcher, sockets, clock, limits, is_for_loopback):
        yield Address(address.host, sockets[0].getsockname()[1])


@asynccontextmanager
async def open_control_socket(dispatcher: ControlDispatcher, path: Path, clock: Clock) -> AsyncIterator[None]:
    """Serve on a Unix socket for the other workers. Only this sidecar's processes may access its folder."""
    async with _listen(dispatcher, [_bind_unix_socket(path)], clock, DEFAULT_PORT_LIMITS, is_for_loopback=False):
        yield
    _unlink_socket(path)


def _bind_unix_socket(path: Path) -> socket.socket:
    _unlink_socket(path)  # a killed process may have left one
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
async def _listen(
    dispatcher: ControlDispatcher,
    sockets: Sequence[socket.socket],
    clock: Clock,
    limits: ControlPortLimits,
    is_for_loopback: bool,
) -> AsyncIterator[None]:
    registry, loop = ConnectionRegistry(clock, limits), asyncio.get_running_loop()
    server = web.Server(partial(dispatcher.handle, is_for_loopback=is_for_loopback))
    runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    timeout_checks = asyncio.create_task(registry.run_timeout_checks())
    try:
        with contextlib.ExitStack() as listeners:
            for listening_socket in sockets:
                listener = await loop.create_server(
                    lambda: _ControlConnection(server, dispatcher, registry), sock=listening_socket, backlog=BACKLOG
                )
                listeners.callback(listener.close)
            yield
    finally:
        timeout_checks.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await runner.cleanup()
