"""Where inputs lie: those worth keeping, those that an oracle has fallen over, and those of the present run."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
KEPT = HERE / "corpus"
FOUND = HERE / "found"  # by a run; they stay, as tests of what was mended
AT_WORK = HERE.parents[1] / "build" / "fuzz" / "corpus"


def inputs(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_file())


def played(name: str) -> list[Path]:
    """All that a target is played without a fuzzer."""
    return inputs(KEPT / name, FOUND / name)
