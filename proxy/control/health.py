"""Whether the process lives, and whether it can do its work: for probes, load balancers and people."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from proxy.errors import PriceKeeperError

# Each asks one thing that the work needs, and raises when it is not there.
Checks = Mapping[str, Callable[[], Awaitable[object]]]

_CHECKS = web.AppKey("checks", Checks)


def add_health(app: web.Application, checks: Checks) -> None:
    app[_CHECKS] = checks
    app.router.add_get("/health", _health)
    app.router.add_get("/ready", _ready)


async def _health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _ready(request: web.Request) -> web.Response:
    troubles = {name: await _trouble(check) for name, check in request.app[_CHECKS].items()}
    is_ready = not any(troubles.values())
    body = {
        "status": "ready" if is_ready else "not ready",
        "checks": {name: trouble or "ok" for name, trouble in troubles.items()},
    }
    return web.json_response(body, status=200 if is_ready else 503)


async def _trouble(check: Callable[[], Awaitable[object]]) -> str | None:
    try:
        await check()
    except PriceKeeperError as failure:
        return str(failure)
    return None
