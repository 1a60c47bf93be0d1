"""Where inputs lie: kept ones, those that failed an oracle, and the present run's."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
KEPT = HERE / "corpus"
FOUND = HERE / "found"  # by a run; they stay, as regression tests
AT_WORK = HERE.parents[1] / "build" / "fuzz" / "corpus"


def inputs(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_file())


def played(name: str) -> list[Path]:
    """All that a target is played without a fuzzer."""
    return inputs(KEPT / name, FOUND / name)
