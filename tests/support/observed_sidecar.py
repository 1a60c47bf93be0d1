"""A sidecar that served calls of every kind, and what its /metrics say of them."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from bedrock_simulator import DEFAULT_KEYS
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService

from tests.support.commands import ROOT, SECONDS, Sidecar, sidecar
from tests.support.hard_budget_processes import noon_time_zone

ORG = "c0000000-0000-4000-8000-00000000000e"
APP = "watched"
SECRET = "what the sidecar of these tests signs its tokens with"
ADMIN_KEY = "the-admin-key-of-these-tests-long-enough"
QUOTAS = {"premium": 20_000, "economy": 10_000_000}  # micro-dollars: two cents for the first
ENVIRONMENT = {
    "PRICE_KEEPER_JWT_SECRET": SECRET,
    "PRICE_KEEPER_API_KEY": ADMIN_KEY,
    "AWS_ACCESS_KEY_ID": DEFAULT_KEYS.access_key,
    "AWS_SECRET_ACCESS_KEY": DEFAULT_KEYS.secret_key,
}
TURN = {"messages": [{"role": "user", "content": [{"text": "hello there"}]}]}


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def samples_of(text: str) -> list[Sample]:
    """Of Prometheus's text format, as it is written here. Fails of what is none."""
    found = []
    for line in text.splitlines():
        if not line.startswith("#"):
            matched = re.fullmatch(r'([a-z0-9_]+)(?:\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)', line)
            assert matched, line
            labels = dict(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', matched[2] or ""))
            found.append(Sample(matched[1], labels, float(matched[3])))
    return found


class ObservedResponse(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def ask(method: str, url: str, body: Any = None, **headers: str) -> ObservedResponse:
    request_headers = {name.replace("_", "-"): value for name, value in headers.items()} | {
        "Content-Type": "application/json"
    }
    payload = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, payload, request_headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return ObservedResponse(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as refused:
        return ObservedResponse(refused.code, refused.headers, refused.read())


def token(app: str = APP, org: str = ORG) -> str:
    return (
        TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", time.time).mint_access(org, app).token
    )


class Scrape:
    def __init__(self, text: str) -> None:
        self.text = text
        self.all = samples_of(text)

    def samples(self, name: str, **labels: str) -> list[Sample]:
        """Those that have these labels, among others."""
        named = [each for each in self.all if each.name == f"price_keeper_{name}"]
        return [each for each in named if labels.items() <= each.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        return sum(each.value for each in self.samples(name, **labels))


@dataclass
class ObservedSidecar:
    running: Sidecar

    def call(
        self, label: str = "premium", path: str = "converse", body: Any = TURN, **headers: str
    ) -> ObservedResponse:
        request_headers = {"Authorization": f"Bearer {token()}"} | headers
        return ask("POST", f"{self.running.data}/model/{label}/{path}", body, **request_headers)

    def cut_off(self, **headers: str) -> Mapping[str, str]:
        """The body of a response that breaks off, as these headers or the simulator's plan make it."""
        request_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        request_headers |= {"Authorization": f"Bearer {token()}", "Content-Type": "application/json"}
        url, body = f"{self.running.data}/model/premium/converse-stream", json.dumps(TURN).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body, request_headers), timeout=SECONDS) as answer:
            try:
                answer.read()
            except (OSError, http.client.HTTPException):
                return answer.headers
        raise AssertionError("it came to its end")

    def control(self, method: str, path: str, body: Any = None, **headers: str) -> ObservedResponse:
        return ask(method, f"{self.running.control}{path}", body, **{"X_API_Key": ADMIN_KEY} | headers)

    def scrape(self) -> Scrape:
        return Scrape(ask("GET", f"{self.running.control}/metrics").body.decode())

    def value(self, name: str, **labels: str) -> float:
        return self.scrape().value(name, **labels)


@contextmanager
def run_observed(
    folder: Path, bedrock: str = "simulated", more_labels: dict[str, Any] | None = None, **sections: Any
) -> Iterator[ObservedSidecar]:
    labels = yaml.safe_load((ROOT / "config.yaml").read_text())["labels"] | (more_labels or {})
    config = {
        "listen": {"data": "127.0.0.1:0", "control": "127.0.0.1:0"},
        "upstream": {"endpoint": bedrock},
        "store": {"path": "price-keeper.db"},
        "journal": {"dir": "journal", "flush_interval_secs": 0.1, "flush_interval_max_secs": 0.3},
        "labels": {name: label | {"price_source": "config"} for name, label in labels.items()},
        **sections,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    # Started by `env`, so that the kernel shows the command line and the environment that it was started with.
    with sidecar("serve", folder=folder, wrapper_command=("env",), **ENVIRONMENT) as running:
        result = ObservedSidecar(running)
        settings = {
            "org_name": "Acme",
            "timezone": noon_time_zone(),
            "quota_scope": "APP",
            "model_ordering": list(QUOTAS),
            "quotas": QUOTAS,
        }
        assert result.control("PUT", f"/api/v1/orgs/{ORG}", settings).status == 201
        yield result
        assert "Traceback" not in running.errors


def exercise(it: ObservedSidecar) -> None:
    """Something of everything that is counted: answers, refusals, retries, tokens, secrets."""
    assert it.call().status == 200
    assert it.call(path="converse-stream").status == 200
    assert it.call("economy", "invoke", {"messages": [{"role": "user", "content": [{"text": "hi"}]}]}).status == 200
    assert it.call("nobody").status == 400
    assert it.call(Authorization="Bearer of-no-token").status == 403
    again = {"amz_sdk_invocation_id": "1f0c6f1e-6f0b-4e55-9b5e-0c1a5be0c9a7"}
    assert [it.call(**again).status for _ in range(2)] == [200, 200]
    app = f"/api/v1/orgs/{ORG}/apps/{APP}"
    made = json.loads(it.control("PUT", app, {"app_name": APP}).body)["secret_retrieval_token"]
    for status in (200, 401):
        assert it.control("GET", f"{app}/credentials/secret", X_Retrieval_Token=made).status == status
