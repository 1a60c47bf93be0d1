"""What the package index knows to be wrong with what is pinned here, and the licences of what a sidecar runs with.

The index tells of a release by its version. One that does not is asked for the newest, and tells of that one alone.
What nobody tells of is listed. Exits with 1 where something is known to be wrong, else with 2 where not all is told.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
SHIPPED = "run"  # the lock of what a sidecar runs with
NODE = ROOT / "tests/flow/clients/programs"
SECONDS = 60
AT_ONCE = 6

_PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)

Read = Callable[[str], Any]  # a path of the index, which answers with JSON; None where it has none


class Pin(NamedTuple):
    name: str
    version: str


class Told(NamedTuple):
    """`wrong` is None where nobody tells."""

    pin: Pin
    wrong: tuple[str, ...] | None
    licence: str = ""


def pins(locks: Iterable[Path]) -> dict[Pin, list[str]]:
    """With the names of the locks that have it."""
    found: dict[Pin, list[str]] = {}
    for lock in locks:
        for name, version in _PIN.findall(lock.read_text()):
            found.setdefault(Pin(name, version), []).append(lock.stem)
    return found


def told_of(pin: Pin, read: Read) -> Told:
    document = read(f"{pin.name}/{pin.version}/json")
    if document is None:
        newest = read(f"{pin.name}/json")
        document = newest if newest is not None and newest["info"]["version"] == pin.version else None
        if document is None:
            return Told(pin, None, "" if newest is None else _licence(newest["info"]))
    wrong = [each["id"] for each in document.get("vulnerabilities", []) if not each.get("withdrawn")]
    return Told(pin, tuple(sorted(wrong)), _licence(document["info"]))


def _licence(info: Mapping[str, Any]) -> str:
    said = [each.rpartition(" :: ")[2] for each in info.get("classifiers") or () if each.startswith("License ::")]
    return info.get("license_expression") or ", ".join(said) or (info.get("license") or "").partition("\n")[0][:60]


def from_index(url: str) -> Read:
    def read(path: str) -> Any:
        try:
            with urlopen(f"{url}/{path}", timeout=SECONDS) as answer:
                return json.load(answer)
        except HTTPError as failure:
            if failure.code == HTTPStatus.NOT_FOUND:
                return None
            raise

    return read


def audit(found: Mapping[Pin, list[str]], read: Read) -> int:
    with ThreadPoolExecutor(AT_ONCE) as several:
        told = list(several.map(lambda pin: told_of(pin, read), sorted(found)))
    wrong = [each for each in told if each.wrong]
    silent = [each for each in told if each.wrong is None]
    for each in wrong:
        print(f"{_spelled(each, found)}: {', '.join(each.wrong or ())}")
    print(f"{len(told)} releases are pinned: {len(wrong)} with something known to be wrong, {len(silent)} not told of")
    for each in silent:
        print(f"  not told of: {_spelled(each, found)}")
    print("licences of what a sidecar runs with:")
    for each in told:
        if SHIPPED in found[each.pin]:
            print(f"  {each.pin.name} {each.pin.version}: {each.licence or 'not told'}")
    return 1 if wrong else 2 if silent else 0


def _spelled(told: Told, found: Mapping[Pin, list[str]]) -> str:
    return f"{told.pin.name} {told.pin.version} ({', '.join(found[told.pin])})"


def audit_node(folder: Path) -> int:
    if shutil.which("npm") is None:
        print(f"{folder}: not asked, as there is no npm here")
        return 2
    done = subprocess.run(
        ["npm", "audit", "--package-lock-only", "--json"], cwd=folder, capture_output=True, text=True, check=False
    )
    told = json.loads(done.stdout or "{}").get("metadata", {}).get("vulnerabilities")
    if told is None:
        print(f"{folder.relative_to(ROOT)}: npm's registry does not tell")
        return 2
    print(f"{folder.relative_to(ROOT)}: {told['total']} packages with something known to be wrong")
    return 1 if told["total"] else 0


def main() -> int:
    from pip._internal.models.index import PyPI  # where it is installed from; loading pip meddles with distutils

    found = pins(sorted((ROOT / "requirements").glob("*.lock")))
    try:
        results = [audit(found, from_index(PyPI.pypi_url))]
    except (URLError, TimeoutError) as failure:
        print(f"the package index cannot be asked: {failure}")
        results = [2]
    results.append(audit_node(NODE))
    return 1 if 1 in results else max(results)


if __name__ == "__main__":
    sys.exit(main())
