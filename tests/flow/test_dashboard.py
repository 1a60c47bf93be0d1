"""The dashboard and the alert rules: every metric they query is in a scrape of a sidecar that served calls."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import yaml
from price_keeper.telemetry.metrics import ALL_METRICS

from tests.support.commands import ROOT
from tests.support.doc_pages import anchors
from tests.support.observed_sidecar import ObservedSidecar, Scrape, exercise, run_observed
from tests.support.prometheus import Prometheus, find_program, prometheus
from tests.support.workers import wait_until

GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboard.json").read_text())
RULES = GRAFANA / "alerts.yaml"
ALERTS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
TESTS = GRAFANA / "alerts_test.yaml"

# Told by Prometheus itself, of whatever it scrapes.
OF_PROMETHEUS = {"job", "instance", "le"}
VARIABLES = {"$__rate_interval": "5m", "$job": ".*", "$instance": ".*"}

# A healthy sidecar has no samples of these: no tracing, no threshold reached, no rate limits.
WITHOUT_DATA = ("spans_total", "alerts_raised_total", "leased{")


class Query(NamedTuple):
    where: str
    expression: str
    legend: str = ""


def queries_of_the_dashboard() -> list[Query]:
    return [
        Query(panel["title"], target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]


PANELS = queries_of_the_dashboard()
EVERY = [*PANELS, *(Query(alert["alert"], alert["expr"]) for alert in ALERTS)]


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedSidecar]:
    with run_observed(tmp_path_factory.mktemp("scraped")) as running:
        exercise(running)
        yield running


@pytest.fixture(scope="module")
def scrape(it: ObservedSidecar) -> Scrape:
    return it.scrape()


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bprice_keeper_\w+", expression))


def labels_in(query: Query) -> set[str]:
    matchers = "".join(re.findall(r"{([^}]*)}", query.expression))
    named = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
    grouped = [name.strip() for group in re.findall(r"\bby \(([^)]*)\)", query.expression) for name in group.split(",")]
    shown = re.findall(r"{{\s*(\w+)\s*}}", query.legend)
    return {*named, *grouped, *shown} - OF_PROMETHEUS


@pytest.mark.parametrize("query", EVERY, ids=lambda query: query.where)
def test_every_dashboard_metric_and_label_exists(scrape: Scrape, query: Query) -> None:
    metrics = metrics_in(query.expression)
    assert metrics
    exported = {f"{metric.name}{part}" for metric in ALL_METRICS for part in _parts(metric.kind)}
    assert metrics <= exported
    assert all(f"# TYPE {_family(name)} " in scrape.text for name in metrics)
    found = {label for each in scrape.all if each.name in metrics for label in each.labels}
    if not any(each.name in metrics for each in scrape.all):
        documented = (ROOT / "docs" / "metrics.md").read_text()
        rows = [line for line in documented.splitlines() for name in metrics if f"| `{_family(name)}` |" in line]
        found = {label for row in rows for label in re.findall(r"`(\w+)`", row.split("|")[2])}
    assert labels_in(query) <= found


def _parts(kind: str) -> tuple[str, ...]:
    return ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)


def _family(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_dashboard_is_complete() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "job", "instance"}
    places = {(x, y) for panel in panels for x, y in _cells(panel["gridPos"])}
    assert len(places) == sum(len(list(_cells(panel["gridPos"]))) for panel in panels)  # none lies on another
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert all('job=~"$job",instance=~"$instance"' in target["expr"] for target in panel["targets"])
    used = {name for query in PANELS for name in re.findall(r"\$\w+", query.expression)}
    assert used <= VARIABLES.keys()


def _cells(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    assert place["x"] + place["w"] <= 24
    for x in range(place["x"], place["x"] + place["w"]):
        yield from ((x, y) for y in range(place["y"], place["y"] + place["h"]))


def test_every_alert_has_instructions_and_test() -> None:
    tested = [each["name"] for each in yaml.safe_load(TESTS.read_text())["tests"]]
    assert tested == [alert["alert"] for alert in ALERTS]
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["description"].endswith(".")
    covered = metrics_in(" ".join(alert["expr"] for alert in ALERTS))
    wanted = ("store_trouble", "unflushed_usd", "journal_trouble", "quota_used_ratio", "active_label_flips_total",
              "refusals_total", "added_latency_seconds_bucket", "revocation_away_seconds", "price_trouble",
              "workers_up")  # fmt: skip
    assert {f"price_keeper_{name}" for name in wanted} <= covered


RUNBOOKS = ROOT / "docs" / "runbooks.md"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_every_alert_links_to_its_runbook(alert: dict[str, Any]) -> None:
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert ROOT / path == RUNBOOKS
    assert anchor in anchors(RUNBOOKS)
    section = RUNBOOKS.read_text().partition(f"\n## {alert['alert']}\n")[2].partition("\n## ")[0]
    assert anchor == alert["alert"].lower()
    assert re.findall(r"^- \*\*(\w+):\*\* \S", section, re.MULTILINE) == ["Symptom", "Impact", "Checks", "Fix"]


def test_every_runbook_has_its_alert() -> None:
    headings = re.findall(r"^## (.+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert headings == [alert["alert"] for alert in ALERTS]


def test_on_call_page_begins_with_what_matters_at_night() -> None:
    box = RUNBOOKS.read_text().partition("\n## ")[0]
    assert "> - **An app that this host has never served runs without a budget while the store is away**" in box
    assert "> - **Never delete or empty the journal's folder**" in box


def test_alert_rules_cover_what_operations_says_to_alert_on() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    table = guide.partition("\nAlert on these.")[2].partition("\n## ")[0]
    conditions = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named, alerted, charted = (
        metrics_in(" ".join(texts))
        for texts in (conditions, (alert["expr"] for alert in ALERTS), (query.expression for query in PANELS))
    )
    assert len(named) > 10
    assert {name for name in named if f"{name}_bucket" not in alerted} <= alerted
    assert {name for name in named if name.startswith("price_keeper_journal_")} <= charted


@pytest.mark.parametrize("what", [("check", "rules", RULES), ("test", "rules", TESTS)], ids=lambda what: what[0])
def test_promtool_accepts_rules_and_tests(what: tuple[str, str, Path]) -> None:
    command = [find_program("promtool"), *what[:2], what[2].name]
    done = subprocess.run(command, cwd=GRAFANA, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def server(it: ObservedSidecar, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    find_program("prometheus")
    target = urlsplit(it.running.control).netloc
    with prometheus(tmp_path_factory.mktemp("prometheus"), target, RULES) as running:
        wait_until(lambda: running.has_scraped(2))
        use_again(it)
        before = running.query("count_over_time(up[5m])")
        wait_until(lambda: running.has_scraped(int(before[0]["value"][1]) + 2))
        yield running


def use_again(it: ObservedSidecar) -> None:
    """So that rates are of something."""
    for label in ("premium", "economy"):
        it.call(label)
        it.call(label, "converse-stream")
    it.call("nobody")


@pytest.mark.parametrize("query", EVERY, ids=lambda query: query.where)
def test_prometheus_answers_every_query(server: Prometheus, query: Query) -> None:
    expression = query.expression
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    found = server.query(expression)
    if query in PANELS and not any(name in expression for name in WITHOUT_DATA):
        assert found, "there is nothing to be seen"
        assert all(set(re.findall(r"{{(\w+)}}", query.legend)) - {"app"} <= each["metric"].keys() for each in found)


def test_healthy_sidecar_fires_no_alert(server: Prometheus) -> None:
    firing = {each["metric"]["alertname"] for each in server.query('ALERTS{alertstate="firing"}')}
    assert firing - {"PriceKeeperLabelFlipped"} == set()
