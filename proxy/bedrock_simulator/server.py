"""The simulator's HTTP server: handles requests, and the control paths below /_simulator/ for tests.

Start with `simulated_bedrock`, then `SimulatedBedrock.handle`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

import orjson
from aiohttp import web

from bedrock_simulator import chat_completions, fault_spec, routes, signatures
from bedrock_simulator.aws_errors import AwsError, UnknownOperationError, validation_error
from bedrock_simulator.clock import Clock, SystemClock
from bedrock_simulator.fault_injection import build_stream_error
from bedrock_simulator.fault_spec import INVOCATION_ID, FaultSchedule
from bedrock_simulator.ledger import MAX_ENTRY_BODY_BYTES, Entry, Ledger
from bedrock_simulator.response_writer import ConnectionEnded, apply_faults_before_response, send_response
from bedrock_simulator.service import Service
from bedrock_simulator.signatures import DEFAULT_KEYS, Keys
from bedrock_simulator.simulated_call import JSON, SimulatedCall, SimulatedResponse, parse_json_object

MAX_BODY_BYTES = 25_000_000  # InvokeModel's own limit
MAX_HEADER_BYTES = 64 * 1024  # a session token may be long
SHUTDOWN_SECONDS = 5.0

_CONTROL_PREFIX = "/_simulator/"

_MODEL_IN_BODY = {"ChatCompletions": "model", "Responses": "model", "StartAsyncInvoke": "modelId"}


class SimulatedBedrock:
    """A running simulator, for tests in the same process."""

    def __init__(
        self, clock: Clock, keys: Keys, require_auth: bool, ledger: Ledger, region: str, min_cache_tokens: int
    ) -> None:
        self.keys = keys
        self.ledger = ledger
        self.url = ""
        self.port = 0
        self._require_auth = require_auth
        self._clock = clock
        self._schedule = FaultSchedule()
        self._service = Service(clock, region, min_cache_tokens)

    def plan(self, *specs: Mapping[str, Any]) -> None:
        """Set the options of each of the next requests: `bedrock.plan({"fault": "throttle"}, {}, {"fault": "cut"})`."""
        self._schedule.plan(specs)

    def always(self, **settings: Any) -> None:
        """Set the options of every request from now on: `bedrock.always(latency_ms=20)`; no argument resets them."""
        self._schedule.set_always(settings)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.raw_path.startswith(_CONTROL_PREFIX):
            return await self._handle_control_request(request)
        entry = self._new_entry(request)
        body: bytes | None = None
        with suppress(web.HTTPRequestEntityTooLarge):
            body = await request.read()
            entry.body, entry.body_size = body[:MAX_ENTRY_BODY_BYTES], len(body)
        self.ledger.add(entry)
        try:
            return await self._respond(request, entry, body)
        except (ConnectionEnded, ConnectionError):
            return web.Response()  # discarded: a fault or the caller has closed the connection
        finally:
            self.ledger.finish(entry)

    def _new_entry(self, request: web.BaseRequest) -> Entry:
        route = routes.find_route(request.method, request.raw_path)
        return Entry(
            sequence=self.ledger.next_sequence(),
            arrived=self._clock.now(),
            method=request.method,
            target=request.raw_path,
            operation=route.operation if route else "",
            model=route.model if route else "",
            invocation_id=request.headers.get(INVOCATION_ID, ""),
            headers=tuple(request.raw_headers),
            body=b"",
            body_size=0,
            request_id=str(uuid4()),
        )

    async def _respond(self, request: web.BaseRequest, entry: Entry, body: bytes | None) -> web.StreamResponse:
        """The model runs before any fault of the response: its usage counts whether or not the response arrives."""
        spec = fault_spec.HEALTHY
        try:
            route = routes.find_route(request.method, request.raw_path)
            if route is None:
                raise UnknownOperationError
            if body is None:
                raise AwsError("RequestEntityTooLargeException")
            spec = self._schedule.next_spec(entry.headers, entry.invocation_id)
            entry.fault = spec.fault
            response_content = self._run_operation(SimulatedCall(route, request.headers, body, spec), entry)
        except AwsError as error:
            response_content = _build_error_response(error, entry)
        entry.usage = response_content.usage
        response_content.headers["x-amzn-RequestId"] = entry.request_id
        await apply_faults_before_response(request, spec, self._clock)
        entry.status = response_content.status
        response, entry.is_whole = await send_response(request, response_content, spec, self._clock)
        return response

    def _run_operation(self, call: SimulatedCall, entry: Entry) -> SimulatedResponse:
        if self._require_auth:
            signatures.check_authorization(
                self.keys, entry.method, entry.target, entry.headers, call.body, self._clock.now()
            )
        error = call.fault_spec.build_error()
        if error is not None:
            raise error
        response = self._service.handle(call)
        if call.route.operation in _MODEL_IN_BODY:
            entry.model = call.parse_body()[_MODEL_IN_BODY[call.route.operation]]
        if call.fault_spec.fault == "exception-frame" and response.frames is None:
            raise build_stream_error(call.fault_spec.exception)  # a response without frames fails as a whole
        return response

    async def _handle_control_request(self, request: web.BaseRequest) -> web.Response:
        """`GET|DELETE /_simulator/ledger` and `GET|PUT|DELETE /_simulator/plan`, which Bedrock does not have."""
        path, _, query = request.raw_path.removeprefix(_CONTROL_PREFIX).partition("?")
        try:
            match request.method, path:
                case "GET", "ledger":
                    return _json_response(self.ledger.report(int(parse_qs(query).get("after", ["0"])[0])))
                case "DELETE", "ledger":
                    self.ledger.clear()
                case "GET", "plan":
                    pass
                case "PUT", "plan":
                    document = parse_json_object(await request.read())
                    self._schedule.set_always(document.get("always", self._schedule.always))
                    self._schedule.plan(document.get("next", []))
                case "DELETE", "plan":
                    self._schedule.clear()
                case _:
                    raise validation_error("the simulator's own paths are /_simulator/ledger and /_simulator/plan")
        except AwsError as error:
            return _json_response(error.body, error.status)
        return _json_response({"always": self._schedule.always, "next": self._schedule.planned})


def _build_error_response(error: AwsError, entry: Entry) -> SimulatedResponse:
    headers, body = error.render()
    if entry.operation in ("ChatCompletions", "Responses") and headers["Content-Type"] == JSON:
        body = orjson.dumps(chat_completions.build_error_document(error))
    return SimulatedResponse(body, headers=headers, status=error.status)


def _json_response(document: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(document), content_type=JSON)


@asynccontextmanager
async def simulated_bedrock(
    host: str = "127.0.0.1",
    port: int = 0,
    clock: Clock | None = None,
    *,
    keys: Keys = DEFAULT_KEYS,
    require_auth: bool = True,
    ledger_file: Path | None = None,
    region: str = "us-east-1",
    min_cache_tokens: int = 1024,
) -> AsyncIterator[SimulatedBedrock]:
    """Serve until the block ends. Port 0 is any free port; `region` appears in generated ARNs."""
    loop = asyncio.get_running_loop()
    ledger = Ledger(ledger_file)
    bedrock = SimulatedBedrock(clock or SystemClock(), keys, require_auth, ledger, region, min_cache_tokens)

    def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)

    server = web.Server(
        bedrock.handle,
        request_factory=make_request,
        handler_cancellation=True,  # a disconnect of the caller ends a stall
        access_log=None,
        auto_decompress=False,  # the signature covers the body as it was sent
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )
    listener = await loop.create_server(server, host, port, backlog=1024)
    try:
        bedrock.port = listener.sockets[0].getsockname()[1]
        bedrock.url = f"http://{f'[{host}]' if ':' in host else host}:{bedrock.port}"
        yield bedrock
    finally:
        listener.close()
        for connection in server.connections:
            connection.force_close()
        await server.shutdown(SHUTDOWN_SECONDS)
        await listener.wait_closed()
        ledger.close()
