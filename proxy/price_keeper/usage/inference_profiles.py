"""App labels, each for an inference profile: parsed from its row in the store to what a call needs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast, get_args

from price_keeper.config import value_checks as must_be
from price_keeper.config.config_sections import EndpointConfig, Format, LabelConfig, PricesConfig
from price_keeper.domain import ResolvedLabel
from price_keeper.price_dimensions import TOKEN_NAMES
from price_keeper.stores.contract import Item
from price_keeper.usage.price_table import PriceTable, build_label_price_table

_REGION = r"[a-z]{2,8}(-[a-z]{1,12}){1,3}-[0-9]{1,2}"
ARN_PATTERN = rf"arn:aws[a-z-]*:bedrock:{_REGION}:[0-9]{{12}}:(application-)?inference-profile/[A-Za-z0-9._:-]{{1,128}}"

_ARN = re.compile(ARN_PATTERN)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AppLabel:
    """One label of an app. It is immutable: changed settings make a new one, and a call keeps the one it began with.

    It is compared by identity, so that what is cached for it never applies to another one of the same name.
    """

    name: str
    label_config: LabelConfig  # as a label in the configuration would be
    price_table: PriceTable


@dataclass(frozen=True, slots=True)
class ResolvedAppLabel(ResolvedLabel):
    profile: AppLabel


class AppLabels:
    """All labels of one app. If several stand for one ARN, a request for it gets the first by name."""

    __slots__ = ("_by_model", "by_name")

    def __init__(self, profiles: Iterable[AppLabel] = ()) -> None:
        ordered = sorted(profiles, key=lambda profile: profile.name, reverse=True)
        self._by_model = {profile.label_config.model: profile for profile in ordered}
        self.by_name = {profile.name: profile for profile in reversed(ordered)}

    def resolve(self, requested: str) -> ResolvedAppLabel | None:
        """Return the label of this name, or for this ARN; None if there is none."""
        profile = self.by_name.get(requested) or self._by_model.get(requested)
        return (
            None if profile is None else ResolvedAppLabel(requested, profile.name, profile.label_config.model, profile)
        )


NO_APP_LABELS = AppLabels()
UNREAD_APP_LABELS = AppLabels()  # the store could not be read, so the app's labels are not known


def parse_profile(name: str, item: Item) -> AppLabel:
    """Parse a row. Raises ValueError for an unusable one (written by hand): no call is served at an unknown price."""
    arn, format = item.get("inference_profile_arn"), item.get("format")
    if not isinstance(arn, str) or not _ARN.fullmatch(arn) or must_be.model(arn):
        raise ValueError("inference_profile_arn: expected the ARN of an inference profile")
    if format not in get_args(Format):
        raise ValueError(f"format: expected one of {', '.join(get_args(Format))}")
    prices = _parse_prices(item.get("prices_usd_per_1m"))
    endpoint = EndpointConfig(arn.split(":")[3])
    label = LabelConfig(arn, cast(Format, format), prices, price_source="config", endpoints=(endpoint,))
    return AppLabel(name, label, build_label_price_table(label))


def _parse_prices(given: Any) -> PricesConfig:
    if not isinstance(given, Mapping):
        raise ValueError("prices_usd_per_1m: expected a mapping")
    prices = {name: _parse_price(name, value) for name, value in given.items() if value is not None}
    input, output, *cache = (prices.get(name) for name in TOKEN_NAMES)
    if input is None or output is None:
        raise ValueError("prices_usd_per_1m: input and output are required")
    return PricesConfig(input, output, *cache)


def _parse_price(name: str, value: Any) -> Decimal:
    if name not in TOKEN_NAMES or not isinstance(value, (int, Decimal)) or isinstance(value, bool):
        raise ValueError(f"prices_usd_per_1m: expected a number for each of {', '.join(TOKEN_NAMES)} and nothing else")
    price = Decimal(value)
    complaint = must_be.price(price) if price.is_finite() else "expected a number"
    if complaint:
        raise ValueError(f"prices_usd_per_1m.{name}: {complaint}")
    return price
