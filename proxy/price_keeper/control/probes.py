"""Whether the process lives, whether it can do its work, and what it has counted: for probes, monitors and people."""

from __future__ import annotations

from price_keeper.control.api_types import AccessLevel, ApiHandler, ApiRequest, ApiResponse, ApiRoute
from price_keeper.control.readiness_checks import Readiness
from price_keeper.telemetry.metrics import CONTENT_TYPE, MetricsRegistry


def build_probe_routes(readiness: Readiness, telemetry: MetricsRegistry) -> tuple[ApiRoute, ...]:
    """They need none of the parts, and answer from the first moment to the last."""

    async def get_health(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse({"status": "ok"})

    async def get_readiness(_: object, __: ApiRequest) -> ApiResponse:
        report = await readiness.report()
        return ApiResponse(report, 200 if report["status"] == "ready" else 503)

    async def get_metrics(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse((await telemetry.scrape()).encode(), content_type=CONTENT_TYPE)

    return (
        _build_probe_route("/health", "health", "Whether the process lives", get_health, {200: "Health"}),
        _build_probe_route(
            "/ready", "ready", "Whether it can do its work", get_readiness, {200: "Ready", 503: "Ready"}
        ),
        _build_probe_route("/metrics", "metrics", "What it has counted, for Prometheus", get_metrics, {200: ""}),
    )


def _build_probe_route(
    path: str, operation_id: str, summary: str, handler: ApiHandler, responses: dict[int, str]
) -> ApiRoute:
    return ApiRoute("GET", path, AccessLevel.PUBLIC, operation_id, summary, handler, responses, group="probes")
