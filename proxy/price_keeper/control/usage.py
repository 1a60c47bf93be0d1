"""Usage that others tell us of: priced as the label's configuration or profile says, counted once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

from price_keeper.control.bodies import SMALL_BODY_BYTES
from price_keeper.control.calls import ApiResponse, ApiRequest, ApiRoute, AccessLevel
from price_keeper.control.charging import Charging
from price_keeper.control.fields import BodyFields, FieldType, TimestampField, PatternField, IntegerField
from price_keeper.control.overrides import LABEL_FIELD
from price_keeper.control.parts import ControlServices
from price_keeper.control.problems import ERROR_CODES, ApiError, invalid_request, not_found, to_api_error
from price_keeper.errors import StoreUnavailable
from price_keeper.metering.pricing import Cost, price_usage, build_label_price_table
from price_keeper.metering.profiles import NO_PROFILES, UNREAD_PROFILES
from price_keeper.metering.usage import Usage
from price_keeper.model import Caller, build_client_id
from price_keeper.recording.entries import PICO_PER_MICRO, Counter, build_counts
from price_keeper.recording.flush import DAY_SECONDS, to_micros
from price_keeper.recording.submitted import MAX_SUBMISSION_AGE_SECONDS, ChargedSubmission, RequestIdConflict, UsageSubmission
from price_keeper.reporting import money
from price_keeper.selection.plan import EffectiveSettings, resolve_settings
from price_keeper.stores import schema

MOST_ITEMS = 100
AHEAD_SECONDS = 300.0  # by which the teller's clock may be ahead
MOST_TOKENS = 10**9

_TOKEN_COUNT_FIELD = IntegerField(0, MOST_TOKENS)
_USAGE_FIELDS: Mapping[str, FieldType] = {
    "request_id": PatternField(r"[A-Za-z0-9._:-]{1,128}", 128, "1 to 128 letters, digits or any of ._:-"),
    "label": LABEL_FIELD,
    "input_tokens": _TOKEN_COUNT_FIELD,
    "output_tokens": _TOKEN_COUNT_FIELD,
    "cache_read_tokens": _TOKEN_COUNT_FIELD,
    "cache_write_5m_tokens": _TOKEN_COUNT_FIELD,
    "cache_write_1h_tokens": _TOKEN_COUNT_FIELD,
    "service_tier": PatternField(r"[a-z]{1,32}", 32, "a service tier in small letters"),
    "occurred_at": TimestampField(),
}
USAGE_BODY = BodyFields(_USAGE_FIELDS, ("request_id", "label", "input_tokens", "output_tokens"))
_TOKEN_FIELD_NAMES = {name.removesuffix("_tokens"): name for name in _USAGE_FIELDS if name.endswith("_tokens")}


async def post(services: ControlServices, request: ApiRequest) -> ApiResponse:
    charging = await _charging(services, request)
    what, counters = await _read(services, charging, request.body, "")
    try:
        kept, is_new = await services.submissions.submit(what, counters)
    except RequestIdConflict as failure:
        raise _taken(failure, "") from None
    _tell(services, counters if is_new else ())
    return ApiResponse(_kept(what.request_id, kept, is_new), _status(is_new))


async def post_batch(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Each by itself: one that is refused does not keep the others from being counted."""
    body = request.body
    items = body.get("items") if isinstance(body, Mapping) and set(body) == {"items"} else None
    if not isinstance(items, list) or not 0 < len(items) <= MOST_ITEMS:
        raise invalid_request("the body cannot be used", ("items", f"expected a list of 1 to {MOST_ITEMS} usages"))
    charging = await _charging(services, request)
    told: dict[int, dict[str, Any]] = {}
    good: dict[int, ChargedSubmission] = {}
    for index, item in enumerate(items):
        try:
            good[index] = await _read(services, charging, item, _below(index))
        except Exception as failure:
            told[index] = _refused(services, request, failure)
    await _count(services, request, good, told)
    return ApiResponse({"results": [{"index": index, **told[index]} for index in range(len(items))]}, 207)


async def _count(services: ControlServices, request: ApiRequest, good: Mapping[int, ChargedSubmission], told: dict[int, dict[str, Any]]) -> None:
    outcomes = await services.submissions.submit_all(list(good.values()))
    new: dict[Counter, None] = {}
    for (index, (what, counters)), outcome in zip(good.items(), outcomes, strict=True):
        if isinstance(outcome, RequestIdConflict):
            told[index] = _refused(services, request, _taken(outcome, _below(index)))
        elif isinstance(outcome, Exception):
            told[index] = _refused(services, request, outcome)
        else:
            kept, is_new = outcome
            told[index] = {"status": _status(is_new), "usage": _kept(what.request_id, kept, is_new)}
            new |= dict.fromkeys(counters if is_new else ())
    _tell(services, new)


def _below(index: int) -> str:
    return f"items.{index}."


def _status(is_new: bool) -> int:
    return 201 if is_new else 200


def _refused(services: ControlServices, request: ApiRequest, failure: Exception) -> dict[str, Any]:
    error = to_api_error(failure, request.request_id)
    return {"status": error.status, "problem": error.to_json(request.request_id, services.clock.now())}


def _taken(failure: RequestIdConflict, below: str) -> ApiError:
    return ApiError(409, ERROR_CODES[409], "this request id stands for another usage", [(f"{below}request_id", str(failure))])


def _tell(services: ControlServices, counters: Iterable[Counter]) -> None:
    for counter in counters:
        services.budgets.note_spend_elsewhere(counter)


async def _charging(services: ControlServices, request: ApiRequest) -> Charging:
    caller = Caller(request.path["org"], request.path["app"], build_client_id(request.path["org"], request.path["app"]))
    return Charging(caller, await _plan(services, request))


async def _plan(services: ControlServices, request: ApiRequest) -> EffectiveSettings:
    """Raises Problem for an app that nobody put there, whose usage nobody would look for."""
    org, app = request.path["org"], request.path["app"]
    keys = [schema.org_config_key(org), schema.app_config_key(org, app)]
    above, own = await services.store.get_many(keys)
    if own is None:
        raise not_found(f"there is no app {app} of an org {org}")
    return resolve_settings(above, own, services.config.defaults, services.config.alerts.thresholds_pct, services.clock.now())


async def _read(services: ControlServices, charging: Charging, body: Any, below: str) -> ChargedSubmission:
    """What is told, and the counters that are charged with it. Raises Problem and StoreUnavailable."""
    given = USAGE_BODY.parse(body, below)
    day = charging.day(_moment(given, services.clock.now(), below))
    caller = charging.caller
    assert caller.app is not None
    priced = await _priced(services, caller, given, below)
    about = {"label": given["label"], "day": day.date, "cost_usd_micros": to_micros(priced.pico)}
    counts = build_counts(_usage(given), priced.pico)
    what = UsageSubmission(caller.org, caller.app, given["request_id"], _digest(given), counts, about)
    return what, day.counters(given["label"])


def _kept(request_id: str, kept: Mapping[str, Any], is_new: bool) -> dict[str, Any]:
    exact = money.exact_micros(int(kept["cost_usd_micros"] * PICO_PER_MICRO))
    return {
        "request_id": request_id,
        "label": kept["label"],
        "day": kept["day"],
        "cost_usd_micros": exact,
        "is_repeat": not is_new,
    }


def _moment(given: Mapping[str, Any], now: float, below: str) -> float:
    at = float(given.get("occurred_at", now))
    if not now - MAX_SUBMISSION_AGE_SECONDS <= at <= now + AHEAD_SECONDS:
        days = MAX_SUBMISSION_AGE_SECONDS // DAY_SECONDS
        raise invalid_request("the body cannot be used", (f"{below}occurred_at", f"expected one of the last {days} days"))
    return at


async def _priced(services: ControlServices, caller: Caller, given: Mapping[str, Any], below: str) -> Cost:
    """As the configuration says, or for a label of the app's own its profile. Raises Problem and StoreUnavailable."""
    name = given["label"]
    own = NO_PROFILES if name in services.config.labels else await services.budgets.app_labels.get(caller)
    label = services.config.labels.get(name)  # which may be another one by now, with a name that was the app's
    if label is not None:
        tariff = services.price_tables.get(name)
        if tariff is None:
            tariff = services.price_tables[name] = build_label_price_table(label)
        return price_usage(tariff, _usage(given))
    if own is UNREAD_PROFILES:
        raise StoreUnavailable("the app's own labels cannot be read")
    profile = own.by_name.get(name)
    if profile is None:
        known = ", ".join((*services.config.labels, *own.by_name))
        raise invalid_request("the body cannot be used", (f"{below}label", f"there is no such label; there are {known}"))
    return price_usage(profile.price_table, _usage(given))


def _usage(given: Mapping[str, Any]) -> Usage:
    return Usage(**{field: given.get(name, 0) for field, name in _TOKEN_FIELD_NAMES.items()}, tier=given.get("service_tier", ""))


def _digest(given: Mapping[str, Any]) -> str:
    """Of what was told, whatever else the same words may come to later. It is kept, so it has to stay as it is."""
    told = {name: given[name] for name in sorted(given) if given[name] != 0 or name not in _TOKEN_FIELD_NAMES.values()}
    return sha256(json.dumps(told, separators=(",", ":")).encode()).hexdigest()


_PATH = "/api/v1/orgs/{org}/apps/{app}/usage"
_ONE, _MANY = "Count a usage, once", f"Count up to {MOST_ITEMS} usages, each by itself"

ROUTES = (
    ApiRoute(
        "POST",
        _PATH,
        AccessLevel.APP,
        "postUsage",
        _ONE,
        post,
        {201: "Usage", 200: "Usage"},
        (404, 409),
        body_schema="UsageBody",
        max_body_bytes=SMALL_BODY_BYTES,
        group="spend",
    ),
    ApiRoute(
        "POST",
        f"{_PATH}/batch",
        AccessLevel.APP,
        "postUsageBatch",
        _MANY,
        post_batch,
        {207: "UsageResults"},
        (404,),
        body_schema="UsageBatch",
        group="spend",
    ),
)
