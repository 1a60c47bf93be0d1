"""Targets of the Makefile that have an environment of their own find the product in it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_fuzz_finds_the_product_without_an_installation() -> None:
    """Only what is installed for a run, and atheris, is in its environment: -S leaves out what is installed here."""
    made = subprocess.run(["make", "--dry-run", "fuzz"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (command,) = (line for line in made.splitlines() if "tests.fuzz.run" in line)
    variables = dict(re.findall(r"(?:^|\s)(\w+)=(\S+)(?=.*python -m)", command))
    found = subprocess.run(
        [sys.executable, "-S", "-c", "import price_keeper, tests; print(price_keeper.__file__)"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()) == ROOT / "proxy" / "price_keeper" / "__init__.py"
