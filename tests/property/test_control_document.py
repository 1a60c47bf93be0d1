"""What the OpenAPI document says of the control API holds: whatever is sent to an operation, an answer comes that the
document declares, in the form it declares, and never one that is a mistake of ours. Schemathesis finds what to send."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.control_harness import ADMIN_KEY, ORG, ControlHarness, open_control_harness
from tests.support.effort import seed, tries
from tests.support.engines import Engines

SECONDS = 900
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "missing_required_header",
    "ignored_auth",
)
# What is there, or hardly anything but 404 would come.
THERE = f"""
[parameters]
"path.org" = "{ORG}"
"path.app" = "shop"
"""
# Streams that have no end are tested in test_status_events.
LASTING = """
[[operations]]
include-path = "/status/events"
enabled = false
"""
# Wrong input may also be too long, which is reported first.
REJECTED = """
[checks]
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 409, 412, 413, 415, 429]
"""


@pytest.mark.parametrize("places", [THERE, ""], ids=["there", "anywhere"])
async def test_openapi_document_matches_behaviour(tmp_path: Path, places: str) -> None:
    (tmp_path / "schemathesis.toml").write_text(places + LASTING + REJECTED)
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path) as api:
        wrong = api.parts.login_throttle
        for failures in (wrong._by_address, wrong._by_client, wrong._malformed):
            failures._capacity = 10**6 * failures._interval  # or those who try keys are soon told nothing else
        await api.put_org()
        await api.put_app()
        code, report, statuses = await _tried(api, tmp_path)
        assert code == 0, report[-8000:]
        assert (await api.ask("GET", f"/api/v1/orgs/{ORG}")).status == 200
    # Else nothing but refusals was looked at.
    assert ({200, 207, 400, 401, 405, 409, 415} if places else {200, 400, 404}) <= statuses.keys()


async def _tried(api: ControlHarness, folder: Path) -> tuple[int | None, str, Counter[int]]:
    arguments = [
        *("run", f"{api.url}/openapi.json", "--header", f"X-API-Key:{ADMIN_KEY}", "--checks", ",".join(CHECKS)),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", str(tries(4)), "--continue-on-failure"),
        *("--suppress-health-check", "all", "--generation-database", "none", "--no-color", "--warnings", "off"),
        *("--seed", str(seed())),
        *("--report", "ndjson", "--report-ndjson-path", "events.ndjson"),
    ]
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("SCHEMATHESIS", "CI"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "schemathesis.cli", *arguments),
        cwd=folder,
        env=quiet,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(), _statuses(folder / "events.ndjson")


def _statuses(events: Path) -> Counter[int]:
    found: Counter[int] = Counter()
    for line in events.read_text().splitlines() if events.exists() else []:
        _count(json.loads(line), found)
    return found


def _count(value: object, found: Counter[int]) -> None:
    if isinstance(value, dict):
        status = value.get("status_code")
        if isinstance(status, int):
            found[status] += 1
        for part in value.values():
            _count(part, found)
    elif isinstance(value, list):
        for part in value:
            _count(part, found)
