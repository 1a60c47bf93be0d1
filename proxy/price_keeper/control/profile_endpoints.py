"""Endpoints for an app's own labels: names for inference profiles, with a format and prices of their own.

Only the administrator creates them, because the price decides how far a budget reaches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, get_args

from price_keeper.budgets.app_label_cache import PROFILES_MADE_ATTRIBUTE
from price_keeper.budgets.effective_settings import is_number
from price_keeper.config import LabelConfig
from price_keeper.config.config_reader import read_text as read_config
from price_keeper.config.config_sections import Format
from price_keeper.config.label_names import LabelNames
from price_keeper.control.api_errors import ERROR_CODES, ApiError, invalid_request
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute, build_cacheable_response
from price_keeper.control.body_fields import BodyFields, choice_field, make_nullable, pattern_field, unchecked_field
from price_keeper.control.budget_endpoints import LABEL_FIELD
from price_keeper.control.control_services import ControlServices
from price_keeper.control.org_endpoints import load_app
from price_keeper.domain import Scope
from price_keeper.errors import ConfigError
from price_keeper.price_dimensions import TOKEN_NAMES, TOKENS
from price_keeper.stores import schema
from price_keeper.stores.audit_log import to_json_value
from price_keeper.stores.conflict_retry import retry_on_conflict
from price_keeper.stores.contract import (
    AttributeMissing,
    Condition,
    Item,
    ItemExists,
    ItemMissing,
    Key,
    Prefix,
    Put,
    Query,
    StoredRow,
    Update,
    Value,
    all_of,
    equals,
)
from price_keeper.usage.inference_profiles import ARN_PATTERN

MAX_PROFILES = 100  # per app
PRICE_DIGITS = 12  # of a price, before and after the decimal point

_PRICE = {"type": "number", "minimum": 0}
PROFILE_BODY = BodyFields(
    {
        "label": LABEL_FIELD,
        "inference_profile_arn": pattern_field(ARN_PATTERN, 300, "the ARN of an inference profile"),
        "format": choice_field(get_args(Format)),
        "prices_usd_per_1m": unchecked_field(
            {
                "type": "object",
                "properties": {each.name: _PRICE if each.is_required else make_nullable(_PRICE) for each in TOKENS},
                "required": [each.name for each in TOKENS if each.is_required],
                "additionalProperties": False,
            }
        ),
    },
    ("label", "inference_profile_arn", "format", "prices_usd_per_1m"),
)


async def post_profile(services: ControlServices, request: ApiRequest) -> ApiResponse:
    org, app, body = request.path["org"], request.path["app"], PROFILE_BODY.parse(request.body)
    _check_label(services, body["label"])
    settings: dict[str, Value] = {**body, "prices_usd_per_1m": _parse_prices(body["prices_usd_per_1m"])}
    _check_prices(settings)
    await load_app(services, org, app)
    key, app_key = schema.inference_profile_key(org, app, body["label"]), schema.app_config_key(org, app)

    async def write() -> tuple[Item, bool]:
        # The app is read before its profiles are counted, so that a profile added in between fails the condition below.
        before, app_item = await services.store.get_many([key, app_key], consistent=True)
        now = services.clock.now()
        if before is None and len(await _load_profiles(services, org, app)) >= MAX_PROFILES:
            raise ApiError(409, ERROR_CODES[409], f"an app has at most {MAX_PROFILES} inference profiles")
        item: Item = {**settings, "version": _read_version(before) + 1, "updated_at_epoch": int(now)}
        audit_record = request.actor.build_record("profile.put", Scope(org, app), before, item, now)
        count_update = [] if before is not None else [_increment_profile_count(app_key, app_item)]
        await services.store.transact([Put(key, item, _require_unchanged(before)), *count_update, audit_record])
        return item, before is None

    item, is_new = await retry_on_conflict(services.clock, write)
    services.budgets.app_labels.invalidate(Scope(org, app))
    return ApiResponse(_format_profile(item), 201 if is_new else 200)


async def list_profiles(services: ControlServices, request: ApiRequest) -> ApiResponse:
    await load_app(services, request.path["org"], request.path["app"])
    rows = await _load_profiles(services, request.path["org"], request.path["app"])
    return build_cacheable_response({"inference_profiles": [_format_profile(row.item) for row in rows]})


async def _load_profiles(services: ControlServices, org: str, app: str) -> tuple[StoredRow, ...]:
    partition, prefix = schema.org_config_key(org).pk, schema.app_profiles_prefix(app)
    return (await services.store.query(Query("config", partition, Prefix(prefix), consistent=True))).rows


def _format_profile(item: Item) -> dict[str, Any]:
    names = ("label", "inference_profile_arn", "format", "prices_usd_per_1m", "version")
    return {name: to_json_value(item.get(name)) for name in names}


def _check_label(services: ControlServices, label: str) -> None:
    if LabelNames(services.config.labels).is_taken(label):
        raise ApiError(409, ERROR_CODES[409], f"{label} is a label of the configuration; name this one otherwise")
    if ".." in label:
        raise invalid_request("the body cannot be used", ("label", "two dots in a row cannot stand in a path"))


def _parse_prices(given: Any) -> dict[str, Value]:
    """The prices as exact numbers with a limited number of digits. Raises ApiError."""
    if not isinstance(given, Mapping):
        raise invalid_request("the body cannot be used", ("prices_usd_per_1m", "expected an object"))
    prices = {str(name): value for name, value in given.items() if value is not None}
    mistakes = [
        (
            f"prices_usd_per_1m.{name[:64]}",
            f"expected a number of at most {PRICE_DIGITS} digits before and after its point",
        )
        for name, value in prices.items()
        if name not in TOKEN_NAMES or not is_number(value) or not _is_representable(value)
    ]
    if mistakes:
        raise invalid_request("the body cannot be used", *mistakes)
    return prices


def _is_representable(value: int | Decimal) -> bool:
    number = Decimal(value)
    exponent = number.as_tuple().exponent
    return 0 <= number < 10**PRICE_DIGITS and isinstance(exponent, int) and -PRICE_DIGITS <= exponent <= PRICE_DIGITS


def _check_prices(settings: Mapping[str, Any]) -> None:
    """Check the prices by the rules for a label of the configuration, with the same reader. Raises ApiError."""
    prices = ", ".join(f"{name}: {Decimal(value):f}" for name, value in settings["prices_usd_per_1m"].items())
    model, format = (json.dumps(settings[name]) for name in ("inference_profile_arn", "format"))
    try:
        text = f"{{model: {model}, format: {format}, prices_usd_per_1m: {{{prices}}}}}"
        read_config(LabelConfig, text, "body", {}, "")
    except ConfigError as failure:
        problems = [problem.partition(": ")[2].partition(": ") for problem in failure.problems]
        raise invalid_request(
            "the body cannot be used", *((path, complaint) for path, _, complaint in problems)
        ) from None


def _read_version(item: Item | None) -> int:
    version = (item or {}).get("version")
    return version if isinstance(version, int) else 0


def _require_unchanged(before: Item | None) -> Condition:
    return ItemMissing() if before is None else equals("version", _read_version(before))


def _increment_profile_count(key: Key, app: Item | None) -> Update:
    """Increment a counter on the app's item on condition that it is unchanged (optimistic lock). Of two profiles added
    concurrently, one conflicts and has to count the profiles again."""
    count = (app or {}).get(PROFILES_MADE_ATTRIBUTE)
    unchanged: Condition = AttributeMissing(PROFILES_MADE_ATTRIBUTE)
    if count is not None:
        unchanged = equals(PROFILES_MADE_ATTRIBUTE, count)  # type: ignore[arg-type]
    return Update(key, add={PROFILES_MADE_ATTRIBUTE: 1}, condition=all_of(ItemExists(), unchanged))


_PROFILES_PATH = "/api/v1/orgs/{org}/apps/{app}/inference-profiles"

PROFILE_ROUTES = (
    ApiRoute(
        "GET",
        _PROFILES_PATH,
        AccessLevel.APP,
        "listInferenceProfiles",
        "The app's own labels for inference profiles",
        list_profiles,
        {200: "Profiles"},
        (404,),
    ),
    ApiRoute(
        "POST",
        _PROFILES_PATH,
        AccessLevel.ADMIN,
        "postInferenceProfile",
        "Name an inference profile of the app's own, with its format and prices",
        post_profile,
        {201: "Profile", 200: "Profile"},
        (404, 409),
        body_schema="ProfileBody",
    ),
)
