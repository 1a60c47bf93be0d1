"""`price-keeper org` and `app` as an operator and a program use them, at a running control port."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from price_keeper.stores import schema
from price_keeper.stores.audit_log import read_records
from price_keeper.stores.contract import Item, Update

from tests.support.commands import SECONDS, price_keeper
from tests.support.control_harness import ADMIN_KEY
from tests.support.control_thread import ControlThread, control_in_thread

ZONE = f"Etc/GMT{datetime.now(UTC).hour - 12:+d}"  # in which it is around noon, so that no test sees a day end
SETTINGS = f"""\
org_name: Acme
timezone: {ZONE}
quota_scope: APP
model_ordering: [premium, economy]
quotas:
  premium: 10_000_000
  economy: 2000000
"""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlThread]:
    with control_in_thread(tmp_path_factory.mktemp("served")) as running:
        (running.folder / "acme.yaml").write_text(SETTINGS)
        yield running


@pytest.fixture
def org() -> str:
    return str(uuid4())


def as_json(api: ControlThread, *arguments: str, stdin: str = "") -> Any:
    return json.loads(api.run_command(*arguments, "--json", stdin=stdin).stdout)


def named(name: str, text: str = SETTINGS) -> str:
    return text.replace("Acme", name)


def changed_by_hand(api: ControlThread, org: str, changes: dict[str, Any]) -> Item:
    return api.do(api.harness.store.update(Update(schema.org_config_key(org), set=changes)))


def test_org_is_created_from_file_listed_and_shown(tmp_path: Path, org: str) -> None:
    with control_in_thread(tmp_path) as api:
        assert "no orgs yet" in api.run_command("org", "list").stdout
        (tmp_path / "acme.yaml").write_text(SETTINGS)
        made, _, secret = api.run_command("org", "put", org, "acme.yaml").stdout.partition("\n\n")
        assert made.splitlines()[0] == f"Acme ({org}): made"
        assert secret.startswith(f"The secret of org-{org} can be fetched once, until ")
        tomorrow = f"{datetime.now(UTC).astimezone(ZoneInfo(ZONE)).date() + timedelta(days=1)} 00:00"
        shown = api.run_command("org", "show", "acme").stdout.splitlines()
        assert shown == [f"Acme ({org})", *made.splitlines()[1:]]
        assert shown[1:3] == [f"  time zone       {ZONE}", "  quotas apply to each app"]
        assert any(line.startswith(f"  period          day, this one until {tomorrow}") for line in shown)
        assert "  quota of        premium: $10.000000" in shown
        listed = api.run_command("org", "list").stdout.splitlines()
        assert listed[1].split() == ["Acme", org, ZONE, "for", "each", "app,", "by", "day", "premium", ">", "economy"]


def test_json_is_read_and_written_by_programs(api: ControlThread, org: str) -> None:
    body = {
        "org_name": "By JSON",
        "timezone": ZONE,
        "quota_scope": "ORG",
        "model_ordering": ["economy"],
        "quotas": {"economy": 5},
        "refresh_interval_tight_secs": 0.5,
    }
    put = as_json(api, "org", "put", org, "-", stdin=json.dumps(body))
    assert put["client_id"] == f"org-{org}"
    assert {"secret_retrieval_token", "secret_retrieval_expires_at"} <= put.keys()
    again = as_json(api, "org", "put", org, "-", stdin=json.dumps(body))
    assert not {"client_id", "secret_retrieval_token"} & again.keys()
    assert again["settings"] == body | {"period": "day", "agg_shard_count": 8}
    assert (again["org"], again["turns_at"], again["in_force"]["version"], again["passed_over"]) == (org, None, 2, [])
    assert again["in_force"]["quotas"] == {"economy": 5}
    assert as_json(api, "org", "show", org) == again
    assert {"org_name": "By JSON"} | again in as_json(api, "org", "list")
    assert as_json(api, "app", "list", org) == []


def test_printed_command_retrieves_secret_once(api: ControlThread, org: str) -> None:
    api.run_command("org", "put", org, "-", stdin=named("Fetching"))
    for arguments, client in (
        (("org", "put", org, "-"), None),
        (("app", "put", org, "shop", "-"), f"org-{org}-app-shop"),
        (("app", "put", org, "shop", "-"), None),
    ):
        result = api.run_command(
            *arguments, stdin=named("Fetching") if client is None and "org" in arguments else "app_name: x"
        )
        assert ("can be fetched once" in result.stdout) == (client is not None)
        if client is not None:
            line = result.stdout.splitlines()[-1]
            done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=SECONDS, check=True)
            assert json.loads(done.stdout).keys() == {"client_id", "client_secret"}
            assert json.loads(done.stdout)["client_id"] == client
            assert subprocess.run(["sh", "-c", line], capture_output=True, timeout=SECONDS).returncode != 0


def test_audit_names_administrator_and_address(api: ControlThread, org: str) -> None:
    api.run_command("org", "put", org, "-", stdin=named("Audited"))
    api.run_command("app", "put", "audited", "shop", "-", stdin="app_name: Shop")
    api.run_command("override", "set", org, "--app", "shop", "economy", "--reason", "x", "--who", "ann")
    api.run_command("override", "clear", org, "--app", "shop")
    page = api.do(read_records(api.harness.store, org, 10, None))
    found = [(row.item["action"], row.item["who"], row.item["address"]) for row in page.rows]
    actions = ("override.clear", "override.set", "credentials.make", "app.put", "credentials.make", "org.put")
    assert sorted(found) == sorted((action, "admin", "127.0.0.1") for action in actions)


def test_every_mistake_is_reported_with_its_line(api: ControlThread, org: str) -> None:
    text = SETTINGS.replace("economy: 2000000", "econmy: 020") + "limts: {}\nsome.thing: 1\n"
    (api.folder / "bad.yaml").write_text(text + "refresh_interval_normal_secs: 1.00000000000000000001\n")
    output = api.run_command("org", "put", org, "bad.yaml", code=2).stderr.splitlines()
    assert output[0].startswith(
        'bad.yaml:7: quotas.econmy: there is no label "econmy" in the configuration; did you mean'
    )
    assert output[1].startswith("bad.yaml:8: limts: unknown setting; ")
    assert output[2].startswith("bad.yaml:9: some.thing: unknown setting; ")
    assert output[3].startswith("bad.yaml:10: refresh_interval_normal_secs: ")
    assert "1.00000000000000000001" in output[3]
    assert len(output) == 4
    assert api.run_command("org", "show", org, code=2).stdout == ""


def test_many_mistakes_have_lines_and_omitted_count(api: ControlThread, org: str) -> None:
    names = [f"x{number:03}" + "y" * 80 for number in range(30)]
    result = api.run_command(
        "org", "put", org, "-", code=2, stdin="".join(f"{name}: 1\n" for name in names)
    ).stderr.splitlines()
    found = [re.fullmatch(r"standard input:(\d+): x(\d{3})y+: .*", line) for line in result]
    lines = [int(each[1]) for each in found if each]
    assert len(lines) > 10
    assert lines == sorted(lines) == [int(each[2]) + 1 for each in found if each]
    assert re.fullmatch(r"standard input:1: and \d+ more mistakes", result[-1])


UNREADABLE = [
    ("-", "{", "standard input:1: not valid YAML at column 2: "),
    ("-", "org_name: a\norg_name: b\n", "standard input:2: org_name: duplicate key, first on line 1"),
    ("-", "[]", "standard input:1: expected a mapping of settings, found []"),
    ("-", "", "standard input:1: org_name: required, but missing"),
    ("-", "a: " + "[" * 15 + "]" * 15, "standard input:1: JSON is nested at most"),
    ("-", "a: " + "x" * 300_000, "price-keeper: too long: 3000"),
    ("-", 'org_name: "\\ud800"', "standard input:1: the body spells half a character"),
    ("nothing.yaml", "", "nothing.yaml: cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("name", "text", "complaint"), UNREADABLE)
def test_unreadable_file_is_reported(api: ControlThread, org: str, name: str, text: str, complaint: str) -> None:
    output = api.run_command("org", "put", org, name, code=2, stdin=text).stderr
    assert output.startswith(complaint), output


NOBODY = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
NO_ORG = f"answered 404: there is no org {NOBODY}; price-keeper org put makes it"
WRONG = [
    (["org", "put", "nobody", "acme.yaml"], 2, "no org has the id or the name 'nobody'; "),
    (["org", "put", "nobody", "acme.yaml"], 2, ". A new org needs an id of its own, a UUID such as "),
    (["org", "show", NOBODY], 2, NO_ORG),
    (["org", "show", NOBODY.upper()], 2, NO_ORG),
    (["app", "put", NOBODY, "shop", "acme.yaml"], 2, NO_ORG),
    (["app", "list", NOBODY], 2, NO_ORG),
    (["app", "put", NOBODY, "a#b", "acme.yaml"], 2, "usage: "),
    (["app", "show", NOBODY, ".."], 2, "usage: "),
    (["override", "show", "nobody"], 2, "no org has the id or the name 'nobody'; "),
    (["override", "show", NOBODY], 2, NO_ORG),
    (["override", "set", NOBODY, "economy"], 2, NO_ORG),
    (["session", "list", NOBODY], 2, NO_ORG),
    (["session", "revoke", NOBODY], 2, "usage: "),
    (["session", "revoke", NOBODY, "../.."], 2, "a session id is a UUID"),
    (["org", "list", "--key-file", "none"], 2, "none: cannot be read: No such file or directory"),
    (["org", "list", "--api", "127.0.0.1"], 2, "--api: expected http(s)://host"),
]


@pytest.mark.parametrize(("arguments", "code", "complaint"), WRONG)
def test_impossible_request_says_what_is_possible(
    api: ControlThread, arguments: list[str], code: int, complaint: str
) -> None:
    assert complaint in api.run_command(*arguments, code=code).stderr


def test_credentials_survive_put_and_are_never_shown(api: ControlThread, org: str) -> None:
    changed_by_hand(api, org, {"client_secret_hash": "$2b$12$secret", "quotas": "x", "org_name": "A\x1b[31mB"})
    shown = api.run_command("org", "show", org)
    assert "\x1b" not in shown.stdout
    assert 'Warning: quotas: expected a mapping, found "x"; nothing may be spent' in shown.stdout
    put = api.run_command("org", "put", org, "-", "--json", stdin=named("By hand"))
    assert "secret" not in shown.stdout + put.stdout
    assert changed_by_hand(api, org, {"seen": 1})["client_secret_hash"] == "$2b$12$secret"


def test_changed_zone_is_shown_with_its_time(api: ControlThread, org: str) -> None:
    api.run_command("org", "put", org, "-", stdin=named("Moving"))
    output = api.run_command("org", "put", "Moving", "-", stdin=named("Moving").replace(ZONE, "Asia/Tokyo")).stdout
    line = re.compile(r"^From \d{4}-\d\d-\d\d 00:00 \S+ on: time zone Asia/Tokyo\.$", re.MULTILINE)
    assert line.search(output)
    assert output.startswith(f"Moving ({org}): changed\n")
    shown = as_json(api, "org", "show", "Moving")
    assert (shown["settings"]["timezone"], shown["in_force"]["timezone"]) == ("Asia/Tokyo", ZONE)
    assert datetime.fromisoformat(shown["turns_at"]) > datetime.now(UTC)
    api.run_command("app", "put", org, "shop", "-", stdin="app_name: Shop")
    assert line.search(api.run_command("app", "show", org, "shop").stdout)


def test_apps_inherit_and_show_own_settings(api: ControlThread, org: str) -> None:
    api.run_command("org", "put", org, "-", stdin=named("Heir"))
    assert "has no apps yet" in api.run_command("app", "list", "Heir").stdout
    none = api.run_command("app", "show", "Heir", "shop", code=2).stderr
    assert none.endswith("answered 404: there is no app shop of org 'Heir'; there are: none yet\n")
    body = '{"app_name": "Shop", "quotas": {"premium": 1, "economy": 2}}'
    made = api.run_command("app", "put", "Heir", "shop", "-", stdin=body).stdout.splitlines()
    assert made[0] == f"Shop ({org} / shop): made"
    shown = api.run_command("app", "show", "heir", "shop").stdout.splitlines()
    assert "  ordering        premium > economy  (the org's)" in shown
    assert "  quota of        premium: $0.000001" in shown
    assert api.run_command("app", "list", "Heir").stdout.splitlines()[1].split()[:2] == ["Shop", "shop"]
    (listed,) = as_json(api, "app", "list", "Heir")
    assert listed == as_json(api, "app", "show", "Heir", "shop")
    assert (listed["settings"]["app_name"], listed["in_force"]["quotas"]) == ("Shop", {"premium": 1, "economy": 2})


def test_app_settings_without_effect_are_shown(api: ControlThread, org: str) -> None:
    api.run_command("org", "put", org, "-", stdin=named("Paying").replace("APP", "ORG"))
    body = "{app_name: Shop, quotas: {premium: 1, economy: 2}}"
    output = api.run_command("app", "put", org, "shop", "-", stdin=body).stdout
    assert "this app's own ordering, quotas and enforcement wait." in output
    assert "  quota of        premium: $10.000000  (the org's)" in output


def test_app_without_quota_for_new_org_label_is_warned_about(api: ControlThread, org: str) -> None:
    small = named("Growing").replace("[premium, economy]", "[premium]")
    api.run_command("org", "put", org, "-", stdin=small)
    api.run_command("app", "put", org, "shop", "-", stdin="{app_name: Shop, quotas: {premium: 1}}")
    output = api.run_command("org", "put", org, "-", stdin=named("Growing")).stdout
    assert "Warning: app shop: economy is unlimited, because the app's own quotas do not name it" in output
    shown = api.run_command("app", "show", org, "shop").stdout
    assert "  quota of        premium: $0.000001\n  quota of        economy: unlimited\n" in shown


def test_list_is_complete_over_pages(api: ControlThread, org: str) -> None:
    api.run_command("org", "put", org, "-", stdin=named("Crowded"))
    apps = [f"app-{number:03}" for number in range(201)]

    async def made() -> None:
        for app in apps:
            await api.harness.store.update(Update(schema.app_config_key(org, app), set={"app_name": app}))

    api.do(made())
    assert [each["app"] for each in as_json(api, "app", "list", "Crowded")] == apps
    assert len(api.run_command("app", "list", org).stdout.splitlines()) == 1 + len(apps)


def test_ambiguous_org_name_is_refused(api: ControlThread) -> None:
    twins = sorted(str(uuid4()) for _ in range(2))
    for twin in twins:
        api.run_command("org", "put", twin, "-", stdin=named("Twin"))
    output = api.run_command("org", "show", "twin", code=2).stderr
    assert output == f"price-keeper: several orgs are called 'twin'; name one by its id: {', '.join(twins)}\n"


def test_command_process_reads_key_from_file(api: ControlThread, org: str) -> None:
    (api.folder / "key").write_text(ADMIN_KEY + "\n")
    place = ("--api", api.harness.url, "--key-file", "key")
    unset = {"PRICE_KEEPER_API_KEY": "", "PRICE_KEEPER_API_URL": ""}
    put = price_keeper("org", "put", org, "-", *place, folder=api.folder, stdin=named("Process"), **unset)
    assert (put.returncode, put.stderr) == (0, "")
    shown = price_keeper("org", "show", "process", *place, folder=api.folder, **unset)
    assert shown.stdout.splitlines()[0] == f"Process ({org})"
