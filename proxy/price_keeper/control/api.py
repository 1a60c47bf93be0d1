"""The control API: build the table of routes, from which requests are served and the OpenAPI document is generated.

Start here to find the module that serves a path. A sidecar serves only the front page and the probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from price_keeper.control import (
    budget_endpoints,
    client_endpoints,
    org_endpoints,
    profile_endpoints,
    spend_endpoints,
    token_endpoints,
    usage_endpoints,
)
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute, build_cacheable_response
from price_keeper.control.control_services import ControlServices
from price_keeper.control.openapi import build_document
from price_keeper.control.page import page_endpoints as page
from price_keeper.control.probe_endpoints import build_front_route, build_probe_routes
from price_keeper.control.readiness_checks import Readiness
from price_keeper.telemetry.metrics import MetricsRegistry

_ROUTE_TABLES = (
    token_endpoints.TOKEN_ROUTES,
    org_endpoints.ORG_ROUTES,
    client_endpoints.CREDENTIAL_ROUTES,
    client_endpoints.SESSION_ROUTES,
    client_endpoints.ORG_KEY_ROUTES,
    budget_endpoints.OVERRIDE_ROUTES,
    profile_endpoints.PROFILE_ROUTES,
    org_endpoints.AUDIT_ROUTES,
    budget_endpoints.SELECTION_ROUTES,
    spend_endpoints.AGGREGATE_ROUTES,
    usage_endpoints.USAGE_ROUTES,
)


def build_routes(readiness: Readiness, telemetry: MetricsRegistry, role: str = "both") -> Sequence[ApiRoute]:
    """All routes of the control port. A sidecar can neither sign tokens nor change settings, so it has no control
    API."""
    routes = [build_front_route(readiness, role), *build_probe_routes(readiness, telemetry)]
    if role == "sidecar":
        return routes
    routes += [route for table in _ROUTE_TABLES for route in table]
    routes += page.build_page_routes(readiness)

    @cache  # few processes are ever asked for it, and all of them start
    def build_openapi() -> ApiResponse:
        return build_cacheable_response(build_document(routes), "public, no-cache")

    async def get_openapi(_: ControlServices, __: ApiRequest) -> ApiResponse:
        return build_openapi()

    summary = "This description of all that can be asked for here"
    routes.append(
        ApiRoute(
            "GET", "/openapi.json", AccessLevel.PUBLIC, "openapi", summary, get_openapi, {200: "OpenApi"}, group="about"
        )
    )
    return routes
