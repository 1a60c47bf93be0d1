"""The same mistake has the same exit code and the same form of message in every command that can make it."""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from uuid import uuid4

import pytest
from price_keeper.cli.command_parser import CommandParser
from price_keeper.cli.root_parser import build_root_parser

from tests.support.commands import call_in_process
from tests.support.control_thread import ControlThread, control_in_thread
from tests.support.ports import free_port

ORG_SETTINGS = """\
org_name: Acme
timezone: UTC
quota_scope: APP
model_ordering: [premium, economy]
quotas: {premium: 5 USD, economy: 1 USD}
"""
CONFIG = """\
store: {path: ./some.db}
labels: {premium: {model: a.b, format: nova, prices_usd_per_1m: {input: 3, output: 15}}}
"""
MISSING = "none/such"
UUID = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
# A sound word for each argument and each required option, by its metavar.
SOUND = {
    "ORG": "Acme",
    "APP": "shop",
    "FILE": "settings.yaml",
    "LABEL": "premium",
    "SESSION": UUID,
    "CLIENT_ID": f"org-{UUID}",
    "JOURNAL": "journal",
    "SHELL": "bash",
    "ID": UUID,
    "TEXT": "x",
    "NEW": "new",  # what is written
}
OUTPUT_FILES = {("price-keeper app put", "--secret-file"), ("price-keeper export", "--out")}
SERVES = {"price-keeper dev", "price-keeper demo", "price-keeper serve"}


def leaves(parser: CommandParser) -> Iterator[CommandParser]:
    for each in parser.subcommands.values():
        yield from leaves(each) if each.subcommands else [each]


LEAVES = list(leaves(build_root_parser()))
BY_API = [each for each in LEAVES if "--api" in each.option_names]


def is_needed(action: Action) -> bool:
    return action.required if action.option_strings else action.nargs not in ("?", "*")


def words_of(command: CommandParser, **replaced: str) -> list[str]:
    """A command line with all that is needed, and `replaced` for arguments by their metavar."""
    words = command.prog.split()[1:]
    for action in command.actions:
        if is_needed(action) or action.option_strings == ["--reason"]:
            metavar = "NEW" if "--out" in action.option_strings else str(action.metavar or "")
            name = replaced.get(metavar) or SOUND.get(metavar) or next(iter(action.choices or ["some"]))
            words += [*action.option_strings[-1:], str(name)]
    return words


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlThread]:
    with control_in_thread(tmp_path_factory.mktemp("served")) as running:
        (running.folder / "settings.yaml").write_text(ORG_SETTINGS)
        (running.folder / "config.yaml").write_text(CONFIG)
        running.run_command("org", "put", str(uuid4()), "settings.yaml")
        running.run_command("tables", "create")
        yield running


@pytest.mark.parametrize("command", LEAVES, ids=lambda each: each.prog)
def test_unknown_option_exits_2_below_one_line_of_usage(tmp_path: Path, command: CommandParser) -> None:
    done = call_in_process(*words_of(command), "--nonsense", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    usage, mistake, more = done.stderr.splitlines()
    assert usage.startswith(f"usage: {command.prog} ")
    assert mistake.startswith("price-keeper: there is no option --nonsense; ")
    assert more == f"For more, run: {command.prog} --help"


NEEDY = [each for each in LEAVES if any(map(is_needed, each.actions))]


@pytest.mark.parametrize("command", NEEDY, ids=lambda each: each.prog)
def test_missing_argument_exits_2_below_one_line_of_usage(tmp_path: Path, command: CommandParser) -> None:
    done = call_in_process(*command.prog.split()[1:], folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    usage, mistake, more = done.stderr.splitlines()
    assert usage.startswith(f"usage: {command.prog} ")
    assert mistake.startswith("price-keeper: the following arguments are required: ")
    assert more == f"For more, run: {command.prog} --help"


def is_one_line(done: CompletedProcess[str], code: int, pattern: str) -> bool:
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert re.fullmatch(f"{pattern}.*\n", done.stderr), done.stderr
    return True


NAMES_ORG = [each for each in LEAVES if any(action.metavar == "ORG" for action in each.actions)]


@pytest.mark.parametrize("command", NAMES_ORG, ids=lambda each: each.prog)
def test_unknown_org_by_name_exits_2(api: ControlThread, command: CommandParser) -> None:
    words = words_of(command, ORG="Nobody")
    if "Nobody" not in words:
        words += ["--org", "Nobody"]
    done = api.run_command(*words, code=2)
    assert is_one_line(done, 2, "price-keeper: no org has the id or the name 'Nobody'; ")


CREATES = {"price-keeper org put"}


@pytest.mark.parametrize(
    "command", [each for each in BY_API if each in NAMES_ORG and each.prog not in CREATES], ids=lambda each: each.prog
)
def test_unknown_org_by_id_exits_2(api: ControlThread, command: CommandParser) -> None:
    done = api.run_command(*words_of(command, ORG=UUID), code=2)
    assert is_one_line(done, 2, rf"price-keeper: \S+ answered 404: there is no (org {UUID}|such client)")


@pytest.mark.parametrize("command", BY_API, ids=lambda each: each.prog)
def test_unreachable_server_exits_1(api: ControlThread, command: CommandParser) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    words = words_of(command, FILE="orgs.yaml" if command.prog == "price-keeper apply" else "settings.yaml")
    (api.folder / "orgs.yaml").write_text("orgs: [{org_name: Acme}]")
    done = api.run_command(*words, "--api", url, code=1, PRICE_KEEPER_CLIENT_SECRET="sesame")
    assert is_one_line(done, 1, f"price-keeper: no server answers at {url} ")


def input_files() -> Iterator[tuple[CommandParser, str]]:
    """Each argument and option of a command that names a file to be read."""
    for command in LEAVES:
        for action in command.actions:
            name = (action.option_strings or [""])[-1]
            if action.metavar == "FILE" and (command.prog, name) not in OUTPUT_FILES:
                yield command, name


@pytest.mark.parametrize(("command", "option"), list(input_files()), ids=lambda each: getattr(each, "prog", each))
def test_unreadable_file_exits_2(api: ControlThread, command: CommandParser, option: str) -> None:
    words = words_of(command, **({} if option in ("--key-file", "--config", "--secret-file") else {"FILE": MISSING}))
    if MISSING not in words:
        words += [option, MISSING]
    done = api.run_command(*words, code=2)
    assert is_one_line(done, 2, f"{MISSING}: cannot be read: No such file or directory")


@pytest.mark.parametrize(
    "words", [["org", "put", "Acme"], ["app", "put", "Acme", "shop"], ["apply", "-f"]], ids=" ".join
)
@pytest.mark.parametrize("amount", ["5 EUR", "'5'", "-1", "1.5", "5,00 USD"])
def test_wrong_amount_exits_2_with_its_line(api: ControlThread, words: list[str], amount: str) -> None:
    settings = ORG_SETTINGS.replace("5 USD", f'"{amount}"' if "," in amount else amount)
    if "app" in words:
        settings = "app_name: Shop\n\n\n\n" + settings.splitlines()[-1]
    if "apply" in words:
        settings = "orgs: [{" + settings.strip().replace("\n", ",\n") + "}]"
    done = api.run_command(*words, "-", code=2, stdin=settings)
    assert is_one_line(
        done, 2, r"standard input:5: quotas\.premium: expected an amount from 0 to 1000000000 USD, such as "
    )


def test_mistyped_label_is_reported_before_a_missing_option(api: ControlThread) -> None:
    api.run_command("app", "put", "Acme", "shop", "-", stdin="app_name: Shop")
    command = ("override", "set", "Acme", "--app", "shop")
    done = api.run_command(*command, "premum", code=2)
    assert is_one_line(done, 2, 'price-keeper: label: "premum" is not in the ordering; did you mean "premium"')
    mistake = api.run_command(*command, "premium", code=2).stderr.splitlines()
    assert mistake[1] == "price-keeper: the following arguments are required: --reason"
    assert mistake[0].startswith("usage: price-keeper override set ")
