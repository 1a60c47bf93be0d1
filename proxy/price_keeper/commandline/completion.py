"""What a shell can complete, read from the parser: commands, options, what these may be, files and folders. Pure."""

from __future__ import annotations

from argparse import Action
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from price_keeper.commandline.parser import CommandParser

FILES, FOLDERS = "files", "folders"
_PLACES = {"FILE": FILES, "DIR": FOLDERS}


class Value(NamedTuple):
    """What an argument may be: one of the words, a file or a folder, or with neither anything."""

    name: str
    words: tuple[str, ...] = ()
    place: str = ""


class Option(NamedTuple):
    names: tuple[str, ...]
    text: str
    value: Value | None  # None: it takes none


class Command(NamedTuple):
    """`path` are its words behind the program's name; all of the program has none."""

    path: tuple[str, ...]
    summary: str
    verbs: tuple[tuple[str, str], ...]
    options: tuple[Option, ...]
    arguments: tuple[Value, ...]


def commands(parser: CommandParser, path: tuple[str, ...] = ()) -> Iterator[Command]:
    """This one, and all below it."""
    verbs = tuple((name, verb.summary) for name, verb in parser.subcommands.items())
    actions = parser.actions
    options = tuple(_option(action) for action in actions if action.option_strings)
    arguments = tuple(_value(action, parser.suggestions) for action in actions if not action.option_strings)
    yield Command(path, parser.summary, verbs, options, arguments)
    for name, verb in parser.subcommands.items():
        yield from commands(verb, (*path, name))


def _option(action: Action) -> Option:
    takes_one = action.nargs != 0
    return Option(tuple(action.option_strings), _text(action), _value(action) if takes_one else None)


def _value(action: Action, hints: Mapping[str, Iterable[str]] = MappingProxyType({})) -> Value:
    name = str(action.metavar or action.dest.upper())
    words = tuple(map(str, action.choices or hints.get(name, ())))
    return Value(name, words, _PLACES.get(name, ""))


def _text(action: Action) -> str:
    """What is said of it, up to the first sign of there being more."""
    if action.nargs == 0 and action.dest == "help":
        return "tell all of it"
    return (action.help or "").partition(";")[0]
