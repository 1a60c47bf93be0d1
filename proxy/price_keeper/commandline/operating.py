"""Commands for whoever keeps it running: `audit`, `replay`, `completion`, `version`, `help`."""

from __future__ import annotations

from pathlib import Path

from price_keeper.cli.command_parser import CommandParser
from price_keeper.commandline import kinds
from price_keeper.commandline.options import add_config_option, add_json_option, add_org_argument, add_store_options

OPERATE_HEADING = "Operate"
DEFAULT_AUDIT_LIMIT = 20
SHELLS = ("bash", "zsh", "fish")


def add_operate_commands(root: CommandParser) -> None:
    _add_audit(root)
    _add_replay(root)
    _add_completion(root)
    version = root.add_command(
        "version",
        "tell which version this is, and whether it is compiled",
        "",
        ("For a person", "price-keeper version"),
        ("For a program", "price-keeper version --json"),
        target="version.run_version",
        heading=OPERATE_HEADING,
    )
    add_json_option(version)
    help_command = root.add_command(
        "help",
        "tell the commands, or all of one",
        "",
        ("Of one command", "price-keeper help org put"),
        target="help.run_help",
        heading=OPERATE_HEADING,
    )
    help_command.add_argument("command", nargs="*", metavar="COMMAND", help="such as spend, or org put")
    help_command.suggestions["COMMAND"] = root.subcommands


def _add_audit(root: CommandParser) -> None:
    audit = root.add_command(
        "audit",
        "tell who changed the settings of an org and its apps, newest first",
        "It reads the store.",
        ("The last changes", "price-keeper audit Acme"),
        ("The last hundred, for a program", "price-keeper audit Acme --limit 100 --json"),
        target="audit.run_audit",
        heading=OPERATE_HEADING,
    )
    add_org_argument(audit)
    text = f"how many changes; default: {DEFAULT_AUDIT_LIMIT}"
    audit.add_argument(
        "--limit", type=kinds.parse_audit_limit, default=DEFAULT_AUDIT_LIMIT, metavar="NUMBER", help=text
    )
    add_json_option(audit)
    add_store_options(audit)


def _add_replay(root: CommandParser) -> None:
    replay = root.add_command(
        "replay",
        "bring a journal found on a dead node to the store",
        "What is in the store already is not counted again, so it is safe to run again. A process that writes to it on "
        "this machine is noticed; of a copy, or a disk from another machine, you have to say that there is none.",
        ("The journal of a disk that came back", "price-keeper replay /mnt/found/journal --owner-is-dead"),
        ("Also what is older than 34 days", "price-keeper replay /mnt/found/journal --owner-is-dead --force"),
        target="replay.run_replay",
        heading=OPERATE_HEADING,
    )
    replay.add_argument("folder", type=Path, metavar="DIR", help="the journal's folder; those of workers in it too")
    replay.add_argument(
        "--owner-is-dead",
        action="store_true",
        help="the process that wrote this journal has ended, and wrote no more after this copy was made",
    )
    replay.add_argument("--force", action="store_true", help="also what is so old that its markers are gone")
    add_config_option(replay)
    add_json_option(replay)


def _add_completion(root: CommandParser) -> None:
    completion = root.add_command(
        "completion",
        "print the script by which a shell completes these commands",
        "It completes commands, options, what they may be, files and folders, and asks nobody.",
        ("bash, now and in every new shell", "echo 'eval \"$(price-keeper completion bash)\"' >> ~/.bashrc"),
        ("zsh, behind compinit", "echo 'eval \"$(price-keeper completion zsh)\"' >> ~/.zshrc"),
        ("fish", "price-keeper completion fish > ~/.config/fish/completions/price-keeper.fish"),
        target="completion.run_completion",
        heading=OPERATE_HEADING,
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
