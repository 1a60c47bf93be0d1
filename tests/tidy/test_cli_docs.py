"""docs/cli.md and the parser agree; and each command says what it is for."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from price_keeper.cli.command_parser import CommandParser
from price_keeper.cli.root_parser import build_root_parser

from tools.cli_docs import DOC, written

NO_JSON = {"price-keeper completion", "price-keeper help"}  # they print a script, and text for people


def leaves(whole: CommandParser) -> Iterator[CommandParser]:
    for each in whole.subcommands.values():
        yield from leaves(each) if each.subcommands else [each]


LEAVES = list(leaves(build_root_parser()))


def test_reference_matches_parser() -> None:
    assert DOC.read_text() == written(DOC.read_text()), "docs/cli.md is not up to date: make cli-docs"


@pytest.mark.parametrize("command", LEAVES, ids=lambda each: each.prog)
def test_each_command_has_summary_and_examples(command: CommandParser) -> None:
    assert re.fullmatch(r"[a-z].*[^.]", command.summary)
    assert command.examples
    assert all(command.prog in line for _, line in command.examples)
    assert ("--json" in command.option_names) is (command.prog not in NO_JSON)
    assert all(each.help for each in command.actions)


def test_pictures_exist() -> None:
    named = re.findall(r"\]\((images/[\w.-]+)\)", DOC.read_text())
    assert named
    assert [each for each in named if not (DOC.parent / each).is_file()] == []


def test_limits_in_help_match_code() -> None:
    from price_keeper.auth.registration import MAX_GRACE_HOURS
    from price_keeper.reports import focus_export
    from price_keeper.reports.report_rows import DIMENSIONS
    from price_keeper.workers.worker_slot import MAX_WORKERS

    root = build_root_parser()
    said = {
        words: " ".join(root.find_subcommand(words.split()).format_help().split())
        for words in ("serve", "rotate", "spend")
    }
    assert f"1 to {MAX_WORKERS};" in said["serve"]
    assert f"0 to {MAX_GRACE_HOURS};" in said["rotate"]
    assert f"FOCUS {focus_export.FOCUS_VERSION}," in said["spend"]
    assert f"each of these: {','.join(DIMENSIONS)}" in said["spend"]
