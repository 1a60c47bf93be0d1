"""What `GET /` of the control port answers: a page that needs nothing from elsewhere, or the same as JSON."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import AsyncIterator
from hashlib import sha256
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import aiohttp
import pytest
from price_keeper.config import Address
from price_keeper.control import api
from price_keeper.control.control_server import ControlDispatcher, open_control_port
from price_keeper.control.probe_endpoints import prefers_json
from price_keeper.control.readiness_checks import Readiness
from price_keeper.errors import StoreUnavailable
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.clock import ManualClock
from tests.support.control_harness import ORG, ControlHarness, open_control_harness
from tests.support.engines import Engines

JSON = {"Accept": "application/json"}
EVIL = '<script>alert(1)</script><img src="https://evil.example/x">'


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ControlHarness]:
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path) as made:
        yield made


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs


async def test_front_page_is_self_contained(served: ControlHarness) -> None:
    await served.put_org(org_name="Sesame and Sons")
    answer = await served.ask("GET", "/", who=None, headers={"Accept": "text/html,application/xml;q=0.9,*/*;q=0.8"})
    text = answer.raw.decode()
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    for shown in ("Bedrock Price Keeper", version("bedrock-price-keeper"), "role both", ">ready<"):
        assert shown in text
    found = Tags(text)
    assert found.tags.isdisjoint({"script", "link", "img", "iframe", "form", "object", "base"})
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("style", "src")]
    links = [value for name, value in found.attributes if name == "href"]
    assert {"/health", "/ready", "/metrics", "/openapi.json"} <= set(links)
    for link in links:
        assert (await served.ask("GET", str(link), who=None)).status == 200, link
    assert "prefers-color-scheme: dark" in text
    assert "Sesame" not in text
    assert ORG not in text


async def test_content_security_policy_allows_only_own_style(served: ControlHarness) -> None:
    answer = await served.ask("GET", "/", who=None)
    (style,) = re.findall(r"<style>(.*?)</style>", answer.raw.decode(), re.DOTALL)
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = answer.headers["Content-Security-Policy"].split("; ")
    assert policy[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Vary"] == "Accept"


async def test_front_page_as_json_and_head_and_openapi(served: ControlHarness) -> None:
    answer = await served.ask("GET", "/", who=None, headers=JSON)
    assert answer.body["status"] == "ready"
    assert (answer.body["role"], answer.body["version"]) == ("both", version("bedrock-price-keeper"))
    page = await served.ask("GET", "/", who=None)
    head = await served.ask("HEAD", "/", who=None)
    assert (head.status, head.raw) == (200, b"")
    assert head.headers["Content-Length"] == str(len(page.raw))
    assert (await served.ask("POST", "/", {}, who=None)).status == 405
    described = (await served.ask("GET", "/openapi.json", who=None)).body["paths"]["/"]["get"]
    assert described["responses"]["200"]["content"].keys() == {"application/json", "text/html"}
    # A page elsewhere whose name points here reads nothing of it.
    assert (await served.ask("GET", "/", who=None, headers={"Host": "evil.example"})).status == 403


@pytest.mark.parametrize(
    ("accept", "is_json"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", True),
        ("application/json, text/plain, */*", True),
        ("text/html, application/json;q=0.5", False),
        ("text/html;q=0.5, Application/JSON ; q=0.8", True),
        ("application/json;q=x", False),
        ("application/json;q=nan", False),
        ("application/json;q=0", False),
        (",;,;q=;", False),
    ],
)
def test_accept_header_selects_json(accept: str, is_json: bool) -> None:
    assert prefers_json(accept) is is_json


async def alone(readiness: Readiness, role: str, *asked: tuple[str, dict[str, str]]) -> list[tuple[int, bytes]]:
    """Without the parts that the control API works with."""
    clock, answers = ManualClock(), []
    control = ControlDispatcher(api.build_routes(readiness, MetricsRegistry(), role), clock.now)
    async with (
        open_control_port(control, Address("127.0.0.1", 0), clock) as address,
        aiohttp.ClientSession() as session,
    ):
        for path, headers in asked:
            async with session.get(f"http://{address}{path}", headers=headers) as answer:
                answers.append((answer.status, await answer.read()))
    return answers


async def test_sidecar_front_page_links_only_served_routes() -> None:
    readiness = Readiness(ManualClock())
    readiness.start({})
    paths = [("/", JSON), ("/", {}), *((path, {}) for path in ("/health", "/ready", "/metrics"))]
    document, page, *probes = await alone(readiness, "sidecar", *paths)
    assert b'"role":"sidecar"' in document[1]
    assert b"/openapi.json" not in document[1] + page[1]
    assert [status for status, _ in probes] == [200, 200, 200]
    assert (await alone(readiness, "sidecar", ("/openapi.json", {})))[0][0] == 404


async def test_failing_checks_are_shown_as_text() -> None:
    async def away() -> None:
        raise StoreUnavailable("/srv/keeper/store.db: no such table")

    async def amiss() -> str:
        return EVIL

    readiness = Readiness(ManualClock())
    (starting,) = await alone(readiness, "both", ("/", JSON))
    assert b'"checks":{"process":"starting"}' in starting[1]
    readiness.start({"store": away, "revocation": amiss})
    (page,) = await alone(readiness, "both", ("/", {}))
    text = page[1].decode()
    assert (page[0], ">not ready<" in text) == (200, True)
    assert "&lt;script&gt;" in text
    assert "the store is away; the log says why" in text
    assert "store.db" not in text
    assert Tags(text).tags.isdisjoint({"script", "img"})
