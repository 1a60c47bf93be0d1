"""Endpoints of the status page: its files, the board (once, or as server-sent events), and what-if.

An event contains what changed since the event before. Authorization is checked again while a stream is open. Start with
`build_page_routes`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Container
from contextlib import suppress
from functools import lru_cache
from importlib.resources import files
from typing import Any

from price_keeper.budgets.effective_settings import MAX_QUOTA_MICROS, format_value
from price_keeper.control.api_errors import ApiError, forbidden, invalid_request, not_found
from price_keeper.control.api_types import (
    HTML,
    AccessLevel,
    ApiHandler,
    ApiRequest,
    ApiResponse,
    ApiRoute,
    Principal,
    StreamingResponse,
    compute_etag_of_bytes,
    dump_json,
)
from price_keeper.control.budget_endpoints import check_known_app
from price_keeper.control.control_services import ControlServices
from price_keeper.control.page import page_sign_in
from price_keeper.control.page.page_state import PageState
from price_keeper.control.page.spend_forecast import simulate_quota
from price_keeper.control.page.status_board import BoardQuery, build_view, get_board, read_budget
from price_keeper.control.readiness_checks import Readiness
from price_keeper.domain import PICO_PER_MICRO, is_app_id, is_org_id
from price_keeper.errors import Refusal
from price_keeper.reports.settings_report import format_utc

_FILE_NAME = re.compile(r"[a-z-]{1,32}\.[a-z]{1,8}", re.ASCII)
_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml; charset=utf-8",
}
# Only files and responses of this origin: no inline scripts or styles, and no embedding in frames.
PAGE_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_FILE_HEADERS = {"Cross-Origin-Resource-Policy": "same-origin"}
_PAGE_HEADERS = {
    **_FILE_HEADERS,
    "Content-Security-Policy": PAGE_CSP,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


async def get_page(_: ControlServices, __: ApiRequest) -> ApiResponse:
    return ApiResponse(_read_file("index.html"), content_type=HTML, headers=_PAGE_HEADERS)


async def get_file(_: ControlServices, request: ApiRequest) -> ApiResponse:
    name = request.path["file"]
    media_type = _MEDIA_TYPES.get(name.rpartition(".")[2])
    content = _read_file(name) if media_type is not None and _FILE_NAME.fullmatch(name) else None
    if media_type is None or content is None:
        raise not_found("there is no such path")
    return ApiResponse(
        content,
        cache_control="no-cache",
        etag=compute_etag_of_bytes(content),
        content_type=media_type,
        headers=_FILE_HEADERS,
    )


@lru_cache(maxsize=64)
def _read_file(name: str) -> bytes | None:
    resource = files(__package__).joinpath("files", name)
    return resource.read_bytes() if resource.is_file() else None


PAGE_FILE_ROUTES = (
    ApiRoute(
        "GET",
        "/status",
        AccessLevel.PUBLIC,
        "statusPage",
        "The status page; what it shows, it asks for once somebody has signed in",
        get_page,
        {200: ""},
        group="page",
        media_types=(HTML,),
        is_rate_limit_exempt=True,
    ),
    ApiRoute(
        "GET",
        "/status/{file}",
        AccessLevel.PUBLIC,
        "statusPageFile",
        "A script, style or picture of the status page",
        get_file,
        {200: ""},
        (404,),
        group="page",
        media_types=tuple(_MEDIA_TYPES.values()),
        is_rate_limit_exempt=True,
    ),
)


EVENT_STREAM = "text/event-stream"
HEARTBEAT_TICKS = 7  # without changes; a heartbeat keeps proxies from closing an idle stream
REAUTHORIZE_TICKS = 15  # between checks that the client is still authorized
RECONNECT_MS = 3000
BOARD_QUERY = {
    "org": {"type": "string", "maxLength": 36, "description": "of the budget that is shown in full"},
    "app": {"type": "string", "maxLength": 64, "description": "as `org`, where apps have budgets of their own"},
    "search": {"type": "string", "maxLength": 100, "description": "a part of an id or a name"},
    "after": {"type": "string", "maxLength": 128, "description": "the cursor of the page before"},
}

ReadContent = Callable[[], Awaitable[dict[str, Any]]]


def build_board_handlers(readiness: Readiness) -> tuple[ApiHandler, ApiHandler]:
    """The handlers for the board as one response, and as an event stream."""

    async def get_board_once(services: ControlServices, request: ApiRequest) -> ApiResponse:
        content = await _read_board(services, readiness, parse_board_query(request))
        return ApiResponse({"at": format_utc(services.clock.now()), **content})

    async def stream_board(services: ControlServices, request: ApiRequest) -> StreamingResponse:
        query = parse_board_query(request)

        async def read_content() -> dict[str, Any]:
            return await _read_board(services, readiness, query)

        return StreamingResponse(lambda: _stream_events(services, request, read_content), EVENT_STREAM)

    return get_board_once, stream_board


async def _read_board(services: ControlServices, readiness: Readiness, query: BoardQuery) -> dict[str, Any]:
    return {"health": await readiness.report(), **await get_board(services, query)}


def parse_board_query(request: ApiRequest) -> BoardQuery:
    """Check the query and whether the caller may see what it selects. Raises ApiError."""
    principal, parameters = request.principal, request.query
    org, app = parameters.get("org"), parameters.get("app")
    mistakes = []
    if org is not None and not is_org_id(org):
        mistakes.append(("org", "an org id is a UUID in lower case"))
    if app is not None and (org is None or not is_app_id(app)):
        mistakes.append(("app", "an app id, and that of its org with it"))
    after = parameters.get("after", "")
    if after and not is_board_cursor(after):
        mistakes.append(("after", "a cursor of the page before"))
    if mistakes:
        raise invalid_request("the query cannot be used", *mistakes)
    if org is not None and not principal.may_read(org, app):
        raise forbidden("a token acts on its own org and app alone")
    return BoardQuery(
        principal.org, principal.app, parameters.get("search", ""), after, None if org is None else (org, app)
    )


def is_board_cursor(text: str) -> bool:
    org, separator, app = text.partition("/")
    return is_org_id(org) and (not separator or is_app_id(app))


async def _stream_events(
    services: ControlServices, request: ApiRequest, read_content: ReadContent
) -> AsyncGenerator[bytes, None]:
    """The events of one page: each contains the parts of the board that changed. A tick without changes yields an empty
    chunk or a heartbeat."""
    page, sent, unchanged_ticks = services.page, dict[str, Any](), 0
    with page.subscriptions.subscribe(request.principal):
        yield f"retry: {RECONNECT_MS}\n\n".encode()
        ticks = 0
        while not page.closed.is_set():
            if ticks % REAUTHORIZE_TICKS == REAUTHORIZE_TICKS - 1 and not await _is_still_authorized(services, request):
                break
            content = await read_content()
            changes = {name: value for name, value in content.items() if name not in sent or sent[name] != value}
            unchanged_ticks = 0 if changes else unchanged_ticks + 1
            if changes:
                yield b"data: " + dump_json({"at": format_utc(services.clock.now()), **changes}) + b"\n\n"
            else:
                yield b"" if unchanged_ticks % HEARTBEAT_TICKS else b": still here\n\n"
            sent = {**sent, **changes}
            ticks += 1
            await _wait_for_tick(page)
        yield b"event: end\ndata: {}\n\n"


async def _is_still_authorized(services: ControlServices, request: ApiRequest) -> bool:
    """Whether the caller's token or session is still valid, and still the same caller's."""
    try:
        current: Principal = await services.authenticator.authenticate(
            request.headers, request.address, is_change=False
        )
    except (ApiError, Refusal):
        return False
    return current == request.principal


async def _wait_for_tick(page: PageState) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(page.tick_seconds):
            await page.closed.wait()


WHAT_IF_QUERY = {
    "label": {"type": "string", "maxLength": 64, "description": "one that has a quota"},
    "quota_usd_micros": {"type": "integer", "minimum": 0, "maximum": MAX_QUOTA_MICROS},
}


async def get_what_if(services: ControlServices, request: ApiRequest) -> ApiResponse:
    org, app = request.path["org"], request.path.get("app")
    await check_known_app(services, org, app)
    budget, _ = await read_budget(services, org, app)
    label, quota = _parse_what_if(request, budget.settings.quotas.keys())
    return ApiResponse(simulate_quota(build_view(services, budget), label, quota * PICO_PER_MICRO))


def _parse_what_if(request: ApiRequest, labels: Container[str]) -> tuple[str, int]:
    """The label and the quota in micro-dollars. Raises ApiError."""
    label, text = request.query.get("label"), request.query.get("quota_usd_micros", "")
    mistakes = []
    if label is None or label not in labels:
        mistakes.append(("label", f"expected a label that has a quota here, found {format_value(label or '')}"))
    if not (
        text.isascii() and text.isdigit() and len(text) <= len(str(MAX_QUOTA_MICROS)) and int(text) <= MAX_QUOTA_MICROS
    ):
        mistakes.append(
            ("quota_usd_micros", f"expected whole micro-USD from 0 to {MAX_QUOTA_MICROS}, found {format_value(text)}")
        )
    if mistakes:
        raise invalid_request("the query cannot be used", *mistakes)
    return str(label), int(text)


WHAT_IF_ROUTES = tuple(
    ApiRoute(
        "GET",
        f"/api/v1/orgs/{{org}}{below}/what-if",
        who,
        f"get{of}WhatIf",
        "What would be if a label had another quota from now on; changes nothing",
        get_what_if,
        {200: "WhatIf"},
        () if of == "Org" else (404,),
        query_schemas=WHAT_IF_QUERY,
        group="spend",
    )
    for below, of, who in (("", "Org", AccessLevel.ORG), ("/apps/{app}", "App", AccessLevel.APP))
)


def build_page_routes(readiness: Readiness) -> list[ApiRoute]:
    get_board, stream_board = build_board_handlers(readiness)
    return [
        *PAGE_FILE_ROUTES,
        *page_sign_in.SIGN_IN_ROUTES,
        ApiRoute(
            "GET",
            "/status/board",
            AccessLevel.ANY_CLIENT,
            "getBoard",
            "What the status page shows: budgets, one of them in full, and health",
            get_board,
            {200: "Board"},
            query_schemas=BOARD_QUERY,
            group="page",
        ),
        ApiRoute(
            "GET",
            "/status/events",
            AccessLevel.ANY_CLIENT,
            "getBoardEvents",
            "The same as server-sent events: each has what changed; goes on until either side ends it",
            stream_board,
            {200: ""},
            query_schemas=BOARD_QUERY,
            group="page",
            media_types=(EVENT_STREAM,),
        ),
        *WHAT_IF_ROUTES,
    ]
