"""Each example of the help does what it says, at a sidecar that runs; and what `--json` prints is documented."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from price_keeper.cli.command_parser import CommandParser
from price_keeper.cli.root_parser import build_root_parser

from tests.support.commands import ROOT, SECONDS, Sidecar, build_environment, call_in_process, sidecar
from tests.support.simulated import Keys, boto_client
from tests.tidy.test_cli_docs import LEAVES, NO_JSON
from tools.cli_docs import DOC, MARK

ACME = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
SECRET = "sesame-open-sesame-open-sesame-open"
SECRETS = {"PRICE_KEEPER_JWT_SECRET": SECRET, "PRICE_KEEPER_API_KEY": SECRET}
SERVE = ("price-keeper dev", "price-keeper serve")
EXAMPLES = [(each, line) for each in LEAVES if each.prog not in SERVE for _, line in each.examples]
SERVING = [line for each in LEAVES if each.prog in SERVE for _, line in each.examples]

# What cannot be carried out here, and why. It is parsed all the same.
ONLY_PARSED = {
    "price-keeper serve --config sidecar.yaml --role sidecar --workers 4": "four processes that sign calls to AWS",
}
NOT_ZERO = {
    # It looks at ports which other programs of this machine may have.
    "price-keeper doctor --config sidecar.yaml --role sidecar": (0, 1),
}


REVOKED = ("Acme", "--app", "shop", "0f8fad5b-d9cb-469f-a165-70867728950e")


@dataclass
class Place:
    folder: Path
    running: Sidecar
    environment: dict[str, str]

    def call(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return call_in_process(*words, folder=self.folder, stdin=stdin, **self.environment)

    def shell(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=build_environment({**self.environment, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )


def _configure(folder: Path) -> None:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["upstream"]["endpoint"] = "simulated"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    config["journal"]["dir"] = "./sidecar/journal"
    (folder / "sidecar.yaml").write_text(yaml.safe_dump(config))
    orgs = (ROOT / "docs" / "orgs.md").read_text()
    for name in ("acme.yaml", "shop.yaml", "orgs.yaml"):  # the very ones of the documentation
        found = re.search(rf"```yaml\n(# {name}: .*?)```", orgs, re.DOTALL)
        assert found
        (folder / name).write_text(found[1])
    program = folder / "bin" / "price-keeper"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m price_keeper.cli "$@"\n')
    program.chmod(0o755)
    (folder / ".config/fish/completions").mkdir(parents=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """With an org Acme that has an app shop, whose secret is in a file; and the journal of a disk that came back."""
    folder = tmp_path_factory.mktemp("examples")
    _configure(folder)
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=folder) as running:
        environment = {
            "HOME": str(folder),
            "PRICE_KEEPER_API_URL": running.control,
            "PRICE_KEEPER_API_KEY": (folder / "data" / "admin-key").read_text().strip(),
            "PRICE_KEEPER_JWT_SECRET": SECRET,
        }
        found = Place(folder, running, environment)
        for words in (("org", "put", ACME, "acme.yaml"), ("app", "put", "Acme", "shop", "shop.yaml")):
            assert found.call(*words).returncode == 0
        (folder / "shop.secret").write_text(found.call("rotate", "Acme", "--app", "shop").stdout)
        client = boto_client(running.data, keys=Keys("any", "any", running.exports["AWS_SESSION_TOKEN"]))
        client.converse(modelId="premium", messages=[{"role": "user", "content": [{"text": "hello"}]}])
        client.close()
        yield found


def _here(line: str) -> str:
    """With days that are kept, whenever this runs, and paths of this test."""
    last_month = datetime.now(UTC).replace(day=1) - timedelta(days=1)
    return line.replace("2026-11", f"{last_month:%Y-%m}").replace("/mnt/found", "found").replace("9090", "0")


def _found(place: Place) -> None:
    """A journal as from another machine: without the lock, by which a copy of one in use is known."""
    journal = place.folder / "found" / "journal"
    shutil.copytree(place.folder / "data" / "journal", journal, dirs_exist_ok=True)
    (journal / "lock").unlink(missing_ok=True)


@pytest.mark.parametrize(("command", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_help_example_runs(place: Place, command: CommandParser, line: str) -> None:
    if command.prog == "price-keeper replay":
        _found(place)
    if command.prog == "price-keeper keys new":
        shutil.rmtree(place.folder / "keys", ignore_errors=True)  # it never writes over a file
    if command.prog == "price-keeper override clear":
        assert place.call("override", "set", "Acme", "--app", "shop", "economy", "--reason", "test").returncode == 0
    if command.prog == "price-keeper session show":
        assert place.call("session", "revoke", *REVOKED).returncode == 0
    if command.prog == "price-keeper org key":
        assert place.call("org", "key", "Acme").returncode == 0
    line = _here(line)
    words = shlex.split(line)
    done = place.call(*words[1:]) if re.fullmatch(r"""[\w ./:"+=-]+""", line) else place.shell(line)
    assert done.returncode in NOT_ZERO.get(line, (0,)), done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_serving_help_examples_become_ready_and_stop(tmp_path: Path) -> None:
    """All at once, each in a folder of its own, at free ports."""
    _configure(tmp_path)

    def served(number: int) -> str:
        folder = tmp_path / str(number)
        folder.mkdir()
        shutil.copy(tmp_path / "config.yaml", folder)
        variables, _, command = SERVING[number].partition("price-keeper ")
        ports = {f"PRICE_KEEPER__LISTEN__{name}": "127.0.0.1:0" for name in ("DATA", "CONTROL")}
        assert set(re.findall(r"(\w+)=", variables)) <= ports.keys()
        words = shlex.split(command)
        more = ("--port", "0", "--control-port", "0") if words[0] == "dev" else ()
        with sidecar(*words, *more, folder=folder, **ports, **SECRETS) as running:
            assert running.control
            assert running.stop(signal.SIGTERM) == 0
        return SERVING[number]

    numbers = [number for number, line in enumerate(SERVING) if line not in ONLY_PARSED]
    with ThreadPoolExecutor(len(numbers)) as pool:
        assert set(pool.map(served, numbers)) == set(SERVING) - ONLY_PARSED.keys()


@pytest.mark.parametrize("line", ONLY_PARSED)
def test_help_example_that_cannot_run_here_parses(line: str) -> None:
    assert line in SERVING
    assert build_root_parser().parse_args(shlex.split(line)[1:]).target == "serve_command.run_serve"


# What programs get.

BY_HAND = DOC.read_text().partition(MARK)[0]
ROW = re.compile(r"^\| ((?:`[a-z -]+`(?:, )?)+) \| (.*) \|$", re.MULTILINE)
DOCUMENTED = {words: text for names, text in ROW.findall(BY_HAND) for words in re.findall(r"`([a-z -]+)`", names)}
ASKED = {
    "demo": (),
    "check-config": ("--settings", "acme.yaml"),
    "doctor": ("--data-dir", "data"),
    "tables create": (),
    "tables check": (),
    "tables describe": (),
    "keys new": ("--kid", "json", "--out", "keys"),
    "apply": ("-f", "orgs.yaml", "--dry-run"),
    "org put": ("Acme", "acme.yaml"),
    "org show": ("Acme",),
    "org list": (),
    "org key": ("Acme",),
    "app put": ("Acme", "second", "shop.yaml"),
    "app show": ("Acme", "shop"),
    "app list": ("Acme",),
    "override set": ("Acme", "--app", "shop", "economy", "--reason", "test"),
    "override show": ("Acme", "--app", "shop"),
    "override clear": ("Acme", "--app", "shop"),
    "spend": (),
    "export": ("--out", "x.csv", "--force", "--data-dir", "data"),
    "token": (f"org-{ACME}-app-shop", "--secret-file", "shop.secret"),
    "rotate": ("Acme", "--app", "shop"),
    "session list": ("Acme", "--app", "shop"),
    "session revoke": ("Acme", "--app", "shop", "all"),
    "session show": REVOKED,
    "audit": ("Acme", "--data-dir", "data"),
    "replay": ("found/journal", "--owner-is-dead"),
    "version": (),
}
# Words of the table that stand there only at times.
AT_TIMES = {"app", "show", "was there", "null", "control", "public_key_file", "secret_file", "secret_retrieval_token"}
AT_TIMES |= {"secret_retrieval_expires_at", "client_id", "created", "--token-only", "--cloudformation"}


def test_each_command_with_json_is_documented() -> None:
    with_json = {each.prog.removeprefix("price-keeper ") for each in LEAVES if each.prog not in NO_JSON}
    assert with_json == set(DOCUMENTED)
    assert with_json == set(ASKED) | {"dev", "serve"}


@pytest.mark.parametrize("command", ASKED)
def test_json_output_is_one_documented_document(place: Place, command: str) -> None:
    if command == "token":
        (place.folder / "shop.secret").write_text(place.call("rotate", "Acme", "--app", "shop").stdout)
    if command == "session list":
        done = place.call("token", f"org-{ACME}-app-shop", "--secret-file", "shop.secret")
        assert done.returncode == 0, done.stderr
    if command == "session show":
        assert place.call("session", "revoke", *REVOKED).returncode == 0
    if command == "replay":
        _found(place)
    shutil.rmtree(place.folder / "keys", ignore_errors=True)
    done = place.call(*command.split(), *ASKED[command], "--json")
    assert done.returncode in ((0, 1) if command == "doctor" else (0,)), done.stderr
    document = json.loads(done.stdout)
    missing = set(re.findall(r"`([^`]+)`", DOCUMENTED[command])) - AT_TIMES - set(_words(document))
    assert missing == set()


def _words(given: Any) -> Iterator[str]:
    if isinstance(given, dict):
        for name, value in given.items():
            yield name
            yield from _words(value)
    elif isinstance(given, list):
        for each in given:
            yield from _words(each)


@pytest.mark.parametrize("command", ["dev", "serve"])
def test_serving_command_with_json_states_addresses(tmp_path: Path, command: str) -> None:
    shutil.copy(ROOT / "config.yaml", tmp_path)
    ports = {f"PRICE_KEEPER__LISTEN__{name}": "127.0.0.1:0" for name in ("DATA", "CONTROL")}
    settings = SECRETS | {"PRICE_KEEPER__UPSTREAM__ENDPOINT": "simulated"}
    more = ("--port", "0", "--control-port", "0") if command == "dev" else ()
    with subprocess.Popen(
        [sys.executable, "-m", "price_keeper.cli", command, *more, "--json"],
        cwd=tmp_path,
        env=build_environment(ports | settings),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            document = json.loads(process.stdout.readline())
        finally:
            process.terminate()
        rest = process.communicate(timeout=SECONDS)[0]
    assert (process.returncode, rest) == (0, "")
    words = re.findall(r"`([^`]+)`", DOCUMENTED[command])
    assert set(words) - AT_TIMES <= set(document)
    assert document["data"].startswith("http://127.0.0.1:")
    if command == "dev":
        assert document["environment"]["AWS_ENDPOINT_URL_BEDROCK_RUNTIME"] == document["data"]
        assert Path(document["admin_key_file"]).read_text().strip() not in json.dumps(document)
