"""What a shell can complete, read from the parser: commands, options, what these may be, files and folders. Pure."""

from __future__ import annotations

from argparse import Action
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from price_keeper.cli.command_parser import CommandParser

FILES, FOLDERS = "files", "folders"
_PATH_KINDS = {"FILE": FILES, "DIR": FOLDERS}


class ValueCompletion(NamedTuple):
    """What an argument may be: one of the words, a file or a folder, or with neither anything."""

    name: str
    words: tuple[str, ...] = ()
    path_kind: str = ""


class OptionCompletion(NamedTuple):
    names: tuple[str, ...]
    text: str
    value: ValueCompletion | None  # None: it takes none


class CommandCompletion(NamedTuple):
    """`path` are its words behind the program's name; all of the program has none."""

    path: tuple[str, ...]
    summary: str
    subcommands: tuple[tuple[str, str], ...]
    options: tuple[OptionCompletion, ...]
    arguments: tuple[ValueCompletion, ...]


def collect_commands(parser: CommandParser, path: tuple[str, ...] = ()) -> Iterator[CommandCompletion]:
    """This one, and all below it."""
    subcommands = tuple((name, verb.summary) for name, verb in parser.subcommands.items())
    actions = parser.actions
    options = tuple(_build_option(action) for action in actions if action.option_strings)
    arguments = tuple(_build_value(action, parser.suggestions) for action in actions if not action.option_strings)
    yield CommandCompletion(path, parser.summary, subcommands, options, arguments)
    for name, verb in parser.subcommands.items():
        yield from collect_commands(verb, (*path, name))


def _build_option(action: Action) -> OptionCompletion:
    takes_value = action.nargs != 0
    return OptionCompletion(
        tuple(action.option_strings), _summarize_help(action), _build_value(action) if takes_value else None
    )


def _build_value(action: Action, suggestions: Mapping[str, Iterable[str]] = MappingProxyType({})) -> ValueCompletion:
    name = str(action.metavar or action.dest.upper())
    words = tuple(map(str, action.choices or suggestions.get(name, ())))
    return ValueCompletion(name, words, _PATH_KINDS.get(name, ""))


def _summarize_help(action: Action) -> str:
    """What is said of it, up to the first sign of there being more."""
    if action.nargs == 0 and action.dest == "help":
        return "tell all of it"
    return (action.help or "").partition(";")[0]
