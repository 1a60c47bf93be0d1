"""Traces for OpenTelemetry: a span for each call, exported over OTLP by a thread that no call waits for.

This is loaded only where it is configured: its packages are the extra `otel`. What a span tells comes from the headers
that the caller is answered with, and from the receipt of the call; of prompts and answers nothing is looked at.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from price_keeper.build import get_version
from price_keeper.config.telemetry import TelemetryConfig as Chosen
from price_keeper.exchange import FlowControl, Handler, Header, Request, Responder
from price_keeper.forwarding.model_path import Operation, OperationPath, parse_path
from price_keeper.model import PICO_PER_USD, Caller
from price_keeper.recording.entries import Receipt
from price_keeper.telemetry import Samples

WAITING = 2048  # spans, beyond which new ones are dropped: 2 MB
BATCH = 512  # spans in one export
EVERY_SECONDS = 5.0  # there is one at the latest
EXPORT_SECONDS = 10.0  # for one export, with all that it takes to try it again
LAST_SECONDS = 2.0  # for the last one, at the end of the process
LONGEST = 256  # characters of what a caller named

_CONTEXT: Final = TraceContextTextMapPropagator()
_PARENT, _STATE = "traceparent", "tracestate"

# By the semantic conventions for generative AI; what they have no name for keeps its own.
_CHATS = (Operation.CONVERSE, Operation.CONVERSE_STREAM, Operation.CHAT_COMPLETIONS)
_NAMED: Final = {
    **{operation: operation.name.lower() for operation in Operation},
    **dict.fromkeys(_CHATS, "chat"),
    **dict.fromkeys((Operation.INVOKE, Operation.INVOKE_STREAM), "generate_content"),
}

REQUESTED: Final = "gen_ai.request.model"
_OF_HEADERS: Final = {
    b"x-price-keeper-request-id": "price_keeper.request_id",
    b"x-price-keeper-requested": REQUESTED,
    b"x-price-keeper-label": "price_keeper.label",
    b"x-price-keeper-mode": "price_keeper.mode",
    b"x-price-keeper-shadow-label": "price_keeper.shadow_label",
    b"x-price-keeper-price-source": "price_keeper.price_source",
    b"x-amzn-requestid": "aws.request_id",
}
_MODEL, _PERCENT, _ERROR = b"x-price-keeper-model", b"x-price-keeper-quota-pct", b"x-amzn-errortype"

_log = logging.getLogger("price_keeper.tracing")

# It warns of each header that a caller sent and that is none: as often as anybody likes, and in the caller's words.
logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
_EXPORTING: Final = logging.getLogger(OTLPSpanExporter.__module__)


class Tracing:
    def __init__(self, chosen: Chosen) -> None:
        base = (chosen.otlp_endpoint or "").rstrip("/")
        self._unpathed = _Unpathed(urlsplit(base).path)
        _EXPORTING.addFilter(self._unpathed)
        self._exporter = _Counted(OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=EXPORT_SECONDS))
        own = Resource({"service.name": "price-keeper", "service.version": get_version()})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(chosen.sample_ratio)),
            resource=own.merge(OTELResourceDetector().detect()),  # the environment goes before
            span_limits=SpanLimits(max_span_attribute_length=LONGEST),
            shutdown_on_exit=False,
        )
        self._batches = BatchSpanProcessor(
            self._exporter,
            max_queue_size=WAITING,
            schedule_delay_millis=EVERY_SECONDS * 1000,
            max_export_batch_size=BATCH,
        )
        self._provider.add_span_processor(self._batches)
        self._tracer = self._provider.get_tracer("price-keeper", get_version())
        self._made = 0

    def samples(self) -> Samples:
        counts = {"made": self._made, "exported": self._exporter.exported, "failed": self._exporter.failed}
        return [({"what": what}, count) for what, count in counts.items()]

    def around(self, handler: Handler) -> Handler:
        async def traced(request: Request, responder: Responder) -> None:
            target = _target(request)
            if target is None:
                await handler(request, responder)
            else:
                await self._traced(target, request, responder, handler)

        return traced

    async def _traced(self, target: OperationPath, request: Request, responder: Responder, handler: Handler) -> None:
        span = self._begun(target, request)
        self._made += span.is_recording()
        heard = _Heard(span, _NAMED[target.operation], target.id, responder)
        request.observer = heard
        try:
            await handler(request, heard)
        finally:
            heard.over()

    def _begun(self, target: OperationPath, request: Request) -> Span:
        """Under the caller's, if that says so; and Bedrock is told of ours."""
        shown = {name: request.headers.pop(name.encode(), b"").decode("latin-1") for name in (_PARENT, _STATE)}
        operation = _NAMED[target.operation]
        span = self._tracer.start_span(
            operation,
            context=_CONTEXT.extract({name: text for name, text in shown.items() if text}),
            kind=SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "aws.bedrock",
                "price_keeper.operation": target.operation.name.lower(),
            },
        )
        told: dict[str, str] = {}
        _CONTEXT.inject(told, set_span_in_context(span))
        request.headers |= {name.encode(): text.encode() for name, text in told.items()}
        return span

    async def close(self) -> None:
        """What has not been exported by then is lost."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            _EXPORTING.removeFilter(self._unpathed)
            with suppress(RuntimeError):  # the loop may be closed by then
                loop.call_soon_threadsafe(over.set)

        # None of the loop's own threads: it would wait for that one at its end, however long an export takes.
        threading.Thread(target=shut_down, name="last traces", daemon=True).start()
        try:
            async with asyncio.timeout(LAST_SECONDS):
                await over.wait()
        except TimeoutError:
            _log.warning("the last traces are not exported: the receiver does not answer")


@asynccontextmanager
async def opened_tracing(chosen: Chosen) -> AsyncIterator[Tracing]:
    tracing = Tracing(chosen)
    try:
        yield tracing
    finally:
        await tracing.close()


def _target(request: Request) -> OperationPath | None:
    """None for what is no call of Bedrock's."""
    try:
        return parse_path(request.target.partition(b"?")[0].decode("latin-1"))
    except ValueError:
        return None


class _Heard:
    """One call's responder, and who hears what it came to."""

    def __init__(self, span: Span, operation: str, model: str, responder: Responder) -> None:
        self._span = span
        self._operation = operation
        self._model = model
        self._responder = responder
        self._has_written = self._is_whole = False

    # The responder.

    @property
    def has_started(self) -> bool:
        return self._responder.has_started

    @property
    def is_disconnected(self) -> bool:
        return self._responder.is_disconnected

    def attach(self, flow: FlowControl) -> None:
        self._responder.attach(flow)

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        if self._span.is_recording():
            self._tell_head(status, dict(headers))
        self._responder.start(status, headers, length)

    def write(self, data: bytes) -> None:
        if data and not self._has_written:
            self._has_written = True
            self._span.add_event("price_keeper.first_byte")
        self._responder.write(data)

    def flush(self) -> None:
        self._responder.flush()

    def finish(self) -> None:
        self._is_whole = True
        self._responder.finish()

    def abort(self) -> None:
        if not self._is_whole:
            self._fails("cut")
        self._responder.abort()

    # Who hears.

    def on_authenticated(self, caller: Caller) -> None:
        self._span.set_attribute("price_keeper.org", caller.org)
        if caller.app is not None:
            self._span.set_attribute("price_keeper.app", caller.app)

    def ended(self, receipt: Receipt | None) -> None:
        if receipt is None or not self._span.is_recording():
            return
        counts = receipt.counts
        written = counts.cache_write_5m_tokens + counts.cache_write_1h_tokens
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": counts.input_tokens + counts.cache_read_tokens + written,
                "gen_ai.usage.output_tokens": counts.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": counts.cache_read_tokens,
                "gen_ai.usage.cache_creation.input_tokens": written,
                "price_keeper.guardrail_units": counts.guardrail_units,
                "price_keeper.cost_usd": counts.pico / PICO_PER_USD,
                "price_keeper.is_estimated": bool(counts.estimated_requests),
            }
        )

    def on_cancelled(self) -> None:
        pass

    def over(self) -> None:
        if not self._is_whole and self._responder.is_disconnected:
            self._span.set_attribute("price_keeper.caller_left", True)
        self._span.update_name(f"{self._operation} {self._model[:LONGEST]}".strip())
        self._span.end()

    def _tell_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        told = {name: headers[header].decode("latin-1") for header, name in _OF_HEADERS.items() if header in headers}
        self._model = told.setdefault(REQUESTED, self._model)
        self._span.set_attributes(told)
        self._span.set_attribute("http.response.status_code", status)
        if _PERCENT in headers:
            self._span.set_attribute("price_keeper.quota_pct", int(headers[_PERCENT]))
        if status >= 400:
            self._fails(headers.get(_ERROR, str(status).encode()).decode("latin-1").partition(":")[0])
        elif _MODEL in headers:
            self._span.set_attribute("gen_ai.response.model", headers[_MODEL].decode())

    def _fails(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)


class _Unpathed(logging.Filter):
    """Takes a path out of what is logged: some receivers want their key there."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def filter(self, record: logging.LogRecord) -> bool:
        if self._path:
            record.msg, record.args = record.getMessage().replace(self._path, "/..."), ()
        return True


class _Counted(SpanExporter):
    """Called by the exporting thread alone."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.exported = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
