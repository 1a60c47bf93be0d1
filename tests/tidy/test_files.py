"""What is true of every file of the tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_FILE = 400
LONGEST_TEST = 450  # tables of cases are long, and easy to read
SOURCES = [path for folder in ("proxy", "tests", "bench", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_grows_past_what_one_reads(path: Path) -> None:
    longest = LONGEST_TEST if path.is_relative_to(ROOT / "tests") else LONGEST_FILE
    assert len(path.read_text().splitlines()) <= longest


def test_no_module_shadows_the_standard_library() -> None:
    names = {path.stem for path in (ROOT / "proxy/price_keeper").glob("*.py")} - {"__init__"}
    assert names & sys.stdlib_module_names == set()


def test_every_module_says_what_it_is_for() -> None:
    silent = [path for path in SOURCES if path.read_text() and not re.match(r'(#!.*\n)?"""', path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in silent if path.name != "conftest.py"] == []


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.lock")), ids=lambda path: path.name)
def test_locks_have_hashes_and_name_no_index(lock: Path) -> None:
    text = lock.read_text()
    requirements = re.findall(r"^[a-z0-9][^ ]*==[^ ]+(?: ;[^\\\n]*)? *\\$", text, re.MULTILINE)
    unpinned = [line for line in text.splitlines() if re.match(r"[a-z0-9]", line) and "==" not in line]
    assert len(requirements) > 20
    assert unpinned == []
    assert text.count("--hash=sha256:") >= len(requirements)
    assert "://" not in text
    assert "index" not in text


def test_importing_the_package_loads_no_aws_library() -> None:
    """Those who use SQLite pay neither the time nor the memory."""
    code = (
        "import sys, price_keeper.cli, price_keeper.app; "
        "print(sorted(m for m in sys.modules if m in ('aioboto3', 'botocore', 'boto3')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


HEAVY = ("aiohttp", "asyncio", "bcrypt", "cryptography", "httptools", "logging", "orjson", "uvloop", "yaml")


def test_help_and_completion_load_nothing_that_takes_long() -> None:
    """They come at once; what a command needs is loaded when it is called."""
    code = (
        "import sys, price_keeper.cli; from price_keeper.commandline import completion, completion_bash, whole; "
        "whole.parser().format_help(); completion_bash.script(completion.commands(whole.parser())); "
        f"print(sorted(set(sys.modules) & set({HEAVY})))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"
