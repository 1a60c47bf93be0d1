"""Chooses the inputs that are worth keeping: a few short ones that go wherever any of them goes, in more ways than one.

python -m tests.fuzz.keep                        # out of what runs have gathered and what is kept already
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.places import AT_WORK, HERE, KEPT, inputs
from tests.fuzz.targets import NAMES, target

MOST_FILES = 10  # of one target, beside those that were put there by hand
LONGEST = 1024  # bytes of one; a longer one shows little more
PRODUCT = str(HERE.parents[1] / "proxy" / "price_keeper")

Steps = set[tuple[CodeType, int, int]]


def steps(one: Callable[[bytes], None], data: bytes) -> Steps:
    """From which line of the product to which it goes."""
    found: Steps = set()

    def call(frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PRODUCT):
            return None
        last = [0]

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                found.add((code, last[0], frame.f_lineno))
                last[0] = frame.f_lineno
            return line

        return line

    before = sys.gettrace()
    sys.settrace(call)
    try:
        one(data)
    finally:
        sys.settrace(before)
    return found


def chosen(one: Callable[[bytes], None], candidates: list[bytes]) -> list[bytes]:
    for data in candidates:
        one(data)  # once before, for what is done only the first time
    reached = {data: steps(one, data) for data in candidates}
    kept: list[bytes] = []
    seen: Steps = set()
    while reached and len(kept) < MOST_FILES:
        best = max(reached, key=lambda data: (len(reached[data] - seen), -len(data), data))
        if seen and reached[best] <= seen:
            seen = set()  # all is reached: those that are left do it in another way
            continue
        kept.append(best)
        seen |= reached.pop(best)
    return kept


def main() -> int:
    for name in NAMES:
        folder = KEPT / name
        by_hand = {path.read_bytes() for path in inputs(folder) if is_by_hand(path)}
        candidates = {path.read_bytes() for path in inputs(AT_WORK / name, folder)} - by_hand
        kept = chosen(target(name), sorted(data for data in candidates if len(data) <= LONGEST))
        _written(folder, kept)
        print(f"{name}: {len(kept)} of {len(candidates)}, {sum(map(len, kept))} bytes", flush=True)
    return 0


def _written(folder: Path, kept: list[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in inputs(folder):
        if not is_by_hand(path):
            path.unlink()
    for data in kept:
        (folder / sha256(data).hexdigest()[:16]).write_bytes(data)


def is_by_hand(path: Path) -> bool:
    """Inputs with descriptive names: these stay."""
    return re.fullmatch(r"[0-9a-f]{16}", path.name) is None


if __name__ == "__main__":
    sys.exit(main())
