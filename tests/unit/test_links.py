"""In a folder that others can write to, a link may stand in the place of a file of ours: it is not followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.errors import JournalUnusable
from proxy.hard.holds import PREFIX, Holds
from proxy.hard.rows import Name
from proxy.recording import folder as journals
from proxy.recording.segment import Segment

TEXT = "not ours"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    found = tmp_path / "theirs"
    found.write_text(TEXT)
    return found


def test_a_journals_lock(tmp_path: Path, theirs: Path) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    (journal / journals.LOCK).symlink_to(theirs)
    with pytest.raises(JournalUnusable, match="cannot use the journal"), journals.locked(journal):
        pass


def test_a_segment(tmp_path: Path, theirs: Path) -> None:
    (tmp_path / "01ARZ3NDEKTSV4RRFFQ69G5FAV.seg").symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic links"):
        Segment(tmp_path, "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    assert theirs.read_text() == TEXT


async def test_the_list_of_holds(tmp_path: Path, theirs: Path) -> None:
    holds = Holds(tmp_path, "holder")
    (tmp_path / f"{PREFIX}holder").symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic links"):
        await holds.name(Name("ORG#c0000000-0000-4000-8000-000000000001", "premium", "DAY#20261118"))
