"""Targets of the Makefile and steps of `.ci/run` name what exists, in the right order."""

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


def test_fast_tests_leave_out_only_files_that_exist() -> None:
    asked = ["make", "--dry-run", "--no-print-directory", "test-fast"]
    made = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    command = made.stdout.partition("PRICE_KEEPER_EFFORT=")[2]
    left_out = re.findall(r"--ignore=(\S+)", command)
    assert left_out
    assert all((ROOT / each).is_file() for each in left_out)
    assert command.split()[-3:] == ["tests/tidy", "tests/property", "tests/unit"]


def test_ci_run_lints_before_it_tests() -> None:
    targets = re.findall(r"^(?:\w+=\w+ )*make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert targets[:2] == ["check", "test"]
    assert {"test-clients", "test-page", "test-deploy", "bench-check"} <= set(targets)
