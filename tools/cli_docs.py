"""Writes the reference of the command line from its parser: `make cli-docs`.

What stands above the mark in docs/cli.md is written by hand and stays.
"""

from __future__ import annotations

from argparse import Action
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from price_keeper.cli.command_parser import EXIT_CODES, CommandParser
from price_keeper.cli.root_parser import build_root_parser

DOC = Path(__file__).parents[1] / "docs" / "cli.md"
WIDTH = 120
MARK = "<!-- What follows is made from the parser: make cli-docs -->\n"


def written(text: str) -> str:
    """The document, with its reference made anew."""
    by_hand, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"docs/cli.md has no line {MARK!r}")
    return f"{by_hand}{mark}\n" + "\n".join(_reference(build_root_parser()))


def _reference(root: CommandParser) -> Iterator[str]:
    yield from ["## Exit codes", "", "| code | what it means |", "|---|---|"]
    yield from (f"| {code} | {meaning} |" for code, meaning in EXIT_CODES)
    for heading in dict.fromkeys(each.heading for each in root.subcommands.values()):
        yield from ["", f"## {heading}"]
        for each in (verb for verb in root.subcommands.values() if verb.heading == heading):
            yield from _command(each, "###")
    yield ""


def _command(command: CommandParser, depth: str) -> Iterator[str]:
    paragraphs = (command.description or "").split("\n\n")
    yield from ["", f"{depth} {command.prog}", "", "\n\n".join(fill(each, WIDTH) for each in paragraphs)]
    if command.subcommands:
        for verb in command.subcommands.values():
            yield from _command(verb, f"{depth}#")
        return
    yield from ["", "```", *_usage(command), "```", ""]
    if rows := [_row(each) for each in command.actions if each.dest != "help"]:
        yield from ["| argument | what it means |", "|---|---|", *rows, ""]
    yield from ["```sh", *(line for what, line in command.examples for line in (f"# {what}", line)), "```"]


def _usage(command: CommandParser) -> list[str]:
    """argparse says it in another way in each version of Python."""
    lines = [command.prog]
    indent = " " * (len(command.prog) + 1)
    for word in _words(command):
        if len(lines[-1]) + len(word) >= WIDTH:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return lines


def _words(command: CommandParser) -> Iterator[str]:
    for each in command.actions:
        if not each.option_strings:
            yield {"?": f"[{each.metavar}]", "*": f"[{each.metavar} ...]"}.get(str(each.nargs), str(each.metavar))
    told: set[Action] = set()
    for each in command.actions:
        if not each.option_strings or each.dest == "help" or each in told:
            continue
        together = next((group for group in command.exclusive_groups if each in group), [each])
        told.update(together)
        text = " | ".join(_named(one) for one in together)
        yield text if each.required else f"[{text}]"


def _named(action: Action) -> str:
    name = action.option_strings[-1] if action.option_strings else ""
    if action.nargs == 0:
        return name
    value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices and not action.metavar else action.metavar
    return f"{name} {value}".strip()


def _row(action: Action) -> str:
    name = action.option_strings[-1] if action.option_strings else _named(action)
    may_be = ", ".join(f"`{each}`" for each in action.choices or ())
    text = f"{may_be}. {action.help}" if may_be else action.help
    return f"| `{name if may_be else _named(action)}` | {text} |"


def main() -> None:
    DOC.write_text(written(DOC.read_text()))


if __name__ == "__main__":
    main()
