"""`price-keeper spend` as a person, a program and finance use it, on stores filled by the real flusher."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import StringIO
from pathlib import Path
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from price_keeper.domain import Scope
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, Receipt, UsageCounts
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store
from price_keeper.stores.sqlite import SqliteStore

from tests.support.clock import ManualClock
from tests.support.commands import PYTHON_PATH, SECONDS, call_in_process, price_keeper, sidecar
from tests.support.engines import PREFIX, TEST_CREDENTIALS, Engines
from tests.support.recording_harness import open_recording_harness
from tests.unit.test_focus_export import faults

ACME, BETA, GHOST = (str(uuid4()) for _ in range(3))
NOTE = "Exact as of the last flush: what still waits in journals (up to about 15 seconds of calls) is not in it."

CONFIG = """
store: {store}
upstream: {{region: eu-central-1}}
labels:
  premium: {{model: a.b, format: nova, prices_usd_per_1m: {{input: 3, output: 15}}}}
  economy:
    model: c.d
    format: nova
    prices_usd_per_1m: {{input: 1, output: 5}}
    endpoints: [{{region: us-east-1}}, {{region: us-west-2}}]
"""


def noonish() -> ZoneInfo:
    """A zone in which it is around noon, so that no test sees a day end."""
    return ZoneInfo(f"Etc/GMT{datetime.now(UTC).hour - 12:+d}")


ZONE = noonish()
TODAY = datetime.now(ZONE).date()
YESTERDAY = TODAY - timedelta(days=1)

# org, app, label, days ago, calls, and what each used
CALLS = [
    (ACME, "shop", "premium", 0, 3, UsageCounts(1, 0, 1000, 200, 50, pico=4_115_000_001)),
    (ACME, "shop", "guardrails", 0, 2, UsageCounts(1, 0, guardrail_units=4, pico=600_000_000)),
    (ACME, None, "premium", 0, 1, UsageCounts(1, 1, 100, 20, pico=411_000_000)),
    (ACME, "bot", "economy", 1, 5, UsageCounts(1, 0, 10, 2, pico=20_000_000)),
    (BETA, "robot", "economy", 0, 2, UsageCounts(1, 0, 10**6, 10**6, pico=6 * 10**12)),
    (BETA, None, "economy", 0, 1, UsageCounts(1, 0, 10**6, 0, pico=10**12)),
    (GHOST, "x", "unlabelled.c.d", 0, 1, UsageCounts(1, 0, 7, 7, pico=123)),
]
SCOPES = {ACME: "ORG", BETA: "APP", GHOST: "ORG"}
ACME_TODAY = 3 * 4_115_000_001 + 2 * 600_000_000 + 411_000_000


async def fill(store: Store, folder: Path) -> None:
    for org, name in ((ACME, "Acme"), (BETA, "Beta Läbs")):
        config = {"org_name": name, "timezone": ZONE.key, "quota_scope": SCOPES[org]}
        await store.put(Put(schema.org_config_key(org), config))
        await store.put(Put(schema.org_entry_key(org), {"org_name": name}))
    await store.put(Put(schema.org_config_key(GHOST), {"timezone": ZONE.key}))
    await store.put(Put(schema.app_config_key(ACME, "shop"), {"app_name": "Shop front"}))
    async with open_recording_harness(folder / "journal", store, ManualClock(time.time())) as rec:
        for org, app, label, ago, calls, counts in CALLS:
            period = f"DAY#{TODAY - timedelta(days=ago):%Y%m%d}"
            whole, own = Scope(org).key, Scope(org, app).key
            scopes = [whole] if app is None else [own] if SCOPES[org] == "APP" else [whole, own]
            account = ChargedCounters.from_counters([Counter(scope, label, period, 8) for scope in scopes])
            for _ in range(calls):
                number = rec.journal.write_intent(Intent(account, int(rec.clock.now() * 1000), 7, 7, 5))
                rec.journal.record(number, Receipt(counts))
        assert await rec.flusher.flush()


async def _filled(folder: Path) -> None:
    store = await SqliteStore(folder / "data" / "price-keeper.db", time.time).open()
    await fill(store, folder)
    await store.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spend")
    asyncio.run(_filled(folder))
    (folder / "config.yaml").write_text(CONFIG.format(store="{engine: sqlite, path: ./data/price-keeper.db}"))
    return folder


def spend(
    place: Path,
    *arguments: str,
    run: Callable[..., subprocess.CompletedProcess[str]] = call_in_process,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    result = run("spend", *arguments, folder=place, **TEST_CREDENTIALS, **environment)
    assert result.returncode == 0, result.stderr
    return result


FOOT = [
    "",
    "Exact as of the last flush: what still waits in journals (up to about 15 seconds",
    "of calls) is not in it.",
]


def test_spend_of_today_is_shown(place: Path) -> None:
    result = spend(place)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        f"Spend of today ({TODAY}), so far",
        "",
        "Org              App    Label           Requests  est.        Cost",
        "Beta Läbs        robot  economy                2     0  $12.000000   92%  ██████",
        "Beta Läbs        -      economy                1     0   $1.000000    8%  ▌",
        "Acme             shop   premium                3     0   $0.012345   <1%  ▏",
        "Acme             shop   guardrails             2     0   $0.001200   <1%  ▏",
        "Acme             -      premium                1     1   $0.000411   <1%  ▏",
        f"{GHOST[:14]}…  x      unlabelled.c.d         1     0  <$0.000001   <1%  ▏",
        "─" * 66,
        "Total                                         10     1  $13.013956",
        *FOOT,
    ]


def test_filtered_spend_is_shown(place: Path) -> None:
    result = spend(place, f"{YESTERDAY}..today", "--org", "acme", "--by", "day")
    assert result.stdout.splitlines() == [
        f"Spend of org acme, {YESTERDAY} to {TODAY}, so far",
        "",
        "Day         Requests  est.  Tokens  Units       Cost",
        f"{YESTERDAY}         5     0      60      0  $0.000100    1%  ▏",
        f"{TODAY}         6     1   3,870      8  $0.013956   99%  ████████████████████",
        "─" * 52,
        "Total             11     1   3,930      8  $0.014056",
        *FOOT,
    ]


def test_wide_terminal_shows_more_columns(place: Path) -> None:
    head = spend(place, "--org", "Acme", COLUMNS="120").stdout.splitlines()[2]
    assert head.split() == ["App", "Label", "Requests", "est.", "Input", "Cached", "Output", "Units", "Cost"]


def test_empty_result_lists_known_names(place: Path) -> None:
    assert spend(place, "--label", "premum").stdout.splitlines() == [
        f"Spend of label premum, today ({TODAY}), so far: nothing",
        *FOOT,
        "Labels with spend: economy, guardrails, premium, unlabelled.c.d.",
    ]
    long_ago = TODAY - timedelta(days=90)
    output = spend(place, str(long_ago), "--org", GHOST).stdout
    assert output.startswith(f"Spend of org {GHOST}, {long_ago}: nothing\n")


def test_json_is_exact_and_complete(place: Path) -> None:
    document = json.loads(spend(place, "--json", "--org", "Acme").stdout)
    assert document["filters"] == {"org": ACME, "app": None, "label": None}
    assert document["by"] == ["org", "app", "label", "day"]
    assert {(row["app"], row["label"]): row["cost_usd_micros"] for row in document["rows"]} == {
        ("shop", "premium"): "12345.000003",
        ("shop", "guardrails"): "1200",
        (None, "premium"): "411",
    }
    assert Decimal(document["total"]["cost_usd_micros"]) * 10**6 == ACME_TODAY
    assert (document["total"]["estimated_requests"], document["is_final"], document["notes"]) == (1, False, [NOTE])
    assert document["rows"][0]["app_name"] == "Shop front"


def test_spend_reads_totals_where_there_are_any_unless_consistent(tmp_path: Path) -> None:
    """One total lacks a call; the other counters have none, and are read from their shards."""

    async def prepare() -> None:
        await _filled(tmp_path)
        store = await SqliteStore(tmp_path / "data" / "price-keeper.db", time.time).open()
        key = schema.total_key(Scope(ACME, "shop"), "guardrails", f"DAY#{TODAY:%Y%m%d}")
        await store.put(Put(key, {"requests": 1, "guardrail_units": 4, "cost_usd_micros": 600, "as_of_epoch": 1}))
        await store.close()

    asyncio.run(prepare())
    (tmp_path / "config.yaml").write_text(CONFIG.format(store="{engine: sqlite, path: ./data/price-keeper.db}"))
    for options, units, note in ((("--json",), 4, "By totals, which"), (("--json", "--consistent"), 8, NOTE)):
        told = json.loads(spend(tmp_path, "--org", "Acme", "--app", "shop", *options).stdout)
        assert (told["total"]["guardrail_units"], told["total"]["input_tokens"]) == (units, 3000)
        assert told["notes"][0].startswith(note)


def test_csv_is_identical_to_file_and_pipe(place: Path) -> None:
    result = spend(place, f"{YESTERDAY}..today", "--csv", run=price_keeper, PYTHONIOENCODING="ascii")
    assert result.stderr == f"{NOTE}\n"
    assert "Beta Läbs" in result.stdout
    rows = list(csv.DictReader(StringIO(result.stdout)))
    assert len(rows) == len(CALLS)
    paid = sum(calls * counts.pico for *_, calls, counts in CALLS)
    assert sum(Decimal(row["cost_usd"]) for row in rows) * 10**12 == paid
    assert {row["day"] for row in rows} == {str(TODAY), str(YESTERDAY)}


def test_focus_output_keeps_rules_and_cost(place: Path) -> None:
    result = spend(place, f"{YESTERDAY}..today", "--focus", "--billing-account", "123456789012")
    assert faults(result.stdout) == []
    rows = list(csv.DictReader(StringIO(result.stdout)))
    assert len(rows) == len(CALLS)
    assert sum(Decimal(row["EffectiveCost"]) for row in rows) * 10**12 == sum(
        calls * counts.pico for *_, calls, counts in CALLS
    )
    assert {row["BillingAccountId"] for row in rows} == {"123456789012"}
    # One label is called in two regions, and what has no label may be called wherever any is.
    assert {(row["SkuId"], row["RegionId"]) for row in rows} == {
        ("premium", "eu-central-1"),
        ("economy", ""),
        ("guardrails", ""),
        ("unlabelled.c.d", ""),
    }
    only = list(csv.DictReader(StringIO(spend(place, "--focus", "--org", "Acme", "--label", "guardrails").stdout)))
    assert [row["ConsumedQuantity"] for row in only] == ["8"]


def test_data_dir_option_needs_no_configuration(place: Path) -> None:
    result = spend(place.parent, "--data-dir", str(place / "data"), "--org", "Acme", "--focus")
    assert {row["RegionId"] for row in csv.DictReader(StringIO(result.stdout))} == {"us-east-1"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tomorrow"], "today, yesterday, a day (2026-11-18), a month (2026-11), or a range"),
        (["2999-01-01"], "2999-01-01 is still to come"),
        (["2020-01-01..today"], "spend is kept for 400 days: the first that can be asked for now is "),
        (["--by", "model"], "there are org, app, label, day"),
        (["--org", "Acmee"], "no org has the id or the name 'Acmee'; there are Acme ("),
        (["--json", "--csv"], "not allowed with"),
        (["--focus", "--by", "org"], "--by is not for --focus"),
        (["--billing-account", "1"], "--billing-account is for --focus alone"),
        (["--config", "config.yaml", "--data-dir", "data"], "not allowed with"),
        (["--config", "none.yaml"], "none.yaml: cannot be read"),
    ],
)
def test_invalid_arguments_exit_2_with_allowed_values(place: Path, arguments: list[str], says: str) -> None:
    result = call_in_process("spend", *arguments, folder=place)
    assert (result.returncode, result.stdout) == (2, "")
    assert says in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_missing_store_is_reported(tmp_path: Path) -> None:
    result = call_in_process("spend", folder=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "there is no config.yaml here; name one with --config FILE" in result.stderr
    result = call_in_process("spend", "--data-dir", "data", folder=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(
        "price-keeper: there is no store in data/price-keeper.db: price-keeper serve or dev"
    )
    assert not (tmp_path / "data").exists()
    (tmp_path / "other.db").write_bytes(b"not a database, but long enough to look like one" * 30)
    (tmp_path / "config.yaml").write_text(CONFIG.format(store="{engine: sqlite, path: ./other.db}"))
    result = call_in_process("spend", folder=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(
        "price-keeper: other.db is no SQLite database; store in the configuration says which"
    )


def on_a_terminal(place: Path, **environment: str) -> str:
    """What a person sees: on a terminal of 100 columns."""
    main, end = pty.openpty()
    os.set_blocking(main, False)
    command = [sys.executable, "-m", "price_keeper.cli", "spend", "--by", "label"]
    surroundings: Mapping[str, str] = os.environ | {"PYTHONPATH": PYTHON_PATH, "COLUMNS": "100", "TERM": "xterm"}
    done = subprocess.run(
        command, cwd=place, env={**surroundings, **environment}, stdout=end, stderr=end, timeout=SECONDS, check=False
    )
    output = os.read(main, 1 << 20).decode()
    os.close(end)
    os.close(main)
    assert done.returncode == 0, output
    return output


def test_colors_are_for_terminals_only(place: Path) -> None:
    assert "\x1b[36m█" in on_a_terminal(place)
    for without in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        shown = on_a_terminal(place, **without)
        assert "\x1b" not in shown
        assert "█" in shown
    assert "\x1b[36m" in on_a_terminal(place, NO_COLOR="")


def test_ascii_terminal_gets_ascii(place: Path) -> None:
    output = spend(place, "--by", "org", run=price_keeper, PYTHONIOENCODING="ascii").stdout
    assert output.isascii()
    assert "####" in output
    assert "Beta L?bs" in output


def test_spend_is_readable_while_sidecar_runs(tmp_path: Path) -> None:
    arguments = ("dev", "--data-dir", "data", "--port", "0", "--control-port", "0")
    with sidecar(*arguments, folder=tmp_path):
        assert "nothing" in spend(tmp_path, "--data-dir", "data").stdout
        asyncio.run(_filled(tmp_path))
        document = json.loads(spend(tmp_path, "--data-dir", "data", "--org", "Acme", "--json").stdout)
        assert Decimal(document["total"]["cost_usd_micros"]) * 10**6 == ACME_TODAY


async def test_spend_reads_dynamodb(tmp_path: Path, engines: Engines) -> None:
    async with engines.open("ministack", tmp_path) as store:
        await fill(store, tmp_path)
    endpoint = engines.endpoints["ministack"]
    config = f'{{engine: dynamodb, endpoint: "{endpoint}", table_prefix: {PREFIX}, region: us-east-1}}'
    (tmp_path / "config.yaml").write_text(CONFIG.format(store=config))
    document = json.loads((await asyncio.to_thread(spend, tmp_path, "--org", ACME, "--json")).stdout)
    assert Decimal(document["total"]["cost_usd_micros"]) * 10**6 == ACME_TODAY
    document = json.loads((await asyncio.to_thread(spend, tmp_path, "--org", BETA, "--json", "--by", "app")).stdout)
    assert {row["app"]: row["cost_usd_micros"] for row in document["rows"]} == {"robot": "12000000", None: "1000000"}
