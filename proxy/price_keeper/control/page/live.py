"""Keeps a page up to date: what changed of what it shows, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from price_keeper.control.api_errors import ApiError, forbidden, invalid_request
from price_keeper.control.api_types import ApiHandler, ApiRequest, ApiResponse, Principal, StreamingResponse, dump_json
from price_keeper.control.control_services import ControlServices
from price_keeper.control.page.page_state import PageState
from price_keeper.control.page.status_board import BoardQuery, get_board
from price_keeper.control.readiness_checks import Readiness
from price_keeper.domain import is_app_id, is_org_id
from price_keeper.errors import Refusal
from price_keeper.reports.settings_report import format_utc

EVENT_STREAM = "text/event-stream"
HEARTBEAT_TICKS = 7  # without anything new, so that whatever stands between does not take it for dead
REAUTHORIZE_TICKS = 15  # whether whoever listens still may
RECONNECT_MS = 3000
BOARD_QUERY = {
    "org": {"type": "string", "maxLength": 36, "description": "of the budget that is shown in full"},
    "app": {"type": "string", "maxLength": 64, "description": "as `org`, where apps have budgets of their own"},
    "search": {"type": "string", "maxLength": 100, "description": "a part of an id or a name"},
    "after": {"type": "string", "maxLength": 128, "description": "the cursor of the page before"},
}

ReadContent = Callable[[], Awaitable[dict[str, Any]]]


def build_board_handlers(readiness: Readiness) -> tuple[ApiHandler, ApiHandler]:
    """For the page once, and for one that is kept up to date."""

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
    """Raises Problem."""
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
    """Of all that is told, what is new to this page. An empty part comes with every turn that has nothing to tell."""
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
    """His token or session may be over, or revoked."""
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
