"""Marked prompts and secrets of every kind go through a sidecar whose log tells all it can, into every kind of failure.
Then they are looked for wherever anything of them could have been left, and in every answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from bedrock_simulator import DEFAULT_KEYS
from price_keeper.auth.client_secrets import make_secret

from tests.support.commands import price_keeper
from tests.support.observed_sidecar import (
    ADMIN_KEY,
    APP,
    ENVIRONMENT,
    ORG,
    SECRET,
    ObservedResponse,
    ObservedSidecar,
    ask,
    run_observed,
    token,
)
from tests.support.otlp_receiver import otlp_receiver
from tests.support.simulated import BedrockProcess, bedrock_process
from tests.support.workers import wait_until

PROMPT = "marked-prompt-for-nobody-else"
HOOK_PATH, HOOK_SECRET = "marked-path-of-a-webhook", "marked-secret-of-a-webhook-0123456789"
WRONG_KEY = "marked-wrong-admin-key-0123456789"
WRONG_TOKEN = "eyJhbGciOiJIUzI1NiJ9.marked-claims.marked-signature"
RETRIEVAL = "marked-retrieval-token-that-is-none"
COOKIE = "marked-cookie"
TURN: dict[str, Any] = {"messages": [{"role": "user", "content": [{"text": PROMPT}]}]}
CLAUDE = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 9, **TURN}
CHAT = {"model": "premium", "messages": [{"role": "user", "content": PROMPT}]}
API = f"/api/v1/orgs/{ORG}"


@dataclass
class Played:
    """Each place by its name, with all that stands there."""

    places: dict[str, bytes] = field(default_factory=dict)
    answers: list[ObservedResponse] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)
    core_limit: str = ""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder, scenario = tmp_path_factory.mktemp("marked"), Played()
    with (
        otlp_receiver() as receiver,
        bedrock_process() as bedrock,
        pytest.MonkeyPatch.context() as more,
    ):
        more.setitem(ENVIRONMENT, "MARKED_HOOK", HOOK_SECRET)
        hook = {"url": f"https://receiver.invalid/{HOOK_PATH}", "secret_env": "MARKED_HOOK"}
        with run_observed(
            folder,
            bedrock.url,
            telemetry={"otlp_endpoint": receiver.url, "log_level": "debug"},
            alerts={"webhook": hook},
        ) as it:
            _clients_call(it, bedrock, scenario)
            _administrators_call(it, scenario)
            _strangers_call(it, scenario)
            wait_until(lambda: it.call("premium", "converse", TURN) and "receiver.invalid:443" in it.running.errors)
            _look(it, folder, scenario)
            assert it.running.stop() == 0
        scenario.places["log"] = (it.running.startup_output + it.running.errors).encode()
        scenario.places["traces"] = b"".join(receiver.bodies) + repr(receiver.headers).encode()
        scenario.places |= {f"file {each.name}": each.read_bytes() for each in folder.rglob("*") if _is_kept(each)}
        done = price_keeper("export", "--config", "config.yaml", "--out", "spent.csv", folder=folder, **ENVIRONMENT)
        scenario.places["export"] = (folder / "spent.csv").read_bytes() + done.stdout.encode() + done.stderr.encode()
        done = price_keeper("doctor", "--config", "config.yaml", folder=folder, **ENVIRONMENT)
        scenario.places["doctor"] = done.stdout.encode() + done.stderr.encode()
    return scenario


def _is_kept(path: Path) -> bool:
    return path.is_file() and path.name != "config.yaml"  # which the operator wrote, the webhook's address in it


def _clients_call(it: ObservedSidecar, bedrock: BedrockProcess, scenario: Played) -> None:
    paths = (("converse", TURN), ("converse-stream", TURN), ("invoke", CLAUDE), ("invoke-with-response-stream", CLAUDE))
    for trouble in ({}, {"fault": "throttle"}, {"fault": "quota"}, {"fault": "cut", "after_bytes": 60}):
        bedrock.plan(always=trouble)
        for path, body in paths:
            try:
                scenario.answers.append(it.call("economy" if path.startswith("converse") else "premium", path, body))
            except (OSError, URLError, ValueError):
                assert trouble  # an answer that was cut
    bedrock.plan(always={})
    scenario.answers += [
        it.call("unknown", "converse", TURN),
        it.call("premium", "converse", {**TURN, PROMPT: {"x": PROMPT}}),
        it.call("premium", "invoke", [PROMPT]),
        it.call("premium", "converse", TURN, Authorization=f"Bearer {WRONG_TOKEN}"),
        it.call("premium", "converse", TURN, X_Amz_Security_Token=WRONG_TOKEN, Authorization="AWS4 x"),
        it.call("premium", "converse", TURN, Cookie=COOKIE, X_Api_Key=WRONG_KEY),
        it.call("premium", f"nowhere-{PROMPT}", TURN),
        ask("POST", f"{it.running.data}/openai/v1/chat/completions", CHAT, Authorization=f"Bearer {token()}"),
        ask("POST", f"{it.running.data}/openai/v1/chat/completions", PROMPT, Authorization=f"Bearer {token()}"),
    ]


def _administrators_call(it: ObservedSidecar, scenario: Played) -> None:
    made = it.control("PUT", f"{API}/apps/{APP}", {"app_name": "watched"})
    retrieval = _json(made)["secret_retrieval_token"]
    path = f"{API}/apps/{APP}/credentials"
    secret = _json(it.control("GET", f"{path}/secret", X_Retrieval_Token=retrieval))["client_secret"]
    pair = {"client_id": f"org-{ORG}-app-{APP}", "client_secret": secret}
    session = _json(ask("POST", f"{it.running.control}/auth/token", pair))
    got = _json(ask("GET", f"{it.running.data}/credentials", Authorization=":".join(pair.values())))
    scenario.secrets |= {"retrieval token": retrieval, "client secret": secret, "container token": _tail(got["Token"])}
    scenario.secrets |= {name: _tail(session[name]) for name in ("access_token", "refresh_token")}
    usage = {
        "request_id": "r",
        "label": "premium",
        "input_tokens": 10**6,
        "output_tokens": 10**6,
    }  # past all thresholds
    scenario.answers += [
        ask("POST", f"{it.running.control}{API}/apps/{APP}/usage", usage, Authorization=f"Bearer {token()}"),
        it.control("GET", f"{path}/secret", X_Retrieval_Token=retrieval),
        it.control("PUT", f"{API}/apps/{APP}/override", {"label": "economy", "reason": "r"}),
        it.control("PUT", API, {"org_name": PROMPT, "quotas": {PROMPT: -1}, "client_secret": secret}),
        ask("POST", f"{it.running.control}/auth/revoke", {"token": session["refresh_token"]}),
        ask("POST", f"{it.running.control}/auth/refresh", {"refresh_token": session["refresh_token"]}),
        it.call("premium", "converse", TURN),
    ]


def _strangers_call(it: ObservedSidecar, scenario: Played) -> None:
    url, wrong = it.running.control, make_secret()
    scenario.secrets["a wrong client secret"] = wrong
    page = {"X_Price_Keeper_Page": "1", "Origin": url}
    scenario.answers += [
        ask("GET", f"{url}{API}", X_API_Key=WRONG_KEY),
        ask("GET", f"{url}{API}", Authorization=f"Bearer {WRONG_TOKEN}"),
        ask("GET", f"{url}{API}", Authorization=f"Basic {WRONG_TOKEN}"),
        ask("GET", f"{url}{API}/credentials/secret", X_Retrieval_Token=RETRIEVAL),
        ask("POST", f"{url}/auth/token", {"client_id": f"org-{ORG}", "client_secret": wrong}),
        ask("POST", f"{url}/auth/token", {"client_secret": wrong}),
        ask("POST", f"{url}/auth/refresh", {"refresh_token": WRONG_TOKEN}),
        ask("GET", f"{it.running.data}/credentials", Authorization=f"org-{ORG}:{wrong}"),
        ask("POST", f"{url}/status/session", {"kind": "admin", "secret": WRONG_KEY}, **page),
        ask("POST", f"{url}/status/session", {"kind": "client", "secret": WRONG_TOKEN}, **page),
        ask("GET", f"{url}/status/session", Cookie=f"price-keeper-{url.rpartition(':')[2]}={COOKIE}", **page),
    ]


def _look(it: ObservedSidecar, folder: Path, scenario: Played) -> None:
    url = it.running.control
    for path in ("/metrics", "/ready", "/health", "/", "/openapi.json", "/.well-known/jwks.json", "/status"):
        scenario.places[path] = ask("GET", url + path).body
    for path in (f"{API}/audit", f"{API}/apps/{APP}/aggregates/today", "/status/board", API, f"{API}/apps/{APP}"):
        scenario.places[path] = it.control("GET", path).body
    scenario.core_limit = _of_process(it, "limits").decode()
    scenario.places["command line"] = _of_process(it, "cmdline")
    scenario.places |= {f"open file {each.name}": each.read_bytes() for each in folder.rglob("*") if _is_kept(each)}


def _of_process(it: ObservedSidecar, name: str) -> bytes:
    path = Path(f"/proc/{it.running.process.pid}/{name}")
    return path.read_bytes() if path.exists() else b""  # of Linux alone


def _json(answer: ObservedResponse) -> Any:
    assert answer.status in (200, 201), answer.body
    return json.loads(answer.body)


def _tail(jwt: str) -> str:
    """The signature, which alone makes it one; its claims are ids and times."""
    return jwt.rpartition(".")[2]


def test_scenario_reached_every_failure(played: Played) -> None:
    """Or nothing could be found because nothing was there."""
    statuses = {each.status for each in played.answers}
    assert {200, 400, 401, 403, 404, 429} <= statuses
    log = played.places["log"].decode()
    assert "a response was cut or broken before it stated its usage" in log
    assert "receiver.invalid:443" in log  # and nothing else of the webhook's address
    assert len(played.places["traces"]) > 5000
    assert b"price_keeper_" in played.places["/metrics"]
    assert ORG.encode() in played.places["file price-keeper.db"] + played.places["export"]
    assert b"credentials.issue" in played.places[f"{API}/audit"] or b"app.put" in played.places[f"{API}/audit"]


def test_no_secret_or_prompt_is_found_anywhere(played: Played) -> None:
    marked = {
        "prompt": PROMPT,
        "webhook's path": HOOK_PATH,
        "webhook's secret": HOOK_SECRET,
        "wrong admin key": WRONG_KEY,
        "wrong token": _tail(WRONG_TOKEN),
        "wrong retrieval token": RETRIEVAL,
        "cookie": COOKIE,
        "admin key": ADMIN_KEY,
        "signing secret": SECRET,
        "AWS secret": DEFAULT_KEYS.secret_key,
        **played.secrets,
    }
    assert len(played.secrets) == 6
    found = [
        (what, where)
        for where, content in played.places.items()
        for what, secret in marked.items()
        if secret.encode() in content
    ]
    assert found == []


def test_no_refusal_repeats_input(played: Played) -> None:
    refusals = [each for each in played.answers if each.status >= 400]
    assert len(refusals) > 15
    for each in refusals:
        for secret in (ADMIN_KEY, WRONG_KEY, _tail(WRONG_TOKEN), RETRIEVAL, COOKIE, *played.secrets.values()):
            assert secret.encode() not in each.body + repr(dict(each.headers)).encode()


def test_core_dumps_are_disabled(played: Played) -> None:
    if not played.core_limit:
        pytest.skip("no /proc here, which has a process's limits")
    (line,) = [line for line in played.core_limit.splitlines() if line.startswith("Max core file size")]
    assert line.split()[4:6] == ["0", "0"]
