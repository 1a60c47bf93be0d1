"""`price-keeper demo`: the budget falls back and refuses, and nothing is left behind, however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from price_keeper.cli import demo_command

from tests.support.commands import SECONDS, build_environment, call_in_process, price_keeper, restore_sigint


def _left(folder: Path) -> list[str]:
    """Files below the temporary folder, and processes that were started there."""
    commands = [_read_command(process) for process in Path("/proc").glob("[0-9]*")]
    return [*map(str, folder.iterdir()), *(command for command in commands if str(folder) in command)]


def _read_command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # it has ended
        return ""


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return price_keeper("demo", *words, folder=folder, TMPDIR=str(folder))


def test_demo_falls_back_label_by_label_then_refuses(tmp_path: Path) -> None:
    done = _run(tmp_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    calls: list[dict[str, Any]] = json.loads(done.stdout)["calls"]
    assert [served for served, _ in groupby(call["served"] for call in calls)] == [
        "premium",
        "standard",
        "economy",
        None,
    ]
    assert {call["asked"] for call in calls} == {"premium"}
    for call, following in pairwise(calls):
        is_spent = call["spent_usd_micros"] >= call["quota_usd_micros"]
        assert is_spent is (following["served"] != call["served"])
    assert (calls[-1]["status"], [call["status"] for call in calls[:-1]]) == (400, [200] * (len(calls) - 1))
    assert _left(tmp_path) == []


def test_demo_tells_each_step_in_words(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    steps = [
        "The administrator gives the app 'Shop front' of 'Acme' a budget for each day:",
        "premium    $0.10",
        "call  1  served by premium",
        "The budget of premium is spent, so standard serves. The app changed nothing.",
        "The budget of standard is spent, so economy serves. The app changed nothing.",
        "The last budget is spent. The next call is refused before it costs anything:",
        "HTTP 400",
        "app 'Shop front' of 'Acme' has used today's budget: premium $0.1",
        "Nothing of this stays on your machine.",
    ]
    places = [done.stdout.find(step) for step in steps]
    assert places == sorted(places), done.stdout
    assert -1 not in places


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_demo_interrupted_leaves_nothing(tmp_path: Path, stop: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "price_keeper.cli", "demo"],
        cwd=tmp_path,
        env=build_environment({"TMPDIR": str(tmp_path)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_sigint,
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "call  1" in line)
        assert _left(tmp_path) != []
        process.send_signal(stop)
        _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (130, "")
    assert _left(tmp_path) == []


def test_demo_whose_sidecar_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such module' >&2\n")
    broken.chmod(0o700)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(demo_command.sys, "executable", str(broken))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    done = call_in_process("demo", folder=tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "price-keeper: the sidecar of the demo did not start: no such module\n",
    )
    assert _left(temporary) == []
