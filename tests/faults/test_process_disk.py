"""A disk that is really full, a file that may not grow, a folder without write permission: for the journal and for
SQLite's file. It is reported, nothing is answered that is not recorded, and with room all is exact, without a restart.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import disks
from tests.support.commands import Sidecar, price_keeper
from tests.support.sidecar_crashes import SECRET, CrashLoad, SidecarSetup
from tests.support.sidecar_trials import (
    FaultTrial,
    fetch,
    price_by_hand,
    read_counts_by_label,
    read_cpu_seconds,
    read_metric,
    read_readiness,
    run_trial,
    wait_until,
)

SECONDS = float(os.environ.get("PRICE_KEEPER_AFFLICTED_SECONDS", "1"))
CALLERS = 3
POLICIES = ["serve", "refuse"] if SECONDS > 1 else ["refuse"]  # that it serves is what a missing table shows as well
DISK_MEGABYTES = 6
STORE_AWAY = "the store is away; the log says why"
NO_ROOM = "the journal cannot be written: No space left on device"
TOO_LARGE = 48 * 1024  # bytes of a file: less than SQLite's has at once, more than the log has at the end

with_disks = pytest.mark.skipif(bool(disks.why_unavailable()), reason=disks.why_unavailable())


@with_disks
def test_full_disk_of_journal_and_store_refuses_what_it_cannot_record(tmp_path: Path) -> None:
    with disks.small_disk(tmp_path, DISK_MEGABYTES) as disk, run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar(
            store={"path": str(disk / "price-keeper.db")}, journal={"dir": str(disk / "journal")}
        )
        with _under_load(lineup) as (running, load):
            disks.fill(disk)
            wait_until(lambda: read_readiness(running.control)["journal"] == NO_ROOM)
            wait_until(lambda: read_readiness(running.control)["store"] == STORE_AWAY)
            assert read_metric(running.control, "journal_trouble") == 1
            wait_until(lambda: load.failed_calls > 20)  # once the room is used up that had been taken beforehand
            refused = load.failed_calls
            _comes_back(running, load, lambda: disks.make_room(disk))
        _is_exact(trial, load, disk / "price-keeper.db")
        assert running.errors.count("\n") <= 8, running.errors  # starts and ends of troubles
    print(f"{refused} calls refused on a full disk, {len(load.complete_requests)} answered before and after")


@with_disks
@pytest.mark.parametrize("policy", POLICIES)
def test_full_disk_of_sqlite_counts_as_store_outage(policy: str, tmp_path: Path) -> None:
    with disks.small_disk(tmp_path, DISK_MEGABYTES) as disk, run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar(store={"path": str(disk / "price-keeper.db")}, on_store_down=policy)
        with _under_load(lineup) as (running, load):
            disks.fill(disk)
            wait_until(lambda: read_readiness(running.control)["store"] == STORE_AWAY)
            wait_until(lambda: read_metric(running.control, "store_trouble") == 1)
            answered, refused = len(load.complete_requests), load.failed_calls
            time.sleep(SECONDS)
            wait_until(lambda: len(load.complete_requests) + load.failed_calls > answered + refused + CALLERS + 20)
            answered, refused = len(load.complete_requests) - answered, load.failed_calls - refused
            # Calls that were under way when the outage was seen end as they began.
            assert refused == 0 if policy == "serve" else answered <= CALLERS, (answered, refused)
            _comes_back(running, load, lambda: disks.make_room(disk))
        _is_exact(trial, load, disk / "price-keeper.db")
        assert "database or disk is full" in running.errors
    print(f"{policy}: {answered} calls answered on a full disk, {refused} refused")


def test_file_size_limit_behaves_like_full_disk(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, which needs no disk of its own: EFBIG for the journal, an I/O error for SQLite."""
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar()
        with _under_load(lineup) as (running, load):
            pid = running.process.pid
            limit, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (TOO_LARGE, hard))
            wait_until(lambda: read_readiness(running.control)["store"] == STORE_AWAY)
            wait_until(lambda: read_readiness(running.control)["journal"].endswith("File too large"))
            wait_until(lambda: load.failed_calls > 20)
            worked, began = read_cpu_seconds(pid), time.monotonic()
            time.sleep(SECONDS)
            assert read_cpu_seconds(pid) - worked < 0.8 * (time.monotonic() - began)
            _comes_back(running, load, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard)))
        _is_exact(trial, load, tmp_path / "price-keeper.db")
        assert running.errors.count("\n") <= 8, running.errors  # starts and ends of troubles


@with_disks
@pytest.mark.parametrize("what", ["journal", "store"])
def test_read_only_folder_is_reported_at_start(what: str, tmp_path: Path) -> None:
    (tmp_path / what).mkdir()
    lineup = SidecarSetup(tmp_path, "http://127.0.0.1:1", {"path": "store/price-keeper.db"})
    lineup.write_config()
    with disks.read_only(tmp_path / what):
        ended = price_keeper("serve", folder=tmp_path, PRICE_KEEPER_JWT_SECRET=SECRET)
    messages = {"journal": "cannot use the journal in journal", "store": f"cannot make {tmp_path}/store/"}
    assert ended.returncode == 1
    assert messages[what] in ended.stderr
    assert "Read-only file system" in ended.stderr
    assert "Traceback" not in ended.stderr


@contextmanager
def _under_load(lineup: SidecarSetup) -> Iterator[tuple[Sidecar, CrashLoad]]:
    with lineup.run_sidecar() as running, CrashLoad(lineup, CALLERS, random.Random(20261119)) as load:
        wait_until(lambda: len(load.complete_requests) > 20)
        yield running, load
        load.__exit__()
        assert running.stop() == 0


def _comes_back(running: Sidecar, load: CrashLoad, mended: Callable[[], object]) -> None:
    assert fetch(running.control, "/ready")[0] == 503
    answered = len(load.complete_requests)
    mended()
    wait_until(lambda: set(read_readiness(running.control).values()) == {"ok"})
    wait_until(lambda: len(load.complete_requests) > answered + 20)


def _is_exact(trial: FaultTrial, load: CrashLoad, database: Path) -> None:
    served = trial.read_used_requests()
    assert set(load.complete_requests) <= set(served)
    assert read_counts_by_label(database) == price_by_hand(served)
