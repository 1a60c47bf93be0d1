"""A process whose wall clock a test can set while it runs, forwards and back. Its monotonic clock stays as it is."""

from __future__ import annotations

from glob import glob
from pathlib import Path

_FOUND = glob("/usr/lib/*/faketime/libfaketimeMT.so.1") + glob("/usr/lib/faketime/libfaketimeMT.so.1")


def why_unavailable() -> str:
    """Why there can be none here; empty if there can."""
    return "" if _FOUND else "no libfaketime here: apt-get install faketime"


class WrongClock:
    def __init__(self, folder: Path, ahead: float = 0.0) -> None:
        self._file = folder / "ahead"
        self.set_ahead(ahead)

    def set_ahead(self, seconds: float) -> None:
        """So far ahead of the true time; negative: behind."""
        self.ahead = seconds
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+f}s\n")
        new.rename(self._file)  # whole, whenever it is read

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": _FOUND[0],
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
