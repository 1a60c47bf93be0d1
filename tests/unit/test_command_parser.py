"""Help texts of the command line, and its answers to unknown words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from price_keeper.cli.command_parser import UsageError
from price_keeper.cli.root_parser import build_root_parser

from tests.support.commands import call_in_process

MISTAKES = [
    (["spnd"], "there is no command 'spnd'; did you mean \"spend\"?"),
    (["org", "shw", "Acme"], "there is no command 'shw'; did you mean \"show\"?"),
    (["xyzzy"], "there are demo, dev, serve, check-config,"),
    (["list"], "list is a part of other commands: price-keeper org list, price-keeper app list, price-keeper session"),
    (["spend", "--jsn"], 'there is no option --jsn; did you mean "--json"?'),
    (["spend", "--forcus"], 'there is no option --forcus; did you mean "--focus"?'),
    (["spend", "-x"], "there is no option -x; there are --help, --org,"),
    (["keys", "new", "--kdi", "k1"], 'there is no option --kdi; did you mean "--kid"?'),  # before: --kid is missing
    (["--data-dir", "data", "spend"], "--data-dir goes behind the command, as in: price-keeper COMMAND --data-dir"),
    (["--until", "+2h"], "as in: price-keeper override --until"),
    (["org", "--key-file", "k"], "--key-file goes behind the command, as in: price-keeper org WHAT --key-file"),
    (["spend", "today", "yesterday"], "there is no place here for yesterday"),
    (["keys", "new"], "required: --kid, --out"),
    (["dev", "--port", "65536"], "a port is a number up to 65535, and 0 any free one, not 65536"),
    (["dev", "--port", "-1"], "--port"),
    (["serve", "--workers", "65"], "expected a number from 1 to 64, not 65"),
    (["audit", "Acme", "--limit", "0"], "expected a number from 1 to 100000, not 0"),
    (["rotate", "Acme", "--grace", "169"], "expected whole hours from 0 to 168, not 169"),
    (["rotate", "Acme", "--app", "a b"], "an app id is 1 to 64 letters"),
    (["keys", "new", "--kid", "../k", "--out", "x"], "the name of a key is 1 to 100 letters"),
    (["serve", "--role", "none"], "invalid choice: 'none'"),
]


@pytest.mark.parametrize(
    ("words", "says"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_command_mistake_suggests_correction(words: list[str], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        build_root_parser().parse_args(words)
    assert says in str(refused.value)


@pytest.mark.parametrize("words", [["spend", "--js"], ["override", "set", "A", "l", "--reason", "--what a day"]])
def test_argparse_abbreviations_are_accepted(words: list[str]) -> None:
    """The beginning of an option, and text that only begins as one does."""
    assert build_root_parser().parse_args(words)


def test_words_after_double_dash_are_no_options() -> None:
    assert build_root_parser().parse_args(["org", "show", "--", "--odd"]).org == "--odd"


def test_usage_is_printed_above_mistake(tmp_path: Path) -> None:
    refused = call_in_process("org", "shw", folder=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    usage, error, more = refused.stderr.splitlines()
    assert usage == "usage: price-keeper org [-h] WHAT ..."
    assert error.startswith("price-keeper: there is no command 'shw'")
    assert more == "For more, run: price-keeper org --help"


@pytest.mark.parametrize("words", [[], ["tables"], ["org"]])
def test_command_group_without_command_lists_its_commands(tmp_path: Path, words: list[str]) -> None:
    result, asked = call_in_process(*words, folder=tmp_path), call_in_process(*words, "--help", folder=tmp_path)
    assert (result.returncode, result.stderr, result.stdout) == (2, "", asked.stdout)
    assert asked.returncode == 0
    assert all(f"\n  {name} " in result.stdout for name in build_root_parser().find_subcommand(words).subcommands)


def test_commands_are_listed_in_groups(tmp_path: Path) -> None:
    result = call_in_process("help", folder=tmp_path)
    heads = [line for line in result.stdout.splitlines() if line.endswith(":") and line[0] != " "]
    assert heads == ["Run:", "Configure:", "Spend and budgets:", "Access:", "Operate:", "exit codes:"]
    assert (result.returncode, max(map(len, result.stdout.splitlines())) <= 80) == (0, True)


def test_help_is_of_the_given_command(tmp_path: Path) -> None:
    result = call_in_process("help", "org", "put", folder=tmp_path)
    assert (result.returncode, result.stdout) == (0, call_in_process("org", "put", "--help", folder=tmp_path).stdout)
    for words, says in ((["orgs"], 'did you mean "org"?'), (["org", "ptu"], '"put"'), (["spend", "x"], "no 'x'")):
        refused = call_in_process("help", *words, folder=tmp_path)
        assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr


def test_mistake_with_json_is_reported_as_json(tmp_path: Path) -> None:
    refused = call_in_process("spend", "--jsno", "--json", folder=tmp_path)
    document = json.loads(refused.stderr)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert (document["error"], document["exit_code"], document["details"]) == ("usage", 2, [document["message"]])
    assert 'did you mean "--json"?' in document["message"]
