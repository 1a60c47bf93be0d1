"""tools/release.py: a release whose versions differ, or that the changelog does not tell of, is not made."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tools.release import PLACES, find_problems, main, read_notes, read_version

NOTES = "# Changelog\n\n## Unreleased\n\nlater\n\n## 1.2.3 - 2026-11-20\n\n### Added\n- a thing\n\n## 1.2.30\n\nold\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a release reads of this tree, as version 1.2.3."""
    for name in ("pyproject.toml", *PLACES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
        path = tmp_path / name
        path.write_text(path.read_text().replace(read_version(ROOT), "1.2.3"))
    (tmp_path / "CHANGELOG.md").write_text(NOTES)
    return tmp_path


def test_release_with_equal_versions_is_accepted(tree: Path) -> None:
    assert list(find_problems(tree, "v1.2.3")) == []


def test_release_notes_are_the_section_of_the_version(tree: Path) -> None:
    assert read_notes(tree) == "### Added\n- a thing"


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2.4", "v1.2.30", ""])
def test_release_under_another_tag_is_refused(tree: Path, tag: str) -> None:
    assert [each.partition(",")[0] for each in find_problems(tree, tag)] == [f"the tag is {tag}"]


@pytest.mark.parametrize("name", PLACES)
def test_release_with_another_version_in_one_file_is_refused(tree: Path, name: str) -> None:
    (tree / name).write_text((tree / name).read_text().replace("1.2.3", "1.2.2", 1))
    (problem,) = find_problems(tree, "v1.2.3")
    assert problem.startswith(f"{name} has 1.2.2")
    assert main(["check", "v1.2.3"], tree) == 1


def test_release_without_section_in_changelog_is_refused(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text(NOTES.replace("## 1.2.3 ", "## 1.2.4 "))
    (problem,) = find_problems(tree, "v1.2.3")
    assert "## 1.2.3" in problem
    assert main(["notes"], tree) == 1


def test_versions_of_this_tree_are_equal() -> None:
    """The changelog has its section by the time of the release."""
    problems = list(find_problems(ROOT, f"v{read_version(ROOT)}"))
    assert [each for each in problems if "CHANGELOG" not in each] == []
