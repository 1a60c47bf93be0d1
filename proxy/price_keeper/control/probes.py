"""Whether the process lives, whether it can do its work, and what it has counted: for probes, monitors and people."""

from __future__ import annotations

from price_keeper.control.calls import ApiResponse, ApiRequest, ApiHandler, ApiRoute, AccessLevel
from price_keeper.control.health import Readiness
from price_keeper.telemetry import CONTENT_TYPE, MetricsRegistry


def probes(readiness: Readiness, telemetry: MetricsRegistry) -> tuple[ApiRoute, ...]:
    """They need none of the parts, and answer from the first moment to the last."""

    async def health(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse({"status": "ok"})

    async def ready(_: object, __: ApiRequest) -> ApiResponse:
        told = await readiness.told()
        return ApiResponse(told, 200 if told["status"] == "ready" else 503)

    async def metrics(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse((await telemetry.scrape()).encode(), content_type=CONTENT_TYPE)

    return (
        _build_probe_route("/health", "health", "Whether the process lives", health, {200: "Health"}),
        _build_probe_route("/ready", "ready", "Whether it can do its work", ready, {200: "Ready", 503: "Ready"}),
        _build_probe_route("/metrics", "metrics", "What it has counted, for Prometheus", metrics, {200: ""}),
    )


def _build_probe_route(path: str, operation_id: str, summary: str, handler: ApiHandler, responses: dict[int, str]) -> ApiRoute:
    return ApiRoute("GET", path, AccessLevel.PUBLIC, operation_id, summary, handler, responses, group="probes")
