"""Each row of the threat model in docs/security.md names tests that are there, or says that nothing protects."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.doc_pages import ROOT, find_missing_tests

PAGE = ROOT / "docs" / "security.md"
OPENLY = "not protected"
LEAST_ROWS = 50

_ROW = re.compile(r"^\| (.+) \| (.+) \| (.+) \| (.+) \|$")
_NAMED = re.compile(r"`([a-z0-9_/]+\.py)::([a-z0-9_]+)`")


def rows() -> list[tuple[str, ...]]:
    model = PAGE.read_text().partition("\n## Threat model\n")[2].partition("\n## ")[0]
    found = [match.groups() for line in model.splitlines() if (match := _ROW.match(line))]
    return [row for row in found if row[0] != "he wants" and not row[0].startswith("---")]


def test_threat_tables_are_found() -> None:
    assert len(rows()) >= LEAST_ROWS


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_each_threat_names_existing_tests_or_no_protection(row: tuple[str, ...]) -> None:
    _, _, stops, tried = row
    named = _NAMED.findall(tried)
    assert named or (OPENLY in stops.lower() and tried == "-")
    assert find_missing_tests(tried) == []
    assert _NAMED.sub("", tried).strip(", -") == ""  # nothing that looks like a test and is none


def test_javascript_packages_are_pinned_with_hashes() -> None:
    packages = json.loads((ROOT / "tests/flow/clients/programs/package-lock.json").read_text())["packages"]
    others = {name: each for name, each in packages.items() if name}
    assert others
    loose = [name for name, each in others.items() if not each["integrity"].startswith("sha512-")]
    assert loose == []
    assert [name for name, wanted in packages[""]["dependencies"].items() if not wanted[0].isdigit()] == []
