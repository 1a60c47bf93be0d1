"""Which route a request of the control port leads to, and what its client gets where there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from price_keeper.config import Address
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute
from price_keeper.control.control_server import MAX_PATH_SEGMENTS, ControlDispatcher, open_control_port
from yarl import URL

from tests.support.clock import ManualClock


def route(method: str, path: str, *, by_secret: bool = False) -> ApiRoute:
    async def handler(_: object, request: ApiRequest) -> ApiResponse:
        return ApiResponse(headers={"Found": f"{method} {path}", "Parameters": repr(dict(request.path))})

    return ApiRoute(
        method,
        path,
        AccessLevel.PUBLIC,
        f"{method} {path}",
        "",
        handler,
        {200: "x"},
        is_authenticated_by_secret=by_secret,
        group="probes",
    )


ROUTES = [
    route("GET", "/"),
    route("GET", "/orgs/{org}/days/{day}"),
    route("GET", "/orgs/{org}/days/today"),
    route("PUT", "/orgs/{org}/days/{day}"),
    route("GET", "/orgs/{org}/apps/{app}"),
    route("GET", "/orgs/{org}/secret", by_secret=True),
    route("GET", "/api/v1/plans/{org}"),
    route("GET", "/api/v1/plans/all"),
]


@pytest.fixture
async def port() -> AsyncIterator[str]:
    clock = ManualClock()
    async with open_control_port(ControlDispatcher(ROUTES, clock.now), Address("127.0.0.1", 0), clock) as address:
        yield f"http://{address}"


async def ask(port: str, method: str, path: str, **headers: str) -> tuple[int, Any, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, URL(port + path, encoded=True), headers=headers) as response,
    ):
        is_json = response.content_type == "application/json" and method != "HEAD"
        return response.status, response.headers, await response.json() if is_json else None


@pytest.mark.parametrize(
    ("method", "path", "found", "parameters"),
    [
        ("GET", "/", "GET /", {}),
        ("HEAD", "/", "GET /", {}),
        ("GET", "/api/v1/plans/a", "GET /api/v1/plans/{org}", {"org": "a"}),
        ("GET", "/plans/a", "GET /api/v1/plans/{org}", {"org": "a"}),
        ("GET", "/plans/all", "GET /api/v1/plans/all", {}),
        ("GET", "/orgs/a/days/b", "GET /orgs/{org}/days/{day}", {"org": "a", "day": "b"}),
        ("GET", "/orgs/a/days/today", "GET /orgs/{org}/days/today", {"org": "a"}),
        ("PUT", "/orgs/a/days/today", "PUT /orgs/{org}/days/{day}", {"org": "a", "day": "today"}),
        ("GET", "/orgs/a%2Fb/apps/%C3%A9", "GET /orgs/{org}/apps/{app}", {"org": "a/b", "app": "é"}),
        ("GET", "/orgs/%252F/apps/%7Bx%7D", "GET /orgs/{org}/apps/{app}", {"org": "%2F", "app": "{x}"}),
        ("GET", "/orgs/a+b/apps/%2B", "GET /orgs/{org}/apps/{app}", {"org": "a+b", "app": "+"}),
        ("GET", "/orgs//apps/", "GET /orgs/{org}/apps/{app}", {"org": "", "app": ""}),
    ],
)
async def test_path_with_several_routes_leads_to_the_most_fixed_one(
    port: str, method: str, path: str, found: str, parameters: dict[str, str]
) -> None:
    status, headers, _ = await ask(port, method, path)
    assert (status, headers["Found"], headers["Parameters"]) == (200, found, repr(parameters))


@pytest.mark.parametrize(
    "path",
    [
        "/orgs",
        "/orgs/a/apps",
        "/orgs/a/apps/%FF",
        "/orgs/a/apps/b/c",
        "/orgs/a/days/today/",
        "//orgs/a/days/today",
        "/%6Frgs/a/days/today",
        "/orgs/a/days%2Ftoday",
        "/x" * 40,
    ],
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_path_without_route_is_answered_404(port: str, method: str, path: str) -> None:
    status, headers, body = await ask(port, method, path, Expect="a miracle")
    assert (status, body["error"], body["message"]) == (404, "not_found", "there is no such path")
    assert headers["X-Request-Id"] == body["request_id"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/orgs/a/days/today", "GET, PUT"),
        ("HEAD", "/orgs/a/secret", "GET"),
        ("DELETE", "/", "GET"),
        ("OPTIONS", "/", "GET"),
    ],
)
async def test_other_method_is_answered_405_with_the_allowed_ones(
    port: str, method: str, path: str, allowed: str
) -> None:
    status, headers, body = await ask(port, method, path)
    assert (status, headers["Allow"]) == (405, allowed)
    assert body is None or (body["error"], body["message"]) == (
        "method_not_allowed",
        f"this path serves only {allowed}",
    )


async def test_deep_path_is_answered_without_a_search_of_its_prefixes(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router of aiohttp copies and looks up each of them, while all other requests wait."""
    searched: list[str] = []
    resolve = web.UrlDispatcher.resolve

    async def noted(self: web.UrlDispatcher, request: web.Request) -> Any:
        searched.append(request.path)
        return await resolve(self, request)

    monkeypatch.setattr(web.UrlDispatcher, "resolve", noted)
    deepest = "/x" * MAX_PATH_SEGMENTS
    assert [(await ask(port, "GET", path))[0] for path in (deepest, f"{deepest}/x", "/" * 8000)] == [404] * 3
    assert searched == [deepest]
