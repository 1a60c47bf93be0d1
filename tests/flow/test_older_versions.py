"""What older versions left behind is read by this one: the store, the journal, hard budgets' money, the snapshot."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from price_keeper.budgets.budget_snapshot import SnapshotFile
from price_keeper.clock import SystemClock
from price_keeper.domain import Scope
from price_keeper.stores.sqlite import SqliteStore

from tests.fixtures.make import FOLDER, copied, replayed, reported
from tests.public_contract.kept import lines_of
from tests.support.clock import ManualClock
from tests.support.commands import sidecar
from tests.support.observed_sidecar import ENVIRONMENT, ORG, ask
from tests.support.recording_harness import open_recording_harness

LABELS = {
    name: {"model": name, "format": "nova", "price_source": "config", "prices_usd_per_1m": {"input": 1, "output": 1}}
    for name in ("premium", "economy")
}
VERSIONS = sorted(path for path in FOLDER.iterdir() if (path / "expected.json").exists())


@dataclass
class Left:
    """A copy of it, at the time at which it was left, as markers and budgets are good for days alone."""

    folder: Path
    made_at: float
    before: list[dict[str, Any]]
    replay: dict[str, Any]
    after: list[dict[str, Any]]

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    def reports(self, expected: list[dict[str, Any]]) -> bool:
        """By the fields that the older version had; newer ones come beside them."""
        found = [{name: row[name] for name in expected[0]} for row in reported(self.folder)]
        return sorted(map(json.dumps, found)) == sorted(map(json.dumps, expected))

    def rows(self, table: str, sk: str) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(self.folder / "price-keeper.db")) as database:
            found = database.execute(f'SELECT item FROM "{table}" WHERE sk LIKE ?', (sk,)).fetchall()
        return [json.loads(item) for (item,) in found]


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def left(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Left:
    expected = json.loads((request.param / "expected.json").read_text())
    monkeypatch.setattr(SystemClock, "now", staticmethod(lambda: expected["made at"]))
    return Left(
        copied(request.param, tmp_path / "left"),
        expected["made at"],
        *(expected[name] for name in ("before", "replay", "after")),
    )


def test_fixtures_of_older_versions_exist() -> None:
    assert "v0_1" in {path.name for path in VERSIONS}


def test_older_store_reports_the_same_spend(left: Left) -> None:
    assert left.before
    assert left.reports(left.before)


def test_older_journal_is_counted_once(left: Left) -> None:
    again = shutil.copytree(left.journal, left.folder / "again")
    counts = replayed(left.folder)
    assert {name: counts[name] for name in left.replay} == left.replay  # newer versions tell more
    assert left.replay["estimated_requests"] > 0
    assert left.reports(left.after)
    assert list(left.journal.glob("*.seg")) == []

    shutil.rmtree(left.journal)
    shutil.copytree(again, left.journal)
    repeated = replayed(left.folder)
    assert repeated["repeated_parts"] > 0
    assert repeated["given_back_usd_micros"] == "0"
    assert left.reports(left.after)


def test_older_journal_is_recovered_by_new_process(left: Left) -> None:
    async def begin() -> None:
        store = await SqliteStore(left.folder / "price-keeper.db", lambda: left.made_at).open()
        async with open_recording_harness(left.journal, store, ManualClock(left.made_at)) as begun:
            assert await begun.flusher.flush()
        await store.close()

    asyncio.run(begin())
    assert left.reports(left.after)


def test_older_budget_leases_are_released(left: Left) -> None:
    (held,) = left.rows("rate-buckets", "HOLD#%")
    free = sum(row["tk"] for row in left.rows("rate-buckets", "BUCKET#HARD#%"))
    assert held["out"] > 0
    assert list(left.journal.glob("holds-*"))
    replayed(left.folder)
    (closed,) = (row for row in left.rows("rate-buckets", "HOLD#%") if row.get("used"))
    came_back = sum(row["tk"] for row in left.rows("rate-buckets", "BUCKET#HARD#%")) - free
    assert closed["out"] == closed["used"]
    assert closed["used"] > held.get("used", 0)  # by the call under way
    assert came_back == Decimal(left.replay["given_back_usd_micros"]) * 10**6 > 0
    assert list(left.journal.glob("holds-*")) == []


async def test_older_budget_snapshot_is_restored(left: Left) -> None:
    snapshot_file = SnapshotFile(left.journal, ManualClock(left.made_at))
    await snapshot_file.open()
    settings = states = 0
    for _, about, scope, kept in lines_of(left.journal / "notes-0")[1:]:
        if about == "settings":
            settings += 1
            found = snapshot_file.snapshot.find_settings(Scope.from_key(scope))
            assert found is not None
            assert found.get("version") == kept.get("version")
            assert found.get("quotas", {}) == kept.get("quotas", {"M": {}})["M"]
        else:
            states += 1
            stood = snapshot_file.snapshot.find_budget(Scope.from_key(scope), kept["period"])
            assert stood is not None
            assert {label: [*parts] for label, parts in stood.spent.items()} == kept["spent"]["M"]
            assert stood.sticky_item == kept["state"]["M"]
    assert min(settings, states) >= 6


def test_older_store_is_served(left: Left) -> None:
    """By a process with a journal of its own, at the real time."""
    config = {
        "listen": {"data": "127.0.0.1:0", "control": "127.0.0.1:0"},
        "store": {"path": "price-keeper.db"},
        "journal": {"dir": "new"},
        "upstream": {"endpoint": "http://127.0.0.1:9"},
        "labels": LABELS,
    }
    (left.folder / "config.yaml").write_text(json.dumps(config))
    with sidecar("serve", folder=left.folder, **ENVIRONMENT) as running:
        url = f"{running.control}/api/v1/orgs/{ORG}"
        document = json.loads(ask("GET", url, X_API_Key=ENVIRONMENT["PRICE_KEEPER_API_KEY"]).body)
        assert document["in_force"]["quotas"] == {"premium": 10_000, "economy": 10_000_000}
        assert running.stop() == 0
        assert "Traceback" not in running.errors
