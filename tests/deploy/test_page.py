"""docs/deployment.md: its links work, and the names and seconds in it match the code."""

from __future__ import annotations

import re

from price_keeper import app
from price_keeper.config.config_sections import JournalConfig
from price_keeper.ledger.recording import LAST_FLUSH_TIMEOUT_SECONDS, LAST_RETURN_TIMEOUT_SECONDS
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import Metric
from price_keeper.workers.supervisor import STOP_SECONDS

from tests.support.commands import ROOT
from tests.support.deploy_tools import containers, filter_kind, manifest, pods

DOCS = ROOT / "docs"
PAGE = (DOCS / "deployment.md").read_text()


def _anchors(text: str) -> set[str]:
    """As the page of a Markdown file on a web site has them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_existing_targets() -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links
    for link in links:
        name, _, anchor = link.partition("#")
        path = (DOCS / name).resolve() if name else DOCS / "deployment.md"
        if name == "performance.md" and not path.exists():
            continue  # `make bench` writes it
        assert path.exists(), link
        assert not anchor or anchor in _anchors(path.read_text()), link


def test_pods_and_containers_are_named_as_documented() -> None:
    found = manifest("sidecar.yaml")
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in filter_kind(found, "Deployment")]
    names = {container["name"] for pod in pods(found) for container in containers(pod)}
    selected = re.findall(r"-l ([\w./-]+)=([\w-]+)", PAGE)
    assert selected
    assert all(any(each.get(key) == value for each in labels) for key, value in selected)
    assert set(re.findall(r" -c ([\w-]+)", PAGE)) == {"price-keeper"} <= names


def test_documented_metrics_exist() -> None:
    known = {each.name for each in vars(metrics).values() if isinstance(each, Metric)}
    assert set(re.findall(r"price_keeper_[a-z_]+", PAGE)) <= known


def test_documented_seconds_match_code() -> None:
    assert (
        f"calls under way have {app.DRAIN_SECONDS:g} s to end, the last flush {LAST_FLUSH_TIMEOUT_SECONDS:g} s" in PAGE
    )
    assert f"giving back hard budgets {LAST_RETURN_TIMEOUT_SECONDS:g} s" in PAGE
    assert (
        f"needs {app.DRAIN_SECONDS + LAST_FLUSH_TIMEOUT_SECONDS + LAST_RETURN_TIMEOUT_SECONDS:g} s of it at most"
        in PAGE
    )
    assert f"Several workers take up to {STOP_SECONDS:g} s" in PAGE
    assert f"`journal.flush_interval_max_secs` ({JournalConfig().flush_interval_max_secs:g} s)" in PAGE
