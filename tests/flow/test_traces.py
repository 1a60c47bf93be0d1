"""Traces of a real sidecar, as a real receiver of OTLP gets them; and that no call depends on one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult
from price_keeper import data_port_wiring
from price_keeper.config import parse_config
from price_keeper.config.config_sections import TelemetryConfig as Chosen
from price_keeper.errors import ConfigError
from price_keeper.exchange import Handler, Request, Responder
from price_keeper.telemetry import tracing
from price_keeper.telemetry.metrics import SPANS, MetricsRegistry

from tests.support.commands import ROOT
from tests.support.observed_sidecar import APP, ORG, ObservedResponse, ObservedSidecar, run_observed, token
from tests.support.otlp_receiver import OtlpReceiver, Span, otlp_receiver
from tests.support.simulated import BedrockProcess, bedrock_process

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{'1' * 32}-{PARENT}-00"
PROMPT = "what-nobody-else-is-to-read"
CLIENT = 3  # the kind of a span
LABELS = "{premium: {model: m, format: nova, prices_usd_per_1m: {input: 1, output: 2}}}"


def telemetry(receiver: OtlpReceiver, **more: Any) -> dict[str, Any]:
    return {"otlp_endpoint": receiver.url, **more}


@dataclass
class Traced:
    """What was answered, what Bedrock got, and what was traced of it."""

    receiver: OtlpReceiver
    answers: dict[str, ObservedResponse] = field(default_factory=dict)
    upstream: dict[str, dict[str, str]] = field(default_factory=dict)

    def span(self, name: str) -> Span:
        wanted = self.answers[name].headers["x-price-keeper-request-id"]
        (found,) = [each for each in self.receiver.spans if each.attributes["price_keeper.request_id"] == wanted]
        return found


@pytest.fixture(autouse=True)
def _nothing_is_exported_any_more() -> Iterator[None]:
    """Or what the exporter logs at last would be found in another test."""
    yield
    for thread in threading.enumerate():
        if thread.name in ("last traces", "OtelBatchSpanRecordProcessor"):
            thread.join(30)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with otlp_receiver() as receiver, bedrock_process() as bedrock:
        recorded = Traced(receiver)
        folder = tmp_path_factory.mktemp("traced")
        with run_observed(folder, bedrock.url, telemetry=telemetry(receiver)) as it:
            _call_everything(it, recorded, bedrock)
            recorded.answers["metrics"] = ObservedResponse(200, {}, it.scrape().text.encode())
            assert it.running.stop() == 0  # which exports what is left
        yield recorded


def _call_everything(it: ObservedSidecar, recorded: Traced, bedrock: BedrockProcess) -> None:
    body = {"messages": [{"role": "user", "content": [{"text": PROMPT}]}]}
    answers = recorded.answers
    answers["converse"] = it.call(body=body, traceparent=SAMPLED, tracestate="vendor=1")
    answers["stream"] = it.call("economy", "converse-stream", body)
    answers["unsampled"] = it.call(traceparent=UNSAMPLED)
    answers["broken"] = it.call(traceparent="00-nonsense", tracestate="vendor=2")
    answers["refused"] = it.call("nobody")
    answers["stranger"] = it.call(Authorization="Bearer of-no-token")
    bedrock.plan({"fault": "throttle"})
    answers["throttled"] = it.call()
    answers["long"] = it.call("m" * 1000)
    again = {"amz_sdk_invocation_id": "1f0c6f1e-6f0b-4e55-9b5e-0c1a5be0c9a7"}
    answers["first"], answers["joined"] = it.call(**again), it.call(**again)
    bedrock.plan({"fault": "cut", "after_frames": 2})
    it.cut_off()
    for entry in bedrock.ledger()["entries"]:
        recorded.upstream[entry["request_id"]] = {name.lower(): value for name, value in entry["headers"]}


def test_span_follows_conventions(traced: Traced) -> None:
    span, answer = traced.span("converse"), traced.answers["converse"]
    usage = json.loads(answer.body)["usage"]
    attributes = span.attributes
    model = "global.anthropic.claude-sonnet-4-5-20250929-v1:0"
    assert (span.name, span.kind, span.is_error) == ("chat premium", CLIENT, False)
    assert attributes.pop("price_keeper.cost_usd") == pytest.approx(
        (usage["inputTokens"] * 3 + usage["outputTokens"] * 15) / 1e6
    )
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "aws.bedrock",
        "gen_ai.request.model": "premium",
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": usage["inputTokens"],
        "gen_ai.usage.output_tokens": usage["outputTokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.cache_creation.input_tokens": 0,
        "http.response.status_code": 200,
        "aws.request_id": answer.headers["x-amzn-RequestId"],
        "price_keeper.request_id": answer.headers["x-price-keeper-request-id"],
        "price_keeper.operation": "converse",
        "price_keeper.org": ORG,
        "price_keeper.app": APP,
        "price_keeper.label": "premium",
        "price_keeper.mode": "NORMAL",
        "price_keeper.quota_pct": 0,
        "price_keeper.price_source": "config",
        "price_keeper.guardrail_units": 0,
        "price_keeper.is_estimated": False,
    }
    assert span.events == ["price_keeper.first_byte"]
    assert 0 < span.seconds < 30
    assert span.resource["service.name"] == "price-keeper"


def test_span_is_child_of_caller_and_parent_of_bedrock(traced: Traced) -> None:
    span = traced.span("converse")
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
    sent = traced.upstream[traced.answers["converse"].headers["x-amzn-RequestId"]]
    assert (sent["traceparent"], sent["tracestate"]) == (f"00-{TRACE}-{span.span_id}-01", "vendor=1")


def test_call_without_traceparent_starts_a_trace(traced: Traced) -> None:
    span = traced.span("stream")
    assert (span.name, span.parent_id) == ("chat economy", "")
    sent = traced.upstream[traced.answers["stream"].headers["x-amzn-RequestId"]]
    assert is_child_of(span, sent["traceparent"])
    assert span.attributes["gen_ai.usage.output_tokens"] > 0


def is_child_of(span: Span, traceparent: str) -> bool:
    """What Bedrock does would be under this span, and is sampled as well."""
    version, trace_id, span_id, flags = traceparent.split("-")
    return (version, trace_id, span_id, int(flags, 16) & 1) == ("00", span.trace_id, span.span_id, 1)


def test_unsampled_caller_gets_no_span(traced: Traced) -> None:
    number = traced.answers["unsampled"].headers["x-price-keeper-request-id"]
    assert number not in {each.attributes.get("price_keeper.request_id") for each in traced.receiver.spans}
    sent = traced.upstream[traced.answers["unsampled"].headers["x-amzn-RequestId"]]["traceparent"]
    assert sent.startswith(f"00-{'1' * 32}-")
    assert sent.endswith("-00")


def test_malformed_traceparent_is_ignored(traced: Traced) -> None:
    span = traced.span("broken")
    assert span.parent_id == ""
    sent = traced.upstream[traced.answers["broken"].headers["x-amzn-RequestId"]]
    assert "tracestate" not in sent
    assert is_child_of(span, sent["traceparent"])


@pytest.mark.parametrize(
    ("name", "status", "kind"),
    [
        ("refused", 400, "ValidationException"),
        ("stranger", 403, "AccessDeniedException"),
        ("throttled", 429, "ThrottlingException"),
    ],
)
def test_refused_call_is_an_error_span(traced: Traced, name: str, status: int, kind: str) -> None:
    span = traced.span(name)
    assert (span.is_error, span.attributes["error.type"]) == (True, kind)
    assert span.attributes["http.response.status_code"] == status
    assert "gen_ai.response.model" not in span.attributes
    assert "price_keeper.cost_usd" not in span.attributes


def test_cut_response_is_an_error_and_estimated(traced: Traced) -> None:
    (span,) = [each for each in traced.receiver.spans if each.attributes.get("error.type") == "cut"]
    assert span.is_error
    assert span.attributes["price_keeper.is_estimated"] is True


def test_joined_retry_has_span_without_usage(traced: Traced) -> None:
    number = traced.answers["first"].headers["x-price-keeper-request-id"]
    assert traced.answers["joined"].headers["x-price-keeper-request-id"] == number
    both = [each for each in traced.receiver.spans if each.attributes["price_keeper.request_id"] == number]
    assert sorted("price_keeper.cost_usd" in each.attributes for each in both) == [False, True]


def test_caller_names_are_bounded_and_prompts_absent(traced: Traced) -> None:
    span = traced.span("long")
    assert max(len(value) for value in span.attributes.values() if isinstance(value, str)) == 256
    assert len(span.name) < 300
    everything = b"".join(traced.receiver.bodies)
    answer = json.loads(traced.answers["converse"].body)["output"]["message"]["content"][0]["text"]
    for hidden in (PROMPT, answer, token()[:60], "of-no-token"):
        assert hidden.encode() not in everything


def test_exported_spans_are_counted(traced: Traced) -> None:
    assert f'{SPANS.name}{{what="made"}} 10\n' in traced.answers["metrics"].body.decode()
    assert len(traced.receiver.spans) == 10  # all but the one that was not wanted


@pytest.mark.parametrize("trouble", ["it refuses, then hangs", "it is not there"])
def test_failing_receiver_delays_no_call(tmp_path: Path, trouble: str) -> None:
    with otlp_receiver() as receiver:
        receiver.status = 503
        chosen = telemetry(receiver)
        if trouble == "it is not there":
            chosen["otlp_endpoint"] = "http://127.0.0.1:9"
        with run_observed(tmp_path, telemetry=chosen) as it:
            began = time.monotonic()
            for number in range(40):
                receiver.hangs = number >= 20
                assert it.call().status == 200
            assert time.monotonic() - began < 20
            assert it.value("spans_total", what="made") == 40
            assert it.value("spans_total", what="exported") == 0
            began = time.monotonic()
            assert it.running.stop() == 0
            assert time.monotonic() - began < 15
            assert "Bearer" not in it.running.errors
        assert bool(receiver.bodies) is (trouble != "it is not there")


class Stuck:
    """An exporter whose receiver never answers in time."""

    def export(self, _: Any) -> SpanExportResult:
        time.sleep(0.2)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None: ...


class Nobody:
    """A caller who has left."""

    is_disconnected = has_started = True

    def finish(self) -> None: ...


async def handler(_: Request, responder: Responder) -> None:
    responder.finish()


@asynccontextmanager
async def stuck(**chosen: Any) -> AsyncIterator[tuple[tracing.Tracing, Handler]]:
    with (
        patch.object(tracing, "OTLPSpanExporter", lambda **_: Stuck()),
        patch.object(tracing, "SHUTDOWN_TIMEOUT_SECONDS", 0.1),
    ):
        async with tracing.open_tracing(Chosen(otlp_endpoint="http://127.0.0.1:9", **chosen)) as made:
            yield made, made.wrap_handler(handler)


def asked(**headers: str) -> Request:
    shown = {name.encode(): value.encode() for name, value in headers.items()}
    return Request(b"POST", b"/model/premium/converse", shown, frozenset())


def counted(made: tracing.Tracing) -> dict[str, float]:
    return {labels["what"]: cast(float, count) for labels, count in made.samples()}


async def test_unexported_spans_are_dropped_beyond_bound() -> None:
    nobody = cast(Responder, Nobody())
    async with stuck() as (made, traced):
        began = time.process_time()
        for _ in range(3 * tracing.MAX_QUEUED_SPANS):
            await traced(asked(), nobody)
        assert time.process_time() - began < 20  # a tenth of a millisecond for each, and thirty times that at the worst
        assert len(made._batches._batch_processor._queue) <= tracing.MAX_QUEUED_SPANS
        assert counted(made)["made"] == 3 * tracing.MAX_QUEUED_SPANS
        assert counted(made)["exported"] == 0


def test_export_in_progress_does_not_delay_exit() -> None:
    """Its event loop waits for every thread that it has lent out."""
    answers = threading.Event()

    async def process() -> None:
        async with stuck() as (_, traced):
            await traced(asked(), cast(Responder, Nobody()))

    with patch.object(Stuck, "export", lambda *_: answers.wait(60)):
        began = time.monotonic()
        try:
            asyncio.run(process())
            assert time.monotonic() - began < 30
        finally:
            answers.set()


async def test_callers_cannot_flood_log(caplog: pytest.LogCaptureFixture) -> None:
    nobody = cast(Responder, Nobody())
    async with stuck() as (_, traced):
        for traceparent, tracestate in (("0" * 600, ""), (SAMPLED, "a" * 9000), (SAMPLED, "Of-No-Form=1")):
            await traced(asked(traceparent=traceparent, tracestate=tracestate), nobody)
    assert [each for each in caplog.records if each.name.startswith("opentelemetry.trace")] == []


async def test_receiver_path_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Some receivers want their key there."""
    chosen = Chosen(otlp_endpoint="http://127.0.0.1:9/key-of-ours")
    async with tracing.open_tracing(chosen) as made:
        await made.wrap_handler(handler)(asked(), cast(Responder, Nobody()))
    assert "127.0.0.1" in caplog.text
    assert "key-of-ours" not in caplog.text


async def test_sampling_ratio_applies_after_caller_decision() -> None:
    nobody = cast(Responder, Nobody())
    async with stuck(sample_ratio=0.0) as (made, traced):
        request = asked()
        await traced(request, nobody)
        assert counted(made)["made"] == 0
        assert int(request.headers[b"traceparent"][-2:], 16) & 1 == 0  # no service behind it samples either
        await traced(asked(traceparent=SAMPLED), nobody)
        assert counted(made)["made"] == 1
    async with stuck(sample_ratio=0.5) as (made, traced):
        for _ in range(400):
            await traced(asked(), nobody)
        assert 120 < counted(made)["made"] < 280  # eight standard deviations


async def test_local_requests_have_no_span() -> None:
    nobody = cast(Responder, Nobody())
    async with stuck() as (made, traced):
        for target in (b"/credentials", b"/inference-profiles", b"/model/a..b/converse", b"/%"):
            await traced(Request(b"GET", target, {}, frozenset()), nobody)
        assert counted(made)["made"] == 0


def test_tracing_packages_are_loaded_only_if_configured() -> None:
    code = (
        "import sys, price_keeper.cli, price_keeper.app; "
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


async def test_missing_tracing_packages_are_reported() -> None:
    text = f"telemetry: {{otlp_endpoint: 'http://127.0.0.1:4318'}}\nlabels: {LABELS}"
    missing = {"price_keeper.telemetry.tracing": None}
    with patch.dict(sys.modules, missing), pytest.raises(ConfigError, match=r"bedrock-price-keeper\[otel\]"):
        async with data_port_wiring.open_traces(parse_config(text, "test", {}), MetricsRegistry()):
            pass


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("otlp_endpoint: collector:4318", "telemetry.otlp_endpoint: expected http"),
        ("otlp_endpoint: http://user:pass@collector", "telemetry.otlp_endpoint: expected http"),
        ("otlp_endpoint: http://collector:4318/v1/traces", "without /v1/traces at its end"),
        ("otlp_endpoint: 'http://collector/?key=abc'", "telemetry.otlp_endpoint: expected http"),
        ("sample_ratio: 1.5", "telemetry.sample_ratio: expected 0 to 1"),
        ("sample_ratio: .nan", "telemetry.sample_ratio: expected a number"),
        ("logs: xml", "telemetry.logs: expected one of text, json"),
        ("log_level: trace", "telemetry.log_level: expected one of debug, info, warning, error"),
        ("otlp_endpont: x", 'did you mean "otlp_endpoint"'),
    ],
)
def test_tracing_configuration_mistakes_are_reported(said: str, complaint: str) -> None:
    text = (
        f"telemetry: {{{said}}}\nlabels: {{a: {{model: m, format: nova, prices_usd_per_1m: {{input: 1, output: 2}}}}}}"
    )
    with pytest.raises(ConfigError) as refused:
        parse_config(text, "test", {})
    (problem,) = refused.value.problems
    assert complaint in problem
    assert "pass@" not in problem
    assert "abc" not in problem
