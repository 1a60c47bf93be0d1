"""A receiver of OTLP over HTTP, as a collector is one: real requests, decoded; and it may be slow, or refuse."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from tests.support.ports import free_port


@dataclass
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    events: list[str]
    seconds: float
    resource: dict[str, Any]


@dataclass
class OtlpReceiver:
    port: int
    status: int = 200
    hangs: bool = False
    bodies: list[bytes] = field(default_factory=list)  # as they were read, unzipped
    headers: list[dict[str, str]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.headers.append(dict(request.headers))
        self.bodies.append(body)
        if self.hangs:
            await asyncio.sleep(3600)
        if self.status == 200:
            self.spans += _spans(body)
        return web.Response(status=self.status, content_type="application/x-protobuf")


def _spans(body: bytes) -> Iterator[Span]:
    for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _values(of_resource.resource.attributes)
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.kind,
                    span.status.code == 2,
                    _values(span.attributes),
                    [event.name for event in span.events],
                    (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                    resource,
                )


def _values(attributes: Any) -> dict[str, Any]:
    def value(pair: KeyValue) -> Any:
        return getattr(pair.value, pair.value.WhichOneof("value") or "string_value")

    return {pair.key: value(pair) for pair in attributes}


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """In a thread of its own, so that tests may wait for processes at the same time."""
    receiver, ready = OtlpReceiver(free_port()), threading.Event()
    loop = asyncio.new_event_loop()
    stopped = asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/traces", receiver.take)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", receiver.port).start()
        ready.set()
        await stopped.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield receiver
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()
