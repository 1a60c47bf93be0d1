"""The pages of the documentation as their tests read them: blocks of code, what is said of each, links and headings.

What a test has to know of a block stands before it in a comment that no reader sees:

    <!-- not run: needs an AWS account -->    shown and not carried out; tests/docs/not_run.txt lists them all
    <!-- server -->                           a command that keeps running; what it prints to be pasted is pasted
    <!-- until it shows this -->              carried out again until it shows what the page shows
    <!-- exits with 1 -->                     what it does is refused, or finds something
    <!-- body of PUT /api/v1/orgs/{org} -->   JSON that this operation takes
    <!-- the server says -->                  lines of its log, in this order

Of a page that something else makes and tests: `<!-- no block of this page is run: made by … -->`. By itself
`<!-- server: price-keeper dev -->` starts a server that the page does not talk about, and `<!-- the server dies -->`
kills it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

EXECUTED_LANGUAGES = ("sh", "python", "js")
KNOWN_LANGUAGES = (*EXECUTED_LANGUAGES, "console", "text", "json", "yaml")
DIES, SAYS = "the server dies", "the server says"
_BY_ITSELF = "server: "
_NONE_IS_RUN = re.compile(r"^<!-- no block of this page is run: (.{8,}) -->$", re.MULTILINE)
_DIRECTIVES = re.compile(
    r"not run: .{8,}|server|until it shows this|exits with [1-9]|the server says|body of (PUT|POST) /\S+"
)
_COMMENT = re.compile(r"\s*<!-- (.+) -->")
_FENCE = re.compile(r"( *)```(.*)")
_FILE = re.compile(r"(?:#|//) ([\w-]+\.(?:yaml|json|py|mjs))\b")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")


@dataclass
class Block:
    page: Path
    line: int
    language: str
    text: str
    directives: list[str] = field(default_factory=list)
    expected_output: Block | None = None  # what it prints, as the page tells

    def __str__(self) -> str:
        return f"{find_page(self.page)}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in (*EXECUTED_LANGUAGES, "server", DIES, SAYS) and self.not_run is None

    @property
    def not_run(self) -> str | None:
        return self._directive("not run: ")

    @property
    def body_of(self) -> str | None:
        return self._directive("body of ")

    @property
    def code(self) -> int:
        return int(self._directive("exits with ") or 0)

    @property
    def is_server(self) -> bool:
        return self.language == "server" or "server" in self.directives

    @property
    def is_retried(self) -> bool:
        return "until it shows this" in self.directives

    @property
    def file(self) -> str | None:
        """The name that its first line gives it."""
        found = _FILE.match(self.text)
        return None if found is None else found.group(1)

    def _directive(self, beginning: str) -> str | None:
        return next((each[len(beginning) :] for each in self.directives if each.startswith(beginning)), None)


def find_page(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def why_not_run(page: Path) -> str | None:
    """Why, of a page none of whose blocks is."""
    found = _NONE_IS_RUN.search(page.read_text())
    return None if found is None else found.group(1)


@cache
def parse_blocks(page: Path) -> tuple[Block, ...]:
    """In their order. Raises AssertionError where what is said of a block is not known."""
    if why_not_run(page) is not None:
        return ()
    found: list[Block] = []
    directives: list[str] = []
    lines = enumerate(page.read_text().splitlines(), 1)
    for number, line in lines:
        comment, fence = _COMMENT.fullmatch(line), _FENCE.fullmatch(line)
        if fence:
            indent, language = fence.groups()
            body = []
            for _, inner in lines:
                if inner.strip() == "```":
                    break
                body.append(inner.removeprefix(indent))
            found += _block(Block(page, number, language, "\n".join(body), directives), found)
            directives = []
        elif comment and comment.group(1).startswith(_BY_ITSELF):
            found.append(Block(page, number, "server", comment.group(1)[len(_BY_ITSELF) :]))
        elif comment and comment.group(1) == DIES:
            found.append(Block(page, number, DIES, ""))
        elif comment:
            directives.append(comment.group(1))
        elif line.strip():
            directives = []
    return tuple(found)


def _block(block: Block, before: list[Block]) -> list[Block]:
    """One that tells what another one prints belongs to that."""
    assert block.language, f"{block}: a block of no language; {', '.join(KNOWN_LANGUAGES)} are run or looked at"
    unknown = [directive for directive in block.directives if not _DIRECTIVES.fullmatch(directive)]
    assert unknown == [], f"{block}: {unknown}"
    assert block.language in KNOWN_LANGUAGES or block.not_run, f"{block}: nothing runs it, which the page must say"
    if block.language == "console":
        return _typed(block)
    if block.language != "text" and (block.language != "json" or block.body_of is not None):
        return [block]
    if SAYS in block.directives:
        block.language = SAYS
    if block.not_run is not None or block.language == SAYS:
        return [block]
    assert before, f"{block}: it tells what nothing prints"
    last = before[-1]
    assert last.language in EXECUTED_LANGUAGES, f"{block}: what is before it prints nothing"
    assert last.expected_output is None, f"{block}: {last} has told what it prints"
    last.expected_output = block
    return []


def _typed(block: Block) -> list[Block]:
    """Each command behind a `$ `, with the lines up to the next one as what it prints."""
    found: list[Block] = []
    for command in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        typed, _, printed = re.sub(r"\\\n", "\0", command).partition("\n")
        own = Block(block.page, block.line, "sh", typed.replace("\0", "\\\n"), block.directives)
        own.expected_output = Block(block.page, block.line, "text", printed.rstrip("\n")) if printed.strip() else None
        found.append(own)
    return found


@cache
def prose(page: Path) -> str:
    """All but the blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def find_quoted(page: Path) -> list[str]:
    """What stands between backticks."""
    return [" ".join(found.split()) for _, found in _CODE.findall(prose(page))]


def links(page: Path) -> list[str]:
    return _LINK.findall(_CODE.sub("", prose(page)))


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    found: set[str] = set()
    for head in heads:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(
            next(name for number in range(len(heads)) if (name := f"{slug}-{number}" if number else slug) not in found)
        )
    return found


# Of a test's file alone, or of one test.
_TEST = re.compile(r"`(?:tests/)?((?:\w+/)+\w+\.py)::(\w+)`|`(?:tests/)?((?:\w+/)+test_\w+\.py)`")


def find_missing_tests(text: str) -> list[str]:
    """Those that it names and that are not there."""
    named_here = [(file or alone, test) for file, test, alone in _TEST.findall(text)]
    return [f"{file}::{test}" for file, test in named_here if not _is_there(file, test)]


def _is_there(file: str, test: str) -> bool:
    path = ROOT / "tests" / file
    return path.exists() and (not test or test in _tests_in(path))


@cache
def _tests_in(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE))
