"""Completion in the shells themselves: what a person types, the tab key, and what comes of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from price_keeper.cli.root_parser import build_root_parser
from price_keeper.cli.shell_completion import collect_commands

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
        told = call_in_process("completion", name, folder=tmp_path)
        assert (told.returncode, told.stderr) == (0, "")
        (tmp_path / f"completion.{name}").write_text(told.stdout)
    return tmp_path


# Whatever stands in the line when it is sent off is what the command of that name prints.
_QUIET_ZSH = "PS1=; unsetopt PROMPT_SP PROMPT_CR AUTO_REMOVE_SLASH; autoload -Uz compinit; compinit -u -d dump"
BEGIN = {
    "bash": "PS1=; PS2=; bind 'set enable-bracketed-paste off'; source completion.bash\n",
    "zsh": f'{_QUIET_ZSH}; eval "$(cat completion.zsh)"\n',
}
ARGUMENTS = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_one_tab_completes_what_fits_alone(place: Path, name: str) -> None:
    typed = BEGIN[name] + 'price-keeper() { echo "GOT<$*>"; }\n'
    typed += "".join(f"price-keeper {line}\t\n" for line, _ in CASES) + "exit\n"
    environment = {"PATH": os.environ["PATH"], "HOME": str(place), "TERM": "dumb" if name == "bash" else "xterm"}
    shown = on_a_terminal([shell(name), *ARGUMENTS[name]], place, environment, columns=200, typed=typed).text
    told = [found.rstrip() for found in re.findall(r"^.*GOT<(.*)>\r?$", shown, re.MULTILINE) if found != "$*"]
    assert told == [wanted for _, wanted in CASES], shown


def test_fish_tells_what_fits(place: Path) -> None:
    fish = shell("fish")
    asked = "\n".join(f"echo GOT; complete -C 'price-keeper {line}'" for line, _ in CASES)
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
    told = [found.split("\n") for found in done.stdout.split("GOT\n")[1:]]
    fitting = [[line.split("\t")[0] for line in lines if line] for lines in told]
    assert fitting == [[wanted.rsplit(" ", 1)[-1]] for _, wanted in CASES]


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_finds_no_fault_in_its_script(place: Path, name: str) -> None:
    command = [shell(name), "-n", f"completion.{name}"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_command_and_option_stands_in_each_script(place: Path) -> None:
    for name in SHELLS:
        script = (place / f"completion.{name}").read_text()
        for command in collect_commands(build_root_parser()):
            assert all(verb in script for verb, _ in command.subcommands)
            assert all(option.names[-1].lstrip("-") in script for option in command.options)


def test_an_option_takes_a_value_everywhere_or_nowhere() -> None:
    """By which the script for fish knows what to pass over."""
    found = [
        (name, each.value is not None)
        for one in collect_commands(build_root_parser())
        for each in one.options
        for name in each.names
    ]
    assert len(set(found)) == len({name for name, _ in found})
