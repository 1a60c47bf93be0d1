"""Completion in the shells themselves: what a person types, the tab key, and the completed line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from price_keeper.cli.command_parser import CommandParser
from price_keeper.cli.root_parser import build_root_parser

from tests.support.commands import SECONDS, call_in_process
from tools.terminal import on_a_terminal

SHELLS = ("bash", "zsh", "fish")

# What is typed, and what stands there after one tab: one thing alone fits.
CASES = [
    ("sp", "spend"),
    ("org p", "org put"),
    ("tables des", "tables describe"),
    ("serve --rol", "serve --role"),
    ("serve --role s", "serve --role sidecar"),
    ("spend --foc", "spend --focus"),
    ("spend y", "spend yesterday"),
    ("spend --org Acme --label x y", "spend --org Acme --label x yesterday"),
    ("check-config --config sid", "check-config --config sidecar.yaml"),
    ("org put Acme ac", "org put Acme acme.yaml"),
    ("org put --key-file acme.yaml Acme si", "org put --key-file acme.yaml Acme sidecar.yaml"),
    ("replay jour", "replay journal/"),
    ("doctor --data-dir jour", "doctor --data-dir journal/"),
    ("session revoke Acme a", "session revoke Acme all"),
    ("completion f", "completion fish"),
    ("help rep", "help replay"),
    ("keys new --kid x --alg H", "keys new --kid x --alg HS256"),
    ("org list --api http://127.0.0.1:8081 --key-file ac", "org list --api http://127.0.0.1:8081 --key-file acme.yaml"),
    ("app put Acme shop --api http://127.0.0.1:8081 ac", "app put Acme shop --api http://127.0.0.1:8081 acme.yaml"),
]
# zsh completes a value behind a blank alone.
CASES_WITH_EQUALS = [
    ("serve --role=s", "serve --role=sidecar"),
    ("check-config --config=sid", "check-config --config=sidecar.yaml"),
    ("doctor --data-dir=jour", "doctor --data-dir=journal/"),
    ("spend --org=Acme y", "spend --org=Acme yesterday"),
]


def list_parsers(parser: CommandParser) -> Iterator[CommandParser]:
    yield parser
    for subcommand in parser.subcommands.values():
        yield from list_parsers(subcommand)


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here; Debian and Ubuntu have it as the package {name}")
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("acme.yaml", "sidecar.yaml", "journal.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "journal").mkdir()
    for name in SHELLS:
        result = call_in_process("completion", name, folder=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        (tmp_path / f"completion.{name}").write_text(result.stdout)
    return tmp_path


# Whatever stands in the line when it is sent off is what the command of that name prints.
_QUIET_ZSH = "PS1=; unsetopt PROMPT_SP PROMPT_CR AUTO_REMOVE_SLASH; autoload -Uz compinit; compinit -u -d dump"
BEGIN = {
    "bash": "PS1=; PS2=; bind 'set enable-bracketed-paste off'; source completion.bash\n",
    "zsh": f'{_QUIET_ZSH}; eval "$(cat completion.zsh)"\n',
}
ARGUMENTS = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_tab_completes_unique_word(place: Path, name: str) -> None:
    cases = CASES + (CASES_WITH_EQUALS if name == "bash" else [])
    typed = BEGIN[name] + 'price-keeper() { echo "GOT<$*>"; }\n'
    typed += "".join(f"price-keeper {line}\t\n" for line, _ in cases) + "exit\n"
    environment = {"PATH": os.environ["PATH"], "HOME": str(place), "TERM": "dumb" if name == "bash" else "xterm"}
    shown = on_a_terminal([shell(name), *ARGUMENTS[name]], place, environment, columns=200, typed=typed).text
    completed = [found.rstrip() for found in re.findall(r"^.*GOT<(.*)>\r?$", shown, re.MULTILINE) if found != "$*"]
    assert completed == [wanted for _, wanted in cases], shown


def test_fish_lists_candidates(place: Path) -> None:
    fish = shell("fish")
    cases = CASES + CASES_WITH_EQUALS
    asked = "\n".join(f"echo GOT; complete -C 'price-keeper {line}'" for line, _ in cases)
    done = subprocess.run(
        [fish, "--no-config", "-c", f"source completion.fish\n{asked}"],
        cwd=place,
        env={"PATH": os.environ["PATH"], "HOME": str(place), "XDG_CONFIG_HOME": str(place)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stderr == ""
    completed = [found.split("\n") for found in done.stdout.split("GOT\n")[1:]]
    fitting = [[line.split("\t")[0] for line in lines if line] for lines in completed]
    assert fitting == [[wanted.rsplit(" ", 1)[-1]] for _, wanted in cases]


@pytest.mark.parametrize("name", SHELLS)
def test_shell_accepts_its_script(place: Path, name: str) -> None:
    command = [shell(name), "-n", f"completion.{name}"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_for_bash_holds_no_pattern_that_bash_3_2_refuses(place: Path) -> None:
    """macOS has 3.2, which takes no unquoted parenthesis behind =~."""
    script = (place / "completion.bash").read_text()
    assert "=~" in script
    assert re.findall(r"""=~[^"'\n]*\(.*""", script) == []


def test_every_command_and_option_is_in_every_script(place: Path) -> None:
    for name in SHELLS:
        script = (place / f"completion.{name}").read_text()
        for parser in list_parsers(build_root_parser()):
            assert [word for word in parser.subcommands if word not in script] == []
            assert [word for word in parser.option_names if word.lstrip("-") not in script] == []


def test_option_takes_value_in_every_command_or_none() -> None:
    """By which the script for fish knows what to pass over."""
    found = {
        (name, action.nargs != 0)
        for parser in list_parsers(build_root_parser())
        for action in parser.actions
        for name in action.option_strings
    }
    assert len(found) == len({name for name, _ in found})
