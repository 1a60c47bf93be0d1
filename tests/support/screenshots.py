"""The pictures of the documentation: `make screenshots` takes all of them again, and nothing in them is made up.

A whole day is too long to wait for, so the wall clock runs some hundred times as fast while apps make their calls; for
the pictures it runs as usual. What is spent is spent by real calls, through the data port, of a simulated Bedrock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo

import aiohttp
from playwright.async_api import Page, async_playwright, expect
from price_keeper import app
from price_keeper.cli import dev_command
from price_keeper.clock import SystemClock

from tests.support.chromium import PageObserver, find_chromium

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MOST_BYTES = 200_000
ZONE = ZoneInfo("Europe/Berlin")
FROM, TO = 7.5, 15.2  # hours of the day that is played
SPEED = 300.0
ORG = "0b6f2a1c-7d43-4c58-9b1e-5a2f3c4d6e70"
SETTINGS = {
    "org_name": "Acme",
    "timezone": "Europe/Berlin",
    "quota_scope": "APP",
    "model_ordering": ["premium", "standard", "economy"],
    "quotas": {"premium": 5_000_000, "standard": 1_500_000, "economy": 500_000},
}
# Each app: its name, how many calls it makes in an hour of a busy time, and what it may spend on its own terms.
APPS: dict[str, tuple[str, float, dict[str, int] | None]] = {
    "checkout": ("Checkout assistant", 42.0, None),
    "search": ("Product search", 10.0, None),
    "support": ("Support drafts", 18.0, {"premium": 15_000_000, "standard": 5_000_000, "economy": 2_000_000}),
    "reports": ("Night reports", 3.0, None),
}
BODY = {"messages": [{"role": "user", "content": [{"text": "What goes well with a rain coat? " * 2000}]}]}


class FastClock(SystemClock):
    """The wall clock alone: whatever is measured or waited for takes as long as ever."""

    def __init__(self, begin: float) -> None:
        self._begin, self._since, self.speed = begin, time.monotonic(), SPEED

    def now(self) -> float:  # type: ignore[override]
        return self._begin + (time.monotonic() - self._since) * self.speed

    def slow_down(self) -> None:
        self._begin, self._since, self.speed = self.now(), time.monotonic(), 1.0


@dataclass
class ScreenshotStage:
    """What runs, and how to ask it."""

    control: str
    data: str
    admin_key: str
    tokens: dict[str, str]
    clock: FastClock
    session: aiohttp.ClientSession

    async def put(self, path: str, body: Any) -> None:
        headers = {"X-API-Key": self.admin_key}
        async with self.session.put(f"{self.control}/api/v1/orgs/{ORG}{path}", json=body, headers=headers) as answer:
            assert answer.status in (200, 201), await answer.text()

    def hour(self) -> float:
        now = datetime.fromtimestamp(self.clock.now(), ZONE)
        return now.hour + now.minute / 60 + now.second / 3600


@asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[ScreenshotStage]:
    """As in development mode, but for what depends on measured time, one second of which is minutes of the day."""
    day = datetime.now(ZONE).replace(hour=0, minute=0, second=0, microsecond=0)
    clock = FastClock((day + timedelta(hours=FROM)).timestamp())
    for name in ("token-key", dev_command.ADMIN_KEY_FILE):
        dev_command._read_or_create(
            folder / name, lambda: "".join(random.choices("abcdefghijkmnpqrstuvwxyz23456789", k=43))
        )
    config = dev_command.build_dev_config(folder, 0, 0, None)
    config = dataclasses.replace(
        config,
        aggregator=dataclasses.replace(config.aggregator, interval_secs=5),
        journal=dataclasses.replace(config.journal, flush_interval_max_secs=1.0),
    )
    begun: asyncio.Future[app.StartedServer] = asyncio.get_running_loop().create_future()

    async def tell(started: app.StartedServer) -> None:
        begun.set_result(started)

    running = asyncio.create_task(app.run(config, os.environ, tell, clock))
    await asyncio.wait({begun, running}, return_when=asyncio.FIRST_COMPLETED)
    started = begun.result()
    tokens = {name: started.token_service.mint_access(ORG, name, 48 * 3600).token for name in APPS}
    async with aiohttp.ClientSession() as session:
        key = (folder / dev_command.ADMIN_KEY_FILE).read_text()
        yield ScreenshotStage(
            f"http://{started.control_address}", f"http://{started.data_address}", key, tokens, clock, session
        )
    signal.raise_signal(signal.SIGTERM)
    await running


async def play_day(stage_in_use: ScreenshotStage) -> None:
    """From the morning to the afternoon, with the page open: it gets its data as usual."""
    await stage_in_use.put("", SETTINGS)
    for name, (title, _, quotas) in APPS.items():
        await stage_in_use.put(f"/apps/{name}", {"app_name": title} | ({} if quotas is None else {"quotas": quotas}))
    at_work = [asyncio.create_task(each(stage_in_use, name)) for name in APPS for each in (_watch, _calls)]
    while stage_in_use.hour() < TO:  # noqa: ASYNC110 - it is looked at the clock, which has no event
        await asyncio.sleep(0.2)
    stage_in_use.clock.slow_down()
    for task in at_work:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _watch(on: ScreenshotStage, name: str) -> None:
    query = {"org": ORG, "app": name}
    async with on.session.get(
        f"{on.control}/status/events", params=query, headers={"X-API-Key": on.admin_key}
    ) as answer:
        async for _ in answer.content:
            pass


async def _calls(on: ScreenshotStage, name: str) -> None:
    chance, busy = random.Random(name), APPS[name][1]
    headers = {"Authorization": f"Bearer {on.tokens[name]}"}
    while True:
        hour = on.hour()  # little before nine, most around eleven and two
        much = 0.15 + 0.85 * max(0.0, 1 - abs(hour - 11.2) / 2.6) + 0.7 * max(0.0, 1 - abs(hour - 14.2) / 1.6)
        await asyncio.sleep(3600 / SPEED / (busy * much) * chance.uniform(0.4, 1.6))
        async with on.session.post(f"{on.data}/model/premium/converse", json=BODY, headers=headers) as answer:
            await answer.read()


# The pictures.


@dataclass(frozen=True)
class Shot:
    """`arrange` brings the page to the part that is shown, from the top of `begin` on and for so many pixels."""

    name: str
    width: int
    scheme: Literal["light", "dark"]
    arrange: Callable[[Page, ScreenshotStage], Awaitable[None]]
    height: int
    begin: str = "body"


async def show_whole_page(page: Page, on: ScreenshotStage) -> None:
    await _signed_in(page, on)
    await asyncio.sleep(1)


async def try_other_quota(page: Page, on: ScreenshotStage) -> None:
    await _signed_in(page, on)
    await page.select_option("#what-if-label", "premium")
    await page.fill("#what-if-quota", "8")
    await expect(page.locator("#what-if-told")).to_contain_text("With")
    await page.evaluate("document.activeElement.blur()")


async def _signed_in(page: Page, on: ScreenshotStage) -> None:
    await page.goto(f"{on.control}/status#{ORG}/checkout")
    await page.fill("#secret", on.admin_key)
    await page.press("#secret", "Enter")
    await expect(page.locator("#chart svg")).to_be_visible()
    await page.evaluate("document.activeElement.blur()")
    await page.mouse.move(1, 1)


SHOTS = (
    Shot("status-page", 1280, "light", show_whole_page, 930),
    Shot("status-page-dark", 1280, "dark", show_whole_page, 930),
    Shot("status-page-what-if", 1280, "light", try_other_quota, 1000, begin="section[aria-labelledby=what-if-title]"),
    Shot("status-page-phone", 390, "light", show_whole_page, 1500),
)


async def take_pictures(on: ScreenshotStage, program: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    async with async_playwright() as playwright, await playwright.chromium.launch(executable_path=program) as browser:
        for shot in SHOTS:
            page = await browser.new_page(
                viewport={"width": shot.width, "height": 900},
                is_mobile=shot.width < 500,
                color_scheme=shot.scheme,
                reduced_motion="reduce",
            )
            observer = PageObserver(page)
            await shot.arrange(page, on)
            assert observer.complaints == [], observer.complaints
            top = await page.evaluate(
                "(begin) => document.querySelector(begin).getBoundingClientRect().top + scrollY", shot.begin
            )
            clip = {"x": 0, "y": top, "width": shot.width, "height": shot.height}
            picture = await page.screenshot(clip=clip, full_page=True)
            await page.close()
            assert len(picture) <= MOST_BYTES, f"{shot.name} has {len(picture)} bytes"
            (IMAGES / f"{shot.name}.png").write_bytes(picture)
            print(json.dumps({"image": f"{shot.name}.png", "bytes": len(picture)}))


async def main() -> int:
    program = find_chromium()
    if program is None:
        print("no Chromium here, without which there are no pictures of pages (Debian: apt-get install chromium)")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        async with stage(Path(folder)) as on:
            await play_day(on)
            await take_pictures(on, program)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
