"""The status page in a real Chromium: `make test-page` installs what it needs and runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.chromium import PageObserver, find_chromium
from tests.support.commands import Sidecar, sidecar

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOW = "PRICE_KEEPER_TEST_PAGE"
SECONDS = 20

# A run of its own: Playwright is installed for these tests alone, and most machines have no Chromium.
collect_ignore_glob = [] if HOW in os.environ else ["test_*.py"]


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Sidecar]:
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=tmp_path) as running:
        yield running
        assert "Traceback" not in running.errors


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        missing = "no Chromium here (Debian: apt-get install chromium)"
        assert os.environ.get(HOW) != "required", missing
        pytest.skip(missing)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=program) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A tab with cookies of its own. A test's parameter is what `new_context` takes."""
    with browser.new_context(**getattr(request, "param", {})) as context:
        context.set_default_timeout(SECONDS * 1000)
        yield context.new_page()


@pytest.fixture
def observer(page: Page) -> PageObserver:
    observer = PageObserver(page)
    session = page.context.new_cdp_session(page)
    session.on("Audits.issueAdded", lambda event: observer.complaints.append(f"issue: {event}"))
    session.send("Audits.enable")
    return observer
