"""The installed Chromium, which Playwright drives, and what a page does there that nobody sees."""

from __future__ import annotations

import shutil
from typing import Any


def find_chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class PageObserver:
    """Collects the requests of a page, and complaints: of the console, the page's policy, and uncaught exceptions."""

    def __init__(self, page: Any) -> None:  # of either API of Playwright
        self.requests: list[Any] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request))
        page.on("console", self._on_console_message)
        page.on("pageerror", lambda failure: self.complaints.append(f"exception: {failure}"))

    def _on_console_message(self, message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(f"{message.type}: {message.text} {message.location['url']}")
