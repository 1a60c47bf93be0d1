"""A release: `check TAG` holds all its versions to each other, `notes` prints its part of the changelog.

`make release-check TAG=v0.2.0`, `make release-notes`; .github/workflows/release.yaml runs both.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = "deploy/helm/price-keeper/Chart.yaml"
# Where the version stands beside pyproject.toml.
PLACES = {CHART: r"^(?:version|appVersion): (\S+)$", "Dockerfile": r"^ARG VERSION=(\S+)$"}


def read_version(root: Path) -> str:
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def find_problems(root: Path, tag: str) -> Iterator[str]:
    version = read_version(root)
    if tag != f"v{version}":
        yield f"the tag is {tag}, and pyproject.toml has the version {version}; expected v{version}"
    for name, pattern in PLACES.items():
        found = re.findall(pattern, (root / name).read_text(), re.MULTILINE)
        if not found or set(found) != {version}:
            yield f"{name} has {', '.join(found) or 'no version'}; expected {version}"
    if not read_notes(root):
        yield f"CHANGELOG.md has no section '## {version}'; move what is unreleased below such a heading"


def read_notes(root: Path) -> str:
    """The section of the version, without its heading; empty if there is none."""
    heading = rf"^## \[?{re.escape(read_version(root))}\]?(?=\s|$).*\n"
    parts = re.split(heading, (root / "CHANGELOG.md").read_text(), maxsplit=1, flags=re.MULTILINE)
    return re.split(r"^## ", parts[1], maxsplit=1, flags=re.MULTILINE)[0].strip() if len(parts) == 2 else ""


def main(arguments: list[str], root: Path = ROOT) -> int:
    if arguments == ["notes"]:
        print(read_notes(root))
        return 0 if read_notes(root) else 1
    if len(arguments) != 2 or arguments[0] != "check":
        print("usage: python -m tools.release check TAG | notes", file=sys.stderr)
        return 2
    problems = list(find_problems(root, arguments[1]))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
