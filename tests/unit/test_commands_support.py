"""The helpers that start `price-keeper` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.commands import ROOT, build_environment


def test_child_process_in_shared_virtual_environment_imports_this_checkout(tmp_path: Path) -> None:
    """`-S` leaves out what the virtual environment has installed, which may be the code of another checkout."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import price_keeper; print(price_keeper.__file__)"],
        cwd=tmp_path,
        env=build_environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == str(ROOT / "proxy" / "price_keeper" / "__init__.py"), done.stderr
