"""What is installed where this runs, as a CycloneDX document on standard output: Python, its packages, Debian's.

No time and no random number stand in it, so the same image has the same document. Needs the standard library alone.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

OURS = "bedrock-price-keeper"
DPKG = Path("/var/lib/dpkg/status")
RELEASE = Path("/etc/os-release")

Component = dict[str, Any]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def component(kind: str, name: str, version: str, purl: str, **more: Any) -> Component:
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}


def of_distribution(found: Distribution, kind: str = "library") -> Component:
    name, version = normal(found.metadata["Name"]), found.version
    told = licence(found)
    return component(kind, name, version, f"pkg:pypi/{quote(name)}@{quote(version)}", **told)


def licence(found: Distribution) -> dict[str, Any]:
    """As the package says it: an SPDX expression, or else words of its own."""
    expression = found.metadata.get("License-Expression")
    if expression:
        return {"licenses": [{"expression": expression}]}
    classifiers = found.metadata.get_all("Classifier") or []
    named = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::")]
    words = named or [(found.metadata.get("License") or "").partition("\n")[0].strip()[:100]]
    return {"licenses": [{"license": {"name": name}} for name in words if name]}


def dependencies(found: Distribution, installed: dict[str, str]) -> list[str]:
    """Of those that it names, whatever the condition, those that are there."""
    named = {normal(re.split(r"[^A-Za-z0-9._-]", each, maxsplit=1)[0]) for each in found.requires or []}
    return sorted(installed[name] for name in named & installed.keys())


def of_debian() -> Iterator[Component]:
    if not DPKG.is_file():
        return
    release = dict(line.split("=", 1) for line in RELEASE.read_text().splitlines() if "=" in line)
    distro = f"{release.get('ID', 'linux')}-{release.get('VERSION_ID', '')}".replace('"', "").rstrip("-")
    for block in DPKG.read_text().split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", block, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version, arch = fields["Package"], fields["Version"], fields["Architecture"]
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={arch}&distro={distro}"
            yield component("library", name, version, purl)


def document() -> dict[str, Any]:
    found = {normal(each.metadata["Name"]): each for each in distributions()}
    installed = {
        name: of_distribution(each, "application" if name == OURS else "library") for name, each in found.items()
    }
    references = {name: str(each["bom-ref"]) for name, each in installed.items()}
    python = platform.python_version()
    interpreter = component("platform", "python", python, f"pkg:generic/python@{python}")
    packages = [each for name, each in sorted(installed.items()) if name != OURS]
    debian = sorted(of_debian(), key=lambda each: str(each["bom-ref"]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": installed[OURS]},
        "components": [interpreter, *packages, *debian],
        "dependencies": [
            {"ref": references[name], "dependsOn": dependencies(each, references)}
            for name, each in sorted(found.items())
        ],
    }


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1)
    print()
