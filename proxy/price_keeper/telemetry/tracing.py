"""OpenTelemetry traces: one span for each call, exported over OTLP by a thread that no call waits for.

Imported only if configured, because its packages are the extra `otel`. A span has attributes from the response headers
and the receipt of the call; prompts and completions are never read. Start with `Tracing.wrap_handler`.
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

from price_keeper.config.config_sections import TelemetryConfig
from price_keeper.domain import PICO_PER_USD, Caller
from price_keeper.exchange import Handler, Header, Request, Responder
from price_keeper.ledger.ledger_entries import Receipt
from price_keeper.operations import BodyForm, Operation, OperationPath, find_operations, parse_path
from price_keeper.responder_wrapper import ResponderWrapper
from price_keeper.telemetry.build_info import get_version
from price_keeper.telemetry.metrics import Samples
from price_keeper.vendor_apis import COUNT_TOKENS, MESSAGES, find_form, replace_alias

MAX_QUEUED_SPANS = 2048  # about 2 MB; further spans are dropped
MAX_BATCH_SPANS = 512  # in one export
EXPORT_INTERVAL_SECONDS = 5.0  # at most, between exports
EXPORT_TIMEOUT_SECONDS = 10.0  # for one export with its retries
SHUTDOWN_TIMEOUT_SECONDS = 2.0  # for the last export, at the end of the process
MAX_ATTRIBUTE_CHARS = 256  # of one attribute, since callers choose some values

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_PARENT, _STATE = "traceparent", "tracestate"

# Named by the semantic conventions for generative AI; operations that these do not cover keep Bedrock's name.
_CONVENTIONAL_NAMES: Final = {
    BodyForm.CONVERSE: "chat",
    BodyForm.CHAT: "chat",
    BodyForm.RESPONSES: "chat",
    BodyForm.INVOKE: "generate_content",
}
_MESSAGES: Final = {MESSAGES: Operation.INVOKE, COUNT_TOKENS: Operation.COUNT_TOKENS}
_SPAN_NAMES: Final = {
    **{operation: operation.name.lower() for operation in Operation},
    **{each: name for form, name in _CONVENTIONAL_NAMES.items() for each in find_operations(form)},
}

REQUESTED_MODEL: Final = "gen_ai.request.model"
_HEADER_ATTRIBUTES: Final = {
    b"x-price-keeper-request-id": "price_keeper.request_id",
    b"x-price-keeper-requested": REQUESTED_MODEL,
    b"x-price-keeper-label": "price_keeper.label",
    b"x-price-keeper-mode": "price_keeper.mode",
    b"x-price-keeper-shadow-label": "price_keeper.shadow_label",
    b"x-price-keeper-price-source": "price_keeper.price_source",
    b"x-amzn-requestid": "aws.request_id",
}
_MODEL, _PERCENT, _ERROR = b"x-price-keeper-model", b"x-price-keeper-quota-pct", b"x-amzn-errortype"

_log = logging.getLogger("price_keeper.tracing")

# This logger warns of every invalid trace header and quotes it, so callers could flood the log with text of their own.
logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
_exporter_log: Final = logging.getLogger(OTLPSpanExporter.__module__)


class Tracing:
    """The tracer of a process and its exporter."""

    def __init__(self, config: TelemetryConfig) -> None:
        base = (config.otlp_endpoint or "").rstrip("/")
        self._path_redactor = _PathRedactor(urlsplit(base).path)
        _exporter_log.addFilter(self._path_redactor)
        self._exporter = _CountingExporter(
            OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=EXPORT_TIMEOUT_SECONDS)
        )
        own = Resource({"service.name": "price-keeper", "service.version": get_version()})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=own.merge(OTELResourceDetector().detect()),  # values from the environment take precedence
            span_limits=SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE_CHARS),
            shutdown_on_exit=False,
        )
        self._batches = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=EXPORT_INTERVAL_SECONDS * 1000,
            max_export_batch_size=MAX_BATCH_SPANS,
        )
        self._provider.add_span_processor(self._batches)
        self._tracer = self._provider.get_tracer("price-keeper", get_version())
        self._spans_made = 0

    def samples(self) -> Samples:
        counts = {"made": self._spans_made, "exported": self._exporter.exported, "failed": self._exporter.failed}
        return [({"what": what}, count) for what, count in counts.items()]

    def wrap_handler(self, handler: Handler) -> Handler:
        async def traced(request: Request, responder: Responder) -> None:
            target = _parse_target(request)
            if target is None:
                await handler(request, responder)
            else:
                await self._trace_call(target, request, responder, handler)

        return traced

    async def _trace_call(
        self, target: OperationPath, request: Request, responder: Responder, handler: Handler
    ) -> None:
        span = self._start_span(target, request)
        self._spans_made += span.is_recording()
        traced_responder = _TracedResponder(span, _SPAN_NAMES[target.operation], target.id, responder)
        request.trace = traced_responder
        try:
            await handler(request, traced_responder)
        finally:
            traced_responder.end_span()

    def _start_span(self, target: OperationPath, request: Request) -> Span:
        """Start a span as a child of the caller's span, if the request has trace headers, and replace these headers so
        that Bedrock receives the new span as the parent."""
        trace_headers = {name: request.headers.pop(name.encode(), b"").decode("latin-1") for name in (_PARENT, _STATE)}
        operation = _SPAN_NAMES[target.operation]
        span = self._tracer.start_span(
            operation,
            context=_PROPAGATOR.extract({name: text for name, text in trace_headers.items() if text}),
            kind=SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "aws.bedrock",
                "price_keeper.operation": target.operation.name.lower(),
            },
        )
        injected: dict[str, str] = {}
        _PROPAGATOR.inject(injected, set_span_in_context(span))
        request.headers |= {name.encode(): text.encode() for name, text in injected.items()}
        return span

    async def close(self) -> None:
        """Export the remaining spans, for SHUTDOWN_TIMEOUT_SECONDS at most; spans not exported by then are lost."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            _exporter_log.removeFilter(self._path_redactor)
            with suppress(RuntimeError):  # the loop may be closed by then
                loop.call_soon_threadsafe(over.set)

        # Not a thread of the loop's executor, which would be waited for at exit, however long an export takes.
        threading.Thread(target=shut_down, name="last traces", daemon=True).start()
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_SECONDS):
                await over.wait()
        except TimeoutError:
            _log.warning(
                "the last spans are lost: the OTLP receiver did not respond within %g s", SHUTDOWN_TIMEOUT_SECONDS
            )


@asynccontextmanager
async def open_tracing(config: TelemetryConfig) -> AsyncIterator[Tracing]:
    tracing = Tracing(config)
    try:
        yield tracing
    finally:
        await tracing.close()


def _parse_target(request: Request) -> OperationPath | None:
    """The operation of a request; None if it is none of Bedrock's. Whether messages are streamed is not known yet."""
    path = replace_alias(find_form(request), request.target.partition(b"?")[0])
    if path in _MESSAGES:
        return OperationPath(_MESSAGES[path])
    try:
        return parse_path(path.decode("latin-1"))
    except ValueError:
        return None


class _TracedResponder(ResponderWrapper):
    """Wraps the responder of one call and observes the call, to fill in the attributes of its span."""

    def __init__(self, span: Span, operation: str, model: str, responder: Responder) -> None:
        super().__init__(responder)
        self._span = span
        self._operation = operation
        self._model = model
        self._has_written = self._is_finished = False

    # The responder.

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        if self._span.is_recording():
            self._record_head(status, dict(headers))
        self._responder.start(status, headers, length)

    def write(self, data: bytes) -> None:
        if data and not self._has_written:
            self._has_written = True
            self._span.add_event("price_keeper.first_byte")
        self._responder.write(data)

    def finish(self) -> None:
        self._is_finished = True
        self._responder.finish()

    def abort(self) -> None:
        if not self._is_finished:
            self._record_error("cut")
        self._responder.abort()

    # The request's trace.

    def on_authenticated(self, caller: Caller) -> None:
        self._span.set_attribute("price_keeper.org", caller.org)
        if caller.app is not None:
            self._span.set_attribute("price_keeper.app", caller.app)

    def on_completed(self, receipt: Receipt | None) -> None:
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

    def on_never_sent(self) -> None:
        pass

    def end_span(self) -> None:
        if not self._is_finished and self._responder.is_disconnected:
            self._span.set_attribute("price_keeper.caller_left", True)
        self._span.update_name(f"{self._operation} {self._model[:MAX_ATTRIBUTE_CHARS]}".strip())
        self._span.end()

    def _record_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        attributes = {
            name: headers[header].decode("latin-1") for header, name in _HEADER_ATTRIBUTES.items() if header in headers
        }
        self._model = attributes.setdefault(REQUESTED_MODEL, self._model)
        self._span.set_attributes(attributes)
        self._span.set_attribute("http.response.status_code", status)
        if _PERCENT in headers:
            self._span.set_attribute("price_keeper.quota_pct", int(headers[_PERCENT]))
        if status >= 400:
            self._record_error(headers.get(_ERROR, str(status).encode()).decode("latin-1").partition(":")[0])
        elif _MODEL in headers:
            self._span.set_attribute("gen_ai.response.model", headers[_MODEL].decode())

    def _record_error(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)


class _PathRedactor(logging.Filter):
    """Removes the receiver's URL path from log messages, because some receivers expect their API key there."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def filter(self, record: logging.LogRecord) -> bool:
        if self._path:
            record.msg, record.args = record.getMessage().replace(self._path, "/..."), ()
        return True


class _CountingExporter(SpanExporter):
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
