"""A sidecar with the default configuration, and callers whose org is not registered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.commands import SECONDS
from tests.support.observed_sidecar import TURN, ObservedResponse, ObservedSidecar, ask, run_observed, token

SETTINGS = {
    "org_name": "New",
    "timezone": "UTC",
    "quota_scope": "APP",
    "model_ordering": ["premium"],
    "quotas": {"premium": 1_000_000},
}
IDENTITY = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedSidecar]:
    with run_observed(tmp_path_factory.mktemp("default")) as running:
        yield running


def until_served(call: Callable[[], ObservedResponse]) -> None:
    deadline = time.monotonic() + SECONDS
    while (answer := call()).status != 200:
        assert answer.status == 403
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)


def test_unregistered_org_is_refused_and_served_once_put(it: ObservedSidecar) -> None:
    org = str(uuid4())
    shown = {"Authorization": f"Bearer {token(org=org)}"}
    refused = it.call(**shown)
    assert (refused.status, refused.headers["x-amzn-errortype"]) == (403, "AccessDeniedException")
    assert f"`price-keeper org put {org} FILE`" in json.loads(refused.body)["message"]
    assert it.value("refusals_total", kind="unknown_org") == 1
    assert it.running.errors.count(f"org {org} is not registered; its calls are refused") == 1
    assert it.control("PUT", f"/api/v1/orgs/{org}", SETTINGS).status == 201
    assert it.call(**shown).status == 200  # at once, in the process that got the request to put it


def test_chat_completion_of_unregistered_org_is_refused(it: ObservedSidecar) -> None:
    org = str(uuid4())
    body = {"model": "premium", "messages": [{"role": "user", "content": "Hello"}]}
    answer = ask(
        "POST", f"{it.running.data}/openai/v1/chat/completions", body, Authorization=f"Bearer {token(org=org)}"
    )
    assert answer.status == 403
    assert org in answer.body.decode()


def test_model_selection_of_unregistered_org_shows_no_label(it: ObservedSidecar) -> None:
    answer = it.control("GET", f"/api/v1/orgs/{uuid4()}/model-selection")
    assert answer.status == 200
    served = {each["label"]: each["served_by"] for each in json.loads(answer.body)["labels"]}
    assert [served[label] for label in ("premium", "standard", "economy")] == [None] * 3


def test_identity_of_unregistered_org_is_refused_until_put(tmp_path: Path) -> None:
    auth = {"mode": "identity", "identity": {"org": IDENTITY, "app": "sample"}}
    with run_observed(tmp_path, auth=auth) as bound:
        url = f"{bound.running.data}/model/premium/converse"
        refused = ask("POST", url, TURN)
        assert refused.status == 403
        assert IDENTITY in json.loads(refused.body)["message"]
        assert bound.control("PUT", f"/api/v1/orgs/{IDENTITY}", SETTINGS).status == 201
        until_served(lambda: ask("POST", url, TURN))


def test_unknown_org_meter_serves_and_reports_unregistered_org(tmp_path: Path) -> None:
    org = str(uuid4())
    with run_observed(tmp_path, unknown_org="meter") as metering:
        for _ in range(2):
            assert metering.call(Authorization=f"Bearer {token(org=org)}").status == 200
        assert metering.value("unknown_orgs_served_total", why="unregistered") == 1
        assert metering.running.errors.count(f"org {org} is not registered; its calls are served and metered") == 1
