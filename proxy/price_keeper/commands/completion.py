"""`price-keeper completion`: prints the script by which a shell completes these commands."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module

from price_keeper.commandline.completion import collect_commands
from price_keeper.commandline.whole import build_root_parser


def run_completion(args: Namespace) -> int:
    shell = import_module(f"price_keeper.commandline.completion_{args.shell}")
    print(shell.script(collect_commands(build_root_parser())), end="")
    return 0
