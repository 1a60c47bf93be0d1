"""Each exit code, as it is documented; and what failures say: what is wrong, and what to do next."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from price_keeper.cli.command_parser import EXIT_CODES

from tests.support.commands import PYTHON_PATH, SECONDS, Sidecar, call_in_process, price_keeper, restore_sigint, sidecar
from tests.support.engines import TEST_CREDENTIALS
from tests.support.ports import free_port
from tools.terminal import on_a_terminal

FREE_PORTS = ("--port", "0", "--control-port", "0")
ORG = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
# Ctrl-C at the moment at which `asyncio.run` has just replaced Python's handler of it.
INTERRUPTED_AT_ONCE = """
import functools, signal, sys
from price_keeper.cli import main

def replaced(number, handler, signal_=signal.signal):
    before = signal_(number, handler)
    if isinstance(handler, functools.partial):
        signal.raise_signal(number)
    return before

signal.signal = replaced
sys.exit(main())
"""
LABELS = "labels:\n  premium: {model: a.b, format: nova, prices_usd_per_1m: {input: 3, output: 15}}\n"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("dev")
    with sidecar("dev", *FREE_PORTS, folder=folder) as process:
        yield process


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a server that never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def interrupted(folder: Path, url: str, *more: str) -> tuple[int, str]:
    """While it waits for an answer that does not come."""
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH, "PRICE_KEEPER_API_KEY": "k" * 30}
    with subprocess.Popen(
        [sys.executable, "-m", "price_keeper.cli", "org", "list", "--api", url, *more],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_sigint,
    ) as process:
        host, port = url.removeprefix("http://").split(":")
        _wait_until_connected(host, int(port), process)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=SECONDS)[1]
        return process.returncode, output


def _wait_until_connected(host: str, port: int, process: subprocess.Popen[str]) -> None:
    """By the kernel's list of connections."""
    wanted = f"0100007F:{port:04X}"
    while process.poll() is None:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(row[2] == wanted and row[3] == "01" for row in rows):
            return


def test_exit_codes_match_documentation(tmp_path: Path, nobody: str) -> None:
    (tmp_path / "config.yaml").write_text(LABELS)
    codes = {
        call_in_process("check-config", folder=tmp_path).returncode,
        call_in_process("tables", "check", folder=tmp_path).returncode,  # there is none yet
        call_in_process("check-config", "--config", "none.yaml", folder=tmp_path).returncode,
        interrupted(tmp_path, nobody)[0],
    }
    assert codes == {code for code, _ in EXIT_CODES} == {0, 1, 2, 130}


def test_interrupt_is_reported_only_as_json(tmp_path: Path, nobody: str) -> None:
    assert interrupted(tmp_path, nobody) == (130, "")
    code, output = interrupted(tmp_path, nobody, "--json")
    assert (code, json.loads(output)["error"]) == (130, "interrupted")


def test_interrupt_as_asyncio_begins_to_handle_it_exits_130(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(LABELS)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_ONCE, "spend"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        timeout=SECONDS,
        preexec_fn=restore_sigint,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("words", [["version"], ["spend", "--help"], ["completion", "zsh"]], ids=" ".join)
def test_closed_output_pipe_is_no_error(tmp_path: Path, words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "price_keeper.cli", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PYTHON_PATH, "PYTHONUNBUFFERED": ""},
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=SECONDS,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def _failure(name: str, folder: Path, running: Sidecar) -> subprocess.CompletedProcess[str]:
    """Frequent failures; with --json, so that one run of each shows both forms."""
    api = {"PRICE_KEEPER_API_URL": running.control, "PRICE_KEEPER_API_KEY": _key(running)}
    away = {"PRICE_KEEPER_API_URL": f"http://127.0.0.1:{free_port()}", "PRICE_KEEPER_API_KEY": "k" * 30}
    dynamodb = TEST_CREDENTIALS | {
        "PRICE_KEEPER__STORE__ENGINE": "dynamodb",
        "PRICE_KEEPER__STORE__ENDPOINT": f"http://127.0.0.1:{free_port()}",
    }
    data_port = running.data.rpartition(":")[2]
    folder_in_use = str(running.errors_file.parent / "data")
    (folder / "in-the-way").touch()
    (folder / "good.yaml").write_text(LABELS)
    run: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "no configuration": (("check-config",), {}),
        "no store": (("spend",), {}),
        "no store in this folder": (("spend", "--data-dir", "none"), {}),
        "the store is away": (("audit", ORG, "--config", "good.yaml"), dynamodb),
        "nobody at the control API": (("org", "list"), away),
        "a wrong admin key": (("org", "list"), {**api, "PRICE_KEEPER_API_KEY": "k" * 30}),
        "no admin key": (("org", "list"), {**api, "PRICE_KEEPER_API_KEY": ""}),
        "an unknown org": (("org", "show", "Acme"), api),
        "an unknown id": (("org", "show", ORG), api),
        "an unknown app": (("app", "show", "demo", "dmo"), api),
        "a port in use": (("dev", "--data-dir", "own", "--port", data_port, "--control-port", "0"), {}),
        "a folder in the way": (("dev", "--data-dir", "in-the-way", *FREE_PORTS), {}),
        "a journal in use": (("dev", "--data-dir", folder_in_use, *FREE_PORTS), {}),
        "a journal in use, replayed": (("replay", f"{folder_in_use}/journal", "--config", "good.yaml"), {}),
        "no such journal": (("replay", "none", "--config", "good.yaml"), {}),
        "a file that is there": (("export", "--out", "in-the-way", "--data-dir", folder_in_use), {}),
        "a folder that is not": (("export", "--out", "none/x.csv", "--data-dir", folder_in_use), {}),
        "a key that is there": (("keys", "new", "--kid", "k", "--out", "keys"), {}),
    }
    arguments, environment = run[name]
    if name == "a key that is there":
        assert call_in_process(*arguments, folder=folder).returncode == 0
    one = price_keeper if arguments[0] == "dev" else call_in_process  # what serves takes a process of its own
    return one(*arguments, "--json", folder=folder, **environment)


def _key(running: Sidecar) -> str:
    return (running.errors_file.parent / "data" / "admin-key").read_text().strip()


FAILURES = {
    "no configuration": (2, "config.yaml: cannot be read", "name one with --config FILE"),
    "no store": (2, "there is no config.yaml here", "--config FILE, or dev's folder with --data-dir DIR"),
    "no store in this folder": (1, "there is no store in none/price-keeper.db", "name another with --config FILE"),
    "the store is away": (1, "no answer from DynamoDB", "price-keeper doctor looks at what is amiss"),
    "nobody at the control API": (1, "no server answers at http://127.0.0.1:", "by --api or PRICE_KEEPER_API_URL"),
    "a wrong admin key": (1, "answered 401", "the right one comes from the variable PRICE_KEEPER_API_KEY"),
    "no admin key": (2, "the admin key comes from", "--key-file FILE"),
    "an unknown org": (2, "no org has the id or the name 'Acme'", "there are demo (d0000000-"),
    "an unknown id": (2, "answered 404", "price-keeper org list tells which there are"),
    "an unknown app": (2, "answered 404", "there are: demo"),
    "a port in use": (1, "cannot listen on 127.0.0.1:", "name other ports with --port and --control-port"),
    "a folder in the way": (1, "cannot keep in-the-way/token-key", "name a folder that can be written to"),
    "a journal in use": (1, "another process writes to the journal", "name another folder with --data-dir DIR"),
    "a journal in use, replayed": (1, "another process writes to the journal", "stop that process first"),
    "no such journal": (1, "cannot use the journal in none", "price-keeper doctor"),
    "a file that is there": (1, "in-the-way is there already", "--force replaces it"),
    "a folder that is not": (1, "cannot write none/x.csv: No such file or directory", "name another place with --out"),
    "a key that is there": (1, "k.pem is there already", "name another key"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failure_says_what_to_do_next(tmp_path: Path, running: Sidecar, name: str) -> None:
    code, wrong, next_step = FAILURES[name]
    done = _failure(name, tmp_path, running)
    document: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (code, "", False), done.stderr
    assert wrong in document["message"]
    assert next_step in document["message"].partition(wrong)[2] or next_step in document["message"]
    assert document["exit_code"] == code
    assert document["error"] == {1: "not_done", 2: "mistake"}[code]
    assert document.get("status") == ({"401": 401, "404": 404}.get(wrong[-3:]))


def test_check_config_result_is_coloured_on_terminal(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(LABELS)
    (tmp_path / "bad.yaml").write_text("labels: {}\n")
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH, "TERM": "xterm", "NO_COLOR": ""}

    def shown(name: str, **more: str) -> str:
        command = [sys.executable, "-m", "price_keeper.cli", "check-config", "--config", name]
        return on_a_terminal(command, tmp_path, environment | more).text

    assert shown("good.yaml").startswith("good.yaml: \x1b[32mgood\x1b[0m, with 1 label: premium")
    assert shown("bad.yaml").startswith("\x1b[31mbad.yaml:1: \x1b[0mlabels: ")
    assert "\x1b" not in shown("good.yaml", NO_COLOR="1") + shown("bad.yaml", TERM="dumb")


def test_configuration_mistakes_are_separate_in_json(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("listen:\n  dta: 127.0.0.1:1\nstore: {engine: oracle}\nlabels: {}\n")
    plain = call_in_process("check-config", folder=tmp_path)
    document = json.loads(call_in_process("check-config", "--json", folder=tmp_path).stderr)
    assert document["details"] == plain.stderr.splitlines()
    assert (document["error"], len(document["details"])) == ("mistake", 3)
