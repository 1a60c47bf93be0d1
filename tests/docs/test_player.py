"""A page that says something else than what happens is found out."""

from __future__ import annotations

from pathlib import Path

import pytest
from price_keeper.config import Config

from tests.docs.test_names import is_key, mistakes
from tests.support.doc_pages import anchors, parse_blocks
from tests.support.output_matching import matches_json, matches_text
from tests.support.page_player import play_page


def page_of(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


def played(folder: Path, text: str) -> None:
    played_in = folder / "clone"
    played_in.mkdir()
    play_page(page_of(folder, text), played_in)


GOOD = "# A page\n\n```sh\nexport WORD=some\n```\n\nThen:\n\n```sh\necho $WORD words\n```\n\n```text\nsome …\n```\n"


def test_correct_page_passes(tmp_path: Path) -> None:
    played(tmp_path, GOOD)


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("some …", "other …"),
        GOOD.replace("echo", "ecko"),
        "```sh\nfalse\ntrue\n```\n",  # a later command does not make up for it
        "```sh\nfalse | true\n```\n",
        "<!-- exits with 2 -->\n```sh\ntrue\n```\n",
        "```sh\nexit 0\n```\n",
        "```sh\nprice-keeper spend --data-dir nowhere\n```\n",
        "```python\nassert False\n```\n",
        "```console\n$ echo one\ntwo\n```\n",
    ],
)
def test_wrong_page_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:\d+|it ended the shell"):
        played(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    ["```\nx\n```\n", "```text\nx\n```\n", "<!-- not run -->\n```sh\nx\n```\n", "<!-- untill -->\n```sh\nx\n```\n"],
)
def test_unknown_marker_of_block_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError):
        parse_blocks(page_of(tmp_path, text))


def test_file_is_saved_and_expected_refusal_passes(tmp_path: Path) -> None:
    refused = "<!-- exits with 1 -->\n```console\n$ grep b a.yaml\n$ grep c a.yaml\n```\n"
    played(tmp_path, f"```yaml\n# a.yaml\na: 1\n```\n\n{refused}")


@pytest.mark.parametrize(
    ("shown", "printed", "is_such"),
    [
        ("one  two", "one      two  \n", True),
        ("one two", "onetwo", False),
        ("a …\n…\nz", "a b\nc\nd\nz\n", True),
        ("a …\n…\nz", "a b\nz\n", True),
        ("a …", "a b\nz\n", False),
        ("$…: (ok)", "$1.5: (ok)", True),
        ("$…: (ok)", "$1.5: (no)", False),
    ],
)
def test_shown_text_is_compared(shown: str, printed: str, is_such: bool) -> None:
    assert matches_text(shown, printed) is is_such


@pytest.mark.parametrize(
    ("shown", "printed", "is_such"),
    [
        ('{"a": "…"}', '{"a": 1}', True),
        ('{"a": "…"}', '{"a": 1, "b": 2}', False),
        ('{"a": 1, "…": "…"}', '{"a": 1, "b": 2}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": "x…z"}', '{"a": "xyz"}', True),
        ("[1, 2]", "[1]", False),
        ("[1]", "no JSON", False),
    ],
)
def test_shown_json_is_compared(shown: str, printed: str, is_such: bool) -> None:
    assert matches_json(shown, printed) is is_such


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("price-keeper spend [today|yesterday] --json", 0),
        (".venv/bin/price-keeper org put ORG FILE", 0),
        ("price-keeper spned", 1),
        ("price-keeper org putt ORG", 1),
        ("A=b price-keeper override set ORG [--ap APP] LABEL", 1),
        ("price-keeper serve --workers 3 --nonsense", 1),
        ("deploy/price-keeper.yaml", 0),
    ],
)
def test_unknown_command_is_detected(line: str, count: int) -> None:
    assert len(list(mistakes(line))) == count


def test_keys_are_found_through_lists_and_names() -> None:
    for path in ("auth.keys.0.secret_env", "labels.any.prices_usd_per_1m.input", "alerts.webhook.url", "store"):
        assert is_key(Config, path.split("."))
    for path in ("auth.keys.secret_env", "labels.any.prices", "alerts.webhook.urls", "stores"):
        assert not is_key(Config, path.split("."))


def test_anchors_match_those_of_github(tmp_path: Path) -> None:
    page = page_of(tmp_path, "# A *plain* `head`, with [a link](x)\n\n## Again\n\n## Again\n\n```sh\n# none\n```\n")
    assert anchors(page) == {"a-plain-head-with-a-link", "again", "again-1"}
