"""`price-keeper override` and `session` as an operator and a program use them, at a running control port."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from price_keeper.domain import Scope

from tests.flow.test_org_commands import SETTINGS, ZONE
from tests.support.control_thread import ControlThread, control_in_thread

BECAUSE = ("--reason", "quiet weekend", "--who", "ann")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlThread]:
    with control_in_thread(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
def org(api: ControlThread) -> str:
    """One whose quotas apply to each app, without any."""
    org = str(uuid4())
    api.run_command("org", "put", org, "-", stdin=SETTINGS.replace("Acme", f"Org {org}"))
    return org


@pytest.fixture
def shop(api: ControlThread, org: str) -> tuple[str, ...]:
    api.run_command("app", "put", org, "shop", "-", stdin="{app_name: Shop}")
    return (org, "--app", "shop")


def as_json(api: ControlThread, *arguments: str) -> Any:
    return json.loads(api.run_command(*arguments, "--json").stdout)


def test_override_is_set_shown_and_cleared(api: ControlThread, org: str) -> None:
    without = api.run_command("override", "set", org, "economy", "--reason", "x", code=2).stderr
    assert (
        without
        == f"price-keeper: quotas apply to each app of Org {org} ({org}): name one with --app; there are: none yet\n"
    )
    api.run_command("app", "put", org, "shop", "-", stdin="{app_name: Shop}")
    where = (f"org {org}", "--app", "shop")
    assert "no override" in api.run_command("override", "show", *where).stdout
    output = api.run_command("override", "set", *where, "economy", *BECAUSE).stdout
    line = rf"Shop \({org} / shop\): economy until \S+ 00:00 \S+, said ann: quiet weekend\n"
    assert re.fullmatch(line, output)
    assert re.fullmatch(line, api.run_command("override", "show", *where).stdout)
    later = as_json(api, "override", "set", *where, "premium", *BECAUSE, "--until", "+2h")["override"]
    assert (later["label"], later["version"]) == ("premium", 2)
    wait = datetime.fromisoformat(later["until"]) - datetime.now(UTC)
    assert timedelta(minutes=115) < wait <= timedelta(minutes=120, seconds=1)
    shown = as_json(api, "override", "show", *where)
    assert shown.keys() == {"org", "app", "period", "override"}
    assert (shown["org"], shown["app"], shown["override"]) == (org, "shop", later)
    assert "the quotas decide again" in api.run_command("override", "clear", *where).stdout
    assert "there was no override" in api.run_command("override", "clear", *where, code=1).stdout
    assert json.loads(api.run_command("override", "clear", *where, "--json", code=1).stdout)["is_cleared"] is False
    assert as_json(api, "override", "show", *where)["override"] is None


MISTAKES = [
    (("premum", *BECAUSE), 'label: "premum" is not in the ordering; did you mean "premium"?\n'),
    (("economy", *BECAUSE, "--until", "soon"), "--until: expected a time as "),
    (("economy", *BECAUSE, "--until", "2020-01-01T00:00"), "until: over already; expected a time to come\n"),
    (("economy", *BECAUSE, "--until", "9999-12-31T23:59-12:00"), "--until: expected a time "),
    (("economy", "--reason", "x" * 100_000), "--reason: expected 1 to 200 printable characters, found 100000\n"),
    (("economy", "--reason", "x", "--who", "y" * 129), "--who: expected 1 to 128 printable characters"),
    (("economy", "--reason", "a\nb"), 'reason: expected 1 to 200 printable characters, found "a'),
    (("not a label", "--reason", "x"), "label: expected a label, found "),
]


@pytest.mark.parametrize(("arguments", "complaint"), MISTAKES)
def test_invalid_override_changes_nothing(
    api: ControlThread, shop: tuple[str, ...], arguments: tuple[str, ...], complaint: str
) -> None:
    result = api.run_command("override", "set", *shop, *arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"price-keeper: {complaint}")
    assert len(result.stderr.splitlines()) == 1
    assert as_json(api, "override", "show", *shop)["override"] is None


def test_override_time_is_in_zone_of_org_and_limited_to_period(api: ControlThread) -> None:
    org = str(uuid4())
    api.run_command("org", "put", org, "-", stdin=SETTINGS.replace("APP", "ORG").replace("Acme", "Whole"))
    local = (datetime.now(ZoneInfo(ZONE)) + timedelta(hours=1)).replace(microsecond=0)
    because = ("--reason", "x", "--until")
    document = as_json(api, "override", "set", org, "economy", *because, f"{local:%Y-%m-%dT%H:%M:%S}")
    assert (datetime.fromisoformat(document["override"]["until"]), document["app"]) == (local, None)
    whole = api.run_command("override", "set", org, "economy", *because, f"{local:%Y-%m-%dT%H:%M:%S}").stdout
    assert "cut to its end" not in whole
    assert "and was cut to its end" in api.run_command("override", "set", org, "economy", *because, "+9d").stdout
    document = api.run_command("override", "set", org, "economy", "--app", "shop", *because, "+1h", code=2).stderr
    assert document == f"price-keeper: quotas apply to the org Whole ({org}) as a whole: leave out --app\n"


def test_override_records_current_user_by_default(api: ControlThread, shop: tuple[str, ...]) -> None:
    output = api.run_command("override", "set", *shop, "economy", "--reason", "x", "--json", LOGNAME="carla").stdout
    assert json.loads(output)["override"]["who"] == "carla"


def begun(api: ControlThread, org: str, app: str | None = None) -> str:
    return api.do(api.harness.parts.sessions.login(Scope(org, app))).sid


def test_sessions_are_listed_and_ended(api: ControlThread, shop: tuple[str, ...]) -> None:
    org = shop[0]
    assert "has no sessions" in api.run_command("session", "list", *shop).stdout
    assert as_json(api, "session", "list", *shop) == []
    first, second, third = (begun(api, org, "shop") for _ in range(3))
    others = begun(api, org)
    lines = api.run_command("session", "list", *shop).stdout.splitlines()
    assert lines[0].split() == ["Session", "Began", "Refreshed", "Expires"]
    assert {line.split()[0] for line in lines[1:]} == {first, second, third}
    assert api.run_command("session", "revoke", *shop, second.upper()).stdout == f"Shop ({org} / shop): 1 ended\n"
    assert {each["session_id"] for each in as_json(api, "session", "list", *shop)} == {first, third}
    assert "it was over already" in api.run_command("session", "revoke", *shop, second).stdout
    shown = as_json(api, "session", "show", *shop, second)
    assert (shown["id"], shown["token_type"], shown["client_id"]) == (second, "refresh", f"org-{org}-app-shop")
    lines = api.run_command("session", "show", *shop, second.upper()).stdout.splitlines()
    assert lines[0] == f"Shop ({org} / shop): {second} is revoked"
    assert [line.split()[0] for line in lines[1:]] == ["token", "client", "revoked", "would", "row"]
    assert "is revoked" in api.run_command("session", "show", *shop, str(uuid4()), code=2).stderr
    assert as_json(api, "session", "revoke", *shop, "all") == {"ended": 2}
    assert as_json(api, "session", "list", *shop) == []
    assert [each["session_id"] for each in as_json(api, "session", "list", org)] == [others]
