"""The command line as a user has it: a process of its own, or a call of what that would run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zoneinfo
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import IO
from unittest.mock import patch

from price_keeper.cli.entry_point import main

from tests.support.preloaded_cli import CLI, PYTHON_PATH, ROOT, PreloadedProcess, start_preloaded

SECONDS = 60
_NOT_PASSED_ON = (
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL",
    "AWS_BEARER",
    "AWS_CONTAINER",
    "PRICE_KEEPER__",
)
# What an interpreter and its libraries read when they start, so that a process that was forked knows nothing of it.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_")
_PROGRAM = [sys.executable, "-m", CLI]
__all__ = ["PYTHON_PATH", "ROOT", "SECONDS", "Sidecar", "build_environment", "call_in_process", "price_keeper",
           "restore_sigint", "sidecar"]  # fmt: skip


def restore_sigint() -> None:
    """Between fork and exec: as on a terminal, also where the tests run in the background, which has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def price_keeper(
    *arguments: str, folder: Path, stdin: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write((stdin or "").encode())
        given.seek(0)
        files = [each.fileno() for each in (given, output, errors)]
        process = _start(arguments, folder, environment, files)
        try:
            code = process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess([*_PROGRAM, *arguments], code, _read_file(output), _read_file(errors))


def _read_file(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _start(
    arguments: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    files: Sequence[int],
    wrapper_command: Sequence[str] = (),
) -> PreloadedProcess | subprocess.Popen[bytes]:
    """Forked from a process that has the imports, unless something must be there before an interpreter starts."""
    environ = build_environment(environment)
    if not wrapper_command and not any(name.startswith(_READ_AT_START) for name in environment):
        return start_preloaded(CLI, arguments, folder=folder, environ=environ, files=files)
    stdin, stdout, stderr = files
    command = [*wrapper_command, *_PROGRAM, *arguments]
    return subprocess.Popen(command, cwd=folder, env=environ, stdin=stdin, stdout=stdout, stderr=stderr)


@dataclass
class Sidecar:
    """A running sidecar, and what it said when it started."""

    process: PreloadedProcess | subprocess.Popen[bytes]
    startup_output: str
    errors_file: Path

    @property
    def data(self) -> str:
        return self._find(r"(?:listens on|data port) +(https?://\S+)")

    @property
    def control(self) -> str:
        return self._find(r"(http://\S+)/ready")

    @property
    def exports(self) -> dict[str, str]:
        """The environment that a user would paste."""
        lines = "\n".join(re.findall(r"^export .+$", self.startup_output, re.MULTILINE))
        done = subprocess.run(
            ["sh", "-ec", f"{lines}\nenv -0"],
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        )
        pairs = dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)
        return {name: value for name, value in pairs.items() if f"{name}=" in lines}

    @property
    def errors(self) -> str:
        return self.errors_file.read_text()

    @property
    def complaints(self) -> list[str]:
        """Lines of the log, without those about the tests' own org, which is not registered."""
        return [line for line in self.errors.splitlines() if " is not registered; " not in line]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(SECONDS)

    def _find(self, pattern: str) -> str:
        match = re.search(pattern, self.startup_output)
        assert match, self.startup_output
        return match.group(1)


@contextmanager
def sidecar(
    *arguments: str, folder: Path, wrapper_command: tuple[str, ...] = (), **environment: str
) -> Iterator[Sidecar]:
    """Started as by a user; ended whatever happens. `wrapper_command` is a command that starts it, and becomes it."""
    output, errors = folder / "sidecar.out", folder / "sidecar.err"
    with open(os.devnull, "rb") as nothing, output.open("wb") as out, errors.open("wb") as err:
        files = [each.fileno() for each in (nothing, out, err)]
        process = _start(arguments, folder, environment, files, wrapper_command)
        try:
            yield Sidecar(process, wait_for_startup(process, output, errors), errors)
        finally:
            process.kill()
            process.wait()


def wait_for_startup(process: PreloadedProcess | subprocess.Popen[bytes], output: Path, errors: Path) -> str:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        text = output.read_text()
        if "/ready" in text:
            return text
        assert process.poll() is None, text + errors.read_text()
        time.sleep(0.02)
    raise AssertionError(f"it said nothing in {SECONDS} s: {errors.read_text()}")


def build_environment(own: dict[str, str]) -> dict[str, str]:
    """The environment of a child process: this checkout's code, and no AWS settings of the developer's own shell."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
    return kept | {"PYTHONPATH": PYTHON_PATH} | own


def call_in_process(
    *arguments: str, folder: Path, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """As `price_keeper`, but in this process, which takes a hundredth of the time. Not for two threads at once."""
    output, errors = (TextIOWrapper(BytesIO(), "utf-8") for _ in range(2))
    kept, zones = dict(os.environ), zoneinfo.TZPATH
    os.environ.clear()
    os.environ.update(build_environment(environment))
    try:
        with (
            chdir(folder),
            redirect_stdout(output),
            redirect_stderr(errors),
            patch("sys.stdin", TextIOWrapper(BytesIO(stdin.encode()), "utf-8")),
        ):
            code = _code(arguments)
    finally:
        os.environ.clear()
        os.environ.update(kept)
        zoneinfo.reset_tzpath(zones)
    return subprocess.CompletedProcess(arguments, code, _read_stream(output), _read_stream(errors))


def _read_stream(stream: TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


def _code(arguments: tuple[str, ...]) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:  # argparse, of a mistake or after --help
        return int(str(ended.code))
