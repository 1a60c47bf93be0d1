"""The OpenAPI document, made of the table of routes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from price_keeper.control.api_types import HTML, JSON, AccessLevel, ApiRoute
from price_keeper.control.schemas import SCHEMAS
from price_keeper.telemetry.build_info import get_version

_UUID = {"type": "string", "format": "uuid", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"}
_PATH_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "org": _UUID,
    "app": {"type": "string", "pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$"},
    "sid": _UUID,
    "day": {"type": "string", "format": "date"},
    "file": {"type": "string", "pattern": r"^[a-z-]+\.[a-z]+$"},
}
_ALWAYS_POSSIBLE = (400, 429, 503)
_AUTH_ERRORS = (401, 403)
_BODY_ERRORS = (408, 413, 415, 417)
_SECURITY = {
    "adminKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"},
}


def build_document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _build_operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Bedrock Price Keeper: control API", "version": get_version()},
        "paths": paths,
        "components": {"schemas": dict(SCHEMAS), "securitySchemes": _SECURITY},
    }


def _build_operation(route: ApiRoute) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "description": f"For {route.access_level.value}."
        if route.access_level is AccessLevel.PUBLIC
        else f"For the administrator or {_describe_access(route)}.",
        "tags": [route.group],
        "parameters": _build_parameters(route),
        "responses": _build_responses(route),
        "security": _build_security(route),
    }
    if route.body_schema is not None:
        limit = f"at most {route.max_body_bytes} bytes"
        operation["requestBody"] = {
            "required": True,
            "description": limit,
            "content": _build_content(route.body_schema),
        }
    return operation


def _describe_access(route: ApiRoute) -> str:
    return "nobody else" if route.access_level is AccessLevel.ADMIN else route.access_level.value


def _build_security(route: ApiRoute) -> list[dict[str, list[str]]]:
    if route.access_level is AccessLevel.PUBLIC:
        return []
    return [{"adminKey": []}] if route.access_level is AccessLevel.ADMIN else [{"adminKey": []}, {"token": []}]


def _build_parameters(route: ApiRoute) -> list[dict[str, Any]]:
    names = [segment[1:-1] for segment in route.segments if segment.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETERS[name]} for name in names]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": dict(schema)}
        for name, schema in route.query_schemas.items()
    ]
    return parameters + [
        {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in route.request_headers.items()
    ]


def _build_responses(route: ApiRoute) -> dict[str, Any]:
    responses = {str(status): _build_response(status, name) for status, name in route.responses.items()}
    if route.media_types:
        responses["200"]["content"] = {
            kind.partition(";")[0]: {"schema": {"type": "string"}} for kind in route.media_types
        }
    if route.has_html_variant:
        responses["200"]["content"][HTML.partition(";")[0]] = {"schema": {"type": "string"}}
    for status in sorted({*route.error_statuses, *_get_common_errors(route)}):
        responses.setdefault(str(status), _build_response(status, "Problem"))
    for status, reason in route.status_descriptions.items():
        responses[str(status)]["description"] = reason
    if route.is_read and route.group != "probes":
        responses["304"] = {"description": HTTPStatus(304).phrase}
    return responses


def _get_common_errors(route: ApiRoute) -> tuple[int, ...]:
    if route.group == "probes":
        return ()
    auth_errors = () if route.access_level is AccessLevel.PUBLIC else _AUTH_ERRORS
    return (*_ALWAYS_POSSIBLE, *auth_errors, *(() if route.body_schema is None else _BODY_ERRORS))


def _build_response(status: int, schema: str) -> dict[str, Any]:
    response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    content = _build_content(schema) if schema else {"text/plain": {"schema": {"type": "string"}}}
    return {**response, "content": content}


def _build_content(schema: str) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
