"""Endpoints for orgs and apps: their settings, what is in effect, and the audit log of an org.

A PUT that was interrupted after the settings and before the credentials is completed by a retry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from price_keeper.auth.client_secrets import SECRET_HASH
from price_keeper.budgets.org_settings import (
    APP_SETTINGS,
    ORG_SETTINGS,
    SettingsChange,
    SettingsCompanions,
    SettingsWrite,
    audit_settings,
    put_app,
    put_org,
)
from price_keeper.control.api_constants import MAX_PAGE_SIZE
from price_keeper.control.api_errors import invalid_request, not_found
from price_keeper.control.api_types import (
    AccessLevel,
    ApiRequest,
    ApiResponse,
    ApiRoute,
    build_cacheable_response,
    compute_etag,
)
from price_keeper.control.client_endpoints import create_credentials
from price_keeper.control.control_services import ControlServices
from price_keeper.domain import Scope, describe_scope, find_name
from price_keeper.reports.settings_report import SettingsReport
from price_keeper.stores import schema
from price_keeper.stores.audit_log import MAX_RECORDS_PER_PAGE, build_record_json, read_records, select_attributes
from price_keeper.stores.contract import Item, Page, Prefix, Query, Write

PAGING_QUERY = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE},
    "cursor": {"type": "string", "maxLength": 200},
}


def show_org(services: ControlServices, org: str, item: Item) -> SettingsReport:
    return SettingsReport(org, item, services.config.defaults, services.clock.now())


def show_app(org_settings: SettingsReport, app: str, item: Item) -> SettingsReport:
    return SettingsReport(org_settings.org, org_settings.org_item, org_settings.defaults, org_settings.now, app, item)


async def load_org(services: ControlServices, org: str) -> SettingsReport:
    """The org's settings. Raises ApiError (404)."""
    item = await services.store.get(schema.org_config_key(org), consistent=True)
    if item is None:
        raise not_found(f"there is no org {org}")
    return show_org(services, org, item)


async def load_app(services: ControlServices, org: str, app: str) -> SettingsReport:
    """The app's settings. Raises ApiError (404)."""
    keys = [schema.org_config_key(org), schema.app_config_key(org, app)]
    org_item, app_item = await services.store.get_many(keys, consistent=True)
    if app_item is None:
        name = describe_scope(Scope(org), find_name(org_item, "org_name"), None)
        raise not_found(f"there is no app {app} of {name}")
    return show_app(show_org(services, org, org_item or {}), app, app_item)


async def get_org(services: ControlServices, request: ApiRequest) -> ApiResponse:
    return build_cacheable_response((await load_org(services, request.path["org"])).to_record())


async def get_app(services: ControlServices, request: ApiRequest) -> ApiResponse:
    return build_cacheable_response((await load_app(services, request.path["org"], request.path["app"])).to_record())


async def put_org_settings(services: ControlServices, request: ApiRequest) -> ApiResponse:
    org = request.path["org"]

    def record(change: SettingsChange) -> Mapping[str, Any] | None:
        return None if change.before is None else show_org(services, org, change.before).to_record()

    audit_hook = _build_audit_hook(services, request, "org.put", Scope(org), record)
    config = services.config
    written = await put_org(
        services.store,
        services.clock,
        org,
        request.body,
        services.labels_and_pseudo_labels,
        config.defaults,
        audit_hook,
    )
    services.budgets.unknown_orgs.forget(org)
    return await _respond_with_credentials(
        services, request, Scope(org), written, show_org(services, org, written.item)
    )


async def put_app_settings(services: ControlServices, request: ApiRequest) -> ApiResponse:
    org, app = request.path["org"], request.path["app"]
    org_settings = await load_org(services, org)

    def record(change: SettingsChange) -> Mapping[str, Any] | None:
        if change.before is None:
            return None
        return show_app(show_org(services, org, change.org or {}), app, change.before).to_record()

    audit_hook = _build_audit_hook(services, request, "app.put", Scope(org, app), record)
    written = await put_app(
        services.store, services.clock, org, app, request.body, services.labels_and_pseudo_labels, audit_hook
    )
    return await _respond_with_credentials(
        services, request, Scope(org, app), written, show_app(org_settings, app, written.item)
    )


def _build_audit_hook(
    services: ControlServices, request: ApiRequest, action: str, scope: Scope, record: Callable[[SettingsChange], Any]
) -> SettingsCompanions:
    """A function that checks the preconditions of a change, and then returns the write of its audit record."""
    audit_change = audit_settings(request.actor, action, scope, services.clock)

    def check_and_audit(change: SettingsChange) -> Sequence[Write]:
        before = record(change)
        if not _is_retry_of_create(request, scope, change):
            request.check_preconditions(None if before is None else compute_etag(before))
        return audit_change(change)

    return check_and_audit


def _is_retry_of_create(request: ApiRequest, scope: Scope, change: SettingsChange) -> bool:
    """Whether this PUT repeats one that created the org or app and was interrupted before it created credentials.

    It must have the same settings; a concurrent PUT with other settings fails its precondition.
    """
    names = ORG_SETTINGS if scope.app is None else APP_SETTINGS
    has_credentials = change.before is None or SECRET_HASH in change.before
    is_same = select_attributes(change.before, names) == select_attributes(change.after, names)
    return is_same and not has_credentials and "If-Match" not in request.headers


async def _respond_with_credentials(
    services: ControlServices, request: ApiRequest, scope: Scope, written: SettingsWrite, shown: SettingsReport
) -> ApiResponse:
    """Create credentials if there are none yet, and respond. If the process dies before this, a repeated PUT does
    it."""
    issued = await create_credentials(services, request, scope)
    record = {**shown.to_record(), "has_credentials": True}
    headers = {"Location": f"/api/v1/orgs/{scope.org}" + (f"/apps/{scope.app}" if scope.app else "")}
    return ApiResponse({**record, **issued}, 201 if written.is_new else 200, etag=compute_etag(record), headers=headers)


async def list_orgs(services: ControlServices, request: ApiRequest) -> ApiResponse:
    page = await _query_page(services, request, schema.ORG_REGISTRY, "ORG#")
    orgs = [Scope.from_key(row.key.sk).org for row in page.rows]
    items = await services.store.get_many([schema.org_config_key(org) for org in orgs])
    records = [
        {"org_name": row.item.get("org_name"), **show_org(services, org, item or {}).to_record()}
        for row, org, item in zip(page.rows, orgs, items, strict=True)
    ]
    return build_cacheable_response({"orgs": records, "cursor": _get_next_cursor(page)})


async def list_apps(services: ControlServices, request: ApiRequest) -> ApiResponse:
    org_settings = await load_org(services, request.path["org"])
    page = await _query_page(services, request, schema.org_config_key(org_settings.org).pk, schema.APPS_PREFIX)
    records = [
        show_app(org_settings, row.key.sk.removeprefix(schema.APPS_PREFIX), row.item).to_record() for row in page.rows
    ]
    return build_cacheable_response({"apps": records, "cursor": _get_next_cursor(page)})


async def _query_page(services: ControlServices, request: ApiRequest, partition: str, prefix: str) -> Page:
    """Read one page of ids. A cursor is the last id of the page before."""
    cursor = request.query.get("cursor")
    after = None if not cursor else f"{prefix}{cursor}"
    query = Query(
        "config", partition, Prefix(prefix), limit=read_limit(request, MAX_PAGE_SIZE), after=after, consistent=True
    )
    return await services.store.query(query)


def _get_next_cursor(page: Page) -> str | None:
    return None if page.cursor is None else page.cursor.partition("#")[2]


def read_limit(request: ApiRequest, maximum: int) -> int:
    """The `limit` of the query; `maximum` if it is missing. Raises ApiError."""
    text = request.query.get("limit", str(maximum))
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= maximum):
        raise invalid_request("the query cannot be used", ("limit", f"expected a whole number from 1 to {maximum}"))
    return int(text)


_ORG_PATH, _APP_PATH = "/api/v1/orgs/{org}", "/api/v1/orgs/{org}/apps/{app}"
_PRECONDITION_HEADERS = {
    "If-Match": "the ETag of what is to be replaced, or *: 412 if it is not there any more",
    "If-None-Match": "*: 412 if it is there already",
}
_PUT_RESPONSES = {201: "Settings", 200: "Settings"}

ORG_ROUTES = (
    ApiRoute(
        "GET",
        "/api/v1/orgs",
        AccessLevel.ADMIN,
        "listOrgs",
        "All orgs, by their ids",
        list_orgs,
        {200: "Orgs"},
        query_schemas=PAGING_QUERY,
    ),
    ApiRoute(
        "GET",
        _ORG_PATH,
        AccessLevel.ORG,
        "getOrg",
        "An org's settings, and what holds now",
        get_org,
        {200: "Settings"},
        (404,),
    ),
    ApiRoute(
        "PUT",
        _ORG_PATH,
        AccessLevel.ORG_ADMIN,
        "putOrg",
        "Make an org, or put new settings in the place of its own",
        put_org_settings,
        _PUT_RESPONSES,
        (412,),
        request_headers=_PRECONDITION_HEADERS,
        body_schema="OrgSettings",
    ),
    ApiRoute(
        "GET",
        f"{_ORG_PATH}/apps",
        AccessLevel.ORG,
        "listApps",
        "The apps of an org, by their ids",
        list_apps,
        {200: "Apps"},
        (404,),
        query_schemas=PAGING_QUERY,
    ),
    ApiRoute(
        "GET",
        _APP_PATH,
        AccessLevel.APP,
        "getApp",
        "An app's settings, and what holds",
        get_app,
        {200: "Settings"},
        (404,),
    ),
    ApiRoute(
        "PUT",
        _APP_PATH,
        AccessLevel.ORG_ADMIN,
        "putApp",
        "Make an app, or put new settings in the place of its own",
        put_app_settings,
        _PUT_RESPONSES,
        (404, 412),
        request_headers=_PRECONDITION_HEADERS,
        body_schema="AppSettings",
    ),
)


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
