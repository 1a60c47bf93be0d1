"""A page of the documentation, typed from top to bottom by a user who has just cloned the repository."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tests.support.clients import NEWEST, PROGRAMS
from tests.support.commands import ROOT, Sidecar, sidecar
from tests.support.doc_pages import DIES, SAYS, Block, parse_blocks
from tests.support.output_matching import ANYTHING, matches_json, matches_text

SECONDS = 60
AGAIN_SECONDS = 30  # for what is true soon, such as that spend is in the store
PAUSE_SECONDS = 0.1

# What the pages say; in tests each server has ports of its own.
DATA, CONTROL = "127.0.0.1:8080", "127.0.0.1:8081"
_ANY_PORTS = {"dev": ("--port", "0", "--control-port", "0"), "serve": ()}
_FREE = {"PRICE_KEEPER__LISTEN__DATA": "127.0.0.1:0", "PRICE_KEEPER__LISTEN__CONTROL": "127.0.0.1:0"}

_PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
PRICE_KEEPER = f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {sys.executable} -m price_keeper.cli "$@"\n'

# Nothing is looked up elsewhere, and no client tells what it thinks of the machine.
_QUIET = {"AWS_EC2_METADATA_DISABLED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NODE_NO_WARNINGS": "1"}

# Packages that only the environments of the clients have.
_OF_CLIENTS = ("anthropic", "langchain_aws", "litellm", "openai", "strands")
_NEEDS = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(_OF_CLIENTS)})\b", re.MULTILINE)
_AWS = re.compile(r"^aws ", re.MULTILINE)


def needs_clients(block: Block) -> bool:
    if block.language == "python":
        return _NEEDS.search(block.text) is not None
    return block.language == "js" or (block.language == "sh" and _AWS.search(block.text) is not None)


def is_played(page: Path) -> bool:
    """Whether anything on it is carried out without the clients' environments."""
    return any(block.is_run and not needs_clients(block) for block in parse_blocks(page))


def play_page(page: Path, folder: Path, program: str = PRICE_KEEPER, *, has_clients: bool = False) -> list[Block]:
    """What was carried out. `program` is the text of `price-keeper`. Raises AssertionError at the first block that does
    something else than the page says."""
    with _shell(folder, program, has_clients) as shell, ExitStack() as servers:
        player = _Player(shell, folder, servers)
        done = []
        for block in parse_blocks(page):
            if block.file is not None and block.not_run is None:
                (folder / block.file).write_text(player.with_free_ports(block.text) + "\n")
            elif block.is_run and (has_clients or not needs_clients(block)):
                player.play(block)
                done.append(block)
        player.stop()
        return done


class _Player:
    def __init__(self, shell: _Shell, folder: Path, servers: ExitStack) -> None:
        self._shell, self._folder, self._servers = shell, folder, servers
        self._running: Sidecar | None = None

    def play(self, block: Block) -> None:
        if block.language == DIES:
            assert self._running is not None, f"{block}: no server runs"
            self._running.stop(signal.SIGKILL)
            self._running = None
        elif block.language == SAYS:
            self._wait_for_output(block)
        elif block.is_server:
            self._start(block)
        else:
            self._run_block(block)

    def stop(self) -> None:
        if self._running is not None:
            assert self._running.stop() == 0, self._running.errors
            assert "Traceback" not in self._running.errors
            self._running = None

    def with_free_ports(self, text: str) -> str:
        """With the ports of the server that runs."""
        for theirs, ours in self._ports():
            text = text.replace(theirs, ours)
        return text

    def _ports(self) -> list[tuple[str, str]]:
        if self._running is None:
            return []
        found = [(CONTROL, self._running.control)]
        if re.search("data port|listens on", self._running.startup_output):
            found.append((DATA, self._running.data))
        return [(theirs, ours.partition("://")[2]) for theirs, ours in found]

    def _start(self, block: Block) -> None:
        self.stop()
        words = shlex.split(block.text.replace("make run", "price-keeper dev"), comments=True)
        assert Path(words[0]).name == "price-keeper", f"{block}: this is no server"
        own = {name: value for name, value in self._shell.environ().items() if name.startswith(("PRICE_KEEPER", "AWS"))}
        free = {} if words[1] == "dev" else _FREE
        arguments = [*words[1:], *_ANY_PORTS[words[1]]]
        self._running = self._servers.enter_context(sidecar(*arguments, folder=self._folder, **(own | free)))
        if words[1] == "dev":
            _, _, pasted = self._running.startup_output.partition("Paste into another shell:\n\n")
            self._shell.run(pasted.partition("\n\n")[0])
        self._check(block, 0, self._running.startup_output)

    def _wait_for_output(self, block: Block) -> None:
        assert self._running is not None, f"{block}: no server runs"
        among = f"{ANYTHING}\n" + "".join(f"{line}\n{ANYTHING}\n" for line in block.text.splitlines())
        until = time.monotonic() + AGAIN_SECONDS
        while not matches_text(among, self._running.errors):
            assert time.monotonic() < until, f"{block}: {block.text}\n--- it said:\n{self._running.errors}"
            time.sleep(PAUSE_SECONDS)

    def _run_block(self, block: Block) -> None:
        until = time.monotonic() + (AGAIN_SECONDS if block.is_retried else 0)
        command = _command_line(block, self.with_free_ports(block.text), self._folder)
        code, printed = self._shell.run(command)
        while time.monotonic() < until and not (code == block.code and self._has_output(block, printed)):
            time.sleep(PAUSE_SECONDS)
            code, printed = self._shell.run(command)
        self._check(block, code, printed)

    def _has_output(self, block: Block, printed: str) -> bool:
        if block.expected_output is None:
            return True
        for theirs, ours in self._ports():
            printed = printed.replace(ours, theirs)
        is_such = matches_json if block.expected_output.language == "json" else matches_text
        return is_such(block.expected_output.text, printed)

    def _check(self, block: Block, code: int, printed: str) -> None:
        failure = f"{block}: {block.text}\n--- ended with {code} and printed:\n{printed}"
        if self._running is not None:
            failure += f"\n--- and the server said:\n{self._running.errors}"
        assert code == block.code, failure
        assert self._has_output(block, printed), (
            f"{failure}\n--- where the page has:\n{block.expected_output and block.expected_output.text}"
        )


def _command_line(block: Block, text: str, folder: Path) -> str:
    if block.language == "sh":
        return text
    if block.language == "js":
        (folder / "block.mjs").write_text(text)
        return "node block.mjs"
    (folder / "block.py").write_text(text)
    return f"{shlex.quote(str(NEWEST)) if needs_clients(block) else 'python3'} block.py"


class _Shell:
    """One bash, so that what is exported or made by a block is there for the next one."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, answers: IO[bytes]) -> None:
        self._process, self._folder, self._answers = process, folder, answers

    def run(self, text: str) -> tuple[int, str]:
        """An exit code that is not 0, if there was one, and all that was printed."""
        typed, printed = self._folder / ".typed", self._folder / ".printed"
        typed.write_text(text + "\n")
        assert self._process.stdin is not None
        line = "bad=0; trap 'bad=$?' ERR; . ./.typed > .printed 2>&1 < /dev/null; trap - ERR; echo $bad >&9\n"
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
        readable, _, _ = select.select([self._answers], [], [], SECONDS)
        assert readable, f"it did not end within {SECONDS} s: {text}"
        code = self._answers.readline()
        assert code, f"it ended the shell: {text}\n{printed.read_text()}"
        return int(code), printed.read_text()

    def environ(self) -> dict[str, str]:
        _, printed = self.run("env -0")
        return dict(pair.split("=", 1) for pair in printed.split("\0") if "=" in pair)


@contextmanager
def _shell(folder: Path, program: str, has_clients: bool) -> Iterator[_Shell]:
    """In a folder as after `make run`, with nothing of this machine's settings but the way to its programs."""
    programs = _programs(folder, program)
    (folder / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    (folder / "deploy").symlink_to(ROOT / "deploy")
    path = [str(programs), *([str(NEWEST.parent)] if has_clients else []), os.environ["PATH"]]
    if has_clients:
        (folder / "node_modules").symlink_to(PROGRAMS / "node_modules")
    environ = {"PATH": ":".join(path), "HOME": str(folder), "LANG": "C.UTF-8"} | _QUIET
    reads, writes = os.pipe()
    process = subprocess.Popen(
        ["bash", "--noprofile", "--norc", "-c", f"exec 9>&{writes}; exec bash --noprofile --norc -o pipefail"],
        cwd=folder,
        env=environ,
        stdin=subprocess.PIPE,
        pass_fds=[writes],
        start_new_session=True,
    )
    os.close(writes)
    with process, open(reads, "rb", buffering=0) as answers:
        try:
            yield _Shell(process, folder, answers)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # with what a block has left behind


def _programs(folder: Path, price_keeper: str) -> Path:
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("price-keeper", price_keeper), ("python", _PYTHON), ("python3", _PYTHON)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    return programs
