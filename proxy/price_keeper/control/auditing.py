"""The audit of an org, read."""

from __future__ import annotations

from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute, build_cacheable_response
from price_keeper.control.control_services import ControlServices
from price_keeper.control.orgs import PAGING_QUERY, read_limit
from price_keeper.stores.audit_log import MAX_RECORDS_PER_PAGE, build_record_json, read_records


async def list_audit_records(services: ControlServices, request: ApiRequest) -> ApiResponse:
    limit = read_limit(request, MAX_RECORDS_PER_PAGE)
    page = await read_records(services.store, request.path["org"], limit, request.query.get("cursor"))
    return build_cacheable_response({"records": [build_record_json(row) for row in page.rows], "cursor": page.cursor})


AUDIT_ROUTES = (
    ApiRoute(
        "GET",
        "/api/v1/orgs/{org}/audit",
        AccessLevel.ORG,
        "listAudit",
        "Every administrative change of an org and its apps, the newest first",
        list_audit_records,
        {200: "Audit"},
        query_schemas=PAGING_QUERY,
    ),
)
