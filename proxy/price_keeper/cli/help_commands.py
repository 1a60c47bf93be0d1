"""`price-keeper help` and `completion`: print the help of a command, and the completion script of a shell."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.cli.root_parser import build_root_parser
from price_keeper.cli.shell_completion import collect_commands, render_bash, render_fish, render_zsh


def run_help(args: Namespace) -> int:
    parser = build_root_parser().find_subcommand(args.command)
    for word in args.command[len(parser.prog.split()) - 1 :]:
        parser.fail_unknown_command(word)
    parser.print_help()
    return 0


def run_completion(args: Namespace) -> int:
    render = {"bash": render_bash, "fish": render_fish, "zsh": render_zsh}[args.shell]
    print(render(collect_commands(build_root_parser())), end="")
    return 0
