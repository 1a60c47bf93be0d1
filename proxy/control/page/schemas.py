"""What goes to the status page and what comes from it, as JSON Schema. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.control.page import signing_in

Schema = Mapping[str, Any]

_TEXT: Schema = {"type": "string"}
_TEXT_OR_NOT: Schema = {"type": ["string", "null"]}
_WHOLE: Schema = {"type": "integer", "minimum": 0}
_TRUTH: Schema = {"type": "boolean"}
_MOMENT: Schema = {"type": "string", "format": "date-time"}
_MOMENT_OR_NOT: Schema = {"type": ["string", "null"], "format": "date-time"}


def _object(properties: Mapping[str, Schema], *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


_REACHED = _object(
    {
        "state": {"type": "string", "enum": ["reached", "expected", "not_in_this_period", "unknown"]},
        "at": _MOMENT_OR_NOT,
    }
)
_FIGURES: Mapping[str, Schema] = {
    "label": _TEXT,
    "spent_usd_micros": {"type": "string", "pattern": r"^[0-9]+(\.[0-9]{1,6})?$"},
    "quota_usd_micros": _WHOLE,
    "quota_pct": _WHOLE,
    "mode": {"type": "string", "enum": ["NORMAL", "TIGHT", "EXCEEDED"]},
}
_SITUATION = _object(
    {
        "serves": {**_TEXT_OR_NOT, "description": "null: no label has anything left"},
        "would_have_served": {**_TEXT_OR_NOT, "description": "had these quotas held since the period began"},
        "labels": _list(_object({**_FIGURES, "reached": _REACHED})),
    }
)
_PLACE: Mapping[str, Schema] = {"org": _TEXT, "org_name": _TEXT_OR_NOT, "app": _TEXT_OR_NOT, "app_name": _TEXT_OR_NOT}
_ROW = _object(
    {
        **_PLACE,
        "active_label": _TEXT_OR_NOT,
        "serves": _TEXT_OR_NOT,
        "is_overridden": _TRUTH,
        "is_stale": _TRUTH,
        "labels": _list(_object(_FIGURES)),
    }
)

SCHEMAS: Mapping[str, Schema] = {
    "PageSignIn": signing_in.BODY.schema,
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
            "health": {"$ref": "#/components/schemas/Ready"},
            "trouble": _TEXT_OR_NOT,
            "list": _object({"rows": _list(_ROW), "cursor": _TEXT_OR_NOT}),
            "scope": {
                "description": "as Selection, with the pace, when quotas will be reached, and since when that is known",
                "type": "object",
            },
            "course": {
                "description": "by label, pairs of epoch seconds and micro-USD spent by then, as far as it is known",
                "type": "object",
            },
            "happened": _list({"type": "object"}),
        },
        "list",
        "scope",
        "course",
        "happened",
    ),
    "WhatIf": _object(
        {
            "label": _TEXT,
            "quota_usd_micros": _WHOLE,
            "as_it_is": _SITUATION,
            "as_it_would_be": _SITUATION,
        }
    ),
}
