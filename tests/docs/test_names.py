"""What the documentation names is there: pages, headings, metrics, commands, options, keys, variables, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from price_keeper.config import Config
from price_keeper.telemetry.metrics import ALL_METRICS as METRICS

from tests.support.commands import call_in_process
from tests.support.doc_pages import (
    PAGES,
    ROOT,
    anchors,
    find_missing_tests,
    find_page,
    find_quoted,
    links,
    parse_blocks,
)

every_page = pytest.mark.parametrize("page", PAGES, ids=find_page)

SECTIONS = {field.name for field in fields(Config)}
SOURCES = {path: path.read_text() for folder in ("proxy", "tests", "bench") for path in (ROOT / folder).rglob("*.py")}


def said(page: Path) -> list[str]:
    """What is between backticks, and each line of the blocks of code."""
    lines = (re.sub(r"\\\n", " ", block.text).splitlines() for block in parse_blocks(page))
    return [*find_quoted(page), *(line for each in lines for line in each)]


@every_page
def test_links_lead_to_existing_targets(page: Path) -> None:
    lost = []
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(link)
    assert lost == []


def test_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links(index) if "://" not in link}
    missing = [find_page(page) for page in PAGES if page.parent.name != "decisions" and page.resolve() not in listed]
    assert [page for page in missing if page not in ("README.md", "docs/README.md")] == []


@every_page
def test_named_tests_exist(page: Path) -> None:
    """Named by their file, or by file and function."""
    assert find_missing_tests(page.read_text()) == []


@every_page
def test_named_metrics_exist(page: Path) -> None:
    known = {metric.name for metric in METRICS}
    named_here = set(re.findall(r"\bprice_keeper_[a-z_]+[a-z]\b", page.read_text()))
    assert {name for name in named_here if re.sub(r"_(bucket|sum|count)$", "", name) not in known} == set()


@every_page
def test_named_commands_and_options_exist(page: Path) -> None:
    assert [wrong for line in said(page) for wrong in mistakes(line)] == []


def mistakes(line: str) -> Iterator[str]:
    """In each command of ours that begins in the line."""
    for part in re.split(r"\$\(|&&|\|\||;|(?<= )\| | {2,}(?=price-keeper )", line.replace("`", "")):
        found = re.match(r"\s*(?:[A-Z_]+=\S* )*(?:\$ )?(?:\S*/)?price-keeper(?= |$)(.*)", part)
        if found:
            yield from _unknown(_words(found.group(1)), part.strip())


def _words(text: str) -> list[str]:
    plain = re.sub(r"[][()|…]| \.\.\.", " ", re.sub(r"\s#.*|>.*", "", text))
    try:
        return shlex.split(plain)
    except ValueError:
        return plain.split()


def _unknown(words: list[str], line: str) -> Iterator[str]:
    """According to the commands' own help."""
    verbs: tuple[str, ...] = ()
    for word in words[:2]:
        if not re.fullmatch(r"[a-z][a-z-]*", word):
            break
        if _helped(*verbs, word) is None:
            yield f"{line}: there is no command {' '.join((*verbs, word))}"
            return
        verbs = (*verbs, word)
    options = {"--help", "--version", *re.findall(r"--[a-z][a-z-]*", f"{_helped()}{_helped(*verbs)}")}
    given = {word.rstrip(",").partition("=")[0] for word in words if word.startswith("--")}
    yield from (f"{line}: there is no option {option}" for option in sorted(given - options))


@cache
def _helped(*words: str) -> str | None:
    done = call_in_process(*words, "--help", folder=ROOT)
    return done.stdout if done.returncode == 0 else None


@every_page
def test_named_configuration_keys_exist(page: Path) -> None:
    paths = [
        text.split(":")[0].split(".")
        for text in find_quoted(page)
        if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+(: .*)?", text)
    ]
    paths += [
        name.lower().split("__") for name in re.findall(r"\bPRICE_KEEPER__([A-Z0-9_]+[A-Z0-9])\b", page.read_text())
    ]
    of_ours = [path for path in paths if path[0] in SECTIONS and path[-1] not in ("py", "yaml", "pem", "db")]
    assert [".".join(path) for path in of_ours if not is_key(Config, path)] == []


def is_key(kind: Any, path: list[str]) -> bool:
    if not path:
        return True
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(is_key(each, path) for each in get_args(kind) if each is not NoneType)
    if origin is tuple:
        return path[0].isdecimal() and is_key(get_args(kind)[0], path[1:])
    if origin is not None and issubclass(origin, Mapping):
        return is_key(get_args(kind)[1], path[1:])
    return is_dataclass(kind) and path[0] in (hints := get_type_hints(kind)) and is_key(hints[path[0]], path[1:])


@every_page
def test_named_variables_and_headers_exist(page: Path) -> None:
    text = page.read_text()
    variables = set(re.findall(r"\bPRICE_KEEPER_(?!_)[A-Z_]+[A-Z]\b", text))
    headers = set(re.findall(r"\bx-price-keeper-[a-z-]+[a-z]\b", text))
    everywhere = _everywhere()
    ours = re.findall(r"_env: ([A-Z_]+)", text)  # what a page itself has chosen
    assert [name for name in variables - set(ours) if name not in everywhere] == []
    assert [name for name in headers if name not in everywhere] == []


@cache
def _everywhere() -> str:
    places = (ROOT / "config.yaml", ROOT / "Makefile", ROOT / "setup.py")
    return "\n".join([*SOURCES.values(), *(path.read_text() for path in places)])


@every_page
def test_named_make_targets_exist(page: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named_here = {found for line in said(page) for found in re.findall(r"^\s*(?:[A-Z_]+=\S+ )*make ([a-z-]+)", line)}
    assert named_here - known == set()


@every_page
def test_named_files_exist(page: Path) -> None:
    places = [
        text
        for text in find_quoted(page)
        if re.fullmatch(r"(proxy|tests|bench|deploy|docs|requirements)/[\w./-]+", text)
    ]
    assert [text for text in places if not (ROOT / text).exists()] == []
