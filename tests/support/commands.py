"""The command line as a user has it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SECONDS = 60


def price_keeper(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proxy.cli", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
