"""`price-keeper completion`: prints the script by which a shell completes these commands."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.cli.root_parser import build_root_parser
from price_keeper.commandline.completion import collect_commands
from price_keeper.commandline.completion_bash import render_bash
from price_keeper.commandline.completion_fish import render_fish
from price_keeper.commandline.completion_zsh import render_zsh


def run_completion(args: Namespace) -> int:
    render = {"bash": render_bash, "fish": render_fish, "zsh": render_zsh}[args.shell]
    print(render(collect_commands(build_root_parser())), end="")
    return 0
