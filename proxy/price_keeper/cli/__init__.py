"""The command line `price-keeper`. Declaring commands is cheap to import; the code of a command is loaded when it runs.

    entry_point         main: parse, load the command's module, run it, report failures
    root_parser         all commands as declared. START HERE.
    command_parser, shared_arguments, hints, terminal   used to declare commands and report mistakes
    *_command(s)        the code of each command; functions run_<command>
    api_client, store_selection, settings_file, settings_view, output, atomic_file, config_handover   shared by commands

The modules of the first three lines must not import asyncio, yaml, aiohttp or anything else that is slow to import.
Commands may import everything; nothing imports cli.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script. Loads the command line when it is called, so that importing this package costs nothing."""
    from price_keeper.cli.entry_point import main as run

    return run(arguments)
