"""The argument parser of a command: help with examples, and for a mistake a suggestion of the nearest valid word.

`add_command` declares a subcommand and names the function that runs it, as a string, so that declaring imports nothing.
A mistake raises UsageError; this module never exits the process.
"""

from __future__ import annotations

import re
import sys
from argparse import Action, ArgumentParser, HelpFormatter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TextIO

from price_keeper.cli.terminal import BOLD, get_terminal_width, is_colored

EXIT_CODES = (
    (0, "done"),
    (1, "not done, or a check found something"),
    (2, "a mistake in the command or the configuration"),
    (130, "interrupted, as by Ctrl-C"),
)
MAX_HELP_WIDTH = 120  # longer lines are hard to read
_NEGATIVE_NUMBER = re.compile(r"-\d")


class Example(NamedTuple):
    purpose: str
    command_line: str


class UsageError(Exception):
    """The command line itself is wrong."""

    def __init__(self, parser: CommandParser, message: str) -> None:
        self.parser = parser
        super().__init__(message)


class CommandParser(ArgumentParser):
    """The parser of the whole command line, of one command, or of one of its subcommands."""

    def __init__(self, *, summary: str = "", heading: str = "", examples: Sequence[Example] = (), **rest: Any) -> None:
        super().__init__(formatter_class=_Formatter, **rest)
        self._positionals.title = "arguments"
        self.color = False  # disables the colours that newer versions of argparse add
        self.summary = summary
        self.heading = heading  # the group in which the parent's help lists this command
        self.heading_of_commands = ""  # the same for the commands that are declared next
        self.examples = tuple(examples)
        self.suggestions: dict[str, Iterable[str]] = {}  # possible values for completion, by metavar
        self.subcommands: dict[str, CommandParser] = {}
        self._commands: Any = None
        self.set_defaults(target="", parser=self)

    def add_command(
        self, name: str, summary: str, description: str, *examples: tuple[str, str], target: str = ""
    ) -> CommandParser:
        """Declare a subcommand. `target` is "module.function" in `price_keeper.cli`, imported when the command runs."""
        if self._commands is None:
            self._commands = self.add_subparsers(metavar="WHAT" if " " in self.prog else "COMMAND")
        text = f"{summary[:1].upper()}{summary[1:]}.\n\n{description}".strip()
        parser: CommandParser = self._commands.add_parser(
            name,
            help=summary,
            summary=summary,
            description=text,
            examples=[Example(*example) for example in examples],
            heading=self.heading_of_commands,
        )
        parser.set_defaults(target=target)
        self.subcommands[name] = parser
        return parser

    def find_subcommand(self, words: Iterable[str]) -> CommandParser:
        """The parser of the subcommand that these words name; unknown words end the search."""
        parser = self
        for word in words:
            if word not in parser.subcommands:
                break
            parser = parser.subcommands[word]
        return parser

    @property
    def option_names(self) -> list[str]:
        return list(self._option_string_actions)

    @property
    def actions(self) -> list[Action]:
        """Arguments and options, without the one that selects the subcommand."""
        return [action for action in self._actions if action is not self._commands]

    @property
    def exclusive_groups(self) -> list[list[Action]]:
        """Groups of options of which at most one may be given."""
        return [list(group._group_actions) for group in self._mutually_exclusive_groups]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown_words = self.parse_known_args(args, namespace)
        if unknown_words:
            parsed.parser.error(f"there is no place here for {' '.join(unknown_words)}")
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Raises UsageError for unknown words before argparse reports arguments that they may have been meant for."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            if word == "--":
                break
            if _is_option(word):
                self._check_option(word.partition("=")[0])
            elif self.subcommands:
                if word not in self.subcommands:
                    self.fail_unknown_command(word)
                break  # the remaining words belong to the subcommand
        return super().parse_known_args(words, namespace)

    def fail_unknown_command(self, word: str) -> NoReturn:
        """Raises UsageError that suggests the nearest command."""
        candidates = [
            f"{self.prog} {name} {word}" for name, verb in self.subcommands.items() if word in verb.subcommands
        ]
        if candidates:
            self.error(f"{word} is a part of other commands: {', '.join(candidates)}")
        if not self.subcommands:
            self.error(f"{self.prog} has no commands of its own, so there is no {word!r}")
        self.error(f"there is no command {word!r}; {_suggest(word, self.subcommands, 'there are')}")

    def error(self, message: str) -> NoReturn:
        raise UsageError(self, message)

    def format_help(self) -> str:
        return "\n".join([*self._build_overview(), *self._build_examples(), self.epilog or ""]).rstrip() + "\n"

    def print_help(self, file: Any = None) -> None:
        stream: TextIO = sys.stdout if file is None else file
        text = self.format_help()
        if is_colored(stream):
            text = re.sub(r"^(usage:|\w[\w ]*:$)", f"\x1b[{BOLD}m\\1\x1b[0m", text, flags=re.MULTILINE)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()  # a closed pipe must be noticed here, not only at the end of the process

    def _build_overview(self) -> list[str]:
        if not self.subcommands:
            return [super().format_help()]
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        lines = [formatter.format_help().rstrip(), "", f"usage: {self.prog} {self._commands.metavar} ...", ""]
        longest = max(map(len, self.subcommands))
        for heading in dict.fromkeys(verb.heading for verb in self.subcommands.values()):
            lines.append(f"{heading or 'commands'}:")
            listed_commands = {name: verb for name, verb in self.subcommands.items() if verb.heading == heading}
            lines += [_format_entry(name, verb.summary, longest) for name, verb in listed_commands.items()]
            lines.append("")
        return lines

    def _build_examples(self) -> list[str]:
        if not self.examples:
            return []
        return ["examples:", *(line for what, line in self.examples for line in (f"  {what}:", f"    {line}")), ""]

    def _check_option(self, name: str) -> None:
        if any(option == name or (name.startswith("--") and option.startswith(name)) for option in self.option_names):
            return
        if self.subcommands and any(name in verb.option_names for verb in _iterate_subcommands(self)):
            self.error(f"{name} goes behind the command, as in: {self.prog} {_find_owner(self, name)} {name}")
        self.error(f"there is no option {name}; {_suggest(name, self.option_names, 'there are')}")


class _Formatter(HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(get_terminal_width() - 2, MAX_HELP_WIDTH))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wraps each paragraph separately."""
        return "\n\n".join(super(_Formatter, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


def _format_entry(name: str, summary: str, longest: int) -> str:
    from textwrap import wrap

    room = max(20, min(get_terminal_width() - 2, MAX_HELP_WIDTH) - longest - 4)
    first, *other_lines = wrap(summary, room)
    return "\n".join([f"  {name:{longest}}  {first}", *(f"{'':{longest + 4}}{line}" for line in other_lines)])


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NEGATIVE_NUMBER.match(word)


def _iterate_subcommands(parser: CommandParser) -> Iterable[CommandParser]:
    for verb in parser.subcommands.values():
        yield verb
        yield from _iterate_subcommands(verb)


def _find_owner(parser: CommandParser, option: str) -> str:
    owners = [
        name
        for name, verb in parser.subcommands.items()
        if any(option in each.option_names for each in (verb, *_iterate_subcommands(verb)))
    ]
    return owners[0] if len(owners) == 1 else ("COMMAND" if " " not in parser.prog else "WHAT")


def _suggest(word: str, possible_words: Iterable[str], prefix: str) -> str:
    from price_keeper.config.config_problems import did_you_mean  # takes 0.1 s, so only a mistake imports it

    words = [each for each in possible_words if each != "-h"]
    return did_you_mean(word, words) or f"{prefix} {', '.join(words)}"
