"""What is true of every file of the tree."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("proxy", "tests", "bench", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]


def _names_of_modules() -> Counter[str]:
    """Of all modules and packages of the product, each by its last part."""
    paths = [path for path in (ROOT / "proxy/price_keeper").rglob("*.py") if path.stem != "__main__"]
    return Counter(path.parent.name if path.stem == "__init__" else path.stem for path in paths)


def test_no_module_shadows_the_standard_library() -> None:
    assert _names_of_modules().keys() & sys.stdlib_module_names == set()


def test_no_two_modules_share_a_name() -> None:
    """So that a name in a message, a test or a conversation means one of them."""
    assert [name for name, number in _names_of_modules().items() if number > 1] == []


def test_every_module_has_a_docstring() -> None:
    silent = [path for path in SOURCES if path.read_text() and not re.match(r'(#!.*\n)?"""', path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in silent if path.name != "conftest.py"] == []


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.lock")), ids=lambda path: path.name)
def test_locks_have_hashes_and_name_no_index(lock: Path) -> None:
    text = lock.read_text()
    requirements = re.findall(r"^[a-z0-9][^ ]*==[^ ]+(?: ;[^\\\n]*)? *\\$", text, re.MULTILINE)
    unpinned = [line for line in text.splitlines() if re.match(r"[a-z0-9]", line) and "==" not in line]
    assert requirements
    assert unpinned == []
    assert text.count("--hash=sha256:") >= len(requirements)
    assert "://" not in text
    assert set(re.findall(r"--[a-z-]+", text)) == {"--hash"}  # no option that names an index


HEAVY = ("aiohttp", "asyncio", "bcrypt", "cryptography", "httptools", "logging", "orjson", "uvloop", "yaml")


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("root_parser.build_root_parser().format_help()", []),
        ("entry_point.main(['completion', 'bash'])", ["logging"]),  # shtab logs
    ],
)
def test_help_and_completion_load_nothing_slow(code: str, loaded: list[str]) -> None:
    """They come at once; what a command needs is loaded when it is called."""
    program = (
        f"import sys; from price_keeper.cli import entry_point, root_parser; {code}; "
        f"print(sorted(set(sys.modules) & set({HEAVY})))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.splitlines()[-1] == str(loaded)
