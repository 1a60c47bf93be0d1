"""The OpenAPI document of the control API: JSON Schemas of bodies, and paths built from the table of routes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, get_args

from price_keeper.budgets.org_settings import APP_SETTINGS, MAX_ORDERING_LABELS, ORG_SETTINGS
from price_keeper.config.config_sections import Format
from price_keeper.control import budget_endpoints, client_endpoints, profile_endpoints, token_endpoints, usage_endpoints
from price_keeper.control.api_types import API_PREFIX, FORM, HTML, JSON, AccessLevel, ApiRoute
from price_keeper.control.body_fields import make_nullable
from price_keeper.control.page import page_sign_in
from price_keeper.domain import AMOUNT_FORMS, AMOUNT_PATTERN, MAX_NAME_LENGTH
from price_keeper.price_dimensions import COUNT_FIELDS
from price_keeper.rates.rate_limit_settings import MAX_BURST_SECS, MAX_RATE, MODES, RATES
from price_keeper.telemetry.build_info import get_version

Schema = Mapping[str, Any]

_TEXT: Schema = {"type": "string"}
_NULLABLE_TEXT: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_NULLABLE_OBJECT: Schema = {"type": ["object", "null"]}
_TIMESTAMP: Schema = {"type": "string", "format": "date-time"}
_NULLABLE_TIMESTAMP: Schema = {"type": ["string", "null"], "format": "date-time"}
_DATE: Schema = {"type": "string", "format": "date"}
# Exact, in micro-dollars; a string, since not every program keeps a number's digits.
_MICRO_USD: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]{1,6})?$"}
_NULLABLE_COUNT: Schema = {"type": ["integer", "null"]}
_NULLABLE_MICRO_USD: Schema = {**_MICRO_USD, "type": ["string", "null"]}


def _money(name: str) -> dict[str, Schema]:
    """Whole micro-dollars, rounded down, and the exact figure."""
    return {name: _COUNT, f"{name}_exact": _MICRO_USD}


def _text_money(name: str, *, nullable: bool = False) -> dict[str, Schema]:
    """A name that is the exact figure until 1.0, and the whole number from then on."""
    exact, whole = (_NULLABLE_MICRO_USD, _NULLABLE_COUNT) if nullable else (_MICRO_USD, _COUNT)
    return {name: exact, f"{name}_exact": exact, f"{name}_whole": whole}


def _list_of(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Mapping[str, Schema], *optional: str, **more: Any) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required, **more}


_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_LENGTH}
_SETTING_SCHEMAS: Mapping[str, Schema] = {
    "org_name": _NAME,
    "app_name": _NAME,
    "timezone": {"type": "string", "description": "of the IANA zone database, as Europe/Berlin"},
    "quota_scope": {"type": "string", "enum": ["ORG", "APP"]},
    "period": {"type": "string", "enum": ["day", "week", "month"]},
    "model_ordering": _list_of(
        _TEXT, minItems=1, maxItems=MAX_ORDERING_LABELS, description="labels, the dearest first"
    ),
    "quotas": {
        "type": "object",
        "additionalProperties": {"type": ["integer", "string"], "minimum": 0, "pattern": f"^(?:{AMOUNT_PATTERN})$"},
        "description": f"amounts by label, such as {AMOUNT_FORMS}; shown in micro-USD",
    },
    "sticky_fallback_enabled": _BOOLEAN,
    "tight_mode_threshold_pct": {"type": "integer", "minimum": 1, "maximum": 100},
    "refresh_interval_normal_secs": _NUMBER,
    "refresh_interval_tight_secs": _NUMBER,
    "enforcement": {"type": "string", "enum": ["soft", "hard", "shadow"]},
    "limits": {
        "type": "object",
        "properties": {
            **dict.fromkeys(RATES, make_nullable({"type": "integer", "minimum": 1, "maximum": MAX_RATE})),
            "burst_secs": make_nullable({"type": "integer", "minimum": 1, "maximum": MAX_BURST_SECS}),
            "mode": make_nullable({"type": "string", "enum": list(MODES)}),
        },
        "additionalProperties": False,
        "description": "requests and tokens a minute, how many seconds of them may come at once, and how they are kept",
    },
    "alert_thresholds_pct": _list_of({"type": "integer", "minimum": 1, "maximum": 999}),
    "agg_shard_count": {"type": "integer", "enum": [8, 16, 32, 64]},
}


def _settings_object(names: tuple[str, ...], *required: str) -> Schema:
    properties = {
        name: _SETTING_SCHEMAS[name] if name in required else make_nullable(_SETTING_SCHEMAS[name]) for name in names
    }
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_SHOWN_SETTINGS = _object(
    {
        "org": _TEXT,
        "app": _TEXT,
        "org_name": _NULLABLE_TEXT,
        "settings": {"type": "object"},
        "in_force": {"type": "object"},
        "turns_at": _NULLABLE_TIMESTAMP,
        "created_at": _NULLABLE_TIMESTAMP,
        "updated_at": _NULLABLE_TIMESTAMP,
        "passed_over": _list_of(_TEXT),
        "has_credentials": {**_BOOLEAN, "description": "false where a put was interrupted: another one makes them"},
        "client_id": _TEXT,
        "secret_retrieval_token": _TEXT,
        "secret_retrieval_expires_at": _TIMESTAMP,
    },
    "app", "org_name", "client_id", "secret_retrieval_token", "secret_retrieval_expires_at",
    additionalProperties=False,
)  # fmt: skip

_QUOTA: Mapping[str, Schema] = {
    "quota_usd_micros": {**_NULLABLE_COUNT, "description": "null: unlimited"},
    "quota_usd_micros_exact": _NULLABLE_MICRO_USD,
}
_COUNTERS: Mapping[str, Schema] = {**dict.fromkeys(COUNT_FIELDS, _COUNT), **_text_money("cost_usd_micros")}
_OVERRIDE = _object({"label": _TEXT, "reason": _TEXT, "who": _TEXT, "until": _TIMESTAMP, "version": _COUNT})
_NULLABLE_OVERRIDE: Schema = {"anyOf": [_OVERRIDE, {"type": "null"}]}
_CURSOR: Schema = {"type": ["string", "null"], "description": "where the next page begins; null on the last one"}
_MODE: Schema = {"type": "string", "enum": ["NORMAL", "TIGHT", "EXCEEDED"]}
_PRICES = {"type": "object", "additionalProperties": _NUMBER}

_QUOTA_USAGE: Mapping[str, Schema] = {
    "label": _TEXT,
    **_text_money("spent_usd_micros"),
    **_money("quota_usd_micros"),
    "quota_pct": _COUNT,
    "mode": _MODE,
}
_LABEL_TOTAL = _object(
    {
        "app": {**_NULLABLE_TEXT, "description": "null where all apps share the budget"},
        "label": _TEXT,
        "period": _TEXT,
        **dict.fromkeys(COUNT_FIELDS, _COUNT),
        **_money("daily_total_usd_micros"),
        **_money("period_total_usd_micros"),
        **_QUOTA,
        "quota_pct": _NULLABLE_COUNT,
        "mode": _MODE,
    }
)
_BOARD_ROW = _object(
    {
        **dict.fromkeys(("org_name", "app", "app_name", "active_label", "serves"), _NULLABLE_TEXT),
        "org": _TEXT,
        "is_overridden": _BOOLEAN,
        "is_stale": _BOOLEAN,
        "labels": _list_of(_object(_QUOTA_USAGE)),
    }
)
_FORECAST_STATES = ["reached", "expected", "not_in_this_period", "unknown"]
_QUOTA_FORECAST = _object({"state": {"type": "string", "enum": _FORECAST_STATES}, "at": _NULLABLE_TIMESTAMP})
_WHAT_IF_OUTCOME = _object(
    {
        "serves": {**_NULLABLE_TEXT, "description": "null: no label has anything left"},
        "would_have_served": {**_NULLABLE_TEXT, "description": "had these quotas held since the period began"},
        "labels": _list_of(_object({**_QUOTA_USAGE, "reached": _QUOTA_FORECAST})),
    }
)

SCHEMAS: Mapping[str, Schema] = {
    "Problem": _object(
        {
            "error": _TEXT,
            "message": _TEXT,
            "details": _list_of(_object({"path": _TEXT, "message": _TEXT})),
            "error_description": {**_TEXT, "description": "the message, for clients of RFC 6749"},
            "retryable": {**_BOOLEAN, "description": "true: the same request may succeed if it is sent again"},
            "timestamp": _TIMESTAMP,
            "request_id": {"type": "string", "format": "uuid"},
        },
        "error_description",
        "retryable",
        additionalProperties=False,
    ),
    "Health": _object({"status": {"type": "string", "const": "ok"}}),
    "Ready": _object(
        {
            "status": {"type": "string", "enum": ["ready", "not ready"]},
            "checks": {"type": "object", "additionalProperties": _TEXT},
        }
    ),
    "Front": _object(
        {
            "product": _TEXT,
            "version": _TEXT,
            "role": {"type": "string", "enum": ["both", "sidecar", "control"]},
            "status": {"type": "string", "enum": ["ready", "not ready"]},
            "checks": {"type": "object", "additionalProperties": _TEXT},
            "links": {"type": "object", "additionalProperties": _TEXT},
        }
    ),
    "OpenApi": {"type": "object"},
    "Login": token_endpoints.LOGIN_SCHEMA,
    "Refresh": token_endpoints.REFRESH_BODY.schema,
    "Revoke": token_endpoints.REVOKE_BODY.schema,
    "LoginForm": token_endpoints.LOGIN_FORM,
    "RefreshForm": token_endpoints.REFRESH_FORM,
    "RevokeForm": token_endpoints.REVOKE_FORM,
    "AuthorizationServer": _object(
        {
            **dict.fromkeys(("issuer", "token_endpoint", "revocation_endpoint", "jwks_uri"), _TEXT),
            "grant_types_supported": _list_of(_TEXT),
            "response_types_supported": _list_of(_TEXT),
            "token_endpoint_auth_methods_supported": _list_of(_TEXT),
            "revocation_endpoint_auth_methods_supported": _list_of(_TEXT),
        }
    ),
    "Revoked": _object({"is_revoked": _BOOLEAN}),
    "Tokens": _object(
        {
            "access_token": _TEXT,
            "refresh_token": _TEXT,
            "token_type": {"type": "string", "const": "Bearer"},
            "expires_in": _COUNT,
            "refresh_expires_in": _COUNT,
            "session_id": _TEXT,
        }
    ),
    "ContainerCredentials": _object(
        {"AccessKeyId": _TEXT, "SecretAccessKey": _TEXT, "Token": _TEXT, "Expiration": _TIMESTAMP}
    ),
    "Jwks": _object({"keys": _list_of({"type": "object"})}),
    "Rotation": client_endpoints.ROTATION_BODY.schema,
    "Issued": _object({"client_id": _TEXT, "secret_retrieval_token": _TEXT, "secret_retrieval_expires_at": _TIMESTAMP}),
    "Sessions": _object(
        {
            "sessions": _list_of(
                _object(
                    {
                        "session_id": _TEXT,
                        "began_at": _TIMESTAMP,
                        "refreshed_at": _TIMESTAMP,
                        "expires_at": _TIMESTAMP,
                    }
                )
            )
        }
    ),
    "Revocation": _object(
        {
            "id": _TEXT,
            "token_type": {
                "type": "string",
                "enum": ["access", "refresh"],
                "description": "refresh: a session, with the access tokens made from it",
            },
            "client_id": _TEXT,
            "revoked_at_epoch": _COUNT,
            "original_expiry_epoch": _COUNT,
            "expires_at_epoch": {**_COUNT, "description": "how long the revocation is kept"},
        }
    ),
    "OrgKeyIssued": _object({"org": _TEXT, "admin_key": _TEXT}),
    "OrgKeyRemoved": _object({"org": _TEXT, "is_removed": _BOOLEAN}),
    "Ended": _object({"ended": {**_COUNT, "description": "sessions"}}),
    "Secret": _object({"client_id": _TEXT, "client_secret": _TEXT}),
    "OrgSettings": _settings_object(ORG_SETTINGS, "org_name", "timezone", "quota_scope", "model_ordering", "quotas"),
    "AppSettings": _settings_object(APP_SETTINGS, "app_name"),
    "Settings": _SHOWN_SETTINGS,
    "Orgs": _object({"orgs": _list_of(_ref("Settings")), "cursor": _CURSOR}),
    "Apps": _object({"apps": _list_of(_ref("Settings")), "cursor": _CURSOR}),
    "Override": budget_endpoints.OVERRIDE_BODY.schema,
    "Overridden": _object(
        {"org": _TEXT, "app": _NULLABLE_TEXT, "period": _TEXT, "override": _NULLABLE_OVERRIDE, "is_cleared": _BOOLEAN},
        "is_cleared",
    ),
    "Selection": _object(
        {
            "scope": _object({"org": _TEXT, "app": _NULLABLE_TEXT}),
            "period": _TEXT,
            "resets_at": _TIMESTAMP,
            "enforcement": _TEXT,
            "active_label": _NULLABLE_TEXT,
            "override": _NULLABLE_OVERRIDE,
            "is_stale": _BOOLEAN,
            "labels": _list_of(
                _object(
                    {
                        "label": _TEXT,
                        "served_by": _NULLABLE_TEXT,
                        "would_be_served_by": _NULLABLE_TEXT,
                        **_text_money("spent_usd_micros", nullable=True),
                        **_text_money("in_flight_usd_micros", nullable=True),
                        **_QUOTA,
                        "quota_pct": _NULLABLE_COUNT,
                        "mode": _MODE,
                    }
                )
            ),
        }
    ),
    "Aggregates": _object(
        {
            "org": _TEXT,
            "app": _NULLABLE_TEXT,
            "from": _DATE,
            "to": _DATE,
            "is_final": _BOOLEAN,
            "rows": _list_of(
                _object(
                    {
                        "org": _TEXT,
                        "org_name": _NULLABLE_TEXT,
                        "app": _NULLABLE_TEXT,
                        "app_name": _NULLABLE_TEXT,
                        "label": _TEXT,
                        "day": _DATE,
                        **_COUNTERS,
                    }
                )
            ),
            "total": _object(_COUNTERS),
            "notes": _list_of(_TEXT),
            "labels": _list_of(_LABEL_TOTAL, description="of today: each label of the budgets that pay"),
        },
        "labels",
    ),
    "UsageBody": usage_endpoints.USAGE_BODY.schema,
    "UsageBatch": {
        "type": "object",
        "properties": {
            "items": _list_of(
                {"description": "as UsageBody; one that is not is refused by itself"},
                minItems=1,
                maxItems=usage_endpoints.MAX_ITEMS,
            )
        },
        "required": ["items"],
        "additionalProperties": False,
    },
    "Usage": _object(
        {
            "request_id": _TEXT,
            "label": _TEXT,
            "day": _DATE,
            **_text_money("cost_usd_micros"),
            "is_repeat": _BOOLEAN,
            **_money("daily_total_usd_micros"),
            **_QUOTA,
            "quota_pct": _NULLABLE_COUNT,
            "mode": _MODE,
            "active_label": _NULLABLE_TEXT,
            "data_age_seconds": {**_NULLABLE_COUNT, "description": "of what is known of the spend of others"},
        }
    ),
    "UsageResults": _object(
        {
            "results": _list_of(
                _object(
                    {"index": _COUNT, "status": _COUNT, "usage": _ref("Usage"), "problem": _ref("Problem")},
                    "usage",
                    "problem",
                )
            )
        }
    ),
    "ProfileBody": profile_endpoints.PROFILE_BODY.schema,
    "Profile": _object(
        {
            "label": _TEXT,
            "inference_profile_arn": _TEXT,
            "format": {"type": "string", "enum": list(get_args(Format))},
            "prices_usd_per_1m": _PRICES,
            "version": _COUNT,
        }
    ),
    "Profiles": _object({"inference_profiles": _list_of(_ref("Profile"))}),
    "Audit": _object(
        {
            "records": _list_of(
                _object(
                    {
                        "id": _TEXT,
                        "at": _TIMESTAMP,
                        "action": _TEXT,
                        "who": _TEXT,
                        "address": _NULLABLE_TEXT,
                        "request_id": _TEXT,
                        "app": _NULLABLE_TEXT,
                        "before": _NULLABLE_OBJECT,
                        "after": _NULLABLE_OBJECT,
                    }
                )
            ),
            "cursor": _CURSOR,
        }
    ),
    "PageSignIn": page_sign_in.SIGN_IN_BODY.schema,
    "PageSession": _object(
        {
            "is_signed_in": _BOOLEAN,
            "is_admin": {"type": ["boolean", "null"]},
            "org": _NULLABLE_TEXT,
            "app": _NULLABLE_TEXT,
            "expires_at": _NULLABLE_TIMESTAMP,
        }
    ),
    "Board": _object(
        {
            "at": _TIMESTAMP,
            "health": _ref("Ready"),
            "trouble": _NULLABLE_TEXT,
            "list": _object({"rows": _list_of(_BOARD_ROW), "cursor": _CURSOR}),
            "scope": {"type": "object", "description": "as Selection, and when quotas will be reached"},
            "course": {"type": "object", "description": "by label, pairs of epoch seconds and micro-USD spent by then"},
            "happened": _list_of({"type": "object"}),
        },
        *("list", "scope", "course", "happened"),
    ),
    "WhatIf": _object(
        {"label": _TEXT, **_money("quota_usd_micros"), "as_it_is": _WHAT_IF_OUTCOME, "as_it_would_be": _WHAT_IF_OUTCOME}
    ),
}


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
        "info": {
            "title": "Bedrock Price Keeper: control API",
            "version": get_version(),
            "description": f"Each path below {API_PREFIX} answers without this prefix too.",
        },
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
            "content": _build_content(route.body_schema) | _build_form_content(route),
        }
    return operation


def _describe_access(route: ApiRoute) -> str:
    return "nobody else" if route.access_level is AccessLevel.ADMIN else route.access_level.value


def _build_security(route: ApiRoute) -> list[dict[str, list[str]]]:
    if route.access_level is AccessLevel.PUBLIC:
        return []
    is_for_keys = route.access_level in (AccessLevel.ADMIN, AccessLevel.ORG_ADMIN)
    return [{"adminKey": []}] if is_for_keys else [{"adminKey": []}, {"token": []}]


def _build_parameters(route: ApiRoute) -> list[dict[str, Any]]:
    names = [segment[1:-1] for segment in route.path.split("/") if segment.startswith("{")]
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


def _build_form_content(route: ApiRoute) -> dict[str, Any]:
    return {} if route.form_schema is None else {FORM: {"schema": _ref(route.form_schema)}}


def _build_content(schema: str) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
