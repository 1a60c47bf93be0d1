"""What `/metrics` of a real sidecar says: what happened, and no extra series for callers who invent names."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from price_keeper.server.acceptors import HTTP2_PREFACE
from price_keeper.telemetry.build_info import get_version
from price_keeper.telemetry.metrics import ALL_METRICS

from tests.support.observed_sidecar import APP, ORG, SECRET, ObservedSidecar, Scrape, ask, exercise, run_observed, token
from tests.support.workers import wait_until

AWAY = "away"  # a label whose endpoint has no listener
PRICES = {"input": 3, "output": 15, "cache_read": 0.3, "cache_write_5m": 3.75, "cache_write_1h": 6}
LABEL = {"model": "anthropic.claude-away-v1:0", "format": "anthropic", "prices_usd_per_1m": PRICES}


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedSidecar]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # no server listens there, and none can while it is held
        place = {"region": "us-east-1", "endpoint": f"http://127.0.0.1:{holder.getsockname()[1]}"}
        yield from _served(tmp_path_factory.mktemp("observed"), place)


def _served(folder: Path, away: dict[str, str]) -> Iterator[ObservedSidecar]:
    with run_observed(folder, more_labels={AWAY: {**LABEL, "endpoints": [away]}}, unknown_org="meter") as running:
        exercise(running)
        wait_until(lambda: running.value("unflushed_usd") == 0)
        yield running


@pytest.fixture(scope="module")
def first(it: ObservedSidecar) -> Scrape:
    """As it was before the tests that do something themselves."""
    return it.scrape()


def test_every_metric_is_exported_in_valid_format(first: Scrape) -> None:
    text = first.text
    described = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert sorted(described) == sorted(metric.name for metric in ALL_METRICS)
    assert first.all


def test_responses_are_counted_by_operation_label_and_status(first: Scrape) -> None:
    assert first.value("requests_total", operation="converse", label="premium", status="2xx") == 2  # the repeat joined
    assert first.value("requests_total", operation="converse_stream", label="premium", status="2xx") == 1
    assert first.value("requests_total", operation="invoke", label="economy", status="2xx") == 1
    assert first.value("requests_total", operation="converse", label="none", status="4xx") == 2
    assert first.value("joined_retries_total") == 1


def test_refusals_are_counted_by_kind(first: Scrape) -> None:
    before = {kind: first.value("refusals_total", kind=kind) for kind in ("invalid_request", "access_denied")}
    assert before == {"invalid_request": 1, "access_denied": 1}
    assert first.value("refusals_total") == 2


def test_durations_are_of_bedrock_responses_only(first: Scrape) -> None:
    whole = {each.labels["operation"]: each.value for each in first.samples("request_duration_seconds_count")}
    assert whole == {"converse": 2, "converse_stream": 1, "invoke": 1}
    begun = {each.labels["operation"]: each.value for each in first.samples("time_to_first_byte_seconds_count")}
    assert begun == {"converse_stream": 1}
    assert first.value("request_duration_seconds_count", label="premium") == 3
    took = first.value("request_duration_seconds_sum", operation="converse_stream")
    to_first = first.value("time_to_first_byte_seconds_sum", operation="converse_stream")
    added = first.value("added_latency_seconds_sum", operation="converse_stream")
    assert 0 < to_first < took
    assert 0 < added < took


def test_tokens_and_cost_are_counted_by_label(first: Scrape) -> None:
    assert first.value("recorded_requests_total", label="premium", estimated="false") == 3
    assert first.value("recorded_requests_total", estimated="true") == 0
    for label in ("premium", "economy"):
        used = {each.labels["type"]: each.value for each in first.samples("tokens_total", label=label)}
        assert set(used) == {"input", "output", "cache_read", "cache_write_5m", "cache_write_1h"}
        assert min(used["input"], used["output"]) > 0
    used = {each.labels["type"]: each.value for each in first.samples("tokens_total", label="premium")}
    assert first.value("recorded_usd_total", label="premium") == pytest.approx(
        (used["input"] * 3 + used["output"] * 15) / 1e6
    )
    assert first.value("unflushed_limit_usd") == 100


def test_secret_and_token_events_are_counted(it: ObservedSidecar, first: Scrape) -> None:
    counts = {each.labels["what"]: each.value for each in first.samples("retrieval_tokens_total")}
    assert counts == {"made": 2, "used": 1, "refused": 1}  # the org's own was never fetched
    shown = token("revoked")
    for known in ("false", "true"):
        before = it.value("revocation_lookups_total", known=known)
        assert it.call(Authorization=f"Bearer {shown}").status == 200
        assert it.value("revocation_lookups_total", known=known) == before + 1
    assert it.control("POST", "/auth/revoke", {"token": shown}).status < 300
    assert it.value("revocations_total", what="token") == 1
    assert it.call(Authorization=f"Bearer {shown}").status == 403
    assert it.value("refusals_total", kind="no_guess") == 1


def test_quota_ratio_mode_and_active_label_are_exported(first: Scrape) -> None:
    spent = first.value("recorded_usd_total", label="premium")
    used = first.value("quota_used_ratio", org=ORG, app=APP, label="premium")
    assert 0 < used <= spent / 0.02 + 1e-9
    assert first.value("quota_mode", org=ORG, app=APP, label="premium") == 0
    assert first.value("active_label_info", org=ORG, app=APP, label="premium") == 1
    assert first.value("scopes_untold") == 0


def test_build_and_price_sources_are_exported(first: Scrape) -> None:
    (build,) = first.samples("build_info")
    assert (build.labels["version"], build.value) == (get_version(), 1)
    sources = {each.labels["label"]: each.labels["source"] for each in first.samples("price_source_info")}
    assert sources == dict.fromkeys(("premium", "standard", "economy", AWAY), "config")
    assert (first.value("workers"), first.value("workers_up")) == (1, 1)


def test_connections_and_streams_are_exported(it: ObservedSidecar) -> None:
    port = urlsplit(it.running.data).port or 0
    with (
        socket.create_connection(("127.0.0.1", port)) as silent,
        socket.create_connection(("127.0.0.1", port)) as other,
    ):
        other.sendall(HTTP2_PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        wait_until(lambda: it.value("connections", protocol="unknown") == 1)
        wait_until(lambda: it.value("connections", protocol="h2") == 1)
        assert it.value("http2_streams") == 0
        silent.sendall(b"GET /in")
        wait_until(lambda: it.value("connections", protocol="http/1.1") >= 1)
    assert it.value("requests_under_way") == 0
    assert it.value("upstream_connections", state="idle") >= 1
    assert it.value("upstream_connections", state="busy") == 0


def test_non_http_input_counts_as_refusal(it: ObservedSidecar) -> None:
    before = it.value("requests_total", operation="none", status="4xx")
    port = urlsplit(it.running.data).port or 0
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.sendall(b"nonsense\r\n\r\n")
        assert b" 400 " in wire.recv(4096)
    assert it.value("requests_total", operation="none", status="4xx") == before + 1


def test_flood_of_callers_and_names_adds_no_series(it: ObservedSidecar) -> None:
    """Apps, models, paths and tokens of a caller's own invention: not one series more for any of them."""
    it.call(Authorization=f"Bearer {token('one-more')}")
    it.call("some-model")
    ask("GET", f"{it.running.data}/some/path", Authorization=f"Bearer {token()}")
    before = it.scrape().text.count("\n")

    def strange(number: int) -> None:
        it.call(f"model-{number}")
        it.call("premium", f"operation-{number}")
        it.call(Authorization=f"Bearer invented-{number}")
        ask("GET", f"{it.running.data}/path/{number}?{number}", Authorization=f"Bearer {token()}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(strange, range(60)))
    assert it.scrape().text.count("\n") == before
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(it.call, Authorization=f"Bearer {token(f'app-{number}')}") for number in range(150)]
        assert {call.result().status for call in calls} == {200}
    quotas = {each.labels["app"] for each in it.scrape().samples("quota_used_ratio")}
    assert len(quotas) == 100
    assert it.value("scopes_untold") == it.value("scopes") - 100
    grown = [line for line in it.scrape().text.splitlines() if "app-" in line]
    assert len(grown) <= 100 * 5  # two labels with two figures, and the active one
    assert it.scrape().text.count("\n") - before <= 100 * 5


def test_metrics_show_no_secret(it: ObservedSidecar) -> None:
    text = it.scrape().text
    for secret in (SECRET, token()[:40], "hello there"):
        assert secret not in text


def test_unreachable_bedrock_is_exported_by_label(it: ObservedSidecar) -> None:
    """Of an org without a budget, so that no chain says which labels it may have."""
    shown = f"Bearer {token(org='c0000000-0000-4000-8000-00000000000f')}"
    assert it.call(AWAY, Authorization=shown).status == 503
    scrape = it.scrape()
    assert scrape.value("refusals_total", kind="upstream_away") == 1
    assert scrape.value("requests_total", operation="converse", label=AWAY, status="5xx") == 1
    assert scrape.samples("request_duration_seconds_count", label=AWAY) == []
    assert scrape.value("recorded_usd_total", label=AWAY) == 0


def test_aborted_response_counts_as_cut(it: ObservedSidecar) -> None:
    it.cut_off(x_simulate_fault="cut", x_simulate_after_frames="2")
    assert it.value("requests_total", operation="converse_stream", label="premium", status="cut") == 1
    assert it.value("recorded_requests_total", label="premium", estimated="true") == 1
