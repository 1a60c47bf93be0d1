"""How metrics are written: histograms, names that callers chose, and the samples of several processes together."""

from __future__ import annotations

import pytest
from price_keeper.telemetry.metrics import (
    ADDED_LATENCY_SECONDS,
    QUOTA_USED_RATIO,
    REQUEST_DURATION_SECONDS,
    REQUESTS,
    SCOPES,
    MetricsRegistry,
)
from price_keeper.telemetry.request_stats import Distribution
from price_keeper.workers.worker_group import merge_samples

from tests.support.observed_sidecar import samples_of

FEW = Distribution((0.5, 1.0), (3, 0, 2), 12.25)


def test_histogram_is_cumulative_with_sum_and_count() -> None:
    telemetry = MetricsRegistry()
    telemetry.add(REQUEST_DURATION_SECONDS, lambda: [({"label": "premium"}, FEW)])
    name = REQUEST_DURATION_SECONDS.name
    assert telemetry.render_own().splitlines() == [
        f"# HELP {name} {REQUEST_DURATION_SECONDS.help}",
        f"# TYPE {name} histogram",
        f'{name}_bucket{{label="premium",le="0.5"}} 3',
        f'{name}_bucket{{label="premium",le="1.0"}} 3',
        f'{name}_bucket{{label="premium",le="+Inf"}} 5',
        f'{name}_sum{{label="premium"}} 12.25',
        f'{name}_count{{label="premium"}} 5',
    ]


def test_histogram_without_labels_has_only_bounds() -> None:
    telemetry = MetricsRegistry()
    telemetry.add(ADDED_LATENCY_SECONDS, lambda: [({}, FEW)])
    assert f'{ADDED_LATENCY_SECONDS.name}_bucket{{le="+Inf"}} 5\n' in telemetry.render_own()
    assert f"{ADDED_LATENCY_SECONDS.name}_count 5\n" in telemetry.render_own()


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", 'price_keeper_scopes 1\n# TYPE x"} 2', "é"])
def test_label_value_cannot_inject_sample(name: str) -> None:
    telemetry = MetricsRegistry()
    telemetry.add(QUOTA_USED_RATIO, lambda: [({"app": name}, 0.5)])
    (sample,) = samples_of(telemetry.render_own())
    app = sample.labels["app"].replace(r"\n", "\n").replace(r"\"", '"').replace(r"\\", "\\")
    assert (sample.name, sample.value, app) == (QUOTA_USED_RATIO.name, 0.5, name)


def test_histograms_of_several_workers_stay_grouped() -> None:
    def of(count: int) -> str:
        telemetry = MetricsRegistry()
        telemetry.add(REQUEST_DURATION_SECONDS, lambda: [({"label": "premium"}, Distribution((0.5,), (count, 1), 1.0))])
        telemetry.add(SCOPES, lambda: count)
        return telemetry.render_own()

    text = merge_samples({0: of(1), 3: of(2)})
    assert text.count("# TYPE") == 2
    lines = text.splitlines()
    assert lines.index(f"# TYPE {SCOPES.name} gauge") == 2 + 8 + 1  # behind all of the histogram's eight samples
    found = {(each.name, each.labels["worker"], each.labels.get("le")): each.value for each in samples_of(text)}
    name = REQUEST_DURATION_SECONDS.name
    assert found[f"{name}_bucket", "3", "0.5"] == 2
    assert found[f"{name}_bucket", "3", "+Inf"] == found[f"{name}_count", "3", None] == 3
    assert found[f"{name}_count", "0", None] == 2
    assert found[SCOPES.name, "3", None] == 2


def test_metric_without_samples_has_help_and_type() -> None:
    telemetry = MetricsRegistry()
    telemetry.add(REQUESTS, lambda: ())
    assert telemetry.render_own() == f"# HELP {REQUESTS.name} {REQUESTS.help}\n# TYPE {REQUESTS.name} counter\n"
