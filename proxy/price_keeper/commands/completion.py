"""`price-keeper completion`: prints the script by which a shell completes these commands."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.cli.root_parser import build_root_parser
from price_keeper.cli.shell_completion import collect_commands, render_bash, render_fish, render_zsh


def run_completion(args: Namespace) -> int:
    render = {"bash": render_bash, "fish": render_fish, "zsh": render_zsh}[args.shell]
    print(render(collect_commands(build_root_parser())), end="")
    return 0
