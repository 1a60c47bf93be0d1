"""Endpoints for usage that clients report themselves. The request id is an idempotency key: each is counted once.

Usage is priced by the configuration of its label or, for an app's own label, by its inference profile.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

from price_keeper.budgets.budget_registry import list_counters_at
from price_keeper.budgets.budget_state import BudgetState
from price_keeper.budgets.effective_settings import EffectiveSettings, resolve_settings
from price_keeper.budgets.label_policy import Mode, compute_mode, compute_quota_percent
from price_keeper.control.api_errors import ERROR_CODES, ApiError, invalid_request, not_found, to_api_error
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute
from price_keeper.control.body_fields import TIMESTAMP_FIELD, BodyFields, FieldType, integer_field, pattern_field
from price_keeper.control.budget_endpoints import LABEL_FIELD, get_active_label, get_spend
from price_keeper.control.control_requests import SMALL_BODY_BYTES
from price_keeper.control.control_services import ControlServices
from price_keeper.domain import Caller, Scope, build_client_id, build_money_record, describe_scope, find_name
from price_keeper.errors import StoreUnavailable
from price_keeper.ledger.counter_writes import DAY_SECONDS, to_micros, to_pico
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.ledger.usage_submissions import (
    MAX_SUBMISSION_AGE_SECONDS,
    ChargedSubmission,
    RequestIdConflict,
    UsageSubmission,
)
from price_keeper.org_calendar import Period, PeriodSpan, find_org_date, find_span
from price_keeper.price_dimensions import TOKEN_COUNTERS, TOKENS
from price_keeper.reports import money
from price_keeper.stores import schema
from price_keeper.usage.inference_profiles import NO_APP_LABELS, UNREAD_APP_LABELS
from price_keeper.usage.meter import build_counts
from price_keeper.usage.price_table import Cost, build_label_price_table, price_usage
from price_keeper.usage.token_usage import Usage


class ChargedDay:
    """One billing day of a caller, with the counters that usage of that day is charged to."""

    def __init__(self, caller: Caller, settings: EffectiveSettings, at: float) -> None:
        self.span: PeriodSpan = find_span(Period.DAY, at, settings.zone)
        self.date = find_org_date(at, settings.zone).isoformat()
        self._caller = caller
        self._settings = settings
        self._at = at
        self._counters_by_label: dict[str, list[Counter]] = {}

    def get_counters(self, label: str) -> list[Counter]:
        """The counters for a label. They are the same all day, because weeks and months consist of whole days."""
        counters = self._counters_by_label.get(label)
        if counters is None:
            counters = self._counters_by_label[label] = list_counters_at(self._caller, self._settings, label, self._at)
        return counters


class UsageCharging:
    """The billing days of a caller that one request needs."""

    def __init__(self, caller: Caller, settings: EffectiveSettings) -> None:
        self.caller = caller
        self._settings = settings
        self._days: list[ChargedDay] = []

    def get_day(self, at: float) -> ChargedDay:
        for day in self._days:
            if day.span.covers(at):
                return day
        self._days.insert(0, ChargedDay(self.caller, self._settings, at))
        return self._days[0]


class UsageFeedback:
    """Where a budget is after the usage of one request was counted: exact for what this process acknowledged, and with
    spend of others as of the last total or the last look at the shards. Computed once for each counter, as all items of
    a batch are answered with the state after all of them."""

    def __init__(self, services: ControlServices, budget: BudgetState) -> None:
        self._services = services
        self._budget = budget
        self._described: dict[Counter, dict[str, Any]] = {}

    @classmethod
    async def load(cls, services: ControlServices, request: ApiRequest) -> UsageFeedback:
        """Raises Busy if the budget cannot be loaded."""
        budget, _ = await services.budgets.read_status(_get_caller(request), forces_read=False)
        return cls(services, budget)

    async def describe(self, counter: Counter) -> dict[str, Any]:
        """The total of this day, and the state of the label's quota in the present period."""
        described = self._described.get(counter)
        if described is None:
            described = self._described[counter] = await self._compute(counter)
        return described

    async def _compute(self, counter: Counter) -> dict[str, Any]:
        known_totals, budget, label = self._services.budgets.known_totals, self._budget, counter.label
        if not known_totals.has_read(counter):  # a repeat of usage that was counted on another day
            await known_totals.read(self._services.store, [counter], keeps=True)
        known, quota = known_totals.get_all([counter])[counter], budget.settings.quotas.get(label)
        is_budget_counter = (counter.scope, counter.period_or_lease) == (budget.scope.key, budget.span.key)
        spent, in_flight = get_spend(budget, label)
        total, exact_at = known.counts.pico, -math.inf
        if quota is not None and is_budget_counter:
            total = spent = max(spent, total)
            exact_at = budget.get_tracker(label).exact_at
        mode = Mode.NORMAL if quota is None else compute_mode(spent + in_flight, quota, budget.settings.tight_pct)
        return {
            **build_money_record("daily_total_usd_micros", total),
            **build_money_record("quota_usd_micros", quota),
            "quota_pct": None if quota is None else compute_quota_percent(spent + in_flight, quota),
            "mode": mode.value,
            "active_label": get_active_label(budget),
            "data_age_seconds": self._compute_age(known.as_of, exact_at),
        }

    def _compute_age(self, as_of: float | None, exact_at: float) -> int | None:
        """Of what is known of others: of the total, or of the last exact look at the shards."""
        clock = self._services.clock
        age = min(math.inf if as_of is None else clock.now() - as_of, clock.monotonic() - exact_at)
        return None if age == math.inf else max(0, math.ceil(age))


MAX_ITEMS = 100
MAX_CLOCK_SKEW_SECONDS = 300.0  # by which a client's clock may be ahead
MAX_TOKENS = 10**9

_TOKEN_COUNT_FIELD = integer_field(0, MAX_TOKENS)
_USAGE_FIELDS: Mapping[str, FieldType] = {
    "request_id": pattern_field(r"[A-Za-z0-9._:-]{1,128}", 128, "1 to 128 letters, digits or any of ._:-"),
    "label": LABEL_FIELD,
    **dict.fromkeys(TOKEN_COUNTERS, _TOKEN_COUNT_FIELD),
    "service_tier": pattern_field(r"[a-z]{1,32}", 32, "a service tier in small letters"),
    "occurred_at": TIMESTAMP_FIELD,
}
USAGE_BODY = BodyFields(_USAGE_FIELDS, ("request_id", "label", *(each.counter for each in TOKENS if each.is_required)))
_DIGEST_ENCODER = json.JSONEncoder(separators=(",", ":"))


async def post_usage(services: ControlServices, request: ApiRequest) -> ApiResponse:
    async def parse() -> ChargedSubmission:
        charging = await _load_charging(services, request)
        charged = await _parse_usage(services, charging, request.body, "")
        await _read_totals(services, [charged])
        return charged

    (submission, counters), feedback = await asyncio.gather(parse(), UsageFeedback.load(services, request))
    try:
        stored, is_new = await services.submissions.submit(submission, counters)
    except RequestIdConflict as failure:
        raise _name_conflict(failure, "") from None
    _notify_hard_budgets(services, counters if is_new else ())
    formatted = await _format_usage(submission.request_id, stored, is_new, counters[0], feedback)
    return ApiResponse(formatted, _get_status(is_new))


async def post_usage_batch(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Count several usages independently: one that is rejected does not prevent the others from being counted."""
    body = request.body
    items = body.get("items") if isinstance(body, Mapping) and set(body) == {"items"} else None
    if not isinstance(items, list) or not 0 < len(items) <= MAX_ITEMS:
        raise invalid_request("the body cannot be used", ("items", f"expected a list of 1 to {MAX_ITEMS} usages"))
    results: dict[int, dict[str, Any]] = {}
    accepted: dict[int, ChargedSubmission] = {}

    async def parse_items() -> None:
        charging = await _load_charging(services, request)
        for index, item in enumerate(items):
            try:
                accepted[index] = await _parse_usage(services, charging, item, _get_item_path(index))
            except Exception as failure:
                results[index] = _format_failure(services, request, failure)
        await _read_totals(services, accepted.values())

    _, feedback = await asyncio.gather(parse_items(), UsageFeedback.load(services, request))
    await _submit_batch(services, request, accepted, results, feedback)
    return ApiResponse({"results": [{"index": index, **results[index]} for index in range(len(items))]}, 207)


async def _submit_batch(
    services: ControlServices,
    request: ApiRequest,
    accepted: Mapping[int, ChargedSubmission],
    results: dict[int, dict[str, Any]],
    feedback: UsageFeedback,
) -> None:
    outcomes = await services.submissions.submit_all(list(accepted.values()))
    new_counters: dict[Counter, None] = {}
    for (index, (submission, counters)), outcome in zip(accepted.items(), outcomes, strict=True):
        if isinstance(outcome, RequestIdConflict):
            results[index] = _format_failure(services, request, _name_conflict(outcome, _get_item_path(index)))
        elif isinstance(outcome, Exception):
            results[index] = _format_failure(services, request, outcome)
        else:
            stored, is_new = outcome
            results[index] = {
                "status": _get_status(is_new),
                "usage": await _format_usage(submission.request_id, stored, is_new, counters[0], feedback),
            }
            new_counters |= dict.fromkeys(counters if is_new else ())
    _notify_hard_budgets(services, new_counters)


def _get_item_path(index: int) -> str:
    return f"items.{index}."


def _get_status(is_new: bool) -> int:
    return 201 if is_new else 200


def _format_failure(services: ControlServices, request: ApiRequest, failure: Exception) -> dict[str, Any]:
    error = to_api_error(failure, request.request_id)
    return {"status": error.status, "problem": error.to_json(request.request_id, services.clock.now())}


def _name_conflict(failure: RequestIdConflict, path_prefix: str) -> ApiError:
    return ApiError(
        409,
        ERROR_CODES[409],
        "this request id has another usage",
        [(f"{path_prefix}request_id", str(failure))],
    )


def _notify_hard_budgets(services: ControlServices, counters: Iterable[Counter]) -> None:
    """Trackers of spend hear of submissions from the flusher of submissions."""
    for counter in counters:
        services.budgets.notify_spent_elsewhere(counter)


async def _load_charging(services: ControlServices, request: ApiRequest) -> UsageCharging:
    caller = _get_caller(request)
    settings = await _load_settings(services, caller.org, caller.app)
    if caller.app is None and settings.quota_scope == "APP":
        raise ApiError(409, ERROR_CODES[409], "the quotas of this org apply to each app: submit usage of an app")
    return UsageCharging(caller, settings)


def _get_caller(request: ApiRequest) -> Caller:
    org, app = request.path["org"], request.path.get("app")
    return Caller(org, app, build_client_id(org, app))


async def _read_totals(services: ControlServices, submissions: Iterable[ChargedSubmission]) -> None:
    """Read the day's totals before anything is sent: what is known of them then is usage of others alone."""
    day_counters = [counters[0] for _, counters in submissions]
    await services.budgets.known_totals.read(services.store, day_counters, keeps=True)


async def _load_settings(services: ControlServices, org: str, app: str | None) -> EffectiveSettings:
    """The effective settings. Raises ApiError (404) for an unknown org or app, whose usage no report would show."""
    keys = [schema.org_config_key(org), *([] if app is None else [schema.app_config_key(org, app)])]
    org_item, *app_items = await services.store.get_many(keys)
    if app_items == [None] or (app is None and org_item is None):
        name = describe_scope(Scope(org), find_name(org_item, "org_name"), None)
        raise not_found(f"there is no {name}" if app is None else f"there is no app {app} of {name}")
    return resolve_settings(
        org_item,
        app_items[0] if app_items else None,
        services.config.defaults,
        services.config.alerts.thresholds_pct,
        services.clock.now(),
    )


async def _parse_usage(
    services: ControlServices, charging: UsageCharging, body: Any, path_prefix: str
) -> ChargedSubmission:
    """The submitted usage with its cost, and the counters to charge. Raises ApiError or StoreUnavailable."""
    fields = USAGE_BODY.parse(body, path_prefix)
    day = charging.get_day(_parse_time(fields, services.clock.now(), path_prefix))
    caller = charging.caller
    usage = _build_usage(fields)
    priced = await _price_usage(services, caller, fields["label"], usage, path_prefix)
    details = {"label": fields["label"], "day": day.date, "cost_usd_micros": to_micros(priced.pico)}
    counts = build_counts(usage, priced.pico)
    submission = UsageSubmission(caller.org, caller.app, fields["request_id"], _digest_fields(fields), counts, details)
    return submission, day.get_counters(fields["label"])


async def _format_usage(
    request_id: str, stored: Mapping[str, Any], is_new: bool, counter: Counter, feedback: UsageFeedback
) -> dict[str, Any]:
    """`counter` is that of the budget's scope on the day of the request; a repeat has the day of the first one."""
    counted_in = counter._replace(period_or_lease=f"DAY#{stored['day'].replace('-', '')}")
    return {
        "request_id": request_id,
        "label": stored["label"],
        "day": stored["day"],
        **money.build_text_record("cost_usd_micros", to_pico(stored["cost_usd_micros"])),
        "is_repeat": not is_new,
        **await feedback.describe(counted_in),
    }


def _parse_time(fields: Mapping[str, Any], now: float, path_prefix: str) -> float:
    at = float(fields.get("occurred_at", now))
    if not now - MAX_SUBMISSION_AGE_SECONDS <= at <= now + MAX_CLOCK_SKEW_SECONDS:
        days = MAX_SUBMISSION_AGE_SECONDS // DAY_SECONDS
        raise invalid_request(
            "the body cannot be used", (f"{path_prefix}occurred_at", f"expected one of the last {days} days")
        )
    return at


async def _price_usage(services: ControlServices, caller: Caller, name: str, usage: Usage, path_prefix: str) -> Cost:
    """The cost by the configuration or, for an app's own label, by its profile. Raises ApiError or StoreUnavailable."""
    own_labels = NO_APP_LABELS if name in services.config.labels else await services.budgets.app_labels.get(caller)
    label = services.config.labels.get(name)  # read again: a reload may have added it during the wait above
    if label is not None:
        price_table = services.price_tables.get(name)
        if price_table is None:
            price_table = services.price_tables[name] = build_label_price_table(label)
        return price_usage(price_table, usage)
    if own_labels is UNREAD_APP_LABELS:
        raise StoreUnavailable("the app's own labels cannot be read")
    profile = own_labels.by_name.get(name)
    if profile is None:
        existing = ", ".join((*services.config.labels, *own_labels.by_name))
        raise invalid_request(
            "the body cannot be used", (f"{path_prefix}label", f"there is no such label; there are {existing}")
        )
    return price_usage(profile.price_table, usage)


def _build_usage(fields: Mapping[str, Any]) -> Usage:
    return Usage(
        **{each.name: fields.get(each.counter, 0) for each in TOKENS},
        tier=fields.get("service_tier", ""),
    )


def _digest_fields(fields: Mapping[str, Any]) -> str:
    """A digest of the submitted fields, to recognise a repeat. It is stored, so its input must never change."""
    significant = {name: fields[name] for name in sorted(fields) if fields[name] != 0 or name not in TOKEN_COUNTERS}
    return sha256(_DIGEST_ENCODER.encode(significant).encode()).hexdigest()


def _build_usage_routes(below: str, access_level: AccessLevel, of: str, whose: str) -> tuple[ApiRoute, ApiRoute]:
    path = f"/api/v1/orgs/{{org}}{below}/usage"
    one = ApiRoute(
        "POST",
        path,
        access_level,
        f"post{of}Usage",
        f"Count a usage{whose}, once",
        post_usage,
        {201: "Usage", 200: "Usage"},
        (404, 409),
        body_schema="UsageBody",
        max_body_bytes=SMALL_BODY_BYTES,
        group="spend",
    )
    batch = ApiRoute(
        "POST",
        f"{path}/batch",
        access_level,
        f"post{of}UsageBatch",
        f"Count up to {MAX_ITEMS} usages{whose}, each by itself",
        post_usage_batch,
        {207: "UsageResults"},
        (404,) if below else (404, 409),
        body_schema="UsageBatch",
        group="spend",
    )
    return one, batch


USAGE_ROUTES = (
    *_build_usage_routes("/apps/{app}", AccessLevel.APP, "", ""),
    *_build_usage_routes("", AccessLevel.ORG, "Org", " of no app, where quota_scope is ORG"),
)
