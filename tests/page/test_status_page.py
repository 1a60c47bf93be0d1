"""What somebody sees and does on the status page: a real Chromium before a process as `price-keeper dev` starts it."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from price_keeper.cli.dev_command import DEMO_APP, DEMO_ORG
from price_keeper.control.page.page_state import MAX_ADMIN_PAGES

from tests.support.chromium import Page
from tests.support.commands import SECONDS, Sidecar, sidecar
from tests.support.ports import free_port

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
API = f"/api/v1/orgs/{DEMO_ORG}"
DEMO = f"{API}/apps/{DEMO_APP}"
# What is looked at: the screen, and how it looks.
SCREENS = [
    pytest.param(1280, 900, "light", id="light"),
    pytest.param(1280, 900, "dark", id="dark"),
    pytest.param(360, 740, "light", id="phone"),
    pytest.param(360, 740, "dark", id="phone-dark"),
]


def key_of(dev: Sidecar) -> str:
    return (dev.errors_file.parent / "data" / "admin-key").read_text().strip()


def asked(dev: Sidecar, method: str, path: str, body: Any = None) -> Any:
    headers = {"X-API-Key": key_of(dev), "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(dev.control + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


async def call(dev: Sidecar, times: int = 1, words: int = 200, label: str = "premium") -> None:
    """Real calls of an app, with the token that `dev` prints."""
    content = [{"text": "Tell me more. " * words}]
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    headers = {"Authorization": f"Bearer {dev.exports['AWS_SESSION_TOKEN']}", "Content-Type": "application/json"}
    for _ in range(times):
        request = urllib.request.Request(f"{dev.data}/model/{label}/converse", body, headers)
        await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=SECONDS).read())  # noqa: B023


async def sign_in(page: Page, dev: Sidecar) -> None:
    await page.open(f"{dev.control}/status")
    await page.wait_for("!document.querySelector('#sign-in').hidden")
    await page.click("#secret")
    await page.type(key_of(dev))
    await page.press("Enter")
    await page.wait_for("!document.querySelector('#in-full').hidden")


def assert_clean(page: Page, dev: Sidecar) -> None:
    """Nothing was complained of, nothing asked of anybody else, and no secret stood in an address."""
    assert page.complaints == []
    assert {urlsplit(url).netloc for url in page.requested} == {urlsplit(dev.control).netloc}, page.requested
    assert not [url for url in page.requested if key_of(dev) in url]


async def audit(page: Page) -> None:
    assert AXE.exists(), "axe-core is not installed: make test-page installs it"
    await page.run(f"(() => {{ if (!window.axe) {{ {AXE.read_text()} }} }})()")
    told = await page.run(
        "axe.run().then((found) => found.violations.map(({id, help, nodes}) =>"
        " ({id, help, where: nodes.map((each) => [each.html, each.failureSummary])})))"
    )
    assert told == [], json.dumps(told, indent=1)


async def assert_no_overflow(page: Page) -> None:
    width = await page.run("document.documentElement.clientWidth")
    assert await page.run("document.documentElement.scrollWidth") <= width
    outside = await page.run(
        "[...document.querySelectorAll('main *')].filter((each) => !each.closest('.scroll')"
        f" && each.getClientRects().length && each.getBoundingClientRect().right > {width} + 0.5)"
        ".map((each) => each.outerHTML.slice(0, 200))"
    )
    assert outside == []


async def test_spend_of_real_calls_appears_by_itself(page: Page, dev: Sidecar) -> None:
    await sign_in(page, dev)
    await page.wait_for_text("#title", "demo")
    await page.wait_for_text("#serves", "premium serves")
    await page.wait_for("document.querySelector('#live').innerText", lambda text: text == "Live")
    spent = "document.querySelector('.tile .value').innerText"
    assert await page.run(spent) == "$0.00"
    await call(dev)
    first = await page.wait_for(spent, lambda text: text != "$0.00")
    await call(dev, 3)
    await page.wait_for(spent, lambda text: text != first)
    told = asked(dev, "GET", f"{DEMO}/model-selection")["labels"][0]["spent_usd_micros"]
    await page.wait_for_text("#chain", f"${float(told) / 1e6:.4f} of $1.00")
    await page.wait_for(
        "document.querySelector('#chart svg')?.getAttribute('aria-label')", lambda text: "premium from" in (text or "")
    )
    assert await page.run("document.querySelectorAll('#chart-table tbody tr').length") > 0
    assert await page.run("performance.getEntriesByType('navigation').length") == 1  # nothing was loaded again
    assert_clean(page, dev)
    assert await page.run("document.cookie") == ""  # no script can read it; that one tried is complained of


async def test_a_spent_quota_is_seen_to_fall_back(page: Page, dev: Sidecar) -> None:
    await sign_in(page, dev)
    settings = asked(dev, "GET", API)["settings"]
    asked(
        dev,
        "PUT",
        API,
        settings
        | {
            "timezone": "UTC",
            "quota_scope": "APP",
            "quotas": {"premium": 1000, "standard": 500_000, "economy": 500_000},
        },
    )
    asked(dev, "GET", f"{DEMO}/model-selection?force_check=true")
    await call(dev, 4)
    await page.wait_for_text("#serves", "standard serves whoever asks for premium")
    await page.wait_for_text("#happened", "premium was spent: standard became active")
    await page.wait_for_text("#tiles", "standard lasts")
    assert_clean(page, dev)


async def test_what_if_is_tried_and_applied(page: Page, dev: Sidecar) -> None:
    await sign_in(page, dev)
    await call(dev, 2)
    await page.wait_for("document.querySelector('.tile .value').innerText", lambda text: text != "$0.00")
    before = asked(dev, "GET", DEMO)
    await page.run("document.querySelector('#what-if-slider').focus()")
    await page.press("Home")
    await page.wait_for_text("#what-if-told", "With $0.00 for premium, standard would serve.")
    assert await page.run("document.querySelector('#what-if-quota').value") == "0.00"
    await page.press("ArrowRight", times=3)
    await page.wait_for_text("#what-if-told", "$0.0060 for premium")
    assert asked(dev, "GET", DEMO) == before  # tried, and nothing more
    await page.run("document.querySelector('#what-if-quota').select()")
    await page.type("a lot")
    await page.wait_for_text("#what-if-error", "an amount of dollars")
    await page.run("document.querySelector('#what-if-quota').select()")
    await page.type("2.5")
    await page.wait_for_text("#what-if-told", "With $2.50 for premium, premium would go on serving.")
    await page.wait_for_text("#what-if-told", "$1.00 → $2.50")
    await page.click("#apply")
    await page.wait_for_text("#confirm", "premium of the app demo alone may then spend $2.50")
    await page.press("Escape")
    await page.wait_for("!document.querySelector('#confirm').open")
    assert asked(dev, "GET", DEMO) == before
    # Asked, left and asked again in one turn, so that the browser tells of the first end after the second beginning.
    again = "document.querySelector('#apply').click()"
    await page.run(f"(() => {{ {again}; document.querySelector('#confirm').close(); {again} }})()")
    await page.click("#confirm-yes")
    await page.wait_for_text("#what-if-told", "The quota of premium is $2.50 now.")
    await page.wait_for_text("#chain", "of $2.50")
    assert asked(dev, "GET", DEMO)["settings"]["quotas"] == {
        "premium": 2_500_000,
        "standard": 500_000,
        "economy": 500_000,
    }
    assert_clean(page, dev)


async def test_an_override_is_set_and_cleared(page: Page, dev: Sidecar) -> None:
    await sign_in(page, dev)
    await page.run("document.querySelector('#override-label').value = 'economy'")
    await page.click("#override-reason")
    await page.type("<i>a quiet day</i>")
    await page.press("Enter")
    await page.wait_for_text("#override-now", "economy is in force until")
    await page.wait_for_text("#override-now", "<i>a quiet day</i>")
    await page.wait_for_text("#serves", "economy serves whoever asks for premium")
    assert asked(dev, "GET", f"{DEMO}/model-selection")["override"]["reason"] == "<i>a quiet day</i>"
    await page.click("#override-clear")
    await page.wait_for_text("#override-now", "None is in force")
    await page.wait_for_text("#serves", "premium serves")
    assert [each["action"] for each in asked(dev, "GET", f"{API}/audit")["records"]][:2] == [
        "override.clear",
        "override.set",
    ]
    await page.run("document.querySelector('#override-until').value = '2020-01-01T00:00'")
    await page.click("#override-reason")
    await page.type("too late")
    await page.press("Enter")
    await page.wait_for_text("#override-error", "over already")
    complaints, page.complaints = page.complaints, []  # the browser tells of the refusal that was asked for
    assert all("400" in each for each in complaints)
    assert_clean(page, dev)


async def test_all_of_it_can_be_done_by_keyboard(page: Page, dev: Sidecar) -> None:
    async def tab_to(selector: str) -> None:
        for _ in range(60):
            if await page.run(f"document.activeElement?.matches({json.dumps(selector)}) ?? false"):
                assert await page.run("getComputedStyle(document.activeElement).outlineStyle") != "none", selector
                return
            await page.press("Tab")
        raise AssertionError(f"{selector} is not reached")

    await page.open(f"{dev.control}/status")
    await page.wait_for("document.activeElement?.id", lambda found: found == "secret")
    await page.press("Tab", shift=True)
    await page.press("ArrowDown")
    assert await page.run("document.querySelector('[name=kind]:checked').value") == "client"
    await page.press("Tab")
    await page.type(dev.exports["AWS_SESSION_TOKEN"])
    await page.press("Enter")
    await page.wait_for_text("#who", f"client of {DEMO_APP}")
    await page.wait_for("!document.querySelector('#in-full').hidden")
    for hidden in ("#override", "#apply"):  # only the administrator changes anything
        assert await page.run(f"document.querySelector('{hidden}').hidden"), hidden
    await tab_to("summary")
    await page.press("Enter")
    assert await page.run("document.querySelector('details').open")
    await tab_to("#what-if-label")
    await tab_to("#what-if-quota")
    await tab_to("#what-if-slider")
    await page.press("ArrowRight")
    await page.wait_for_text("#what-if-told", "premium would go on serving")
    await page.run("document.activeElement.blur()")
    await tab_to("#sign-out")
    await page.press("Enter")
    await page.wait_for("!document.querySelector('#sign-in').hidden")
    assert await page.run("document.activeElement.id") == "secret"
    assert DEMO_APP not in await page.text("main")
    assert_clean(page, dev)


@pytest.mark.parametrize(("width", "height", "scheme"), SCREENS)
async def test_it_is_accessible_and_fits(page: Page, dev: Sidecar, width: int, height: int, scheme: str) -> None:
    await page.set_size(width, height)
    await page.prefer(color_scheme=scheme, reduced_motion="reduce")
    await page.open(f"{dev.control}/status")
    await page.wait_for("!document.querySelector('#sign-in').hidden")
    await audit(page)
    await assert_no_overflow(page)
    paper = await page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.removeprefix("rgb(").rstrip(")").split(","))) < 200) is (scheme == "dark")
    settings = asked(dev, "GET", API)["settings"] | {"timezone": "UTC", "quota_scope": "APP"}
    long = "An-org-with-a-name-that-is-as-long-as-a-name-may-be-" * 2
    asked(dev, "PUT", API, settings | {"org_name": long})
    asked(dev, "PUT", f"{API}/apps/{'w' * 64}", {"app_name": "<img src=x onerror=alert(1)>"})
    asked(dev, "PUT", f"{DEMO}/override", {"label": "standard", "reason": "x" * 200})
    asked(dev, "GET", f"{DEMO}/model-selection?force_check=true")
    await call(dev, 2, label="standard")
    await page.click("#secret")
    await page.type(key_of(dev))
    await page.press("Enter")
    await page.wait_for_text("#rows", "<img src=x onerror=alert(1)>")
    await page.click(f"#rows a[href='#{DEMO_ORG}/{DEMO_APP}']")
    await page.wait_for_text("#chain", "standard")
    await page.wait_for("document.querySelector('#chart svg') !== null")
    await page.run("document.querySelector('details').open = true")
    await page.run("document.querySelector('#what-if-slider').focus()")
    await page.press("Home")
    await page.wait_for_text("#what-if-told", "With $0.00")
    await page.wait_for_text("#override-now", "is in force")
    await audit(page)
    await assert_no_overflow(page)
    assert_clean(page, dev)


async def test_one_of_several_is_found_and_kept_in_the_address(page: Page, dev: Sidecar) -> None:
    for app in ("checkout", "search"):
        asked(dev, "PUT", f"{API}/apps/{app}", {"app_name": app.title()})
    await sign_in_to_list(page, dev)
    await page.wait_for_text("#rows", "Checkout")
    await page.click("#search")
    await page.type("checko")
    await page.wait_for("document.querySelectorAll('#rows li').length", lambda count: count == 1)
    await page.click("#rows a")
    await page.wait_for_text("#title", "Checkout")
    assert (await page.run("location.hash")).endswith("/checkout")
    assert await page.run("document.querySelector('#rows a').getAttribute('aria-current')") == "true"
    await page.open(f"{dev.control}/status#{DEMO_ORG}/search")
    await page.call("Page.reload")
    await page.wait_for_text("#title", "Search")
    assert_clean(page, dev)


async def sign_in_to_list(page: Page, dev: Sidecar) -> None:
    await page.open(f"{dev.control}/status")
    await page.wait_for("!document.querySelector('#sign-in').hidden")
    await page.click("#secret")
    await page.type(key_of(dev))
    await page.press("Enter")
    await page.wait_for("!document.querySelector('#budgets').hidden")


async def test_it_comes_back_by_itself_when_the_process_does(page: Page, tmp_path: Path) -> None:
    ports = ("--port", str(free_port()), "--control-port", str(free_port()))
    with sidecar("dev", *ports, folder=tmp_path) as first:
        await sign_in(page, first)
        await page.wait_for("document.querySelector('#live').innerText", lambda text: text == "Live")
        first.stop(signal.SIGTERM)
        await page.wait_for_text("#live", "Connecting again")
    with sidecar("dev", *ports, folder=tmp_path) as second:
        await page.wait_for("document.querySelector('#live').innerText", lambda text: text == "Live", seconds=40)
        await call(second)
        await page.wait_for("document.querySelector('.tile .value').innerText", lambda text: text != "$0.00")
    page.complaints = []  # of what could not be reached meanwhile


async def test_a_session_that_was_ended_elsewhere_leads_back_to_signing_in(page: Page, dev: Sidecar) -> None:
    await sign_in(page, dev)
    (cookie,) = (await page.call("Network.getCookies"))["cookies"]
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
    headers = {"Cookie": f"{cookie['name']}={cookie['value']}", "Origin": dev.control, "X-Price-Keeper-Page": "1"}
    ended = urllib.request.Request(f"{dev.control}/status/session", headers=headers, method="DELETE")
    urllib.request.urlopen(ended, timeout=SECONDS).close()  # noqa: ASYNC210
    await page.run("location.hash = location.hash + 'x'")
    await page.wait_for_text("#sign-in-error", "The session is over")
    assert (await page.call("Network.getCookies"))["cookies"] == []


async def test_who_signs_in_next_sees_nothing_of_who_was_there(page: Page, dev: Sidecar) -> None:
    for app in ("checkout", "search"):
        asked(dev, "PUT", f"{API}/apps/{app}", {"app_name": app.title()})
    await sign_in_to_list(page, dev)
    await page.click("#search")
    await page.type("checkout")
    await page.run(f"location.hash = '#{DEMO_ORG}/checkout'")
    await page.wait_for_text("#title", "Checkout")
    await page.wait_for_text("#serves", "premium serves")
    await page.click("#sign-out")
    await page.wait_for("document.activeElement?.id === 'secret'")
    left = await page.run(
        "[location.href, document.title, document.body.textContent,"
        " ...[...document.querySelectorAll('input')].map((each) => each.value)].join()"
    )
    assert [word for word in ("heckout", "premium", DEMO_ORG) if word in left] == []


async def test_where_it_cannot_begin_it_says_why_and_lets_one_sign_in(page: Page, dev: Sidecar) -> None:
    """As where others at this address have shown too many wrong cookies."""
    wrong = f"price-keeper-{urlsplit(dev.control).port}=a.b.c"
    async with aiohttp.ClientSession() as session:
        for _ in range(12):
            headers = {"Cookie": wrong, "X-Price-Keeper-Page": "1"}
            (await session.get(f"{dev.control}/status/session", headers=headers)).close()
    await page.open(f"{dev.control}/health")
    await page.run(f"document.cookie = '{wrong}; path=/'")
    await page.open(f"{dev.control}/status")
    await page.wait_for_text("#sign-in-error", "too many")
    await page.click("#secret")
    await page.type(key_of(dev))
    await page.press("Enter")
    await page.wait_for("!document.querySelector('#in-full').hidden")


async def test_whatever_a_name_says_it_stays_text(page: Page, dev: Sidecar) -> None:
    mean = "\"'><img src=x onerror=\"document.title='run'\"><a href=javascript:alert(1)>{{7*7}}</a>"
    asked(dev, "PUT", f"{API}/apps/{DEMO_APP}", {"app_name": mean})
    asked(dev, "PUT", f"{DEMO}/override", {"label": "economy", "reason": mean, "who": mean})
    await sign_in(page, dev)
    await page.wait_for_text("#title", mean)
    await page.wait_for_text("#override-now", f"by {mean}: {mean}")
    assert await page.run("document.querySelectorAll('main img, main a:not([href^=\"#\"])').length") == 0
    assert await page.run("document.title.startsWith('\"')")
    assert_clean(page, dev)


async def test_where_too_many_pages_are_open_it_asks_for_itself(page: Page, dev: Sidecar) -> None:
    headers = {"X-API-Key": key_of(dev)}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, AsyncExitStack() as open_now:
        for _ in range(MAX_ADMIN_PAGES):
            answer = await open_now.enter_async_context(session.get(f"{dev.control}/status/events", headers=headers))
            await answer.content.readline()
        await page.open(f"{dev.control}/status#{DEMO_ORG}/{DEMO_APP}")
        await page.wait_for("!document.querySelector('#sign-in').hidden")
        await page.click("#secret")
        await page.type(key_of(dev))
        await page.press("Enter")
        await page.wait_for_text("#live", "Every half minute")
        await page.wait_for_text("#serves", "premium serves")
