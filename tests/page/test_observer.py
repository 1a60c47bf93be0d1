"""What the other tests rely on: no request and no complaint of a page is missed."""

from __future__ import annotations

from playwright.sync_api import Page

from tests.support.chromium import PageObserver
from tests.support.commands import Sidecar


def test_observer_of_a_page_that_misbehaves_collects_each_complaint(
    page: Page, observer: PageObserver, dev: Sidecar
) -> None:
    page.goto(f"{dev.control}/status")
    for misbehaviour in (
        "console.error('said on the console')",
        "setTimeout(() => { throw new Error('caught by nobody') })",
        "document.body.setAttribute('style', 'color: red')",
        "fetch('/status/no-such-file').then((answer) => answer.text())",
        "fetch('http://127.0.0.1:9/elsewhere').catch(() => 0)",
    ):
        page.evaluate(misbehaviour)
    told = "\n".join(observer.complaints)
    for each in ("said on the console", "caught by nobody", "'style-src 'self''", "404 (Not Found)", "issue: "):
        assert each in told
    assert observer.requests[-1].url == f"{dev.control}/status/no-such-file"
