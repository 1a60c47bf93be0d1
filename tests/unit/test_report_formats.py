"""JSON and CSV of a report, and the names of orgs and apps in them."""

from __future__ import annotations

import csv
import json
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, date, datetime
from fractions import Fraction
from io import StringIO
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.ledger.ledger_entries import UsageCounts
from price_keeper.reports.org_directory import OrgInfo, load_app_names, load_org_names, load_orgs, resolve_org
from price_keeper.reports.report_formats import build_json_report, escape_formula, format_csv_report, format_time
from price_keeper.reports.report_rows import SpendEntry, group_spend
from price_keeper.reports.spend_report import SpendReport
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store

from tests.support.effort import tries
from tests.support.engines import Engines

ACME, BETA = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b", "11111111-2222-4333-8444-555555555555"
DAY = date(2026, 11, 18)
NOON = datetime(2026, 11, 18, 12, tzinfo=UTC).timestamp()
UTC_ZONE, BERLIN = ZoneInfo("UTC"), ZoneInfo("Europe/Berlin")


def report(*spent: SpendEntry, name: str | None = "Acme", app_name: str | None = "Shop front") -> SpendReport:
    named = {ACME: OrgInfo(ACME, name, BERLIN, "ORG"), BETA: OrgInfo(BETA, None, UTC_ZONE, "ORG")}
    apps = {(ACME, "shop"): app_name} if app_name is not None else {}
    return SpendReport(NOON + 0.9, DAY, DAY, True, False, list(spent), named, apps, ["a note"])


SPENT = (
    SpendEntry(ACME, "shop", "premium", DAY, UsageCounts(2, 1, 10, 20, 3, 4, 5, 6, 12_345_678_901)),
    SpendEntry(BETA, None, "economy", DAY, UsageCounts(1, 0, 1, 2, pico=5)),
)


def test_json_report_round_trips() -> None:
    by = ("org", "app", "label", "day")
    filters: Mapping[str, str | None] = {"org": None, "app": None, "label": None}
    document = build_json_report(report(*SPENT), group_spend(SPENT, by), by, filters, ["a note"])
    assert json.loads(json.dumps(document)) == document
    assert document["rows"][0] == {
        "org": ACME,
        "org_name": "Acme",
        "app": "shop",
        "app_name": "Shop front",
        "label": "premium",
        "day": "2026-11-18",
        "requests": 2,
        "estimated_requests": 1,
        "input_tokens": 10,
        "output_tokens": 20,
        "cache_read_tokens": 3,
        "cache_write_5m_tokens": 4,
        "cache_write_1h_tokens": 5,
        "guardrail_units": 6,
        "search_units": 0,
        "images": 0,
        "video_seconds": 0,
        "tool_calls": 0,
        "routed_requests": 0,
        "cost_usd_micros": "12345.678901",
        "cost_usd_micros_exact": "12345.678901",
        "cost_usd_micros_whole": 12345,
    }
    assert (document["rows"][1]["app"], document["rows"][1]["app_name"], document["rows"][1]["org_name"]) == (
        None,
        None,
        None,
    )
    assert document["total"]["cost_usd_micros"] == "12345.678906"
    assert {key: document[key] for key in ("from", "to", "as_of", "is_final", "by", "notes")} == {
        "from": "2026-11-18",
        "to": "2026-11-18",
        "as_of": "2026-11-18T12:00:00Z",
        "is_final": False,
        "by": list(by),
        "notes": ["a note"],
    }


def test_csv_report_has_requested_columns() -> None:
    assert format_csv_report(report(*SPENT), group_spend(SPENT, ("label", "day")), ("label", "day")) == (
        "label,day,requests,estimated_requests,input_tokens,output_tokens,cache_read_tokens,cache_write_5m_tokens,"
        "cache_write_1h_tokens,guardrail_units,cost_usd,search_units,images,video_seconds,tool_calls,"
        "routed_requests\n"
        "premium,2026-11-18,2,1,10,20,3,4,5,6,0.012345678901,0,0,0,0,0\n"
        "economy,2026-11-18,1,0,1,2,0,0,0,0,0.000000000005,0,0,0,0,0\n"
    )
    assert (
        format_csv_report(report(), [], ("org", "app"))
        .splitlines()[0]
        .startswith("org,org_name,app,app_name,requests,")
    )


def test_name_is_escaped_against_spreadsheet_formulas() -> None:
    risky = report(*SPENT, name="=HYPERLINK(1)", app_name="-2+3")
    (row, _) = csv.DictReader(StringIO(format_csv_report(risky, group_spend(SPENT, ("org", "app")), ("org", "app"))))
    assert (row["org_name"], row["app_name"]) == ("'=HYPERLINK(1)", "'-2+3")
    assert row["app"] == "shop"


@pytest.mark.parametrize(
    "name",
    [
        *"=+-@\t\r\n",
        *"\uff1d\uff0b\uff0d\uff20",  # full width
        *"\ufe66\ufe62\ufe63\ufe6b",  # small
        "\u207a1",
        "\u22121",
        " =1",
        "\u00a0=1",
        "\u3000\uff1d1",
        "\ufeff=1",
        "\u200b=1",
        "\x00=1",
        "\n=1",
        "\v+1",
    ],
)
def test_formula_sign_of_any_width_after_any_space_is_escaped(name: str) -> None:
    assert escape_formula(name) == f"'{name}"


@pytest.mark.parametrize("name", ["Acme", "a=b", "Ä", "会社", "1+1", "", " Acme", "#1", "(x)"])
def test_harmless_name_is_not_escaped(name: str) -> None:
    assert escape_formula(name) == name


@given(st.text(min_size=1), st.integers(0, 10**25))
@settings(max_examples=tries(200))
def test_random_names_survive_csv(name: str, pico: int) -> None:
    spent = SpendEntry(ACME, "shop", "premium", DAY, UsageCounts(pico=pico))
    text = format_csv_report(report(spent, name=name), group_spend([spent], ("org",)), ("org",))
    (row,) = csv.DictReader(StringIO(text, newline=""))
    assert row["org_name"].removeprefix("'") == name.replace("\r", " ").removeprefix("'")
    assert Fraction(row["cost_usd"]) * 10**12 == pico


def test_times_are_utc_with_z() -> None:
    assert format_time(0) == "1970-01-01T00:00:00Z"
    assert format_time(NOON + 0.999) == "2026-11-18T12:00:00Z"


NAMES = {ACME: "Acme", BETA: "Beta"}


def test_org_is_resolved_by_id_or_name() -> None:
    assert resolve_org("acme", NAMES) == resolve_org(ACME, NAMES) == resolve_org(ACME.upper(), NAMES) == ACME
    unknown = "99999999-2222-4333-8444-555555555555"
    assert resolve_org(unknown, NAMES) == unknown


def test_unknown_org_lists_known_ones() -> None:
    with pytest.raises(ValueError, match=rf"no org has .* 'Acm'; there are Acme \({ACME}\), Beta \({BETA}\)$"):
        resolve_org("Acm", NAMES)
    with pytest.raises(ValueError, match=r"several orgs are called 'ACME'; .* 1, 2$"):
        resolve_org("ACME", {"1": "Acme", "2": "acme", "3": None})
    with pytest.raises(ValueError, match="none is registered"):
        resolve_org("Acme", {})
    with pytest.raises(ValueError, match=r"and 5 more$"):
        resolve_org("x", {str(number): f"org {number}" for number in range(25)})


@pytest.fixture
async def local(tmp_path: Path, engines: Engines) -> AsyncIterator[Store]:
    async with engines.open("sqlite", tmp_path) as opened:
        yield opened


async def test_names_and_zones_come_from_store(local: Store) -> None:
    config = {"org_name": "Acme", "timezone": "Europe/Berlin", "quota_scope": "APP"}
    await local.put(Put(schema.org_config_key(ACME), config))
    await local.put(Put(schema.org_entry_key(ACME), {"org_name": "an older name"}))
    await local.put(Put(schema.org_entry_key(BETA), {"org_name": "Beta"}))
    await local.put(Put(schema.app_config_key(ACME, "shop"), {"app_name": "Shop front"}))
    await local.put(Put(schema.app_config_key(ACME, "bot"), {"client_secret_hash": "x"}))
    names = await load_org_names(local)
    assert names == {ACME: "an older name", BETA: "Beta"}
    unknown = "99999999-2222-4333-8444-555555555555"
    assert await load_orgs(local, [ACME, BETA, unknown, ACME], names, UTC_ZONE, NOON) == {
        ACME: OrgInfo(ACME, "Acme", BERLIN, "APP"),
        BETA: OrgInfo(BETA, "Beta", UTC_ZONE, "APP"),
        unknown: OrgInfo(unknown, None, UTC_ZONE, "APP"),
    }
    assert await load_app_names(local, [(ACME, "shop"), (ACME, "bot"), (BETA, "x")]) == {(ACME, "shop"): "Shop front"}


async def test_malformed_org_configuration_is_ignored(local: Store) -> None:
    config = {"org_name": " ", "timezone": "Europe/Berlim", "quota_scope": "TEAM"}
    await local.put(Put(schema.org_config_key(ACME), config))
    assert await load_orgs(local, [ACME], {}, BERLIN, NOON) == {ACME: OrgInfo(ACME, None, BERLIN, "APP")}
