"""`price-keeper help`: what `--help` tells, for whoever asks so."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.commandline.whole import parser


def help_of(chosen: Namespace) -> int:
    found = parser().called(chosen.command)
    for word in chosen.command[len(found.prog.split()) - 1 :]:
        found.miss(word)
    found.print_help()
    return 0
