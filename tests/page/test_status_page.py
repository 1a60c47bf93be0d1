"""What a user sees and does on the status page: a real Chromium with a process as `price-keeper dev` starts it."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect
from price_keeper.cli.dev_command import DEMO_APP, DEMO_ORG
from price_keeper.control.page.page_state import MAX_ADMIN_PAGES

from tests.support.chromium import PageObserver
from tests.support.commands import SECONDS, Sidecar, sidecar
from tests.support.ports import free_port

API = f"/api/v1/orgs/{DEMO_ORG}"
DEMO = f"{API}/apps/{DEMO_APP}"
# What is looked at: the screen, and how it looks.
SCREENS = [
    pytest.param(
        {
            "viewport": {"width": width, "height": height},
            "is_mobile": width < 500,
            "color_scheme": scheme,
            "reduced_motion": "reduce",
        },
        id=name,
    )
    for name, width, height, scheme in (
        ("light", 1280, 900, "light"),
        ("dark", 1280, 900, "dark"),
        ("phone", 360, 740, "light"),
        ("phone-dark", 360, 740, "dark"),
    )
]


def key_of(dev: Sidecar) -> str:
    return (dev.errors_file.parent / "data" / "admin-key").read_text().strip()


def asked(dev: Sidecar, method: str, path: str, body: Any = None) -> Any:
    headers = {"X-API-Key": key_of(dev), "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(dev.control + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


def call(dev: Sidecar, times: int = 1, words: int = 200, label: str = "premium") -> None:
    """Real calls of an app, with the token that `dev` prints."""
    content = [{"text": "Tell me more. " * words}]
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    headers = {"Authorization": f"Bearer {dev.exports['AWS_SESSION_TOKEN']}", "Content-Type": "application/json"}
    for _ in range(times):
        request = urllib.request.Request(f"{dev.data}/model/{label}/converse", body, headers)
        urllib.request.urlopen(request, timeout=SECONDS).close()


def type_key(page: Page, key: str) -> None:
    """Where one signs in, by hand."""
    page.click("#secret")
    page.keyboard.insert_text(key)
    page.keyboard.press("Enter")


def sign_in(page: Page, dev: Sidecar, shows: str = "#in-full") -> None:
    page.goto(f"{dev.control}/status")
    type_key(page, key_of(dev))
    expect(page.locator(shows)).to_be_visible()


def expect_text(page: Page, selector: str, text: str) -> None:
    expect(page.locator(selector)).to_contain_text(text, use_inner_text=True)


def find_spent(page: Page) -> Locator:
    return page.locator(".tile .value").first


def assert_clean(observer: PageObserver, dev: Sidecar) -> None:
    """Nothing was complained of, nothing asked of anybody else, and no secret stood in an address."""
    assert observer.complaints == []
    urls = [request.url for request in observer.requests]
    assert {urlsplit(url).netloc for url in urls} == {urlsplit(dev.control).netloc}, urls
    assert not [url for url in urls if key_of(dev) in url]


def audit(page: Page) -> None:
    violations = Axe().run(page).response["violations"]
    assert violations == [], json.dumps(violations, indent=1)


def assert_no_overflow(page: Page) -> None:
    width = page.evaluate("document.documentElement.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        "[...document.querySelectorAll('main *')].filter((each) => !each.closest('.scroll')"
        f" && each.getClientRects().length && each.getBoundingClientRect().right > {width} + 0.5)"
        ".map((each) => each.outerHTML.slice(0, 200))"
    )
    assert outside == []


def test_spend_of_real_calls_appears_without_reload(page: Page, observer: PageObserver, dev: Sidecar) -> None:
    sign_in(page, dev)
    expect_text(page, "#title", "demo")
    expect_text(page, "#serves", "premium serves")
    expect(page.locator("#live")).to_have_text("Live", use_inner_text=True)
    spent = find_spent(page)
    expect(spent).to_have_text("$0.00")
    call(dev)
    expect(spent).not_to_have_text("$0.00")
    first = spent.inner_text()
    call(dev, 3)
    expect(spent).not_to_have_text(first)
    spent_micros = asked(dev, "GET", f"{DEMO}/model-selection")["labels"][0]["spent_usd_micros"]
    expect_text(page, "#chain", f"${float(spent_micros) / 1e6:.4f} of $1.00")
    expect(page.locator("#chart svg")).to_have_attribute("aria-label", re.compile("premium from"))
    expect(page.locator("#chart-table tbody tr")).not_to_have_count(0)
    assert len([each for each in observer.requests if each.is_navigation_request()]) == 1  # nothing was loaded again
    assert_clean(observer, dev)
    assert page.evaluate("document.cookie") == ""  # no script can read it; that one tried is complained of


def test_spent_quota_is_shown_to_fall_back(page: Page, observer: PageObserver, dev: Sidecar) -> None:
    sign_in(page, dev)
    settings = asked(dev, "GET", API)["settings"]
    quotas = {"premium": 1000, "standard": 500_000, "economy": 500_000}
    asked(dev, "PUT", API, settings | {"timezone": "UTC", "quota_scope": "APP", "quotas": quotas})
    asked(dev, "GET", f"{DEMO}/model-selection?force_check=true")
    call(dev, 4)
    expect_text(page, "#serves", "standard serves whoever asks for premium")
    expect_text(page, "#happened", "premium was spent: standard became active")
    expect_text(page, "#tiles", "standard lasts")
    assert_clean(observer, dev)


def test_what_if_is_tried_and_applied(page: Page, observer: PageObserver, dev: Sidecar) -> None:
    sign_in(page, dev)
    call(dev, 2)
    expect(find_spent(page)).not_to_have_text("$0.00")
    before = asked(dev, "GET", DEMO)
    quota = page.locator("#what-if-quota")
    page.press("#what-if-slider", "Home")
    expect_text(page, "#what-if-told", "With $0.00 for premium, standard would serve.")
    expect(quota).to_have_value("0.00")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect_text(page, "#what-if-told", "$0.0060 for premium")
    assert asked(dev, "GET", DEMO) == before  # tried, and nothing more
    quota.fill("a lot")
    expect_text(page, "#what-if-error", "an amount of dollars")
    quota.fill("2.5")
    expect_text(page, "#what-if-told", "With $2.50 for premium, premium would go on serving.")
    expect_text(page, "#what-if-told", "$1.00 → $2.50")
    page.click("#apply")
    expect_text(page, "#confirm", "premium of the app demo alone may then spend $2.50")
    page.keyboard.press("Escape")
    expect(page.locator("#confirm")).to_be_hidden()
    assert asked(dev, "GET", DEMO) == before
    # Asked, left and asked again in one turn, so that the browser reports the first end after the second beginning.
    again = "document.querySelector('#apply').click()"
    page.evaluate(f"(() => {{ {again}; document.querySelector('#confirm').close(); {again} }})()")
    page.click("#confirm-yes")
    expect_text(page, "#what-if-told", "The quota of premium is $2.50 now.")
    expect_text(page, "#chain", "of $2.50")
    quotas = {"premium": 2_500_000, "standard": 500_000, "economy": 500_000}
    assert asked(dev, "GET", DEMO)["settings"]["quotas"] == quotas
    assert_clean(observer, dev)


def test_override_is_set_and_cleared(page: Page, observer: PageObserver, dev: Sidecar) -> None:
    def put_in_force(reason: str) -> None:
        page.click("#override-reason")
        page.keyboard.insert_text(reason)
        page.keyboard.press("Enter")

    sign_in(page, dev)
    page.select_option("#override-label", "economy")
    put_in_force("<i>a quiet day</i>")
    expect_text(page, "#override-now", "economy is in force until")
    expect_text(page, "#override-now", "<i>a quiet day</i>")
    expect_text(page, "#serves", "economy serves whoever asks for premium")
    assert asked(dev, "GET", f"{DEMO}/model-selection")["override"]["reason"] == "<i>a quiet day</i>"
    page.click("#override-clear")
    expect_text(page, "#override-now", "None is in force")
    expect_text(page, "#serves", "premium serves")
    actions = [each["action"] for each in asked(dev, "GET", f"{API}/audit")["records"]]
    assert actions[:2] == ["override.clear", "override.set"]
    page.fill("#override-until", "2020-01-01T00:00")
    put_in_force("too late")
    expect_text(page, "#override-error", "over already")
    complaints, observer.complaints = observer.complaints, []  # the browser reports the refusal that was asked for
    assert complaints
    assert all("400" in each for each in complaints)
    assert_clean(observer, dev)


def test_everything_works_by_keyboard(page: Page, observer: PageObserver, dev: Sidecar) -> None:
    def tab_to(selector: str) -> None:
        for _ in range(60):
            if page.evaluate(f"document.activeElement?.matches({json.dumps(selector)}) ?? false"):
                assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", selector
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{selector} is not reached")

    page.goto(f"{dev.control}/status")
    expect(page.locator("#secret")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowDown")
    expect(page.locator("[name=kind]:checked")).to_have_value("client")
    page.keyboard.press("Tab")
    page.keyboard.insert_text(dev.exports["AWS_SESSION_TOKEN"])
    page.keyboard.press("Enter")
    expect_text(page, "#who", f"client of {DEMO_APP}")
    expect(page.locator("#in-full")).to_be_visible()
    for hidden in ("#override", "#apply"):  # only the administrator changes anything
        expect(page.locator(hidden)).to_be_hidden()
    tab_to("summary")
    page.keyboard.press("Enter")
    expect(page.locator("#chart-table")).to_be_visible()
    tab_to("#what-if-label")
    tab_to("#what-if-quota")
    tab_to("#what-if-slider")
    page.keyboard.press("ArrowRight")
    expect_text(page, "#what-if-told", "premium would go on serving")
    page.evaluate("document.activeElement.blur()")
    tab_to("#sign-out")
    page.keyboard.press("Enter")
    expect(page.locator("#sign-in")).to_be_visible()
    expect(page.locator("#secret")).to_be_focused()
    assert DEMO_APP not in page.inner_text("main")
    assert_clean(observer, dev)


@pytest.mark.parametrize("page", SCREENS, indirect=True)
def test_page_is_accessible_and_fits_screen(page: Page, observer: PageObserver, dev: Sidecar) -> None:
    page.goto(f"{dev.control}/status")
    expect(page.locator("#sign-in")).to_be_visible()
    audit(page)
    assert_no_overflow(page)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = sum(map(int, paper.removeprefix("rgb(").rstrip(")").split(","))) < 200
    assert is_dark is page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    settings = asked(dev, "GET", API)["settings"] | {"timezone": "UTC", "quota_scope": "APP"}
    long = "An-org-with-a-name-that-is-as-long-as-a-name-may-be-" * 2
    asked(dev, "PUT", API, settings | {"org_name": long})
    asked(dev, "PUT", f"{API}/apps/{'w' * 64}", {"app_name": "<img src=x onerror=alert(1)>"})
    asked(dev, "PUT", f"{DEMO}/override", {"label": "standard", "reason": "x" * 200})
    asked(dev, "GET", f"{DEMO}/model-selection?force_check=true")
    call(dev, 2, label="standard")
    type_key(page, key_of(dev))
    expect_text(page, "#rows", "<img src=x onerror=alert(1)>")
    page.click(f"#rows a[href='#{DEMO_ORG}/{DEMO_APP}']")
    expect_text(page, "#chain", "standard")
    expect(page.locator("#chart svg")).to_be_visible()
    page.click("summary")
    page.press("#what-if-slider", "Home")
    expect_text(page, "#what-if-told", "With $0.00")
    expect_text(page, "#override-now", "is in force")
    audit(page)
    assert_no_overflow(page)
    assert_clean(observer, dev)


def test_selected_scope_is_kept_in_address(page: Page, observer: PageObserver, dev: Sidecar) -> None:
    for app in ("checkout", "search"):
        asked(dev, "PUT", f"{API}/apps/{app}", {"app_name": app.title()})
    sign_in(page, dev, "#budgets")
    expect_text(page, "#rows", "Checkout")
    page.click("#search")
    page.keyboard.insert_text("checko")
    expect(page.locator("#rows li")).to_have_count(1)
    page.click("#rows a")
    expect_text(page, "#title", "Checkout")
    expect(page).to_have_url(re.compile("/checkout$"))
    expect(page.locator("#rows a")).to_have_attribute("aria-current", "true")
    page.goto(f"{dev.control}/status#{DEMO_ORG}/search")
    page.reload()
    expect_text(page, "#title", "Search")
    assert_clean(observer, dev)


def test_page_reconnects_after_restart(page: Page, tmp_path: Path) -> None:
    ports = ("--port", str(free_port()), "--control-port", str(free_port()))
    live = page.locator("#live")
    with sidecar("dev", *ports, folder=tmp_path) as first:
        sign_in(page, first)
        expect(live).to_have_text("Live", use_inner_text=True)
        first.stop(signal.SIGTERM)
        expect_text(page, "#live", "Connecting again")
    with sidecar("dev", *ports, folder=tmp_path) as second:
        expect(live).to_have_text("Live", use_inner_text=True, timeout=40_000)
        call(second)
        expect(find_spent(page)).not_to_have_text("$0.00")


def test_session_ended_elsewhere_returns_to_sign_in(page: Page, dev: Sidecar) -> None:
    sign_in(page, dev)
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
    headers = {"Cookie": f"{cookie['name']}={cookie['value']}", "Origin": dev.control, "X-Price-Keeper-Page": "1"}
    ended = urllib.request.Request(f"{dev.control}/status/session", headers=headers, method="DELETE")
    urllib.request.urlopen(ended, timeout=SECONDS).close()
    page.evaluate("location.hash = location.hash + 'x'")
    expect_text(page, "#sign-in-error", "The session is over")
    assert page.context.cookies() == []


def test_next_user_sees_nothing_of_former_one(page: Page, dev: Sidecar) -> None:
    for app in ("checkout", "search"):
        asked(dev, "PUT", f"{API}/apps/{app}", {"app_name": app.title()})
    sign_in(page, dev, "#budgets")
    page.click("#search")
    page.keyboard.insert_text("checkout")
    page.evaluate(f"location.hash = '#{DEMO_ORG}/checkout'")
    expect_text(page, "#title", "Checkout")
    expect_text(page, "#serves", "premium serves")
    page.click("#sign-out")
    expect(page.locator("#secret")).to_be_focused()
    left = page.evaluate(
        "[location.href, document.title, document.body.textContent,"
        " ...[...document.querySelectorAll('input')].map((each) => each.value)].join()"
    )
    assert [word for word in ("heckout", "premium", DEMO_ORG) if word in left] == []


def test_failed_start_is_explained_and_sign_in_possible(page: Page, dev: Sidecar) -> None:
    """As where others at this address have shown too many wrong cookies."""
    wrong = f"price-keeper-{urlsplit(dev.control).port}=a.b.c"
    headers = {"Cookie": wrong, "X-Price-Keeper-Page": "1"}
    for _ in range(12):
        with suppress(HTTPError):  # the last ones are refused
            urllib.request.urlopen(urllib.request.Request(f"{dev.control}/status/session", headers=headers)).close()
    page.goto(f"{dev.control}/health")
    page.evaluate(f"document.cookie = '{wrong}; path=/'")
    page.goto(f"{dev.control}/status")
    expect_text(page, "#sign-in-error", "too many")
    type_key(page, key_of(dev))
    expect(page.locator("#in-full")).to_be_visible()


def test_hostile_name_stays_text(page: Page, observer: PageObserver, dev: Sidecar) -> None:
    mean = "\"'><img src=x onerror=\"document.title='run'\"><a href=javascript:alert(1)>{{7*7}}</a>"
    asked(dev, "PUT", f"{API}/apps/{DEMO_APP}", {"app_name": mean})
    asked(dev, "PUT", f"{DEMO}/override", {"label": "economy", "reason": mean, "who": mean})
    sign_in(page, dev)
    expect_text(page, "#title", mean)
    expect_text(page, "#override-now", f"by {mean}: {mean}")
    expect(page.locator('main img, main a:not([href^="#"])')).to_have_count(0)
    assert page.title().startswith('"')
    assert_clean(observer, dev)


def test_page_polls_when_too_many_are_open(page: Page, dev: Sidecar) -> None:
    events = urllib.request.Request(f"{dev.control}/status/events", headers={"X-API-Key": key_of(dev)})
    with ExitStack() as open_now:
        for _ in range(MAX_ADMIN_PAGES):
            open_now.enter_context(urllib.request.urlopen(events, timeout=SECONDS)).readline()
        page.goto(f"{dev.control}/status#{DEMO_ORG}/{DEMO_APP}")
        type_key(page, key_of(dev))
        expect_text(page, "#live", "Every half minute")
        expect_text(page, "#serves", "premium serves")
