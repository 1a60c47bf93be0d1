"""Serves as `price-keeper serve` does, and keeps what a soak wants to see: each segment of the journal under a second
name before it is removed, and at SIGUSR1 how many tasks there are.

python -m tests.soak.watched FOLDER serve --config config.yaml
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from price_keeper.cli.entry_point import main
from price_keeper.ledger.segment import SEGMENT_SUFFIX


def keep_what_is_removed(folder: Path) -> None:
    """Nothing of the product is changed for it: an audit hook reports every file that is about to be removed."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.remove":
            return
        path = os.fsdecode(arguments[0])
        if path.endswith(SEGMENT_SUFFIX):
            with suppress(FileExistsError, FileNotFoundError):
                os.link(path, folder / os.path.basename(path))

    sys.addaudithook(hear)


def tasks_file(folder: Path, pid: int) -> Path:
    return folder / f"tasks-{pid}.json"


def tell_tasks_when_asked(folder: Path) -> None:
    def tell(_: int, __: object) -> None:
        found: Counter[str] = Counter()
        with suppress(RuntimeError):  # a process without a loop has none
            found.update(task.get_coro().__qualname__ for task in asyncio.all_tasks(asyncio.get_running_loop()))
        unfinished = folder / f"tasks-{os.getpid()}.new"
        unfinished.write_text(json.dumps(found))
        unfinished.rename(tasks_file(folder, os.getpid()))

    signal.signal(signal.SIGUSR1, tell)


if __name__ == "__main__":
    kept = Path(sys.argv[1])
    keep_what_is_removed(kept)
    tell_tasks_when_asked(kept)
    sys.exit(main(sys.argv[2:]))
