"""Copies of a journal, as a disk's snapshot has them, are replayed while its sidecar lives and after it died."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.flow.test_worker_journals import SLOW, requests_in
from tests.support.commands import price_keeper
from tests.support.sidecar_crashes import SidecarSetup
from tests.support.simulated import BedrockProcess
from tests.support.workers import WorkerProcesses, build_setup, run_workers


@pytest.fixture
def lineup(tmp_path: Path, bedrock: BedrockProcess) -> SidecarSetup:
    made = build_setup(tmp_path, bedrock.url, 1, journal=SLOW)
    made.options = ()
    return made


def calls(workers: WorkerProcesses, number: int) -> None:
    assert {workers.call()[0] for _ in range(number)} == {200}


def copied(lineup: SidecarSetup, name: str, *, elsewhere: bool = True) -> None:
    """`elsewhere`: as on another machine, where the lock on the original cannot be seen."""
    shutil.copytree(lineup.journal, lineup.folder / name)
    if elsewhere:
        (lineup.folder / name / "lock").unlink()


def test_replay_of_snapshot_then_of_dead_node_counts_every_call(lineup: SidecarSetup) -> None:
    with run_workers(lineup) as workers:
        calls(workers, 5)
        copied(lineup, "snapshot")
        calls(workers, 6)
        workers.running.stop(signal.SIGKILL)
    assert price_keeper("replay", "snapshot", "--owner-is-dead", folder=lineup.folder).returncode == 0
    assert requests_in(lineup) == 5
    done = price_keeper("replay", "journal", "--json", folder=lineup.folder)
    assert requests_in(lineup) == 11
    assert (done.returncode, json.loads(done.stdout)["requests"]) == (0, 11)


def test_replay_of_snapshot_of_living_node_costs_no_later_call(lineup: SidecarSetup) -> None:
    with run_workers(lineup) as workers:
        calls(workers, 5)
        copied(lineup, "snapshot")
        assert price_keeper("replay", "snapshot", "--owner-is-dead", folder=lineup.folder).returncode == 0
        assert requests_in(lineup) == 5
        calls(workers, 23)
        assert workers.running.stop() == 0
    assert requests_in(lineup) == 28


def test_replay_of_copy_is_refused_while_its_owner_lives_and_asks_where_nobody_can_tell(lineup: SidecarSetup) -> None:
    with run_workers(lineup) as workers:
        calls(workers, 2)
        copied(lineup, "here", elsewhere=False)
        copied(lineup, "there")
        for options in ((), ("--owner-is-dead",)):
            done = price_keeper("replay", "here", *options, folder=lineup.folder)
            assert (done.returncode, done.stdout) == (1, "")
            assert "it is a copy of the journal in " in done.stderr
            assert "stop that process first" in done.stderr
        workers.running.stop(signal.SIGKILL)
    done = price_keeper("replay", "there", folder=lineup.folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert "confirm it with --owner-is-dead" in done.stderr
    assert requests_in(lineup) == 0
    assert price_keeper("replay", "here", folder=lineup.folder).returncode == 0  # the original is not locked
    assert price_keeper("replay", "there", "--owner-is-dead", folder=lineup.folder).returncode == 0
    assert requests_in(lineup) == 2
