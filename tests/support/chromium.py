"""A real Chromium without a screen, driven over its debugging protocol: what a user does, and what he would see."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

SECONDS = 20
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_KEYS = {  # with the code by which pages know them, and the text they write
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    " ": (32, " "),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    "Home": (36, ""),
}


def find_chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Page:
    """One tab. `complaints` are errors on its console, what its policy blocked, and exceptions nobody caught."""

    def __init__(self, wire: aiohttp.ClientWebSocketResponse) -> None:
        self._wire = wire
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())
        self.complaints: list[str] = []
        self.requested: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        number = len(self._waiting) + 1
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._wire.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(SECONDS):
            return await answer

    async def _read(self) -> None:
        async for message in self._wire:
            message_document = json.loads(message.data)
            if "id" in message_document:
                answer = self._waiting[message_document["id"]]
                if not answer.done():
                    failure = message_document.get("error")
                    answer.set_exception(RuntimeError(str(failure))) if failure else answer.set_result(
                        message_document["result"]
                    )
                continue
            self._on_event(message_document["method"], message_document["params"])

    def _on_event(self, method: str, parameters: dict[str, Any]) -> None:
        match method:
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(
                    f"{parameters['entry']['source']}: {parameters['entry']['text']} "
                    f"{parameters['entry'].get('url', '')}"
                )
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(f"console: {[each.get('value') for each in parameters['args']]}")
            case "Runtime.exceptionThrown":
                self.complaints.append(f"exception: {json.dumps(parameters['exceptionDetails'])[:2000]}")
            case "Audits.issueAdded":
                self.complaints.append(f"issue: {json.dumps(parameters['issue'])[:2000]}")
            case "Network.requestWillBeSent" if not parameters["request"]["url"].startswith("data:"):  # asked of nobody
                self.requested.append(parameters["request"]["url"])

    async def begin(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            await self.call(f"{domain}.enable")

    async def close(self) -> None:
        await self._wire.close()
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    # What a user does.

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete'")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False, times: int = 1) -> None:
        code, text = _KEYS[key]
        key_event: dict[str, Any] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        for _ in range(times):
            await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **key_event)
            await self.call("Input.dispatchKeyEvent", type="keyUp", **key_event)

    async def click(self, selector: str) -> None:
        """At the middle of what is there, wherever that has to be scrolled to."""
        await self.wait_for(f"document.querySelector({json.dumps(selector)})?.getClientRects().length > 0")
        x, y = await self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = found.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def set_size(self, width: int, height: int, scale: float = 1.0) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 500,
        )

    async def prefer(self, **features: str) -> None:
        """As `color_scheme="dark"`."""
        media_features = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()
        ]
        await self.call("Emulation.setEmulatedMedia", features=media_features)

    # What there is to see.

    async def run(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(json.dumps(result["exceptionDetails"])[:2000])
        return result["result"].get("value")

    async def text(self, selector: str = "body") -> str:
        return str(await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def wait_for(self, expression: str, what: Callable[[Any], bool] = bool, seconds: float = SECONDS) -> Any:
        value = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not what(value := await self.run(expression)):  # noqa: ASYNC110 - the page does not say when
                    await asyncio.sleep(0.05)
                return value
        failure = f"{expression}: still {value!r} after {seconds} s; complaints: {self.complaints}"
        raise AssertionError(f"{failure}; the page says: {await self.text()}")

    async def wait_for_text(self, selector: str, part: str) -> None:
        await self.wait_for(f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(part)})")

    async def take_picture(self, begin: str, height: int) -> bytes:
        """Of so many pixels from the top of an element on, or of what there is of them."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        top = await self.run(f"document.querySelector({json.dumps(begin)}).getBoundingClientRect().top + scrollY")
        height = min(height, size["height"] - top)
        clip = {"x": 0, "y": top, "width": size["width"], "height": height, "scale": 1}
        result = await self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(result["data"])


@asynccontextmanager
async def chromium(program: str) -> AsyncIterator[Callable[[], Any]]:
    """Gives what opens a tab with cookies of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            *_FLAGS,
            f"--user-data-dir={folder}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port, path = (await _read_address(Path(folder) / "DevToolsActivePort")).split()
            async with aiohttp.ClientSession() as session:
                browser = Page(await session.ws_connect(f"http://127.0.0.1:{port}{path}", max_msg_size=0))
                try:
                    yield lambda: _open_tab(session, browser, port)
                finally:
                    await browser.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@asynccontextmanager
async def _open_tab(session: aiohttp.ClientSession, browser: Page, port: str) -> AsyncIterator[Page]:
    context = (await browser.call("Target.createBrowserContext"))["browserContextId"]
    target = (await browser.call("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
    page = Page(await session.ws_connect(f"http://127.0.0.1:{port}/devtools/page/{target}", max_msg_size=0))
    try:
        await page.begin()
        yield page
    finally:
        await page.close()
        await browser.call("Target.disposeBrowserContext", browserContextId=context)


async def _read_address(file: Path) -> str:
    async with asyncio.timeout(SECONDS):
        while True:
            with contextlib.suppress(FileNotFoundError):
                if len((text := file.read_text()).splitlines()) == 2:  # noqa: ASYNC240
                    return text
            await asyncio.sleep(0.02)
