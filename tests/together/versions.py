"""Two versions of the product, each from its own checkout, and sidecars whose version can be exchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.fleet import Member
from tests.support.commands import SECONDS
from tests.support.observed_sidecar import Scrape, ask
from tests.support.sidecar_crashes import SegmentCopies


@dataclass(frozen=True)
class Version:
    name: str
    executable: Path  # its price-keeper, in the virtual environment of its checkout


NEW = Version("new", Path(sys.executable).with_name("price-keeper"))


def version_in(checkout: Path) -> Version:
    """The one that `make setup` has installed there."""
    executable = checkout.absolute() / ".venv" / "bin" / "price-keeper"
    assert executable.exists(), f"{executable} does not exist; run `make setup` in {checkout}"
    return Version("old", executable)


@dataclass
class VersionedMember(Member):
    """A sidecar's folder and ports, with whichever version serves there at the moment."""

    version_in_use: Version = field(default=NEW)

    def command(self) -> list[str]:
        return [str(self.version_in_use.executable)]

    def environment(self) -> dict[str, str]:
        """Without the path to this checkout's code."""
        return {name: value for name, value in super().environment().items() if name != "PYTHONPATH"}

    @contextmanager
    def copying_segments(self) -> Iterator[None]:
        """Segments get second names, to be read after either version has removed its own."""
        with SegmentCopies(self.journal, self.kept):
            yield

    def run(self, version: Version, *arguments: str) -> dict[str, Any]:
        """What that version's command prints as JSON."""
        done = subprocess.run(
            [str(version.executable), *arguments, "--json"],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{version.name}: {' '.join(arguments)}: {done.stdout}{done.stderr}"
        printed: dict[str, Any] = json.loads(done.stdout)
        return printed

    def read_metric(self, name: str) -> float:
        return Scrape(ask("GET", f"{self.api}/metrics").body.decode()).value(name)
