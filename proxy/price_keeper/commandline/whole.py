"""All of the command line, in groups."""

from __future__ import annotations

from price_keeper.cli.command_parser import EXIT_CODES, CommandParser
from price_keeper.commandline import access, budgets, configuring, operating, running

PROGRAM = "price-keeper"


def build_root_parser() -> CommandParser:
    codes = "\n".join(f"  {code:<3}  {meaning}" for code, meaning in EXIT_CODES)
    root = CommandParser(
        prog=PROGRAM,
        description="Keeps every org and app on Amazon Bedrock inside its budget.",
        epilog=f"More of a command: {PROGRAM} help COMMAND. To begin: {PROGRAM} dev.\n\nexit codes:\n{codes}",
    )
    root.add_argument("--version", action="store_true", help="the same as the command version")
    for add_commands in (
        running.add_run_commands,
        configuring.add_configure_commands,
        budgets.add_budget_commands,
        access.add_access_commands,
        operating.add_operate_commands,
    ):
        add_commands(root)
    return root
