"""The status page in a real Chromium: `make test-page` installs what it needs and runs it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.chromium import Page, chromium, find_chromium
from tests.support.commands import Sidecar, sidecar

HOW = "PRICE_KEEPER_TEST_PAGE"

# A run of its own: each test starts a browser, and most machines have none.
collect_ignore_glob = [] if HOW in os.environ else ["test_*.py"]


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Sidecar]:
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=tmp_path) as running:
        yield running
        assert "Traceback" not in running.errors


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    program = find_chromium()
    if program is None:
        missing = "no Chromium here (Debian: apt-get install chromium)"
        assert os.environ.get(HOW) != "required", missing
        pytest.skip(missing)
    async with chromium(program) as opened, opened() as tab:
        yield tab
