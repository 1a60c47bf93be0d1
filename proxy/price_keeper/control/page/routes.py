"""All that the status page asks for."""

from __future__ import annotations

from price_keeper.control.api_types import AccessLevel, ApiRoute
from price_keeper.control.page import live, page_files, signing_in, what_if
from price_keeper.control.readiness_checks import Readiness


def build_page_routes(readiness: Readiness) -> list[ApiRoute]:
    get_board, stream_board = live.build_board_handlers(readiness)
    return [
        *page_files.PAGE_FILE_ROUTES,
        *signing_in.SIGN_IN_ROUTES,
        ApiRoute(
            "GET",
            "/status/board",
            AccessLevel.ANY_CLIENT,
            "getBoard",
            "What the status page shows: budgets, one of them in full, and health",
            get_board,
            {200: "Board"},
            query_schemas=live.BOARD_QUERY,
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
            query_schemas=live.BOARD_QUERY,
            group="page",
            media_types=(live.EVENT_STREAM,),
        ),
        *what_if.WHAT_IF_ROUTES,
    ]
