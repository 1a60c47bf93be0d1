"""`price-keeper completion`: prints the script by which a shell completes these commands."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module

from proxy.commandline.completion import commands
from proxy.commandline.whole import parser


def completion(chosen: Namespace) -> int:
    shell = import_module(f"proxy.commandline.completion_{chosen.shell}")
    print(shell.script(commands(parser())), end="")
    return 0
