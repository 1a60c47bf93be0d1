"""`price-keeper help`: what `--help` tells, for whoever asks so."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.commandline.whole import build_root_parser


def help_of(args: Namespace) -> int:
    found = build_root_parser().find_subcommand(args.command)
    for word in args.command[len(found.prog.split()) - 1 :]:
        found.fail_unknown_command(word)
    found.print_help()
    return 0
