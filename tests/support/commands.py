"""The command line as a user has it: a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SECONDS = 60
_NOT_PASSED_ON = (
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL",
    "AWS_BEARER",
    "AWS_CONTAINER",
    "PRICE_KEEPER__",
)
ROOT = Path(__file__).parents[2]


def price_keeper(
    *arguments: str, folder: Path, stdin: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proxy.cli", *arguments],
        cwd=folder,
        env=_environment(environment),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@dataclass
class Sidecar:
    """A running sidecar, and what it said when it started."""

    process: subprocess.Popen[bytes]
    told: str
    errors_file: Path

    @property
    def data(self) -> str:
        return self._found(r"(?:listens on|data port) +(https?://\S+)")

    @property
    def control(self) -> str:
        return self._found(r"(http://\S+)/ready")

    @property
    def exports(self) -> dict[str, str]:
        """The environment that a user would paste."""
        lines = re.findall(r"^export (.+)$", self.told, re.MULTILINE)
        return dict(pair.split("=", 1) for line in lines for pair in line.replace("'", "").split())

    @property
    def errors(self) -> str:
        return self.errors_file.read_text()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(SECONDS)

    def _found(self, pattern: str) -> str:
        found = re.search(pattern, self.told)
        assert found, self.told
        return found.group(1)


@contextmanager
def sidecar(*arguments: str, folder: Path, **environment: str) -> Iterator[Sidecar]:
    """Started as by a user; ended whatever happens."""
    output, errors = folder / "sidecar.out", folder / "sidecar.err"
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "proxy.cli", *arguments],
            cwd=folder,
            env=_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            yield Sidecar(process, _what_it_tells(process, output, errors), errors)
        finally:
            process.kill()
            process.wait()


def _what_it_tells(process: subprocess.Popen[bytes], output: Path, errors: Path) -> str:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        told = output.read_text()
        if "/ready" in told:
            return told
        assert process.poll() is None, told + errors.read_text()
        time.sleep(0.02)
    raise AssertionError(f"it said nothing in {SECONDS} s: {errors.read_text()}")


def _environment(own: dict[str, str]) -> dict[str, str]:
    """What the developer's own shell says of AWS is left out, but for the keys that tests set themselves."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
    return kept | {"PYTHONPATH": str(ROOT)} | own
