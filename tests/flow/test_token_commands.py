"""`price-keeper token` and `rotate` as a user has them, with a real control API and without one."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from price_keeper.auth.client_secrets import make_secret
from price_keeper.cli.dev_command import ADMIN_KEY_FILE, DEMO_APP, DEMO_ORG

from tests.support.commands import PYTHON_PATH, SECONDS, Sidecar, call_in_process, sidecar
from tests.support.ports import free_port
from tests.support.scripted_server import ScriptedServer, run_scripted_server

CLIENT = f"org-{DEMO_ORG}-app-{DEMO_APP}"


class Running:
    def __init__(self, folder: Path, process: Sidecar) -> None:
        self.folder = folder
        self.process = process
        self.key = (folder / "data" / ADMIN_KEY_FILE).read_text().strip()
        found = re.search(rf"AWS_CONTAINER_AUTHORIZATION_TOKEN='{CLIENT}:(.+)'", process.startup_output)
        assert found
        self.secret = found[1]

    def asked(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        shown = {"PRICE_KEEPER_API_URL": self.process.control, "PRICE_KEEPER_API_KEY": ""} | environment
        done = call_in_process(*arguments, folder=self.folder, **shown)
        assert "Traceback" not in done.stderr
        assert not any(secret in done.stderr for secret in (self.key, self.secret, *environment.values()) if secret)
        return done

    def token(self, *arguments: str, secret: str | None = None) -> subprocess.CompletedProcess[str]:
        return self.asked("token", CLIENT, *arguments, PRICE_KEEPER_CLIENT_SECRET=secret or self.secret)

    def rotate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.asked("rotate", DEMO_ORG, "--app", DEMO_APP, *arguments, PRICE_KEEPER_API_KEY=self.key)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("dev")
    with sidecar("dev", "--data-dir", "data", "--port", "0", "--control-port", "0", folder=folder) as process:
        yield Running(folder, process)


def test_token_is_printed_alone_or_as_json(running: Running) -> None:
    plain = running.token()
    assert (plain.returncode, plain.stderr) == (0, "")
    assert re.fullmatch(r"[\w-]+\.[\w-]+\.[\w-]+\n", plain.stdout)
    document = json.loads(running.token("--json").stdout)
    assert {"access_token", "refresh_token", "expires_in", "session_id"} <= document.keys()


def test_printed_environment_lets_app_call(running: Running) -> None:
    printed = running.token("--env", "--data", running.process.data)
    assert printed.returncode == 0, printed.stderr
    script = f"{printed.stdout}\nexec {sys.executable} -c '{_CALL}'"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    kept["AWS_BEARER_TOKEN_BEDROCK"] = "bedrock-api-key-of-aws"  # which goes before a session token
    called = subprocess.run(
        ["sh", "-c", script], env=kept, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (called.returncode, called.stdout.strip()) == (0, "200"), called.stderr


_CALL = (
    'import boto3; print(boto3.client("bedrock-runtime").converse(modelId="premium", '
    'messages=[dict(role="user", content=[dict(text="Hello")])])["ResponseMetadata"]["HTTPStatusCode"])'
)


def test_secret_is_read_from_file_or_hidden_prompt(running: Running) -> None:
    (running.folder / "secret").write_text(running.secret + "\n")
    assert running.asked("token", CLIENT, "--secret-file", "secret").returncode == 0
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "price_keeper.cli", "token", CLIENT, "--api", running.process.control],
        env={name: value for name, value in os.environ.items() if name != "PRICE_KEEPER_CLIENT_SECRET"}
        | {"PYTHONPATH": PYTHON_PATH},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,  # without a terminal of its own, which the question would go to
    )
    shown = b""
    while not shown.endswith(b": "):
        shown += os.read(ours, 1000)
    os.write(ours, running.secret.encode() + b"\n")
    output = process.communicate(timeout=SECONDS)[0]
    os.set_blocking(ours, False)
    shown += os.read(ours, 1000)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0, shown
    assert output.count(b".") == 2
    assert running.secret.encode() not in shown + output


def test_wrong_secret_is_reported(running: Running) -> None:
    wrong = running.token(secret=make_secret())
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.endswith("answered 401: the client id or its secret is wrong\n")
    assert running.token().returncode == 0


def test_rotate_prints_new_secret_and_old_one_has_grace(running: Running) -> None:
    done = running.rotate("--grace", "2")
    assert done.returncode == 0, done.stderr
    assert "stays good for 2 h" in done.stderr
    new = done.stdout.strip()
    assert running.token().returncode == running.token(secret=new).returncode == 0
    document = json.loads(running.rotate("--grace", "0", "--json").stdout)
    assert document.keys() == {"client_id", "client_secret", "grace_hours"}
    assert running.token().returncode == 1
    running.secret = document["client_secret"]
    assert running.token().returncode == 0


def test_retrieval_token_can_be_printed_for_others(running: Running) -> None:
    done = running.rotate("--token-only")
    assert re.fullmatch(r"[\w-]{43}\n", done.stdout)
    document = json.loads(running.rotate("--token-only", "--json").stdout)
    assert {"client_id", "secret_retrieval_token", "secret_retrieval_expires_at"} <= document.keys()
    assert running.token().returncode == 0


def test_unauthorised_or_unknown_rotation_is_reported(running: Running) -> None:
    refused = running.asked("rotate", DEMO_ORG, PRICE_KEEPER_API_KEY="not the admin key".replace(" ", "-"))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "answered 401: the admin key is wrong" in refused.stderr
    missing = running.asked("rotate", DEMO_ORG, "--app", "none", PRICE_KEEPER_API_KEY=running.key)
    assert missing.returncode == 2
    assert "answered 404: there is no app none" in missing.stderr


MISTAKES = [
    (("token", "somebody"), "a client id is org-ORG"),
    (("token", CLIENT), "the client's secret comes from"),
    (("token", CLIENT, "--secret-file", "none"), "none: cannot be read: No such file or directory"),
    (("token", CLIENT, "--secret-file", "empty"), "empty: a client secret is printable ASCII"),
    (("token", CLIENT, "--api", "ftp://x"), "--api: expected http(s)://host"),
    (("token", CLIENT, "--api", "http://keeper.example:8081"), "--api: expected https: secrets travel there; http is"),
    (("rotate", DEMO_ORG, "--api", "http://10.0.0.1"), "http is for loopback alone"),
    (("token", CLIENT, "--env", "--json"), "not allowed with"),
    (("token", CLIENT, "--env", "--data", "x y"), "--data: expected http(s)"),
    (("rotate", DEMO_ORG), "the admin key comes from"),
    (("rotate", DEMO_ORG, "--app", "a b"), "--app: an app id is"),
    (("rotate", DEMO_ORG, "--grace", "169"), "expected whole hours from 0 to 168"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_command_mistake_is_reported_without_request(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "empty").write_text("\n")
    environment = {"PRICE_KEEPER_API_KEY": "k" * 30 if "--api" in arguments else "", "PRICE_KEEPER_CLIENT_SECRET": ""}
    done = call_in_process(*arguments, folder=tmp_path, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_unreachable_control_service_is_reported(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = call_in_process("token", CLIENT, "--api", url, folder=tmp_path, PRICE_KEEPER_CLIENT_SECRET="sesame")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"price-keeper: no server answers at {url} (Connection refused): is price-keeper running"
    )
    assert "sesame" not in done.stderr


@pytest.fixture
def script() -> Iterator[ScriptedServer]:
    with run_scripted_server() as running:
        yield running


def rotated(folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    return call_in_process("rotate", DEMO_ORG, "--api", url, folder=folder, PRICE_KEEPER_API_KEY="k" * 30)


ISSUED = (200, {"client_id": f"org-{DEMO_ORG}", "secret_retrieval_token": "sesame"}, {})


def test_store_outage_is_retried_for_secret(tmp_path: Path, script: ScriptedServer) -> None:
    script.answers += [
        ISSUED,
        (503, {"message": "away"}, {"Retry-After": "1"}),
        (200, {"client_id": "c", "client_secret": "s"}, {}),
    ]
    done = rotated(tmp_path, script.url)
    assert (done.returncode, done.stdout) == (0, "s\n")


TROUBLES = [
    (
        [(429, {"message": "too many wrong secrets"}, {"Retry-After": "6"})],
        "429: too many wrong secrets; try again in 6 s",
    ),
    ([(409, {"message": "somebody else changed it"}, {})], "answered 409: somebody else changed it"),
    ([(0, b"", {})], "gave no whole answer (RemoteDisconnected); it may have been done all the same"),
    ([(200, b"<html>", {})], "is no control API of Bedrock Price Keeper"),
    ([(302, b"{}", {"Location": "http://127.0.0.1:9/"})], "answered 302"),
    ([ISSUED, (401, {"message": "used"}, {})], "the new secret could not be fetched: "),
    ([ISSUED, (0, b"", {})], "Rotate again with the same grace"),
    ([(0, b"", {})], "Rotate again with the same grace"),
    ([(200, {}, {})], "answered no client_id of printable ASCII without spaces; the credentials may be rotated"),
    ([(200, {}, {})], "Rotate again with the same grace"),
    ([(200, {"client_id": "c"}, {})], "answered no secret_retrieval_token of printable ASCII"),
    ([(200, {"client_id": "c", "secret_retrieval_token": "a\r\nX-Own: 1"}, {})], "may be rotated all the same. Rotate"),
    ([ISSUED, (200, {}, {})], "the new secret could not be fetched: "),
    (
        [ISSUED, (200, {"client_id": "c", "client_secret": "s\x1b]0;x\x07"}, {})],
        "answered no client_secret of printable",
    ),
    ([ISSUED, (200, {"client_id": "\x1b[2J", "client_secret": "s"}, {})], "answered no client_id of printable"),
]


@pytest.mark.parametrize(("answered", "words"), TROUBLES)
def test_failure_on_the_way_is_explained(
    tmp_path: Path, script: ScriptedServer, answered: list[Any], words: str
) -> None:
    script.answers += answered
    done = rotated(tmp_path, script.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "sesame" not in done.stderr
    assert "kkk" not in done.stderr


@pytest.mark.parametrize("option", [(), ("--env",), ("--json",)])
@pytest.mark.parametrize("token", ["a\x1b]52;c;x\x07", "a b", "a\nb", "\ud800", "\xe9", "", 7, None])
def test_token_with_terminal_escapes_is_rejected(
    tmp_path: Path, script: ScriptedServer, token: Any, option: tuple[str, ...]
) -> None:
    script.answers.append((200, {"access_token": token}, {}))
    done = call_in_process(
        "token", CLIENT, *option, "--api", script.url, folder=tmp_path, PRICE_KEEPER_CLIENT_SECRET="not told"
    )
    assert (done.returncode, done.stdout) == (1, "")
    words = f"{script.url} answered no access_token of printable ASCII without spaces"
    if "--json" in option:
        assert json.loads(done.stderr)["message"] == words
    else:
        assert done.stderr == f"price-keeper: {words}\n"


@pytest.mark.parametrize("option", [(), ("--json",), ("--token-only",)])
def test_unreadable_rotation_prints_no_secret(tmp_path: Path, script: ScriptedServer, option: tuple[str, ...]) -> None:
    script.answers.append((200, ISSUED[1] | {"secret_retrieval_token": "\x1b[31m"}, {}))
    done = call_in_process(
        "rotate", DEMO_ORG, *option, "--api", script.url, folder=tmp_path, PRICE_KEEPER_API_KEY="k" * 30
    )
    assert (done.returncode, done.stdout, "\x1b" in done.stderr) == (1, "", False)
    assert "the credentials may be rotated all the same. Rotate again" in done.stderr
