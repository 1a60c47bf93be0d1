"""What clients and administrators do with one version, and then with the other: settings, secrets, sessions, usage."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from price_keeper.auth.refresh_sessions import REUSE_GRACE_SECONDS

from tests.soak.fleet import ADMIN_KEY
from tests.soak.tenants import (
    A_CALL,
    AMPLE,
    APPS,
    FLIPPING,
    HARD,
    LIMITED,
    MODELS,
    SPENDING,
    STEADY,
    SUBMITTED,
    TURNING,
    App,
    app_body,
    orgs,
)
from tests.soak.verdict import Verdict
from tests.support.hard_budget_processes import noon_time_zone
from tests.support.observed_sidecar import ObservedResponse, ask
from tests.together.versions import VersionedMember

TURN = {"messages": [{"role": "user", "content": [{"text": "hello"}]}], "inferenceConfig": {"maxTokens": 50}}
REVOKED_SECONDS = 30.0  # within which a revocation holds everywhere
REUSE_SECONDS = REUSE_GRACE_SECONDS + 1  # after that, a refresh token that comes again was stolen
SUBMISSION_TRIES = 50

FLIPS_AFTER_CALLS = 20
LIMITED_RPM = 40
HARD_SHARE = 0.6  # of what the calls of a hard budget would cost, it has

_MORE: dict[App, dict[str, Any]] = {
    FLIPPING: {"quotas": {"premium": FLIPS_AFTER_CALLS * A_CALL["premium"], "economy": AMPLE}},
    LIMITED: {"limits": {"rpm": LIMITED_RPM}},
}


@dataclass
class Clients:
    old: VersionedMember
    new: VersionedMember
    verdict: Verdict
    credentials: dict[str, str] = field(default_factory=dict)  # of STEADY's client
    submitted_usd_micros: Decimal = Decimal()

    # Settings: each version writes some, and both read all of them.

    def settle_tenants(self, calls: int) -> dict[str, str]:
        """Budgets are for this number of calls. Returns the zone of each org, where it is noon, so no day ends."""
        zone = noon_time_zone()
        hard_calls = calls * SPENDING.weight / sum(app.weight for app in APPS) / len(MODELS)
        hard_quotas = {label: int(hard_calls * HARD_SHARE * A_CALL[label]) for label in MODELS}
        for number, (org, body) in enumerate(orgs().items()):
            quotas = hard_quotas if org == HARD else body["quotas"]
            self._put(number, f"/api/v1/orgs/{org}", body | {"timezone": zone, "quotas": quotas})
        for number, app in enumerate(APPS):
            made = self._put(number, app.path, app_body(app, **_MORE.get(app, {})))
            self._fetch_secret(number + 1, app, made["secret_retrieval_token"])
        return dict.fromkeys(orgs(), zone)

    def _put(self, number: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return _expect(201, ask("PUT", f"{self._member(number).api}{path}", body, X_API_Key=ADMIN_KEY))

    def _member(self, number: int) -> VersionedMember:
        return (self.old, self.new)[number % 2]

    def _fetch_secret(self, number: int, app: App, retrieval_token: str) -> None:
        """From the version that did not make it, and never again from either."""
        path, shown = f"{app.path}/credentials/secret", {"X_Retrieval_Token": retrieval_token}
        client = _expect(200, ask("GET", f"{self._member(number).api}{path}", **shown))
        again = [ask("GET", f"{member.api}{path}", **shown).status for member in (self.old, self.new)]
        self.verdict.holds(f"a used retrieval token of {app.name}", "[401, 401]", again, is_so=again == [401, 401])
        if app is STEADY:
            self.credentials = {name: client[name] for name in ("client_id", "client_secret")}

    # Sessions.

    def check_session(self, issuer: VersionedMember, other: VersionedMember) -> None:
        """Made by one version, used and ended at the other."""
        way = f"{issuer.version_in_use.name} to {other.version_in_use.name}"
        issued, kept, ended = (self._log_in(issuer) for _ in range(3))
        refreshed = _expect(200, _refresh(other, issued))
        told = {
            "access token": _call(other, issued),
            "access token of the refreshed session": _call(issuer, refreshed),
        }
        time.sleep(REUSE_SECONDS)
        told |= {
            "refresh token used twice": _refresh(issuer, issued).status,
            "refresh token of the stolen session": _refresh(other, refreshed).status,
            "end of a session": self._end(other, ended),
            "refresh token of the ended session": _refresh(issuer, ended).status,
            "revocation": ask("POST", f"{other.api}/auth/revoke", {"token": kept["access_token"]}).status,
            "revoked access token": _until_refused(issuer, kept),
        }
        wanted = dict(zip(told, (200, 200, 401, 401, 200, 401, 200, 403), strict=True))
        odd = [f"{what}: {status}" for what, status in told.items() if status != wanted[what]]
        self.verdict.none(f"sessions of one version that the other treats otherwise, {way}", odd)

    def _log_in(self, member: VersionedMember) -> dict[str, Any]:
        return _expect(200, ask("POST", f"{member.api}/auth/token", self.credentials))

    def _end(self, member: VersionedMember, session: dict[str, Any]) -> int:
        url = f"{member.api}{STEADY.path}/sessions/{session['session_id']}"
        return ask("DELETE", url, X_API_Key=ADMIN_KEY).status

    # What only the new version has, and the old one must leave as it is.

    def check_org_key(self) -> None:
        org = f"/api/v1/orgs/{TURNING}"
        key = _expect(200, ask("POST", f"{self.new.api}{org}/admin-key", {"grace_hours": 0}, X_API_Key=ADMIN_KEY))
        shown = {"X_API_Key": key["admin_key"]}
        at_old = ask("GET", f"{self.old.api}{org}", **shown).status
        body = orgs()[TURNING] | {"timezone": noon_time_zone()}
        written = ask("PUT", f"{self.old.api}{org}", body, X_API_Key=ADMIN_KEY).status
        found = [at_old, written, ask("GET", f"{self.new.api}{org}", **shown).status]
        self.verdict.holds(
            "an org's key at the old version, a change of the org there, and the key after it",
            "[401, 200, 200]",
            found,
            is_so=found == [401, 200, 200],
        )

    # Usage from elsewhere.

    def submit_usage(self, number: int) -> None:
        """To both, under one id: it counts once, and both state the same cost."""
        label = list(MODELS)[number % len(MODELS)]
        usage = {"request_id": f"together-{number}", "label": label, "input_tokens": 10 * number, "output_tokens": 7}
        costs = {self._submit(member, usage) for member in (self._member(number), self._member(number + 1))}
        assert len(costs) == 1, f"{usage} costs {costs}"
        self.submitted_usd_micros += costs.pop()

    def _submit(self, member: VersionedMember, usage: dict[str, Any]) -> Decimal:
        for _ in range(SUBMISSION_TRIES):
            answer = ask("POST", f"{member.api}{SUBMITTED.path}/usage", usage, **member.bearer(SUBMITTED))
            if answer.status in (200, 201):
                return Decimal(json.loads(answer.body)["cost_usd_micros"])
            assert answer.status in (429, 500, 503), (answer.status, answer.body)
            time.sleep(0.2)
        raise AssertionError(f"{usage} could not be submitted")

    # Budgets while the store is away.

    def check_snapshot(self, member: VersionedMember) -> None:
        """What the version before it on this disk has written of budgets, this one goes by."""
        heard = {app.name: _answer(member, app) for app in (FLIPPING, SPENDING)}
        is_so = heard["flipping"] == (200, "economy") and heard["spending"][0] in (400, 503)
        wanted = "flipping served by economy, spending refused"
        name = member.version_in_use.name
        self.verdict.holds(f"{name} while the store is away, on the other's snapshot", wanted, heard, is_so=is_so)


def _expect(status: int, answer: ObservedResponse) -> dict[str, Any]:
    assert answer.status == status, (answer.status, answer.body)
    body: dict[str, Any] = json.loads(answer.body)
    return body


def _refresh(member: VersionedMember, session: dict[str, Any]) -> ObservedResponse:
    return ask("POST", f"{member.api}/auth/refresh", {"refresh_token": session["refresh_token"]})


def _call(member: VersionedMember, session: dict[str, Any]) -> int:
    url, headers = f"http://127.0.0.1:{member.data}/model/economy/converse", {}
    headers["Authorization"] = f"Bearer {session['access_token']}"
    return ask("POST", url, TURN, **headers).status


def _until_refused(member: VersionedMember, session: dict[str, Any]) -> int:
    deadline = time.monotonic() + REVOKED_SECONDS
    while (status := _call(member, session)) == 200 and time.monotonic() < deadline:
        time.sleep(0.2)
    return status


def _answer(member: VersionedMember, app: App) -> tuple[int, str]:
    url = f"http://127.0.0.1:{member.data}/model/premium/converse"
    answer = ask("POST", url, TURN, **member.bearer(app))
    return answer.status, answer.headers.get("x-price-keeper-label", "")
