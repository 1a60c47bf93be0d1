"""`price-keeper export`: the same rows as the reports, of any length, whole or not at all."""

from __future__ import annotations

import asyncio
import csv
import gc
import json
import os
import signal
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from price_keeper.domain import Scope
from price_keeper.ledger import counter_writes
from price_keeper.ledger.aggregator import AS_OF_ATTRIBUTE, build_total_key
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.reports.spend_report import SpendReport, build_report
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Update
from price_keeper.stores.sqlite import SqliteStore

from tests.flow.test_spend import CONFIG, NOTE
from tests.support.commands import PYTHON_PATH, SECONDS, call_in_process, restore_sigint
from tests.unit.test_focus_export import faults
from tools.terminal import on_a_terminal

ACME, BETA = (str(uuid4()) for _ in range(2))
TODAY = datetime.now(UTC).date()
WEEKS = 10
DAYS = WEEKS * 7
LABELS = 20
FIRST = TODAY - timedelta(days=DAYS + 10)
LAST = FIRST + timedelta(days=DAYS - 1)
WHOLE = f"{FIRST}..{LAST}"


async def fill(path: Path) -> None:
    """Days that are long over, as the flusher and the aggregator left them."""
    store = await SqliteStore(path, time.time).open()
    for org, name in ((ACME, "Acme, Ltd"), (BETA, "=Beta")):
        await store.put(Put(schema.org_config_key(org), {"org_name": name, "timezone": "UTC", "quota_scope": "APP"}))
        await store.put(Put(schema.org_entry_key(org), {"org_name": name}))
    for number in range(DAYS):
        day = FIRST + timedelta(days=number)
        noon = datetime(day.year, day.month, day.day, 12, tzinfo=UTC).timestamp()
        part = []
        for label in range(LABELS if number % 7 else 3):
            org = (ACME, BETA)[label % 2]
            counter = Counter(Scope(org, "shop").key, f"label-{label}", f"DAY#{day:%Y%m%d}", 8)
            part.append((counter, UsageCounts(1 + label, 0, number, pico=10**9 + number)))
        stamped = [
            Update(build_total_key(counter), set={AS_OF_ATTRIBUTE: int(noon) + 10 * 86_400}) for counter, _ in part
        ]
        entries = [
            *counter_writes.CounterListing().build_entries([counter for counter, _ in part], noon),
            *counter_writes.build_total_additions(tuple(part), noon),
            *stamped,
        ]
        await asyncio.gather(*(store.update(each) for each in entries))
    await store.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "data").mkdir()
    asyncio.run(fill(folder / "data" / "price-keeper.db"))
    (folder / "config.yaml").write_text(CONFIG.format(store="{engine: sqlite, path: ./data/price-keeper.db}"))
    return folder


def export(place: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = call_in_process("export", *arguments, folder=place)
    assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr
    return result


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(file.read_text())))


def left_over(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("form", ["csv", "focus"])
def test_export_rows_equal_report_rows(place: Path, tmp_path: Path, form: str) -> None:
    result = export(place, WHOLE, "--format", form, "--out", str(tmp_path / "x.csv"))
    rows = rows_of(tmp_path / "x.csv")
    reported = call_in_process("spend", WHOLE, f"--{form}", folder=place).stdout
    expected = list(csv.DictReader(StringIO(reported)))

    def key(row: dict[str, str]) -> list[str]:
        return sorted(row.values())

    assert sorted(rows, key=key) == sorted(expected, key=key)
    days = [row["x_OrgDay" if form == "focus" else "day"] for row in rows]
    assert days == sorted(days)
    if form == "focus":
        assert faults((tmp_path / "x.csv").read_text()) == []
    assert result.stdout.splitlines()[0].startswith(f"{tmp_path}/x.csv: {len(rows):,} rows, $")
    assert NOTE in result.stdout
    assert result.stderr == ""


def test_json_export_equals_spend_document(place: Path, tmp_path: Path) -> None:
    arguments = (WHOLE, "--org", "acme, ltd", "--label", "label-0")
    document = json.loads(export(place, *arguments, "--format", "json", "--out", str(tmp_path / "x"), "--json").stdout)
    found = json.loads((tmp_path / "x").read_text())
    expected = json.loads(call_in_process("spend", *arguments, "--json", folder=place).stdout)
    for each in (found, expected):
        each["rows"].sort(key=lambda row: row["day"])
        del each["as_of"]
    assert found == expected
    assert (document["rows"], document["total"], document["is_final"]) == (DAYS, expected["total"], True)
    assert len((tmp_path / "x").read_text().splitlines()) == DAYS + 2  # each row is a line


@pytest.mark.parametrize("form", ["csv", "json", "focus"])
def test_empty_export_is_complete(place: Path, tmp_path: Path, form: str) -> None:
    export(place, str(FIRST), "--app", "none", "--format", form, "--out", str(tmp_path / "x"))
    text = (tmp_path / "x").read_text()
    if form == "json":
        assert json.loads(text)["rows"] == []
    else:
        assert (text.count("\n"), text.count("requests") + text.count("x_Requests") > 0) == (1, True)


def test_export_holds_at_most_a_week_in_memory(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, int]] = []

    async def watched(*arguments: Any) -> SpendReport:
        gc.collect()
        earlier = [each for each in gc.get_objects() if isinstance(each, SpendReport)]
        found = await build_report(*arguments)
        held.append((len(found.spent), sum(len(each.spent) for each in earlier)))
        return found

    monkeypatch.setattr("price_keeper.cli.spend_commands.build_report", watched)
    export(place, WHOLE, "--out", str(tmp_path / "x.csv"))
    assert sum(rows for rows, _ in held) == len(rows_of(tmp_path / "x.csv"))
    assert max(rows for rows, _ in held) <= 7 * LABELS
    assert max(earlier for _, earlier in held) <= 7 * LABELS


def test_existing_file_is_kept_without_force(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("mine")
    refused = export(place, WHOLE, "--out", str(file), code=1)
    assert "x.csv is there already; --force replaces it" in refused.stderr
    assert file.read_text() == "mine"
    export(place, str(FIRST), "--out", str(file), "--force")
    assert file.read_text().startswith("org,org_name,")
    assert left_over(tmp_path) == []
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_umask()
    for name in ("/dev/null", str(tmp_path)):
        assert "is not a file" in export(place, "--out", name, "--force", code=2).stderr


def test_replaced_file_keeps_restrictive_mode(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.touch(0o600)
    export(place, str(FIRST), "--out", str(file), "--force")
    assert file.stat().st_size > 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_file_created_during_export_is_kept(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file came to be while this one was written."""
    file, fsync = tmp_path / "x.csv", os.fsync

    def slow(descriptor: int) -> None:
        file.write_text("theirs")
        fsync(descriptor)

    monkeypatch.setattr("price_keeper.cli.atomic_file.os.fsync", slow)
    assert "is there already" in export(place, str(FIRST), "--out", str(file), code=1).stderr
    assert (file.read_text(), left_over(tmp_path)) == ("theirs", [])


def test_failed_export_leaves_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("price_keeper.cli.atomic_file.os.fsync", full)
    result = export(place, str(FIRST), "--out", str(tmp_path / "x.csv"), code=1)
    assert f"cannot write {tmp_path}/x.csv: No space left on device" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_export_leaves_old_file(place: Path, tmp_path: Path, how: signal.Signals) -> None:
    """However it ends: the old file stands as it was, and after Ctrl-C nothing else does."""
    file = tmp_path / "x.csv"
    file.write_text("old")
    command = [sys.executable, "-m", "price_keeper.cli", "export", WHOLE, "--out", str(file), "--force"]
    with subprocess.Popen(
        command,
        cwd=place,
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.DEVNULL,
        preexec_fn=restore_sigint,
    ) as process:
        while not left_over(tmp_path) and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(how)
        code = process.wait(SECONDS)
    assert (code, file.read_text()) == (130 if how == signal.SIGINT else -how, "old")
    if how == signal.SIGINT:
        assert left_over(tmp_path) == []


def test_export_progress_is_shown_on_terminal_only(place: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "price_keeper.cli", "export", WHOLE, "--out", str(tmp_path / "x.csv")]
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH, "TERM": "xterm"}
    code, shown = on_a_terminal(command, place, environment)
    assert code == 0
    assert f"piece 1 of {WEEKS}, 0 rows so far" in shown
    assert shown.rindex("\r\x1b[K") < shown.index("x.csv: ")  # and it is cleared before the result


def test_export_sums_are_exact(place: Path, tmp_path: Path) -> None:
    export(place, WHOLE, "--out", str(tmp_path / "x.csv"))
    rows = rows_of(tmp_path / "x.csv")
    spent = sum((LABELS if number % 7 else 3) * (10**9 + number) for number in range(DAYS))
    assert sum(Decimal(row["cost_usd"]) for row in rows) * 10**12 == spent
    assert {row["org_name"] for row in rows} == {"Acme, Ltd", "'=Beta"}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--out", "x", "--billing-account", "1"], 2, "--billing-account is for --format focus alone"),
        (["2999-01-01", "--out", "x"], 2, "is still to come"),
        (["--out", "x", "--org", "nobody"], 2, "no org has the id or the name 'nobody'"),
        (["--out", "x", "--format", "xml"], 2, "invalid choice: 'xml'"),
    ],
)
def test_invalid_export_arguments_create_nothing(place: Path, arguments: list[str], code: int, says: str) -> None:
    assert says in export(place, *arguments, code=code).stderr
    assert not (place / "x").exists()
    assert left_over(place) == []
