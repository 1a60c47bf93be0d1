"""The OpenAPI document, made of the table of routes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from price_keeper.build import get_version
from price_keeper.control.calls import HTML, JSON, ApiRoute, AccessLevel
from price_keeper.control.schemas import SCHEMAS

_UUID = {"type": "string", "format": "uuid", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"}
_PATHS: Mapping[str, Mapping[str, Any]] = {
    "org": _UUID,
    "app": {"type": "string", "pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$"},
    "sid": _UUID,
    "day": {"type": "string", "format": "date"},
    "file": {"type": "string", "pattern": r"^[a-z-]+\.[a-z]+$"},
}
_ALWAYS = (400, 429, 503)
_OF_KNOWN = (401, 403)
_OF_BODIES = (408, 413, 415, 417)
_SECURITY = {
    "adminKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"},
}


def document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Bedrock Price Keeper: control API", "version": get_version()},
        "paths": paths,
        "components": {"schemas": dict(SCHEMAS), "securitySchemes": _SECURITY},
    }


def _operation(route: ApiRoute) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "description": f"For {route.access_level.value}."
        if route.access_level is AccessLevel.PUBLIC
        else f"For the administrator or {_whom(route)}.",
        "tags": [route.group],
        "parameters": _parameters(route),
        "responses": _responses(route),
        "security": _security(route),
    }
    if route.body_schema is not None:
        most = f"at most {route.max_body_bytes} bytes"
        told["requestBody"] = {"required": True, "description": most, "content": _content(route.body_schema)}
    return told


def _whom(route: ApiRoute) -> str:
    return "nobody else" if route.access_level is AccessLevel.ADMIN else route.access_level.value


def _security(route: ApiRoute) -> list[dict[str, list[str]]]:
    if route.access_level is AccessLevel.PUBLIC:
        return []
    return [{"adminKey": []}] if route.access_level is AccessLevel.ADMIN else [{"adminKey": []}, {"token": []}]


def _parameters(route: ApiRoute) -> list[dict[str, Any]]:
    names = [segment[1:-1] for segment in route.segments if segment.startswith("{")]
    found = [{"name": name, "in": "path", "required": True, "schema": _PATHS[name]} for name in names]
    found += [
        {"name": name, "in": "query", "required": False, "schema": dict(schema)} for name, schema in route.query_schemas.items()
    ]
    return found + [
        {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in route.request_headers.items()
    ]


def _responses(route: ApiRoute) -> dict[str, Any]:
    responses = {str(status): _response(status, name) for status, name in route.responses.items()}
    if route.media_types:
        responses["200"]["content"] = {kind.partition(";")[0]: {"schema": {"type": "string"}} for kind in route.media_types}
    if route.has_html_variant:
        responses["200"]["content"][HTML.partition(";")[0]] = {"schema": {"type": "string"}}
    for status in sorted({*route.error_statuses, *_usual(route)}):
        responses.setdefault(str(status), _response(status, "Problem"))
    for status, reason in route.status_descriptions.items():
        responses[str(status)]["description"] = reason
    if route.is_read and route.group != "probes":
        responses["304"] = {"description": HTTPStatus(304).phrase}
    return responses


def _usual(route: ApiRoute) -> tuple[int, ...]:
    if route.group == "probes":
        return ()
    known = () if route.access_level is AccessLevel.PUBLIC else _OF_KNOWN
    return (*_ALWAYS, *known, *(() if route.body_schema is None else _OF_BODIES))


def _response(status: int, schema: str) -> dict[str, Any]:
    told: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    content = _content(schema) if schema else {"text/plain": {"schema": {"type": "string"}}}
    return {**told, "content": content}


def _content(schema: str) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
