"""An app's own labels, each for an inference profile: parsed from its row in the store to what a call needs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast, get_args

from price_keeper.config import value_checks as must_be
from price_keeper.config.config_sections import EndpointConfig, Format, LabelConfig, PricesConfig, caches_have_prices
from price_keeper.domain import ResolvedLabel
from price_keeper.stores.contract import Item
from price_keeper.usage.price_table import PriceTable, build_label_price_table

_REGION = r"[a-z]{2,8}(-[a-z]{1,12}){1,3}-[0-9]{1,2}"
ARN_PATTERN = rf"arn:aws[a-z-]*:bedrock:{_REGION}:[0-9]{{12}}:(application-)?inference-profile/[A-Za-z0-9._:-]{{1,128}}"
PRICE_FIELDS = ("input", "output", "cache_read", "cache_write_5m", "cache_write_1h")

_ARN = re.compile(ARN_PATTERN)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class InferenceProfile:
    """It never changes: other settings are another one, and a call keeps the one it began with. Each is equal to itself
    alone, so that what is kept for it is nobody else's, whatever the two are called."""

    name: str
    label: LabelConfig  # as if it stood in the configuration
    price_table: PriceTable


@dataclass(frozen=True, slots=True)
class ResolvedProfile(ResolvedLabel):
    profile: InferenceProfile


class AppProfiles:
    """All those of one app. One that is named by its ARN is the first, by name, that stands for it."""

    __slots__ = ("_by_model", "by_name")

    def __init__(self, profiles: Iterable[InferenceProfile] = ()) -> None:
        ordered = sorted(profiles, key=lambda profile: profile.name, reverse=True)
        self._by_model = {profile.label.model: profile for profile in ordered}
        self.by_name = {profile.name: profile for profile in reversed(ordered)}

    def resolve(self, requested: str) -> ResolvedProfile | None:
        """By its name, or by the ARN that it stands for."""
        profile = self.by_name.get(requested) or self._by_model.get(requested)
        return None if profile is None else ResolvedProfile(requested, profile.name, profile.label.model, profile)


NO_PROFILES = AppProfiles()
UNREAD_PROFILES = AppProfiles()  # nobody can tell what there is


def parse_profile(name: str, item: Item) -> InferenceProfile:
    """Raises ValueError for what was written by hand and cannot be used: nobody is served at an unknown price."""
    arn, format = item.get("inference_profile_arn"), item.get("format")
    if not isinstance(arn, str) or not _ARN.fullmatch(arn) or must_be.model(arn):
        raise ValueError("inference_profile_arn: expected the ARN of an inference profile")
    if format not in get_args(Format):
        raise ValueError("format: expected one that labels have")
    prices = _parse_prices(item.get("prices_usd_per_1m"))
    for path, complaint in caches_have_prices(cast(Format, format), prices, ()):
        raise ValueError(f"{'.'.join(path)}: {complaint}")
    endpoint = EndpointConfig(arn.split(":")[3])
    label = LabelConfig(arn, cast(Format, format), prices, price_source="config", endpoints=(endpoint,))
    return InferenceProfile(name, label, build_label_price_table(label))


def _parse_prices(given: Any) -> PricesConfig:
    if not isinstance(given, Mapping):
        raise ValueError("prices_usd_per_1m: expected a mapping")
    found = {name: _parse_price(name, value) for name, value in given.items() if value is not None}
    input, output, *cache = (found.get(name) for name in PRICE_FIELDS)
    if input is None or output is None:
        raise ValueError("prices_usd_per_1m: input and output are required")
    return PricesConfig(input, output, *cache)


def _parse_price(name: str, value: Any) -> Decimal:
    if name not in PRICE_FIELDS or not isinstance(value, (int, Decimal)) or isinstance(value, bool):
        raise ValueError(f"prices_usd_per_1m: expected a number for each of {', '.join(PRICE_FIELDS)} and nothing else")
    price = Decimal(value)
    complaint = must_be.price(price) if price.is_finite() else "expected a number"
    if complaint:
        raise ValueError(f"prices_usd_per_1m.{name}: {complaint}")
    return price
