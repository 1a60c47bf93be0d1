"""The snippets of the documentation for clients that live in environments of their own, typed as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clients import AWS_CLI, JAVASCRIPT
from tests.support.doc_pages import PAGES, find_page, parse_blocks
from tests.support.page_player import needs_clients, play_page

OF_CLIENTS = [page for page in PAGES if any(block.is_run and needs_clients(block) for block in parse_blocks(page))]


@pytest.mark.parametrize("page", OF_CLIENTS, ids=find_page)
def test_documented_client_snippets_run(page: Path, tmp_path: Path) -> None:
    for client in (AWS_CLI, JAVASCRIPT):  # one of each environment
        client.require_installed()
    assert play_page(page, tmp_path, has_clients=True)
