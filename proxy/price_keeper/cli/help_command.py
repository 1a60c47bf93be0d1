"""`price-keeper help`: print the help of a command."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.cli.root_parser import build_root_parser


def run_help(args: Namespace) -> int:
    parser = build_root_parser().find_subcommand(args.command)
    for word in args.command[len(parser.prog.split()) - 1 :]:
        parser.fail_unknown_command(word)
    parser.print_help()
    return 0
