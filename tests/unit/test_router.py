"""Which route a path leads to, and what is told where it leads to none."""

from __future__ import annotations

import pytest
from price_keeper.control.api_errors import ApiError
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute
from price_keeper.control.control_services import ControlServices
from price_keeper.control.router import Router


async def nothing(_: ControlServices, __: ApiRequest) -> ApiResponse:
    return ApiResponse()


def route(method: str, path: str, *, by_secret: bool = False) -> ApiRoute:
    return ApiRoute(
        method,
        path,
        AccessLevel.PUBLIC,
        f"{method} {path}",
        "",
        nothing,
        {200: "x"},
        is_authenticated_by_secret=by_secret,
    )


ROUTING = Router(
    [
        route("GET", "/"),
        route("GET", "/orgs/{org}/days/{day}"),
        route("GET", "/orgs/{org}/days/today"),
        route("PUT", "/orgs/{org}/days/{day}"),
        route("GET", "/orgs/{org}/apps/{app}"),
        route("GET", "/orgs/{org}/secret", by_secret=True),
    ]
)


@pytest.mark.parametrize(
    ("method", "path", "found", "values"),
    [
        ("GET", "/", "GET /", {}),
        ("HEAD", "/", "GET /", {}),
        ("GET", "/orgs/a/days/b", "GET /orgs/{org}/days/{day}", {"org": "a", "day": "b"}),
        ("GET", "/orgs/a/days/today", "GET /orgs/{org}/days/today", {"org": "a"}),
        ("PUT", "/orgs/a/days/today", "PUT /orgs/{org}/days/{day}", {"org": "a", "day": "today"}),
        ("GET", "/orgs/a%2Fb/apps/%C3%A9", "GET /orgs/{org}/apps/{app}", {"org": "a/b", "app": "é"}),
        ("GET", "/orgs//apps/", "GET /orgs/{org}/apps/{app}", {"org": "", "app": ""}),
    ],
)
def test_a_word_goes_before_a_name(method: str, path: str, found: str, values: dict[str, str]) -> None:
    route, told = ROUTING.match(method, path)
    assert (route.operation_id, told) == (found, values)


@pytest.mark.parametrize("path", ["", "/orgs", "/orgs/a/apps", "/orgs/a/apps/%FF", "/orgs/a/apps/b/c", "/x" * 40])
def test_what_leads_nowhere_is_not_there(path: str) -> None:
    with pytest.raises(ApiError) as refused:
        ROUTING.match("GET", path)
    assert refused.value.status == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("POST", "/orgs/a/days/today", "GET, PUT"), ("HEAD", "/orgs/a/secret", "GET"), ("DELETE", "/", "GET")],
)
def test_another_method_is_told_which_there_are(method: str, path: str, allowed: str) -> None:
    with pytest.raises(ApiError) as refused:
        ROUTING.match(method, path)
    assert (refused.value.status, refused.value.headers["Allow"]) == (405, allowed)
