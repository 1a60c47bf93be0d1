"""The examples of docs/api.md, as a reader pastes them, against `price-keeper dev`; and what the audit tells then."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from pathlib import Path

from price_keeper.cli.dev_command import DEMO_ORG as DEMO

from tests.support.commands import ROOT, SECONDS, call_in_process, price_keeper, sidecar

EXAMPLES = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)


def test_api_examples_run_as_documented(tmp_path: Path) -> None:
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=tmp_path) as running:
        assert f"admin key     in {tmp_path}/data/admin-key" in running.startup_output
        key = (tmp_path / "data" / "admin-key").read_text().strip()
        assert key not in running.startup_output
        script = "\n".join(["set -eu", *EXAMPLES]).replace("http://127.0.0.1:8081", running.control)
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        assert '"cost_usd_micros":"6000"' in done.stdout
        assert '"spent_usd_micros":"6000"' in done.stdout
        request = urllib.request.Request(f"{running.control}/api/v1/orgs/{DEMO}", headers={"X-API-Key": key})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            assert json.load(answer)["settings"]["org_name"] == "demo"
        assert key not in running.errors
    audit = price_keeper("audit", "Acme", "--data-dir", "data", folder=tmp_path)
    assert audit.returncode == 0, audit.stderr
    lines = audit.stdout.splitlines()
    assert re.fullmatch(r"\S+Z  override.clear of shop, by admin from 127.0.0.1", lines[0])
    assert '    label: "economy" -> -' in lines
    assert any(re.fullmatch(r"\S+Z  org.put, by admin from 127.0.0.1", line) for line in lines)


def test_commands_leave_audit_records(tmp_path: Path) -> None:
    org = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
    settings = {
        "org_name": "Acme",
        "timezone": "UTC",
        "quota_scope": "APP",
        "model_ordering": ["premium"],
        "quotas": {"premium": 5},
    }
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=tmp_path) as running:
        pasted = running.exports
        assert "demo" in price_keeper("org", "list", folder=tmp_path, **pasted).stdout
        for arguments, stdin in (
            (("org", "put", org, "-"), json.dumps(settings)),
            (("org", "put", org, "-"), json.dumps(settings | {"quotas": {"premium": 7}})),
            (("app", "put", org, "shop", "-"), '{"app_name": "Shop"}'),
            (("override", "set", org, "premium", "--app", "shop", "--reason", "a demo"), ""),
            (("override", "clear", org, "--app", "shop"), ""),
        ):
            done = call_in_process(*arguments, folder=tmp_path, stdin=stdin, **pasted)
            assert done.returncode == 0, done.stderr
    place = ("--data-dir", "data")
    result = call_in_process("audit", org, "--json", *place, folder=tmp_path)
    records = json.loads(result.stdout)
    made = "credentials.make"
    actions = ["override.clear", "override.set", made, "app.put", "org.put", made, "org.put"]
    assert [each["action"] for each in records] == actions
    assert {(each["who"], each["address"]) for each in records} == {("admin", "127.0.0.1")}
    assert (records[4]["before"]["quotas"], records[4]["after"]["quotas"]) == ({"premium": 5}, {"premium": 7})
    short = call_in_process("audit", org, "--limit", "1", *place, folder=tmp_path)
    assert len(re.findall("override.clear", short.stdout)) == 1
    assert "app.put" not in short.stdout
    refused = call_in_process("audit", "nobody", *place, folder=tmp_path)
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
