"""What docs/operations.md quotes of the log, of answers and of commands is what the code says."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.test_names import SOURCES
from tests.support.doc_pages import ROOT, prose

PAGE = ROOT / "docs" / "operations.md"
QUOTES = sorted(set(re.findall(r"(?:says|[Ll]og|answer): `([^`]+)`", prose(PAGE))))
THE_LOG = "; the log says why"  # behind a reason in /ready
_PLACE = re.compile(r"%(?:\.\d+)?[sdrgf]")


@cache
def templates() -> frozenset[str]:
    """Every text in the code, with `…` where something is put into it."""
    trees = (ast.parse(text) for path, text in SOURCES.items() if path.is_relative_to(ROOT / "proxy"))
    return frozenset(
        _text(node) for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))
    )


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return _PLACE.sub("…", node.value) if isinstance(node.value, str) else ""
    return "".join(_text(part) for part in node.values) if isinstance(node, ast.JoinedStr) else "…"


@pytest.mark.parametrize("quote", QUOTES)
def test_quote_matches_code(quote: str) -> None:
    assert is_said(quote)


def is_said(quote: str) -> bool:
    pattern = re.compile(".*".join(map(re.escape, quote.split("…"))))
    if any(pattern.fullmatch(each) for each in templates()):
        return True
    return quote.endswith(THE_LOG) and f"…{THE_LOG}" in templates() and is_said(quote.removesuffix(THE_LOG))


def test_unknown_quote_is_detected() -> None:
    assert len(QUOTES) > 25
    assert not is_said("the store is awry; the log says why")
    assert not is_said("spend cannot be flushed, and gets lost: …")
