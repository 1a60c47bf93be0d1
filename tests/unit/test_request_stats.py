"""What requests came to, as numbers: against a plain model, and never more of them than the configuration has names."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.errors import QuotaExceeded, Refusal, TokenRejected, UpstreamUnavailable
from price_keeper.operations import Operation
from price_keeper.telemetry.request_stats import (
    ADDED_LATENCY_BOUNDS,
    DURATION_BOUNDS,
    FIRST_BYTE_BOUNDS,
    NONE,
    OTHER_LABEL,
    STATUSES,
    Distribution,
    RequestStats,
)

SPANS = st.floats(0, 1000, allow_nan=False) | st.sampled_from(
    [*ADDED_LATENCY_BOUNDS, *DURATION_BOUNDS, *FIRST_BYTE_BOUNDS]
)


@given(st.lists(st.tuples(SPANS, SPANS, SPANS, SPANS, st.sampled_from([0, 200, 204, 301, 404, 429, 500, 599, 999]))))
def test_random_requests_match_plain_model(calls: list[tuple[float, float, float, float, int]]) -> None:
    traffic = RequestStats(["premium"])
    lane = traffic.get_stats("CONVERSE_STREAM", "premium")
    took, waited, ours, statuses = [], [], [], []
    for before, thinking, streaming, after, status in calls:
        began = 7.0
        sent = began + before
        first, last = sent + thinking, sent + thinking + streaming
        now = last + after
        lane.record_response(status, began, sent, first, last, now)
        took.append(now - began)
        waited.append(first - began)
        ours.append(sent - began + (now - last))
        statuses.append("cut" if not status else f"{min(status // 100, 5)}xx")
    assert dict(zip(STATUSES, lane.responses_by_status, strict=True)) == {
        each: statuses.count(each) for each in STATUSES
    }
    for distribution, seen, bounds in (
        (lane.durations, took, DURATION_BOUNDS),
        (lane.times_to_first_byte, waited, FIRST_BYTE_BOUNDS),
        (lane.added_latencies, ours, ADDED_LATENCY_BOUNDS),
    ):
        assert distribution == Distribution(bounds, _counted(seen, bounds), pytest.approx(sum(seen)))
    assert (len(traffic.measured_operations) == 1) is bool(calls)


def _counted(seen: list[float], bounds: tuple[float, ...]) -> tuple[int, ...]:
    """A bound belongs to what is below it, as `le` says."""
    places = [bisect_left(bounds, each) for each in seen]
    assert all(seen[n] <= bounds[place] for n, place in enumerate(places) if place < len(bounds))
    return tuple(places.count(place) for place in range(len(bounds) + 1))


@given(st.lists(st.text(max_size=20), max_size=50))
def test_callers_cannot_add_operation_stats(labels: list[str]) -> None:
    traffic = RequestStats(["premium", "economy"])
    for label in labels:
        for operation in Operation:
            traffic.get_stats(operation.name, label).record_response(200, 0, 0, 0, 0, 0)
    assert {lane.label for lane in traffic.operations} <= {"premium", "economy", OTHER_LABEL, NONE}
    assert len(traffic.operations) <= len(Operation) * 4


def test_refusal_counts_where_it_was_refused() -> None:
    traffic = RequestStats(["premium"])
    traffic.count_refusal(QuotaExceeded("all is spent"))
    traffic.count_refusal(UpstreamUnavailable("it is away"), traffic.get_stats("CONVERSE", "premium"))
    traffic.count_refusal(UpstreamUnavailable("it is away"), traffic.get_stats("CONVERSE", "premium"))
    counts = {
        (lane.operation, lane.label): dict(zip(STATUSES, lane.responses_by_status, strict=True))
        for lane in traffic.operations
    }
    assert counts[NONE, NONE]["4xx"] == 1
    assert counts["converse", "premium"]["5xx"] == 2
    assert (traffic.refusals_by_kind["quota_spent"], traffic.refusals_by_kind["upstream_away"]) == (1, 2)
    assert traffic.measured_operations == ()  # no times of what was never answered by Bedrock


def test_every_refusal_kind_is_reported_from_start() -> None:
    """A counter that begins with its first event has none that can be seen."""
    kinds = Refusal.__subclasses__()
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert set(RequestStats().refusals_by_kind) == {kind.counted_as for kind in kinds}
    assert set(RequestStats().refusals_by_kind.values()) == {0}


def test_refusal_kind_name_is_independent_of_class_name() -> None:
    every = [*Refusal.__subclasses__(), TokenRejected]
    assert len({kind.counted_as for kind in every}) == len(every)
    assert all("counted_as" in vars(kind) for kind in every)
    renamed = type("Renamed", (QuotaExceeded,), {})("all is spent")
    traffic = RequestStats()
    traffic.count_refusal(renamed)
    assert {kind for kind, count in traffic.refusals_by_kind.items() if count} == {"quota_spent"}


def test_first_byte_time_is_reported_for_streams_only() -> None:
    traffic = RequestStats(["premium"])
    for operation in Operation:
        traffic.get_stats(operation.name, "premium").record_response(200, 0.0, 0.1, 0.5, 0.5, 0.6)
    operations = {lane.operation for lane in traffic.operations if sum(lane.times_to_first_byte.counts)}
    assert operations == {"converse_stream", "invoke_stream", "chat_completions", "responses"}


def test_added_latency_is_summed_over_labels() -> None:
    traffic = RequestStats(["premium", "economy"])
    for label in ("premium", "economy"):
        traffic.get_stats("CONVERSE", label).record_response(200, 0.0, 0.002, 0.5, 0.5, 0.5)
    traffic.get_stats("INVOKE", "economy").record_response(200, 0.0, 9.0, 9.5, 9.5, 9.5)
    latencies = dict(traffic.sum_added_latencies())
    assert sum(latencies["converse"].counts) == 2
    assert latencies["converse"].total == 0.004
    assert latencies["invoke"].counts[-1] == 1
