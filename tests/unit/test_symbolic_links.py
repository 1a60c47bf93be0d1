"""In a folder that others can write to, a link may stand in the place of a file of ours: it is not followed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from price_keeper.errors import JournalUnusable
from price_keeper.ledger import journal_lock as journals
from price_keeper.ledger.lease_file import LEASE_FILE_PREFIX, BudgetLeaseFile
from price_keeper.ledger.lease_rows import HardBudgetKey
from price_keeper.ledger.segment import Segment

TEXT = "not ours"
NAME = HardBudgetKey("ORG#c0000000-0000-4000-8000-000000000001", "premium", "DAY#20261118")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    found = tmp_path / "theirs"
    found.write_text(TEXT)
    return found


def test_journal_lock_link_is_refused(tmp_path: Path, theirs: Path) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    (journal / journals.LOCK_NAME).symlink_to(theirs)
    with pytest.raises(JournalUnusable, match="cannot use the journal"), journals.lock_folder(journal):
        pass


def test_segment_link_is_refused(tmp_path: Path, theirs: Path) -> None:
    (tmp_path / "01ARZ3NDEKTSV4RRFFQ69G5FAV.seg").symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic links"):
        Segment(tmp_path, "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    assert theirs.read_text() == TEXT


async def test_lease_file_link_is_refused(tmp_path: Path, theirs: Path) -> None:
    holds = BudgetLeaseFile(tmp_path, "holder")
    (tmp_path / f"{LEASE_FILE_PREFIX}holder").symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic links"):
        await holds.add(NAME)


async def test_journal_files_are_private(tmp_path: Path) -> None:
    before, journal = os.umask(0), tmp_path / "journal"
    try:
        with journals.lock_folder(journal):
            Segment(journal, "01ARZ3NDEKTSV4RRFFQ69G5FAV").append(b"{}")
            await BudgetLeaseFile(journal, "holder").add(NAME)
    finally:
        os.umask(before)
    assert _open_to_others(journal) == {
        "journal": 0,
        "lock": 0,
        "01ARZ3NDEKTSV4RRFFQ69G5FAV.seg": 0,
        f"{LEASE_FILE_PREFIX}holder": 0,
    }


def _open_to_others(folder: Path) -> dict[str, int]:
    return {each.name: stat.S_IMODE(each.stat().st_mode) & 0o077 for each in (folder, *folder.iterdir())}
