"""What a real sidecar writes on standard error: lines that can be read by programs, and nothing that is secret."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

from tests.support.observed_sidecar import ADMIN_KEY, APP, ORG, SECRET, run_observed, token
from tests.support.simulated import DEFAULT_KEYS, bedrock_process
from tests.support.workers import wait_until

PROMPT = "what-nobody-else-is-to-read"
LONG = f"{PROMPT} " + "word " * 3000  # three thousand tokens: a cent for premium


@dataclass
class Logged:
    text: str
    lines: list[dict[str, object]]
    secrets: list[str]
    cut_off: str  # Bedrock's id of an answer that broke off

    def about(self, words: str) -> list[dict[str, object]]:
        return [line for line in self.lines if words in str(line["message"])]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    """At the lowest level, and with all that makes a sidecar speak."""
    chosen = {"logs": "json", "log_level": "debug"}
    with (
        bedrock_process() as bedrock,
        run_observed(tmp_path_factory.mktemp("logged"), bedrock.url, telemetry=chosen) as it,
    ):
        shown = token()
        app = f"/api/v1/orgs/{ORG}/apps/{APP}"
        retrieval = json.loads(it.control("PUT", app, {"app_name": APP}).body)["secret_retrieval_token"]
        secret = json.loads(it.control("GET", f"{app}/credentials/secret", X_Retrieval_Token=retrieval).body)[
            "client_secret"
        ]
        body = {"messages": [{"role": "user", "content": [{"text": LONG}]}]}
        wait_until(lambda: it.call(body=body).status and it.value("alerts_raised_total") > 0)  # the quota is spent
        override = {"label": "premium", "reason": "for a while", "until": None}
        it.control("PUT", f"{app}/override", {name: value for name, value in override.items() if value})
        bedrock.plan({"usage": "none"})
        it.call("economy", body=body)
        it.call(Authorization=f"Bearer {shown[:-4]}AAAA")
        it.call(Authorization=f"Bearer {secret}")
        it.call(X_Amz_Security_Token=shown)
        it.control("POST", "/auth/token", {"client_id": f"org-{ORG}-app-{APP}", "client_secret": f"{secret}x"})
        tokens = json.loads(
            it.control("POST", "/auth/token", {"client_id": f"org-{ORG}-app-{APP}", "client_secret": secret}).body
        )
        for _ in range(2):  # the second use of a refresh token ends its session
            it.control("POST", "/auth/refresh", {"refresh_token": tokens["refresh_token"]})
        it.control("GET", "/api/v1/orgs", X_API_Key=f"{ADMIN_KEY}x")
        bedrock.plan({"fault": "cut", "after_frames": 2})
        cut_off = it.cut_off()["x-amzn-RequestId"]
        wait_until(lambda: it.value("unflushed_usd") == 0)
        assert it.running.stop() == 0
        text = it.running.errors
    secrets = [shown, shown[:60], secret, retrieval, tokens["access_token"], tokens["refresh_token"]]
    secrets += [ADMIN_KEY, SECRET, DEFAULT_KEYS.secret_key, PROMPT]
    return Logged(text, [json.loads(line) for line in text.splitlines()], secrets, cut_off)


def test_no_log_level_shows_secret_token_or_prompt(logged: Logged) -> None:
    assert len(logged.lines) >= 3  # or there was nothing to see
    for secret in logged.secrets:
        assert secret not in logged.text
    assert not re.search(r"eyJ[\w-]+\.", logged.text)


def test_every_line_is_json_with_time_level_and_logger(logged: Logged) -> None:
    for line in logged.lines:
        assert {"time", "level", "logger", "message"} <= line.keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line["time"]))
        assert str(line["logger"]).startswith("price_keeper.")
        assert str(line["message"]).isprintable()


def test_significant_events_are_logged(logged: Logged) -> None:
    assert logged.about("threshold reached")
    assert logged.about(" now (before: ")
    assert logged.about("cut or broken")


def test_line_about_response_has_its_request_id(logged: Logged) -> None:
    (line,) = logged.about("cut or broken")
    assert line["bedrock_request_id"] == logged.cut_off
