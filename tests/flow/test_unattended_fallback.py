"""Fallback of apps that spend a label and are silent then, by a real process, whose event loop is uvloop's."""

from __future__ import annotations

from pathlib import Path

from tests.support.observed_sidecar import ORG, run_observed, token
from tests.support.workers import wait_until

APPS = [f"silent-{number}" for number in range(12)]
QUOTA = 500  # micro-dollars; a call costs more


def test_fallback_of_silent_apps_needs_no_further_call(tmp_path: Path) -> None:
    with run_observed(tmp_path) as it:
        for app in APPS:
            settings = {"app_name": app, "quotas": {"premium": QUOTA, "economy": 10_000_000}}
            assert it.control("PUT", f"/api/v1/orgs/{ORG}/apps/{app}", settings).status == 201
        for app in APPS:
            assert it.call(Authorization=f"Bearer {token(app)}").status == 200
        wait_until(lambda: it.value("budget_moves_total") == len(APPS))
