"""Gives each segment of a journal a second name as soon as it is there, to be read after its owner removed it.

A process of its own, so that no test keeps it from looking. Run as: python -m tests.support.segment_copier JOURNAL
FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from price_keeper.ledger.segment import SEGMENT_SUFFIX

LONGEST_SECONDS = 1800  # should nothing end it


def main(journal: Path, folder: Path) -> None:
    seen: set[str] = set()
    until = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < until:
        for place in (journal, *journal.glob("worker-*")):
            with suppress(FileNotFoundError):
                copy_new_segments(place, folder, seen)
        time.sleep(0.002)


def copy_new_segments(journal: Path, folder: Path, seen: set[str]) -> None:
    for name in os.listdir(journal):
        if name.endswith(SEGMENT_SUFFIX) and name not in seen:
            with suppress(FileNotFoundError):
                os.link(journal / name, folder / name)
                seen.add(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
