"""`price-keeper org`, `app` and `override` as an operator and a program use them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest

from proxy.stores import schema
from proxy.stores.contract import Item, Update
from proxy.stores.sqlite import SqliteStore
from proxy.stores.sqlite_file import prepare
from tests.support.commands import price_keeper
from tests.support.engines import PREFIX, Engines

ORG = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
ZONE = f"Etc/GMT{datetime.now(UTC).hour - 12:+d}"  # in which it is around noon, so that no test sees a day end
CONFIG = """
store: {store}
labels:
  premium: {{model: a.b, format: nova, prices_usd_per_1m: {{input: 3, output: 15}}}}
  economy: {{model: c.d, format: nova, prices_usd_per_1m: {{input: 1, output: 5}}}}
"""
SETTINGS = f"""\
org_name: Acme
timezone: {ZONE}
quota_scope: APP
model_ordering: [premium, economy]
quotas:
  premium: 10_000_000
  economy: 2000000
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG.format(store="{path: ./data/price-keeper.db}"))
    (tmp_path / "acme.yaml").write_text(SETTINGS)
    prepare(tmp_path / "data" / "price-keeper.db")
    return tmp_path


def run(place: Path, *arguments: str, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    told = price_keeper(*arguments, folder=place, stdin=stdin)
    assert (told.returncode, "Traceback" in told.stderr) == (code, False), told.stderr
    return told


def as_json(place: Path, *arguments: str, stdin: str = "") -> Any:
    return json.loads(run(place, *arguments, "--json", stdin=stdin).stdout)


def changed_by_hand(place: Path, org: str, changes: dict[str, Any]) -> Item:
    async def change() -> Item:
        store = await SqliteStore(place / "data" / "price-keeper.db", time.time).open()
        try:
            return await store.update(Update(schema.org_config(org), set=changes))
        finally:
            await store.close()

    return asyncio.run(change())


def test_an_org_is_made_from_a_file_listed_and_told(place: Path) -> None:
    assert "no orgs yet" in run(place, "org", "list").stdout
    made = run(place, "org", "put", ORG, "acme.yaml").stdout.splitlines()
    assert made[0] == f"Acme ({ORG}): made"
    tomorrow = f"{datetime.now(UTC).astimezone(ZoneInfo(ZONE)).date() + timedelta(days=1)} 00:00"
    shown = run(place, "org", "show", "acme").stdout.splitlines()
    assert shown == [f"Acme ({ORG})", *made[1:]]
    assert shown[1:3] == [f"  time zone       {ZONE}", "  quotas apply to each app"]
    assert any(line.startswith(f"  period          day, this one until {tomorrow}") for line in shown)
    assert "  quota of        premium: $10.000000" in shown
    listed = run(place, "org", "list").stdout.splitlines()
    assert listed[1].split() == ["Acme", ORG, ZONE, "for", "each", "app,", "by", "day", "premium", ">", "economy"]


def test_a_program_reads_and_writes_json(place: Path) -> None:
    body = {
        "org_name": "Acme",
        "timezone": ZONE,
        "quota_scope": "ORG",
        "model_ordering": ["economy"],
        "quotas": {"economy": 5},
        "refresh_interval_tight_secs": 0.5,
    }
    put = as_json(place, "org", "put", ORG, "-", stdin=json.dumps(body))
    assert put["settings"] == body | {"period": "day", "agg_shard_count": 8}
    assert (put["org"], put["turns_at"], put["in_force"]["version"], put["passed_over"]) == (ORG, None, 1, [])
    assert put["in_force"]["quotas"] == {"economy": 5}
    assert as_json(place, "org", "show", ORG) == put
    assert as_json(place, "org", "list") == [{"org_name": "Acme"} | put]
    assert as_json(place, "app", "list", ORG) == []


def test_every_mistake_is_told_with_its_line(place: Path) -> None:
    (place / "bad.yaml").write_text(SETTINGS.replace("economy: 2000000", "econmy: 020") + "limits: {}\n")
    told = run(place, "org", "put", ORG, "bad.yaml", code=2).stderr.splitlines()
    assert told[0] == "bad.yaml:5: quotas: each label of the ordering has one; missing: economy"
    assert told[1].startswith(
        'bad.yaml:7: quotas.econmy: there is no label "econmy" in the configuration; did you mean'
    )
    assert told[2].startswith("bad.yaml:8: limits: unknown setting; allowed are org_name, ")
    assert len(told) == 3
    assert "no orgs yet" in run(place, "org", "list").stdout


UNREADABLE = [
    ("-", "{", "standard input:1: not valid YAML at column 2: "),
    ("-", "org_name: a\norg_name: b\n", "standard input:2: org_name: duplicate key, first on line 1"),
    ("-", "[]", "standard input:1: expected a mapping of settings, found []"),
    ("-", "", "standard input:1: org_name: required, but missing"),
    ("nothing.yaml", "", "nothing.yaml: cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("name", "text", "complaint"), UNREADABLE)
def test_a_file_that_cannot_be_read_says_why(place: Path, name: str, text: str, complaint: str) -> None:
    assert run(place, "org", "put", ORG, name, code=2, stdin=text).stderr.startswith(complaint)


WRONG = [
    (["org", "put", "Acme", "acme.yaml"], 2, "no org has the id or the name 'Acme'; none is registered. A new org"),
    (["org", "show", ORG], 2, f"there is no org {ORG}; price-keeper org put makes it"),
    (["app", "put", ORG, "shop", "acme.yaml"], 2, f"there is no org {ORG}"),
    (["app", "put", ORG, "a#b", "acme.yaml"], 2, "usage: "),
    (["override", "show", "nobody"], 2, "no org has the id or the name 'nobody'; none is registered"),
    (["override", "set", ORG, "economy"], 2, "usage: "),
    (["org", "list", "--data-dir", "nowhere"], 1, "price-keeper: there is no store in nowhere/price-keeper.db"),
    (["org", "list", "--config", "none.yaml"], 2, "none.yaml: cannot be read"),
]


@pytest.mark.parametrize(("arguments", "code", "complaint"), WRONG)
def test_what_cannot_be_done_says_what_can(place: Path, arguments: list[str], code: int, complaint: str) -> None:
    assert run(place, *arguments, code=code).stderr.startswith(complaint)


def test_credentials_survive_a_put_and_are_never_shown(place: Path) -> None:
    changed_by_hand(place, ORG, {"client_secret_hash": "$2b$12$secret", "quotas": "x", "org_name": "A\x1b[31mB"})
    shown = run(place, "org", "show", ORG)
    assert "\x1b" not in shown.stdout
    assert 'Warning: quotas: expected a mapping, found "x"; nothing may be spent' in shown.stdout
    put = run(place, "org", "put", ORG, "acme.yaml", "--json")
    assert "secret" not in shown.stdout + put.stdout
    assert changed_by_hand(place, ORG, {"seen": 1})["client_secret_hash"] == "$2b$12$secret"


def test_a_changed_zone_is_told_with_its_time(place: Path) -> None:
    run(place, "org", "put", ORG, "acme.yaml")
    (place / "acme.yaml").write_text(SETTINGS.replace(ZONE, "Asia/Tokyo"))
    told = run(place, "org", "put", "Acme", "acme.yaml").stdout
    assert re.search(r"^From \d{4}-\d\d-\d\d 00:00 \S+ on: time zone Asia/Tokyo\.$", told, re.MULTILINE)
    shown = as_json(place, "org", "show", "Acme")
    assert (shown["settings"]["timezone"], shown["in_force"]["timezone"]) == ("Asia/Tokyo", ZONE)
    assert datetime.fromisoformat(shown["turns_at"]) > datetime.now(UTC)


def test_apps_inherit_and_say_what_is_their_own(place: Path) -> None:
    run(place, "org", "put", ORG, "acme.yaml")
    assert "has no apps yet" in run(place, "app", "list", "Acme").stdout
    assert run(place, "app", "show", "Acme", "shop", code=2).stderr.endswith("has no app shop; there are: none\n")
    body = '{"app_name": "Shop", "quotas": {"premium": 1, "economy": 2}}'
    made = run(place, "app", "put", "Acme", "shop", "-", stdin=body).stdout.splitlines()
    assert made[0] == f"Shop ({ORG} / shop): made"
    shown = run(place, "app", "show", "acme", "shop").stdout.splitlines()
    assert "  ordering        premium > economy  (the org's)" in shown
    assert "  quota of        premium: $0.000001" in shown
    assert run(place, "app", "list", "Acme").stdout.splitlines()[1].split()[:2] == ["Shop", "shop"]
    (listed,) = as_json(place, "app", "list", "Acme")
    assert listed == as_json(place, "app", "show", "Acme", "shop")
    assert (listed["settings"]["app_name"], listed["in_force"]["quotas"]) == ("Shop", {"premium": 1, "economy": 2})


def test_an_org_that_outgrows_the_quotas_of_an_app_is_warned(place: Path) -> None:
    small = SETTINGS.replace("[premium, economy]", "[premium]")
    run(place, "org", "put", ORG, "-", stdin=small)
    run(place, "app", "put", ORG, "shop", "-", stdin="{app_name: Shop, quotas: {premium: 1}}")
    told = run(place, "org", "put", ORG, "acme.yaml").stdout
    assert "Warning: app shop: quotas: none for economy, so nothing may be spent on it" in told


def test_an_override_is_set_shown_and_cleared(place: Path) -> None:
    run(place, "org", "put", ORG, "acme.yaml")
    without = run(place, "override", "set", ORG, "economy", "--reason", "x", code=2).stderr
    assert without == f"quotas apply to each app of Acme ({ORG}): name one with --app; there are: none yet\n"
    run(place, "app", "put", ORG, "shop", "-", stdin="{app_name: Shop}")
    where = ("Acme", "--app", "shop")
    assert "no override" in run(place, "override", "show", *where).stdout
    because = ("--reason", "quiet weekend", "--who", "ann")
    told = run(place, "override", "set", *where, "premum", *because, code=2).stderr
    assert told == 'label: "premum" is not in the ordering; did you mean "premium"?\n'
    told = run(place, "override", "set", *where, "economy", *because, "--until", "soon", code=2).stderr
    assert told.startswith("--until: expected a time as ")
    told = run(place, "override", "set", *where, "economy", *because).stdout
    assert re.fullmatch(rf"Shop \({ORG} / shop\): economy until \S+ 00:00 \S+, said ann: quiet weekend\n", told)
    later = as_json(place, "override", "set", *where, "premium", *because, "--until", "+2h")["override"]
    assert (later["label"], later["version"]) == ("premium", 2)
    wait = datetime.fromisoformat(later["until"]) - datetime.now(UTC)
    assert timedelta(minutes=115) < wait <= timedelta(minutes=120, seconds=1)
    assert as_json(place, "override", "show", *where)["override"] == later
    assert "the quotas decide again" in run(place, "override", "clear", *where).stdout
    assert "there was no override" in run(place, "override", "clear", *where, code=1).stdout
    assert as_json(place, "override", "show", *where)["override"] is None


def test_a_time_is_that_of_the_orgs_zone_and_cut_to_the_period(place: Path) -> None:
    body = SETTINGS.replace("APP", "ORG")
    run(place, "org", "put", ORG, "-", stdin=body)
    local = (datetime.now(ZoneInfo(ZONE)) + timedelta(hours=1)).replace(microsecond=0)
    because = ("--reason", "x", "--until")
    told = as_json(place, "override", "set", ORG, "economy", *because, f"{local:%Y-%m-%dT%H:%M:%S}")
    assert (datetime.fromisoformat(told["override"]["until"]), told["app"]) == (local, None)
    assert "and was cut to its end" in run(place, "override", "set", ORG, "economy", *because, "+9d").stdout
    told = run(place, "override", "set", ORG, "economy", "--app", "shop", *because, "+1h", code=2).stderr
    assert told == f"quotas apply to the org Acme ({ORG}) as a whole: leave out --app\n"


def test_on_the_store_of_dev(place: Path) -> None:
    run(
        place,
        "org",
        "put",
        ORG,
        "-",
        "--data-dir",
        "data",
        stdin=SETTINGS.replace("[premium", "[standard, premium"),
        code=2,
    )
    text = SETTINGS.replace("[premium, economy]", "[standard]") + "  standard: 5\n"
    run(place, "org", "put", ORG, "-", "--data-dir", "data", stdin=text)
    assert as_json(place, "org", "show", "Acme", "--data-dir", "data")["in_force"]["model_ordering"] == ["standard"]


async def test_on_dynamodb(tmp_path: Path, engines: Engines) -> None:
    async with engines.open("ministack", tmp_path):
        pass
    endpoint, org = engines.endpoints["ministack"], str(uuid4())
    store = f'{{engine: dynamodb, endpoint: "{endpoint}", table_prefix: {PREFIX}, region: us-east-1}}'
    (tmp_path / "config.yaml").write_text(CONFIG.format(store=store))

    def use() -> Any:
        run(tmp_path, "org", "put", org, "-", stdin=SETTINGS)
        run(tmp_path, "app", "put", org, "shop", "-", stdin="{app_name: Shop, refresh_interval_tight_secs: 0.5}")
        run(tmp_path, "override", "set", org, "--app", "shop", "economy", "--reason", "x")
        return as_json(tmp_path, "app", "show", org, "shop"), as_json(
            tmp_path, "override", "show", org, "--app", "shop"
        )

    app, override = await asyncio.to_thread(use)
    assert app["in_force"]["refresh_interval_tight_secs"] == 0.5
    assert override["override"]["label"] == "economy"
