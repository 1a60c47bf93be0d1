"""The commands as their help tells them: arguments, options, exit codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.commands import call_in_process


def commands(folder: Path) -> dict[str, Any]:
    help_text = _help(folder)
    names = re.findall(r"^  ([a-z][a-z-]+) {2,}\S", help_text.partition("exit codes:")[0], re.MULTILINE)
    found: dict[str, Any] = {}
    for name in names:
        _add(found, folder, name)
    return {"commands": found, "exit codes": [int(code) for code in re.findall(r"^  (\d+) ", help_text, re.MULTILINE)]}


def _add(found: dict[str, Any], folder: Path, *words: str) -> None:
    help_text = _help(folder, *words)
    sections = dict(re.findall(r"^(\w[\w ]*):\n((?:(?: .*)?\n)+)", help_text + "\n", re.MULTILINE))
    if "commands" in sections:
        for name in re.findall(r"^  ([a-z][a-z-]+) {2,}\S", sections["commands"], re.MULTILINE):
            _add(found, folder, *words, name)
        return
    listed = [each for part in ("arguments", "options") for each in _entries(sections.get(part, ""))]
    found[" ".join(words)] = listed


def _entries(section: str) -> list[str]:
    """The first column; what is too long for it stands alone on its line."""
    return [entry.split("  ")[0].strip() for entry in re.findall(r"^  (\S.*)$", section, re.MULTILINE)]


def _help(folder: Path, *words: str) -> str:
    done = call_in_process(*words, "--help", folder=folder, COLUMNS="200", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    return done.stdout
