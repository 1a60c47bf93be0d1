"""Whether the process lives, whether it can do its work, and what it has counted: for probes, monitors and people."""

from __future__ import annotations

from price_keeper.control.calls import ApiResponse, ApiRequest, ApiHandler, Route, Who
from price_keeper.control.health import Readiness
from price_keeper.telemetry import CONTENT_TYPE, MetricsRegistry


def probes(readiness: Readiness, telemetry: MetricsRegistry) -> tuple[Route, ...]:
    """They need none of the parts, and answer from the first moment to the last."""

    async def health(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse({"status": "ok"})

    async def ready(_: object, __: ApiRequest) -> ApiResponse:
        told = await readiness.told()
        return ApiResponse(told, 200 if told["status"] == "ready" else 503)

    async def metrics(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse((await telemetry.scrape()).encode(), content_type=CONTENT_TYPE)

    return (
        _probe("/health", "health", "Whether the process lives", health, {200: "Health"}),
        _probe("/ready", "ready", "Whether it can do its work", ready, {200: "Ready", 503: "Ready"}),
        _probe("/metrics", "metrics", "What it has counted, for Prometheus", metrics, {200: ""}),
    )


def _probe(path: str, name: str, summary: str, handle: ApiHandler, answers: dict[int, str]) -> Route:
    return Route("GET", path, Who.ANYBODY, name, summary, handle, answers, group="probes")
