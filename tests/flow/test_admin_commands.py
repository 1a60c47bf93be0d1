"""What the administrator's commands print when the control API refuses, fails, or is something else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from price_keeper.cli import api_client

from tests.support.commands import call_in_process
from tests.support.ports import free_port
from tests.support.scripted_server import ScriptedServer, run_scripted_server

ORG = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
KEY = "k" * 30
SETTINGS = "{org_name: Acme}"
HOLDS = {
    "timezone": "UTC",
    "quota_scope": "ORG",
    "period": "day",
    "model_ordering": ["premium"],
    "quotas": {"premium": 5},
    "sticky_fallback_enabled": True,
    "enforcement": "soft",
    "tight_mode_threshold_pct": 95,
    "refresh_interval_normal_secs": 300,
    "refresh_interval_tight_secs": 60.5,
    "alert_thresholds_pct": [],
    "agg_shard_count": 8,
    "version": 1,
}
SHOWN_ORG = {
    "org": ORG,
    "settings": {"org_name": "Acme"},
    "in_force": HOLDS,
    "turns_at": None,
    "created_at": None,
    "updated_at": None,
    "passed_over": [],
}


@pytest.fixture
def script() -> Iterator[ScriptedServer]:
    with run_scripted_server() as running:
        yield running


def asked(folder: Path, url: str, *arguments: str, **more: str) -> CompletedProcess[str]:
    known = {"PRICE_KEEPER_API_URL": url, "PRICE_KEEPER_API_KEY": KEY} | more
    done = call_in_process(*arguments, folder=folder, stdin=SETTINGS, **known)
    assert "Traceback" not in done.stderr
    assert KEY not in done.stdout + done.stderr
    return done


REFUSED = [
    (
        401,
        {"message": "the admin key is wrong"},
        {},
        "401: the admin key is wrong; the right one comes from the variable",
    ),
    (403, {"message": "no admin key is configured here"}, {}, "auth.admin_api_key_env"),
    (404, {"message": "there is no org x"}, {}, "; price-keeper org put makes it"),
    (409, {"message": "somebody was faster"}, {}, "409: somebody was faster; look at it again, then do it again"),
    (412, {"message": "not any more"}, {}, "412: not any more; look at it again, then do it again"),
    (429, {"message": "too many wrong keys"}, {"Retry-After": "6"}, "too many wrong keys; try again in 6 s"),
    (503, {"message": "the store is away"}, {"Retry-After": "5"}, "the store is away; try again in 5 s"),
    (503, {"message": "away"}, {"Retry-After": "9" * 5000}, "503: away"),
    (500, {"message": "a mistake of ours"}, {}, "500: a mistake of ours"),
    (404, {"message": "two\nlines\x1b[31m" + "x" * 9000, "details": [7, {"path": 1}]}, {}, "404: two\\nlines\\x1b"),
    (302, {}, {"Location": "http://127.0.0.1:9/"}, "302: no reason is given"),
    (200, b"<html>", {}, "is no control API of Bedrock Price Keeper"),
    (200, b"[" * 100_000, {}, "is no control API of Bedrock Price Keeper"),
    (200, [], {}, "is no control API of Bedrock Price Keeper"),
]
COMMANDS = [
    ("org", "put", ORG, "-"),
    ("org", "show", ORG),
    ("app", "put", ORG, "shop", "-"),
    ("override", "show", ORG),
    ("session", "revoke", ORG, "all"),
]


@pytest.mark.parametrize(("status", "body", "headers", "words"), REFUSED)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_api_refusal_is_one_line_with_what_to_do(
    tmp_path: Path, script: ScriptedServer, command: tuple[str, ...], status: int, body: Any, headers: Any, words: str
) -> None:
    script.answers.append((status, body, headers))
    done = asked(tmp_path, script.url, *command)
    assert (done.returncode, done.stdout) == (2 if status == 404 else 1, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert len(done.stderr) < 2500


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_unreachable_server_is_reported(tmp_path: Path, script: ScriptedServer, command: tuple[str, ...]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = asked(tmp_path, url, *command)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"price-keeper: no server answers at {url} (Connection refused): is price-keeper running"
    )
    keyless = asked(tmp_path, url, *command, PRICE_KEEPER_API_KEY="")
    assert (keyless.returncode, keyless.stdout) == (2, "")
    assert keyless.stderr.startswith("price-keeper: the admin key comes from the variable PRICE_KEEPER_API_KEY, or")


def test_put_with_lost_answer_explains_how_to_get_secret(tmp_path: Path, script: ScriptedServer) -> None:
    script.answers.append((0, b"", {}))
    done = asked(tmp_path, script.url, "org", "put", ORG, "-")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "it may have been done all the same. Put it again; " in done.stderr
    assert "price-keeper rotate creates another secret" in done.stderr


BROKEN = [
    {},
    {"org": None},
    SHOWN_ORG | {"in_force": {}},
    SHOWN_ORG | {"in_force": HOLDS | {"timezone": "Mars/Olympus"}},
    SHOWN_ORG | {"in_force": HOLDS | {"timezone": "America"}},
    SHOWN_ORG | {"in_force": HOLDS | {"timezone": "\ud800"}},
    SHOWN_ORG | {"in_force": HOLDS | {"period": "year"}},
    SHOWN_ORG | {"in_force": HOLDS | {"quotas": {"premium": "5" * 20_000_000}}},
    SHOWN_ORG | {"in_force": HOLDS | {"quotas": {"premium": 5.5}}},
    SHOWN_ORG | {"in_force": HOLDS | {"quotas": {"premium": "five"}}},
    SHOWN_ORG | {"in_force": HOLDS | {"quotas": []}},
    SHOWN_ORG | {"in_force": HOLDS | {"refresh_interval_tight_secs": "soon"}},
    SHOWN_ORG | {"settings": None},
    SHOWN_ORG | {"turns_at": "tomorrow"},
    SHOWN_ORG | {"passed_over": 7},
    SHOWN_ORG | {"org": ORG.replace("6", "7")},
]


@pytest.mark.parametrize("document", BROKEN)
def test_malformed_answer_gives_no_traceback(tmp_path: Path, script: ScriptedServer, document: Any) -> None:
    script.answers.append((200, document, {}))
    done = asked(tmp_path, script.url, "org", "show", ORG)
    assert (done.returncode, done.stdout) == (1, "")
    assert "answered what cannot be read here" in done.stderr or "answered for another org" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_secret_is_shown_although_rest_of_answer_is_malformed(tmp_path: Path, script: ScriptedServer) -> None:
    token = "'; touch spoilt; '"
    script.answers.append((201, {"client_id": f"org-{ORG}", "secret_retrieval_token": token}, {}))
    done = asked(tmp_path, script.url, "org", "put", ORG, "-")
    assert done.returncode == 1
    assert "answered what cannot be read here" in done.stderr
    assert f"The secret of org-{ORG} can be fetched once" in done.stdout
    assert """'X-Retrieval-Token: '"'"'; touch spoilt; '"'"''""" in done.stdout


def test_unknown_newer_fields_are_shown_by_their_name(tmp_path: Path, script: ScriptedServer) -> None:
    script.answers.append((200, SHOWN_ORG | {"in_force": HOLDS | {"hue": {"rgb": 5}}}, {}))
    done = asked(tmp_path, script.url, "org", "show", ORG)
    assert done.returncode == 0, done.stderr
    assert '  hue             {"rgb": 5}' in done.stdout.splitlines()
    assert "  and when tight  every 60.5 s" in done.stdout.splitlines()


LISTS = [
    (
        [{"orgs": [], "cursor": "b"}, {"orgs": [], "cursor": "b"}],
        "returned a page of a list with a wrong cursor, after 'b'",
    ),
    ([{"orgs": [], "cursor": ""}], "returned a page of a list with a wrong cursor, after ''"),
    ([{"orgs": [], "cursor": 5}], "returned a page of a list with a wrong cursor, after ''"),
    ([{"orgs": 5}], "answered what cannot be read here"),
    ([{}], "answered what cannot be read here"),
    ([{"orgs": [5]}], "answered what cannot be read here"),
    ([{"orgs": [{"org": ORG}]}], "answered what cannot be read here"),
]


@pytest.mark.parametrize(("pages", "words"), LISTS)
def test_endless_pagination_stops(tmp_path: Path, script: ScriptedServer, pages: list[Any], words: str) -> None:
    script.answers += [(200, page, {}) for page in pages]
    done = asked(tmp_path, script.url, "org", "list")
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr


def test_cursor_is_returned_unchanged_and_page_may_be_long(tmp_path: Path, script: ScriptedServer) -> None:
    long = SHOWN_ORG | {"org_name": "Acme", "padding": "x" * 3_000_000}
    script.answers += [
        (200, {"orgs": [long], "cursor": "a/b&c=d"}, {}),
        (200, {"orgs": [SHOWN_ORG], "cursor": None}, {}),
    ]
    done = asked(tmp_path, script.url, "org", "list")
    assert done.returncode == 0, done.stderr
    assert script.requests == ["GET /api/v1/orgs?limit=100", "GET /api/v1/orgs?limit=100&cursor=a%2Fb%26c%3Dd"]
    assert len(done.stdout.splitlines()) == 3


def test_missing_override_in_answer_is_reported(tmp_path: Path, script: ScriptedServer) -> None:
    stale = {"scope": {"org": ORG, "app": None}, "period": "DAY#20261118", "override": None, "is_stale": True}
    script.answers += [(200, SHOWN_ORG, {}), (200, stale, {})]
    done = asked(tmp_path, script.url, "override", "show", ORG, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the store did not answer" in done.stderr


# Answers that are meant to do harm.

ESCAPE = "\x1b]0;mine\x07"


def test_terminal_escapes_are_removed_from_all_output(tmp_path: Path, script: ScriptedServer) -> None:
    named = SHOWN_ORG | {"settings": {"org_name": f"Acme{ESCAPE}"}, "in_force": HOLDS | {"quota_scope": "APP"}}
    mistakes = {"message": "no", "details": [{"path": f"a{ESCAPE}", "message": f"b{ESCAPE}"}]}
    hostile: list[tuple[tuple[str, ...], list[Any]]] = [
        (("org", "show", ORG), [(200, named, {})]),
        (("org", "put", ORG, "-"), [(400, mistakes, {})]),
        (("override", "show", ORG), [(200, named, {}), (200, {"apps": [{"app": ESCAPE}]}, {})]),
        (("override", "show", ORG, "--app", "a"), [(200, named | {"in_force": HOLDS}, {})]),
        (("org", "show", "none"), [(200, {"orgs": [{"org": ORG, "org_name": ESCAPE}]}, {})]),
        (("session", "revoke", ORG, "all"), [(200, named, {}), (200, {"ended": ESCAPE}, {})]),
    ]
    for command, answers in hostile:
        script.answers[:] = answers
        done = asked(tmp_path, script.url, *command)
        assert done.stdout + done.stderr
        assert "\x1b" not in done.stdout + done.stderr, command


@pytest.mark.parametrize("org", ["\xe9", "../audit", "\r\nX-Own: 1", ORG.upper()])
def test_malformed_org_id_is_not_requested(tmp_path: Path, script: ScriptedServer, org: str) -> None:
    script.answers.append((200, {"orgs": [{"org": org, "org_name": "Acme"}]}, {}))
    done = asked(tmp_path, script.url, "org", "show", "Acme")
    assert (done.returncode, done.stdout, len(script.requests)) == (1, "", 1)
    assert "answered what cannot be read here" in done.stderr


def test_long_name_lengthens_only_its_own_line(tmp_path: Path, script: ScriptedServer) -> None:
    long = SHOWN_ORG | {"settings": {"org_name": "x" * 1_000_000}}
    script.answers.append((200, {"orgs": [long] + [SHOWN_ORG] * 99}, {}))
    done = asked(tmp_path, script.url, "org", "list")
    assert done.returncode == 0
    assert sorted(map(len, done.stdout.splitlines()))[-2] < 500


def test_endless_list_is_aborted_after_pages(
    tmp_path: Path, script: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_client, "MAX_PAGES", 5)
    script.answers += [(200, {"orgs": [], "cursor": f"{number:03}"}, {}) for number in range(100)]
    done = asked(tmp_path, script.url, "org", "list")
    assert (done.returncode, done.stdout, len(script.requests)) == (1, "", 5)
    assert "returned too long a list" in done.stderr


def test_endless_list_is_aborted_by_size(
    tmp_path: Path, script: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_client, "MAX_LISTED_BYTES", 2500)
    script.answers += [(200, {"orgs": [], "cursor": "a", "padding": "x" * 3000}, {})]
    assert "returned too long a list" in asked(tmp_path, script.url, "org", "list").stderr
    script.answers += [(200, {"orgs": [SHOWN_ORG] * 101, "cursor": "a"}, {})]
    done = asked(tmp_path, script.url, "org", "list")
    assert (len(script.requests), "returned too long a list" in done.stderr) == (2, True)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"])
def test_slowly_sent_answer_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    monkeypatch.setattr(api_client, "REQUEST_DEADLINE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_drip, args=(server, begin))
        thread.start()
        began = time.monotonic()
        done = asked(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}", "org", "show", ORG)
        thread.join()
    assert time.monotonic() - began < 5
    assert (done.returncode, done.stdout) == (1, "")
    assert "gave no whole answer" in done.stderr


def _drip(server: socket.socket, begin: bytes) -> None:
    connection, _ = server.accept()
    with connection, suppress(OSError):
        connection.sendall(begin)
        for _ in range(200):
            connection.sendall(b"x")
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("which", "ended", "words"),
    [
        (ORG, 0, "it was over already; no access token made from it is good any more"),
        (ORG, 1, ": 1 ended"),
        ("all", 0, ": 0 ended"),
    ],
)
def test_ending_ended_session_revokes_its_tokens(
    tmp_path: Path, script: ScriptedServer, which: str, ended: int, words: str
) -> None:
    script.answers += [(200, SHOWN_ORG, {}), (200, {"ended": ended}, {})]
    done = asked(tmp_path, script.url, "session", "revoke", ORG, which)
    assert (done.returncode, done.stderr) == (0, "")
    assert words in done.stdout
