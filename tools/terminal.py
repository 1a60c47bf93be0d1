"""A program on a terminal, and all that it shows there."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SECONDS = 60
ROWS = 60


class Shown(NamedTuple):
    code: int
    text: str


def on_a_terminal(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], columns: int = 100, typed: str = ""
) -> Shown:
    """Standard output and errors as they come; `typed` is what a person types, all of it at once."""
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    kept = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        words, cwd=folder, env=kept, stdin=end, stdout=end, stderr=end, start_new_session=True
    ) as run:
        os.close(end)
        os.write(main, typed.encode())
        told = b"".join(_read(main))
        code = run.wait(SECONDS)
    os.close(main)
    return Shown(code, told.decode().replace("\r\n", "\n"))


def _read(descriptor: int) -> Iterator[bytes]:
    """Until all who write there are gone, which Linux tells as an error."""
    while True:
        try:
            found = os.read(descriptor, 65_536)
        except OSError:
            return
        if not found:
            return
        yield found
