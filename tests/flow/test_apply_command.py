"""`price-keeper apply`: files describe orgs and apps; what differs is changed, once, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from price_keeper.control import org_endpoints
from price_keeper.domain import Scope
from price_keeper.errors import Busy

from tests.support.commands import call_in_process
from tests.support.control_harness import ADMIN_KEY
from tests.support.control_thread import ControlThread, control_in_thread

STATE = """\
orgs:
  - org_name: {name}
    timezone: Europe/Berlin
    quota_scope: APP
    model_ordering: [premium, economy]
    quotas: {{premium: 10 USD, economy: $2}}
    apps:
      - app_name: Shop front
        quotas: {{premium: 0.50 USD, economy: 1}}
      - {{app_name: Robot, id: robot-7}}
"""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlThread]:
    with control_in_thread(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
def name() -> str:
    return f"Acme {uuid4().hex[:8]}"


def apply(api: ControlThread, text: str, *words: str, code: int = 0) -> str:
    done = api.run_command("apply", "-f", "-", *words, code=code, stdin=text)
    return done.stdout if code == 0 else done.stderr


def changes(api: ControlThread, text: str, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(apply(api, text, "--json", *words))["changes"]
    return found


def org_names(api: ControlThread) -> list[str]:
    orgs = json.loads(api.run_command("org", "list", "--json").stdout)
    return [each["settings"]["org_name"] for each in orgs]


def app_settings(api: ControlThread, org: str, app: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(api.run_command("app", "show", org, app, "--json").stdout)["settings"]
    return found


def test_apply_makes_what_is_missing_and_prints_ids_and_differences(api: ControlThread, name: str) -> None:
    lines = apply(api, STATE.format(name=name)).splitlines()
    org = json.loads(api.run_command("org", "show", name, "--json").stdout)["org"]
    assert lines[0] == f"org {name} ({org}): made"
    assert "  + quotas.premium: $10.00" in lines
    assert f"app Shop front ({org} / shop-front): made" in lines
    assert f"app Robot ({org} / robot-7): made" in lines
    assert "  + quotas.economy: $0.000001" in lines
    assert sum(line.startswith("The secret of org-") for line in lines) == 3
    assert lines[-1] == "3 made, 0 changed, 0 unchanged"
    assert app_settings(api, name, "shop-front")["quotas"] == {"premium": 500_000, "economy": 1}


def test_second_apply_finds_all_by_name_and_changes_nothing(api: ControlThread, name: str) -> None:
    first = changes(api, STATE.format(name=name))
    audit = f"/api/v1/orgs/{first[0]['org']}/audit"
    records = len(api.do(api.harness.ask("GET", audit)).body["records"])
    again = changes(api, STATE.format(name=name.upper()).replace(name.upper(), name))
    assert [each["action"] for each in again] == ["keep"] * 3
    assert [(each["org"], each["app"]) for each in again] == [(each["org"], each["app"]) for each in first]
    assert len(api.do(api.harness.ask("GET", audit)).body["records"]) == records
    assert "0 made, 0 changed, 3 unchanged" in apply(api, STATE.format(name=name))


def test_dry_run_shows_differences_and_changes_nothing(api: ControlThread, name: str) -> None:
    shown = apply(api, STATE.format(name=name), "--dry-run")
    assert shown.endswith("3 would be made, 0 would be changed, 0 unchanged\n")
    assert name not in org_names(api)
    made = changes(api, STATE.format(name=name))
    org = made[0]["org"]
    assert f"org {name} ({org}): would be made" in shown  # the same id
    raised = STATE.format(name=name).replace("10 USD", "12 USD")
    shown = apply(api, raised, "--dry-run")
    assert f"org {name} ({org}): would be changed\n  ~ quotas.premium: $10.00 -> $12.00\n" in shown
    assert [each["action"] for each in changes(api, STATE.format(name=name))] == ["keep"] * 3


def test_omitted_settings_stay_and_null_returns_to_default(api: ControlThread, name: str) -> None:
    org = changes(api, STATE.format(name=name))[0]["org"]
    entry = f"orgs:\n  - org_name: {name}\n    enforcement: shadow\n    apps: [{{id: shop-front, quotas: null}}]\n"
    done = changes(api, entry)
    assert [each["action"] for each in done] == ["change", "change"]
    assert done[0]["after"] == {**done[0]["before"], "enforcement": "shadow"}
    assert app_settings(api, org, "shop-front") == {"app_name": "Shop front"}
    assert app_settings(api, org, "robot-7") == {"app_name": "Robot"}  # the file does not name it
    text = apply(api, f"orgs: [{{id: {org}, enforcement: null, alert_thresholds_pct: [90, 50, 90]}}]")
    assert "  - enforcement: shadow\n" in text
    assert "  + alert_thresholds_pct: [50, 90]\n" in text
    assert "1 unchanged" in apply(api, f"orgs: [{{id: {org}, alert_thresholds_pct: [90, 50, 90]}}]")


def test_renamed_org_is_found_by_id_and_its_old_name_makes_no_second_one(api: ControlThread, name: str) -> None:
    org = changes(api, STATE.format(name=name))[0]["org"]
    assert "~ org_name: " in apply(api, f"orgs: [{{id: {org}, org_name: {name} Ltd}}]")
    refused = apply(api, STATE.format(name=name), code=2)
    assert refused == (
        f'standard input:2: the id that follows from its name, {org}, belongs to "{name} Ltd"; give it an id\n'
    )
    assert "unchanged" in apply(api, STATE.format(name=f"{name} Ltd"))


def test_folder_is_applied_file_by_file_and_mistakes_stop_all(api: ControlThread, name: str) -> None:
    folder = api.folder / name.replace(" ", "-")
    folder.mkdir()
    (folder / "b.yaml").write_text(STATE.format(name=f"{name} B"))
    (folder / "a.json").write_text(json.dumps({"orgs": [{"org_name": f"{name} A", "quotas": {"premium": "$x"}}]}))
    (folder / "notes.txt").write_text("not read")
    refused = api.run_command("apply", "-f", str(folder), code=2).stderr
    assert refused.startswith(f"{folder}/a.json:1: quotas.premium: expected an amount from 0 to")
    assert f"{name} B" not in org_names(api)
    (folder / "a.json").write_text(json.dumps({"orgs": [{"id": str(uuid4()), "org_name": f"{name} C"}]}))
    assert f"{folder}/a.json:1: timezone: required, but missing" in (
        api.run_command("apply", "-f", str(folder), code=2).stderr
    )
    (folder / "a.json").unlink()
    assert "3 made" in api.run_command("apply", "-f", str(folder)).stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "standard input:1: expected `orgs:`"),
        ("orgs: []", "standard input:1: expected `orgs:`"),
        ("orgs: {a: 1}", "standard input:1: expected `orgs:`"),
        ("orgs: [7]", "standard input:1: expected the settings of an org"),
        ("orgs: [{timezone: UTC}]", "standard input:1: expected an id or an org_name, by which it is found"),
        ("orgs: [{id: 7, org_name: A}]", "standard input:1: id: expected a UUID in lower case"),
        ("orgs: [{org_name: A, apps: {}}]", "standard input:1: apps: expected a list of apps"),
        ("orgs: [{org_name: A, apps: [{id: a/b}]}]", "standard input:1: id: expected 1 to 64 letters"),
        ("orgs:\n- org_name: A\n- org_name: a", 'standard input:3: "a" is described twice'),
        ("orgs: [{org_name: A, quotas: {premium: 5 EUR}}]", "standard input:1: quotas.premium: expected an amount"),
        ("orgs: [{org_name: A, apps: [{id: x}, {id: x}]}]", 'standard input:1: "x" is described twice'),
    ],
)
def test_mistakes_of_a_file_are_reported_with_their_lines(api: ControlThread, text: str, said: str) -> None:
    before = org_names(api)
    assert apply(api, text, code=2).startswith(said)
    assert org_names(api) == before


def test_concurrent_change_is_not_undone(api: ControlThread, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from price_keeper.cli import apply_command

    org = changes(api, STATE.format(name=name))[0]["org"]
    put = apply_command._put

    def put_later(admin: Any, change: Any) -> None:
        body = {**change.before, "enforcement": "hard"}
        assert api.do(api.harness.ask("PUT", f"/api/v1/orgs/{org}", body)).status == 200
        put(admin, change)

    monkeypatch.setattr(apply_command, "_put", put_later)
    refused = apply(api, f"orgs: [{{id: {org}, enforcement: shadow}}]", code=1)
    assert f"org {name} ({org}): " in refused
    assert "answered 412" in refused
    assert json.loads(api.run_command("org", "show", org, "--json").stdout)["settings"]["enforcement"] == "hard"


@pytest.mark.parametrize("failing", ["org", "app"])
def test_apply_whose_credentials_failed_is_completed_by_the_next(
    api: ControlThread, name: str, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    create = org_endpoints.create_credentials

    async def fail(services: Any, request: Any, scope: Scope) -> Any:
        if (scope.app is None) == (failing == "org"):
            raise Busy("the store is away", retry_after=1)
        return await create(services, request, scope)

    with monkeypatch.context() as patched:
        patched.setattr(org_endpoints, "create_credentials", fail)
        assert "the store is away" in apply(api, STATE.format(name=name), code=1)
    shown = changes(api, STATE.format(name=name), "--dry-run")
    assert [each["action"] for each in shown] == {"org": ["change", "make", "make"], "app": ["keep", "change", "make"]}[
        failing
    ]
    completed = changes(api, STATE.format(name=name))
    (change,) = [each for each in completed if each["action"] == "change"]
    assert change["before"] == change["after"]
    assert change["secret_retrieval_token"]
    assert [each["action"] for each in changes(api, STATE.format(name=name))] == ["keep"] * 3


def test_entries_before_a_failed_one_are_in_the_json(api: ControlThread, name: str) -> None:
    text = STATE.format(name=name).replace("id: robot-7", "id: robot-7, enforcement: soon")
    done = api.run_command("apply", "-f", "-", "--json", code=2, stdin=text)
    made = json.loads(done.stdout)["changes"]
    assert [(each["kind"], each["action"]) for each in made] == [("org", "make"), ("app", "make")]
    assert all(each["secret_retrieval_token"] for each in made)
    assert json.loads(done.stderr)["message"].startswith("standard input:10: enforcement: ")


@pytest.mark.parametrize("other", ["app_name: shop-front", "app_name: Shop, id: shop-front"])
def test_two_entries_with_one_id_are_refused_by_the_dry_run_too(api: ControlThread, name: str, other: str) -> None:
    text = STATE.format(name=name).replace("app_name: Robot, id: robot-7", other)
    said = 'standard input:10: its id, shop-front, is also that of "Shop front"; give it another\n'
    assert apply(api, text, "--dry-run", code=2) == said
    assert apply(api, text, code=2) == said


def test_two_orgs_of_one_name_need_an_id(api: ControlThread, name: str) -> None:
    first, second = sorted(str(uuid4()) for _ in range(2))
    for org in (first, second):
        changes(api, STATE.format(name=name).replace("org_name:", f"id: {org}\n    org_name:"))
    refused = apply(api, f"orgs: [{{org_name: {name}}}]", code=2)
    assert f'several are called "{name}"; give the id of one: {first}, {second}' in refused


def test_names_without_letters_get_stable_ids(api: ControlThread, name: str) -> None:
    text = STATE.format(name=name).replace("Shop front", "店")
    apps = [change["app"] for change in changes(api, text)]
    assert apps[1].startswith("app-")
    assert [change["app"] for change in changes(api, text)] == apps


def test_secret_of_new_app_is_written_to_private_file(api: ControlThread, name: str, tmp_path: Path) -> None:
    org = changes(api, STATE.format(name=name))[0]["org"]
    secret, settings = tmp_path / "web.secret", "app_name: Web"
    put = ("app", "put", org, "web", "-", "--secret-file", str(secret))
    made = api.run_command(*put, stdin=settings).stdout
    assert made.endswith(f"The secret of org-{org}-app-web is in {secret}\n")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().strip() not in made
    client = f"org-{org}-app-web"
    token = api.run_command("token", client, "--secret-file", str(secret), PRICE_KEEPER_API_KEY=ADMIN_KEY).stdout
    assert token.count(".") == 2
    kept = secret.read_text()
    assert f"{secret} is there already" in api.run_command(*put, code=1, stdin=settings).stderr
    assert secret.read_text() == kept
    other = api.run_command(*put[:-1], str(tmp_path / "other"), stdin=settings)
    assert "the app has a secret already, and price-keeper rotate makes another" in other.stderr
    assert not (tmp_path / "other").exists()
    assert (
        "there is no such folder" in api.run_command(*put[:-1], str(tmp_path / "none/x"), code=1, stdin=settings).stderr
    )


def test_check_config_says_what_a_bare_number_is_in_dollars(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "labels: {premium: {model: a.b, format: nova, prices_usd_per_1m: {input: 3, output: 15}}}"
    )
    (tmp_path / "orgs.yaml").write_text(STATE.format(name="Acme").replace("$2", "5_000"))
    checked = ("check-config", "--settings", "orgs.yaml")
    done = call_in_process(*checked, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    said = [
        "orgs.yaml:6: quotas.economy: 5000 has no unit, so it is in micro-USD: $0.005",
        "orgs.yaml:9: quotas.economy: 1 has no unit, so it is in micro-USD: $0.000001",
    ]
    assert done.stdout.splitlines()[1:] == [*said, "orgs.yaml: good"]
    assert json.loads(call_in_process(*checked, "--json", folder=tmp_path).stdout)["amounts_without_unit"] == said
    (tmp_path / "shop.yaml").write_text("app_name: Shop\nquotas:\n  premium: 1_000_000\n  economy: 5 EUR\n")
    refused = call_in_process("check-config", "--settings", "shop.yaml", folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("shop.yaml:4: quotas.economy: expected an amount from 0 to")
    (tmp_path / "shop.yaml").write_text("app_name: Shop\nquotas:\n  premium: 1_000_000\n")
    done = call_in_process("check-config", "--settings", "shop.yaml", folder=tmp_path)
    assert "shop.yaml:3: quotas.premium: 1000000 has no unit, so it is in micro-USD: $1.00\n" in done.stdout
