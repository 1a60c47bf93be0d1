"""Keeps a page up to date: what changed of what it shows, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from price_keeper.control.calls import ApiResponse, ApiRequest, ApiHandler, Principal, StreamingResponse, dump_json
from price_keeper.control.health import Readiness
from price_keeper.control.page.board import BoardQuery, get_board
from price_keeper.control.page.state import PageState
from price_keeper.control.parts import ControlServices
from price_keeper.control.problems import ApiError, forbidden, invalid_request
from price_keeper.errors import Refusal
from price_keeper.model import is_app_id, is_org_id
from price_keeper.reporting.settings_shown import utc

EVENTS = "text/event-stream"
HEARTBEAT_TICKS = 7  # without anything new, so that whatever stands between does not take it for dead
CHECKED_TICKS = 15  # whether whoever listens still may
AGAIN_MS = 3000
QUERY = {
    "org": {"type": "string", "maxLength": 36, "description": "of the budget that is shown in full"},
    "app": {"type": "string", "maxLength": 64, "description": "as `org`, where apps have budgets of their own"},
    "search": {"type": "string", "maxLength": 100, "description": "a part of an id or a name"},
    "after": {"type": "string", "maxLength": 128, "description": "the cursor of the page before"},
}

Told = Callable[[], Awaitable[dict[str, Any]]]


def handlers(readiness: Readiness) -> tuple[ApiHandler, ApiHandler]:
    """For the page once, and for one that is kept up to date."""

    async def once(services: ControlServices, request: ApiRequest) -> ApiResponse:
        told = await _told(services, readiness, topic_of(request))
        return ApiResponse({"at": utc(services.clock.now()), **told})

    async def kept_up(services: ControlServices, request: ApiRequest) -> StreamingResponse:
        topic = topic_of(request)

        async def told() -> dict[str, Any]:
            return await _told(services, readiness, topic)

        return StreamingResponse(lambda: _events(services, request, told), EVENTS)

    return once, kept_up


async def _told(services: ControlServices, readiness: Readiness, topic: BoardQuery) -> dict[str, Any]:
    return {"health": await readiness.report(), **await get_board(services, topic)}


def topic_of(request: ApiRequest) -> BoardQuery:
    """Raises Problem."""
    principal, query = request.principal, request.query
    org, app = query.get("org"), query.get("app")
    mistakes = []
    if org is not None and not is_org_id(org):
        mistakes.append(("org", "an org id is a UUID in lower case"))
    if app is not None and (org is None or not is_app_id(app)):
        mistakes.append(("app", "an app id, and that of its org with it"))
    after = query.get("after", "")
    if after and not _is_cursor(after):
        mistakes.append(("after", "a cursor of the page before"))
    if mistakes:
        raise invalid_request("the query cannot be used", *mistakes)
    if org is not None and not principal.may_read(org, app):
        raise forbidden("a token acts on its own org and app alone")
    return BoardQuery(principal.org, principal.app, query.get("search", ""), after, None if org is None else (org, app))


def _is_cursor(text: str) -> bool:
    org, found, app = text.partition("/")
    return is_org_id(org) and (not found or is_app_id(app))


async def _events(services: ControlServices, request: ApiRequest, told: Told) -> AsyncGenerator[bytes, None]:
    """Of all that is told, what is new to this page. An empty part comes with every turn that has nothing to tell."""
    page, sent, quiet = services.page, dict[str, Any](), 0
    with page.listeners.one_more(request.principal):
        yield f"retry: {AGAIN_MS}\n\n".encode()
        turns = 0
        while not page.closed.is_set():
            if turns % CHECKED_TICKS == CHECKED_TICKS - 1 and not await _still_may(services, request):
                break
            found = await told()
            new = {name: value for name, value in found.items() if name not in sent or sent[name] != value}
            quiet = 0 if new else quiet + 1
            if new:
                yield b"data: " + dump_json({"at": utc(services.clock.now()), **new}) + b"\n\n"
            else:
                yield b"" if quiet % HEARTBEAT_TICKS else b": still here\n\n"
            sent = {**sent, **new}
            turns += 1
            await _tick(page)
        yield b"event: end\ndata: {}\n\n"


async def _still_may(services: ControlServices, request: ApiRequest) -> bool:
    """His token or session may be over, or revoked."""
    try:
        current: Principal = await services.authenticator.authenticate(request.headers, request.address, is_change=False)
    except (ApiError, Refusal):
        return False
    return current == request.principal


async def _tick(page: PageState) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(page.tick_seconds):
            await page.closed.wait()
