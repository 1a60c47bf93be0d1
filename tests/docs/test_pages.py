"""Every page, typed from top to bottom against a sidecar that runs: each command does what the page says it does.

What needs the clients' environments is left to `make test-clients`; what can be run nowhere here is in not_run.txt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from price_keeper.clock import SystemClock
from price_keeper.config import parse_config
from price_keeper.control import api
from price_keeper.control.openapi import build_document
from price_keeper.control.readiness_checks import Readiness
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.configs import CONFIG_YAML
from tests.support.doc_pages import PAGES, Block, find_page, parse_blocks, why_not_run
from tests.support.page_player import is_played, play_page
from tests.support.preloaded_cli import preloaded

NOT_RUN = Path(__file__).with_name("not_run.txt")
UPDATE = "PRICE_KEEPER_UPDATE_DOCS"
DOCUMENT = build_document(api.build_routes(Readiness(SystemClock()), MetricsRegistry()))


def is_known(page: Path) -> bool:
    """Else the first test tells why."""
    with suppress(AssertionError):
        return bool(parse_blocks(page)) or True
    return False


KNOWN = [page for page in PAGES if is_known(page)]
ALL = [block for page in KNOWN for block in parse_blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=find_page)
def test_each_block_has_a_known_language_and_marker(page: Path) -> None:
    parse_blocks(page)


@pytest.fixture(scope="module")
def price_keeper() -> Iterator[str]:
    with preloaded() as program:
        yield program


@pytest.mark.parametrize("page", [page for page in KNOWN if is_played(page)], ids=find_page)
def test_page_typed_from_top_to_bottom_works(page: Path, tmp_path: Path, price_keeper: str) -> None:
    assert play_page(page, tmp_path, price_keeper)


def test_blocks_not_run_are_listed_with_reason() -> None:
    """So that leaving a command out shows up in a change to that file."""
    listed = "".join(f"{find_page(page)}: all blocks: {why}\n" for page in PAGES if (why := why_not_run(page)))
    listed += "".join(f"{find_page(each.page)}: {_first_line(each)}: {each.not_run}\n" for each in ALL if each.not_run)
    if os.environ.get(UPDATE):
        NOT_RUN.write_text(listed)
    assert NOT_RUN.read_text() == listed, f"with {UPDATE}=1 in the environment, this test writes {NOT_RUN.name}"


def _first_line(block: Block) -> str:
    return " ".join(block.text.strip().splitlines()[0].split())


def is_of_the_configuration(block: Block) -> bool:
    return block.language == "yaml" and block.not_run is None and block.file is None


@pytest.mark.parametrize("block", [each for each in ALL if is_of_the_configuration(each)], ids=str)
def test_configuration_block_is_valid(block: Block) -> None:
    whole = over(yaml.safe_load(CONFIG_YAML.read_text()), yaml.safe_load(block.text))
    parse_config(yaml.safe_dump(whole), str(block), {})


def over(below: Any, above: Any) -> Any:
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{name: over(below.get(name), value) for name, value in above.items()}}


@pytest.mark.parametrize("block", [each for each in ALL if each.body_of], ids=str)
def test_body_block_is_accepted_by_its_operation(block: Block) -> None:
    method, _, path = str(block.body_of).partition(" ")
    content = DOCUMENT["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]
    jsonschema.validate(json.loads(block.text), {**content["schema"], "components": DOCUMENT["components"]})


@pytest.mark.parametrize("block", [each for each in ALL if each.file and each.not_run is None], ids=str)
def test_file_block_is_used_by_its_page(block: Block) -> None:
    used = [
        each
        for each in parse_blocks(block.page)
        if each.line > block.line and each.is_run and str(block.file) in each.text
    ]
    assert used, f"nothing on the page uses {block.file}"
