"""Bodies and queries of the control port: read in one way or refused with words; what is taken can be kept and used."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

from price_keeper.budgets.effective_settings import DEFAULT_ALERT_THRESHOLDS, resolve_settings
from price_keeper.budgets.org_settings import InvalidSettings, validate_app, validate_org
from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.control import (
    api,
    budget_endpoints,
    client_endpoints,
    profile_endpoints,
    token_endpoints,
    usage_endpoints,
)
from price_keeper.control.api_errors import ApiError
from price_keeper.control.control_requests import MAX_JSON_DEPTH, parse_json, parse_query
from price_keeper.domain import PICO_PER_MICRO
from price_keeper.reports import report_period
from price_keeper.stores.dynamodb_expressions import item_from_wire, item_to_wire
from price_keeper.stores.item_codec import decode_item, encode_item
from price_keeper.stores.item_values import check_attributes
from yarl import URL

from tests.fuzz.documents import document, views
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader

FORMS = (
    token_endpoints.LOGIN_BODY,
    token_endpoints.REFRESH_BODY,
    token_endpoints.REVOKE_BODY,
    client_endpoints.ROTATION_BODY,
    budget_endpoints.OVERRIDE_BODY,
    usage_endpoints.USAGE_BODY,
    profile_endpoints.PROFILE_BODY,
)
LABELS = ("premium", "standard", "economy")  # fmt: skip
NAMES = ("org_name", "timezone", "quota_scope",
         "model_ordering", "quotas", "period", "enforcement", "limits", "rpm", "tpm", "agg_shard_count",
         "alert_thresholds_pct", "tight_mode_threshold_pct", "refresh_interval_normal_secs",
         "refresh_interval_tight_secs", "sticky_fallback_enabled", "app_name", *LABELS, "grant_type", "client_id",
         "client_secret", "refresh_token", "token", "grace_hours", "label", "reason", "until", "who", "request_id",
         "input_tokens", "output_tokens", "cache_read_tokens", "service_tier", "occurred_at", "format",
         "inference_profile_arn", "prices_usd_per_1m", "input", "output", "capacity", "refill",
         "overrides")  # fmt: skip
TEXTS = (*LABELS, "UTC", "Europe/Berlin", "ORG", "APP", "day", "month", "hard", "soft", "client_credentials",
         "anthropic", "2026-11-18T15:00:00Z", "2026-02-30T15:00:00Z", "0001-01-01T00:00:00+23:59", "../../etc/passwd",
         "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc")  # fmt: skip
GOOD = {"org_name": "Acme", "timezone": "UTC", "quota_scope": "ORG", "model_ordering": ["premium", "standard"],
        "quotas": {"premium": 5, "standard": 7}}  # fmt: skip
QUERIES = [route for table in api._ROUTE_TABLES for route in table if route.query_schemas]
WORDS = (*(b'"%b":' % name.encode() for name in NAMES), b"limit=", b"cursor=", b"from=2026-11-01", b"&to=", b"%00")
DEFAULTS = DefaultsConfig()
NOW = 1_795_003_200.0


def one(data: bytes) -> None:
    reader = Reader(data)
    how = reader.byte()
    if how % 4 == 3:
        _asked(reader)
        return
    body = document(reader, NAMES, TEXTS)
    try:
        value = parse_json(body)
    except ApiError as problem:
        _check_message(problem)
        return
    first, last = views(body)
    same(first, last, "the body to two readers")
    same(_plain(value), _plain(last), "the body")
    holds(_depth(value) <= MAX_JSON_DEPTH, "deeper than is taken")
    if how % 4 == 0:
        value = {**GOOD, **value} if isinstance(value, dict) else value
    for form in FORMS:
        with suppress(ApiError):
            given = form.parse(value)
            holds(set(form.required) <= given.keys() <= form.types.keys(), f"fields: {given}")
    _settings(value)


def _settings(value: Any) -> None:
    """Of an org, and of an app in it."""
    org = _checked(lambda: validate_org(value, LABELS, None, DEFAULTS))
    if org is not None:
        settings = resolve_settings(org, None, DEFAULTS, DEFAULT_ALERT_THRESHOLDS, NOW)
        same(settings.problems, (), f"what is passed over of {org}")
        same(list(settings.ordering), org["model_ordering"], f"the ordering of {org}")
        micros = {label: pico / PICO_PER_MICRO for label, pico in settings.quotas.items()}
        same(micros, org["quotas"], f"the quotas of {org}")
    above = org or GOOD
    app = _checked(lambda: validate_app(value, LABELS, above))
    if app is not None:
        same(
            resolve_settings(above, app, DEFAULTS, DEFAULT_ALERT_THRESHOLDS, NOW).problems,
            (),
            f"what is passed over of {app}",
        )


def _checked(check: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """What is taken is kept by every store; what is not is refused with words."""
    try:
        settings = check()
    except InvalidSettings as refused:
        words = refused.problems
        holds(words and all(each.isprintable() for each in words), f"words that are none: {words}")
        return None
    check_attributes(settings)
    for kept in (decode_item(encode_item(settings)), item_from_wire(item_to_wire(settings))):
        same(kept, settings, "settings that are read back")
    return settings


def _asked(reader: Reader) -> None:
    route, text = reader.pick(QUERIES), reader.rest()
    raw = "".join(chr(each) for each in text if 0x20 < each < 0x7F and each != ord("#"))
    try:
        url = URL(f"/?{raw}", encoded=True)
    except ValueError:
        return
    try:
        given = parse_query(SimpleNamespace(rel_url=url), route)  # type: ignore[arg-type]
    except ApiError as problem:
        _check_message(problem)
        return
    found = parse_qsl(raw, keep_blank_values=True)
    same(given, dict(found), "the query")
    same(len(given), len(found), "names in the query")
    for name in ("from", "to"):
        if name in given:
            with suppress(ValueError):
                report_period.check_report_period(report_period.parse_report_period(given[name]), NOW)


def _check_message(problem: ApiError) -> None:
    holds(400 <= problem.status < 500, f"a mistake of ours: {problem.status}")
    holds(problem.message.isprintable(), f"words that are none: {problem.message!r}")


def _plain(value: Any) -> Any:
    """Numbers as they are to a reader that knows no Decimals."""
    if isinstance(value, (Decimal, float)):
        return float(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else json.dumps(value)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)
