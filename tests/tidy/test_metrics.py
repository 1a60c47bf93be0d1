"""Every metric is documented and named by the conventions of Prometheus, and the documents name no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from price_keeper.errors import Refusal
from price_keeper.telemetry.metrics import ALL_METRICS, Metric

ROOT = Path(__file__).parents[2]
METRICS_MD = ROOT / "docs" / "metrics.md"
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])

# Of a histogram and a summary these are parts.
_PARTS = ("_bucket", "_count", "_sum", "_created")
_UNITS = ("seconds", "usd", "bytes", "ratio")  # base units, and nothing like _ms or _percent
_NO_UNITS = ("_ms", "_millis", "_minutes", "_hours", "_percent", "_pct", "_kb", "_mb", "_micros", "_cents")


def test_every_metric_is_documented_once_and_no_other() -> None:
    described = re.findall(r"^\| `(price_keeper_\w+)` \|", METRICS_MD.read_text(), re.MULTILINE)
    assert sorted(described) == sorted(metric.name for metric in ALL_METRICS)


def test_every_refusal_kind_is_documented() -> None:
    rows = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", METRICS_MD.read_text(), re.MULTILINE)
    described = [kind for row in rows for kind in re.findall(r"`(\w+)`", row)]
    kinds = {each.counted_as for each in Refusal.__subclasses__()}
    assert kinds <= set(described)
    assert len(described) == len(set(described))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_only_existing_metrics(path: Path) -> None:
    known = {metric.name for metric in ALL_METRICS}
    named = set(re.findall(r"price_keeper_[a-z0-9_]*[a-z0-9]", path.read_text()))
    named -= {"price_keeper_request_id"}  # no metric
    assert {name for name in named if not any(name in (each, *_parts_of(each)) for each in known)} == set()


def _parts_of(name: str) -> list[str]:
    return [f"{name}{part}" for part in _PARTS]


def test_metric_names_and_helps_are_unique() -> None:
    assert (
        len({metric.name for metric in ALL_METRICS}) == len({metric.help for metric in ALL_METRICS}) == len(ALL_METRICS)
    )


@pytest.mark.parametrize("metric", ALL_METRICS, ids=lambda metric: metric.name)
def test_metric_names_follow_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"price_keeper(_[a-z][a-z0-9]*)+", metric.name)
    assert metric.name.endswith("_total") is (metric.kind == "counter")
    assert not metric.name.endswith((*_PARTS, *_NO_UNITS))
    assert not metric.name.removesuffix("_total").endswith(_NO_UNITS)
    if metric.kind == "histogram":
        assert metric.name.endswith(_UNITS)
    if metric.name.endswith("_info"):
        assert metric.help.startswith("1; ")
    assert "\n" not in metric.help
    assert metric.help
    assert not metric.help.endswith(".")
