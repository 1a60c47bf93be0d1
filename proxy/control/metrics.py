"""`/metrics`, for Prometheus."""

from __future__ import annotations

from aiohttp import web

from proxy.telemetry import CONTENT_TYPE, Telemetry

_TELEMETRY = web.AppKey("telemetry", Telemetry)


def add_metrics(app: web.Application, telemetry: Telemetry) -> None:
    app[_TELEMETRY] = telemetry
    app.router.add_get("/metrics", _metrics)


async def _metrics(request: web.Request) -> web.Response:
    text = request.app[_TELEMETRY].text()
    return web.Response(body=text.encode(), headers={"content-type": CONTENT_TYPE})
