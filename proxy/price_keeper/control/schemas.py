"""What goes in and what comes out, as JSON Schema. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from price_keeper.config.prices import Format
from price_keeper.control import auth, credentials, overrides, profiles, usage
from price_keeper.control.fields import make_nullable
from price_keeper.control.page import signing_in
from price_keeper.limits.settings import MODES, MAX_RATE, MAX_BURST_SECS, RATES
from price_keeper.recording.entries import UsageCounts
from price_keeper.selection.settings import APP_SETTINGS, MAX_NAME_LENGTH, MAX_ORDERING_LABELS, ORG_SETTINGS

Schema = Mapping[str, Any]

_TEXT: Schema = {"type": "string"}
_TEXT_OR_NOT: Schema = {"type": ["string", "null"]}
_WHOLE: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_TRUTH: Schema = {"type": "boolean"}
_ANYTHING: Schema = {"type": ["object", "null"]}
_MOMENT: Schema = {"type": "string", "format": "date-time"}
_MOMENT_OR_NOT: Schema = {"type": ["string", "null"], "format": "date-time"}
_DATE: Schema = {"type": "string", "format": "date"}
# Exact, in micro-dollars; a string, since not every program keeps a number's digits.
_MICROS: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]{1,6})?$"}
_MICROS_OR_NOT: Schema = {**_MICROS, "type": ["string", "null"]}


def _list(of: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": of, **more}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Mapping[str, Schema], *optional: str, **more: Any) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required, **more}


_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_LENGTH}
_SETTING: Mapping[str, Schema] = {
    "org_name": _NAME,
    "app_name": _NAME,
    "timezone": {"type": "string", "description": "of the IANA zone database, as Europe/Berlin"},
    "quota_scope": {"type": "string", "enum": ["ORG", "APP"]},
    "period": {"type": "string", "enum": ["day", "week", "month"]},
    "model_ordering": _list(_TEXT, minItems=1, maxItems=MAX_ORDERING_LABELS, description="labels, the dearest first"),
    "quotas": {"type": "object", "additionalProperties": _WHOLE, "description": "micro-USD by label"},
    "sticky_fallback_enabled": _TRUTH,
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
    "alert_thresholds_pct": _list({"type": "integer", "minimum": 1, "maximum": 999}),
    "agg_shard_count": {"type": "integer", "enum": [8, 16, 32, 64]},
}


def _settings(names: tuple[str, ...], *required: str) -> Schema:
    properties = {name: _SETTING[name] if name in required else make_nullable(_SETTING[name]) for name in names}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_SHOWN = _object(
    {
        "org": _TEXT,
        "app": _TEXT,
        "org_name": _TEXT_OR_NOT,
        "settings": {"type": "object"},
        "in_force": {"type": "object"},
        "turns_at": _MOMENT_OR_NOT,
        "created_at": _MOMENT_OR_NOT,
        "updated_at": _MOMENT_OR_NOT,
        "passed_over": _list(_TEXT),
        "client_id": _TEXT,
        "secret_retrieval_token": _TEXT,
        "secret_retrieval_expires_at": _MOMENT,
    },
    "app", "org_name", "client_id", "secret_retrieval_token", "secret_retrieval_expires_at",
    additionalProperties=False,
)  # fmt: skip

_NUMBERS: Mapping[str, Schema] = {**dict.fromkeys(UsageCounts._fields[:-1], _WHOLE), "cost_usd_micros": _MICROS}
_OVERRIDE = _object({"label": _TEXT, "reason": _TEXT, "who": _TEXT, "until": _MOMENT, "version": _WHOLE})
_OVERRIDE_OR_NOT: Schema = {"anyOf": [_OVERRIDE, {"type": "null"}]}
_CURSOR: Schema = {"type": ["string", "null"], "description": "where the next page begins; null on the last one"}
_MODE: Schema = {"type": "string", "enum": ["NORMAL", "TIGHT", "EXCEEDED"]}
_PRICES = {"type": "object", "additionalProperties": _NUMBER}

_FIGURES: Mapping[str, Schema] = {
    "label": _TEXT,
    "spent_usd_micros": _MICROS,
    "quota_usd_micros": _WHOLE,
    "quota_pct": _WHOLE,
    "mode": _MODE,
}
_ROW = _object(
    {
        **dict.fromkeys(("org_name", "app", "app_name", "active_label", "serves"), _TEXT_OR_NOT),
        "org": _TEXT,
        "is_overridden": _TRUTH,
        "is_stale": _TRUTH,
        "labels": _list(_object(_FIGURES)),
    }
)
_STATES = ["reached", "expected", "not_in_this_period", "unknown"]
_REACHED = _object({"state": {"type": "string", "enum": _STATES}, "at": _MOMENT_OR_NOT})
_SITUATION = _object(
    {
        "serves": {**_TEXT_OR_NOT, "description": "null: no label has anything left"},
        "would_have_served": {**_TEXT_OR_NOT, "description": "had these quotas held since the period began"},
        "labels": _list(_object({**_FIGURES, "reached": _REACHED})),
    }
)

SCHEMAS: Mapping[str, Schema] = {
    "Problem": _object(
        {
            "error": _TEXT,
            "message": _TEXT,
            "details": _list(_object({"path": _TEXT, "message": _TEXT})),
            "timestamp": _MOMENT,
            "request_id": {"type": "string", "format": "uuid"},
        },
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
    "Login": auth.LOGIN_BODY.schema,
    "Refresh": auth.REFRESH_BODY.schema,
    "Revoke": auth.REVOKE_BODY.schema,
    "Revoked": _object({"is_revoked": _TRUTH}),
    "Tokens": _object(
        {
            "access_token": _TEXT,
            "refresh_token": _TEXT,
            "token_type": {"type": "string", "const": "Bearer"},
            "expires_in": _WHOLE,
            "refresh_expires_in": _WHOLE,
            "session_id": _TEXT,
        }
    ),
    "ContainerCredentials": _object(
        {"AccessKeyId": _TEXT, "SecretAccessKey": _TEXT, "Token": _TEXT, "Expiration": _MOMENT}
    ),
    "Jwks": _object({"keys": _list({"type": "object"})}),
    "Rotation": credentials.ROTATION_BODY.schema,
    "Issued": _object({"client_id": _TEXT, "secret_retrieval_token": _TEXT, "secret_retrieval_expires_at": _MOMENT}),
    "Sessions": _object(
        {
            "sessions": _list(
                _object(
                    {
                        "session_id": _TEXT,
                        "began_at": _MOMENT,
                        "refreshed_at": _MOMENT,
                        "expires_at": _MOMENT,
                    }
                )
            )
        }
    ),
    "Ended": _object({"ended": {**_WHOLE, "description": "sessions"}}),
    "Secret": _object({"client_id": _TEXT, "client_secret": _TEXT}),
    "OrgSettings": _settings(ORG_SETTINGS, "org_name", "timezone", "quota_scope", "model_ordering", "quotas"),
    "AppSettings": _settings(APP_SETTINGS, "app_name"),
    "Settings": _SHOWN,
    "Orgs": _object({"orgs": _list(_ref("Settings")), "cursor": _CURSOR}),
    "Apps": _object({"apps": _list(_ref("Settings")), "cursor": _CURSOR}),
    "Override": overrides.OVERRIDE_BODY.schema,
    "Overridden": _object(
        {"org": _TEXT, "app": _TEXT_OR_NOT, "period": _TEXT, "override": _OVERRIDE_OR_NOT, "is_cleared": _TRUTH},
        "is_cleared",
    ),
    "Selection": _object(
        {
            "scope": _object({"org": _TEXT, "app": _TEXT_OR_NOT}),
            "period": _TEXT,
            "resets_at": _MOMENT,
            "enforcement": _TEXT,
            "active_label": _TEXT_OR_NOT,
            "override": _OVERRIDE_OR_NOT,
            "is_stale": _TRUTH,
            "labels": _list(
                _object(
                    {
                        "label": _TEXT,
                        "served_by": _TEXT_OR_NOT,
                        "would_be_served_by": _TEXT_OR_NOT,
                        "spent_usd_micros": _MICROS_OR_NOT,
                        "in_flight_usd_micros": _MICROS_OR_NOT,
                        "quota_usd_micros": {"type": ["integer", "null"]},
                        "quota_pct": {"type": ["integer", "null"]},
                        "mode": _MODE,
                    }
                )
            ),
        }
    ),
    "Aggregates": _object(
        {
            "org": _TEXT,
            "app": _TEXT_OR_NOT,
            "from": _DATE,
            "to": _DATE,
            "is_final": _TRUTH,
            "rows": _list(
                _object(
                    {
                        "org": _TEXT,
                        "org_name": _TEXT_OR_NOT,
                        "app": _TEXT_OR_NOT,
                        "app_name": _TEXT_OR_NOT,
                        "label": _TEXT,
                        "day": _DATE,
                        **_NUMBERS,
                    }
                )
            ),
            "total": _object(_NUMBERS),
            "notes": _list(_TEXT),
        }
    ),
    "UsageBody": usage.USAGE_BODY.schema,
    "UsageBatch": {
        "type": "object",
        "properties": {
            "items": _list(
                {"description": "as UsageBody; one that is not is refused by itself"},
                minItems=1,
                maxItems=usage.MOST_ITEMS,
            )
        },
        "required": ["items"],
        "additionalProperties": False,
    },
    "Usage": _object(
        {"request_id": _TEXT, "label": _TEXT, "day": _DATE, "cost_usd_micros": _MICROS, "is_repeat": _TRUTH}
    ),
    "UsageResults": _object(
        {
            "results": _list(
                _object(
                    {"index": _WHOLE, "status": _WHOLE, "usage": _ref("Usage"), "problem": _ref("Problem")},
                    "usage",
                    "problem",
                )
            )
        }
    ),
    "ProfileBody": profiles.PROFILE_BODY.schema,
    "Profile": _object(
        {
            "label": _TEXT,
            "inference_profile_arn": _TEXT,
            "format": {"type": "string", "enum": list(get_args(Format))},
            "prices_usd_per_1m": _PRICES,
            "version": _WHOLE,
        }
    ),
    "Profiles": _object({"inference_profiles": _list(_ref("Profile"))}),
    "Audit": _object(
        {
            "records": _list(
                _object(
                    {
                        "id": _TEXT,
                        "at": _MOMENT,
                        "action": _TEXT,
                        "who": _TEXT,
                        "address": _TEXT_OR_NOT,
                        "request_id": _TEXT,
                        "app": _TEXT_OR_NOT,
                        "before": _ANYTHING,
                        "after": _ANYTHING,
                    }
                )
            ),
            "cursor": _CURSOR,
        }
    ),
    "PageSignIn": signing_in.SIGN_IN_BODY.schema,
    "PageSession": _object(
        {
            "is_signed_in": _TRUTH,
            "is_admin": {"type": ["boolean", "null"]},
            "org": _TEXT_OR_NOT,
            "app": _TEXT_OR_NOT,
            "expires_at": _MOMENT_OR_NOT,
        }
    ),
    "Board": _object(
        {
            "at": _MOMENT,
            "health": _ref("Ready"),
            "trouble": _TEXT_OR_NOT,
            "list": _object({"rows": _list(_ROW), "cursor": _CURSOR}),
            "scope": {"type": "object", "description": "as Selection, and when quotas will be reached"},
            "course": {"type": "object", "description": "by label, pairs of epoch seconds and micro-USD spent by then"},
            "happened": _list({"type": "object"}),
        },
        *("list", "scope", "course", "happened"),
    ),
    "WhatIf": _object(
        {"label": _TEXT, "quota_usd_micros": _WHOLE, "as_it_is": _SITUATION, "as_it_would_be": _SITUATION}
    ),
}
