"""All that the status page asks for."""

from __future__ import annotations

from price_keeper.control.calls import Route, Who
from price_keeper.control.health import Readiness
from price_keeper.control.page import live, page_files, signing_in, what_if


def routes(readiness: Readiness) -> list[Route]:
    once, kept_up = live.handlers(readiness)
    return [
        *page_files.ROUTES,
        *signing_in.ROUTES,
        Route(
            "GET",
            "/status/board",
            Who.KNOWN,
            "getBoard",
            "What the status page shows: budgets, one of them in full, and health",
            once,
            {200: "Board"},
            query=live.QUERY,
            group="page",
        ),
        Route(
            "GET",
            "/status/events",
            Who.KNOWN,
            "getBoardEvents",
            "The same as server-sent events: each has what changed; goes on until either side ends it",
            kept_up,
            {200: ""},
            query=live.QUERY,
            group="page",
            media=(live.EVENTS,),
        ),
        *what_if.ROUTES,
    ]
