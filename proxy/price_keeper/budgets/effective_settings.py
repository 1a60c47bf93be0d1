"""The settings that apply to an org or app: its own over its org's over the defaults. Pure.

    org only          timezone, quota_scope, period, agg_shard_count
    per budget        model_ordering, quotas, sticky_fallback_enabled, enforcement: an app's own over its org's, unless
                      quota_scope is ORG and all apps share one budget
    everything else   an app's own over its org's

Items may have been written by hand. A value that cannot be used is ignored and listed in `problems`. Where money is
concerned nothing may be spent then: an unusable quota is a quota of zero, and an ordering without any usable label lets
no label serve. A label that usable `quotas` do not name is unlimited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast
from zoneinfo import ZoneInfo

from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.domain import PICO_PER_MICRO, find_name, is_label
from price_keeper.org_calendar import Period, load_zone
from price_keeper.stores.contract import Item
from price_keeper.stores.schema import SHARD_COUNTS

T = TypeVar("T")

MAX_QUOTA_MICROS = 10**15  # a thousand million dollars
MAX_REFRESH_SECONDS = 86_400
MAX_DECIMALS = 3
MAX_ALERT_PERCENT = 999  # an alert may be set beyond a soft quota
DEFAULT_ALERT_THRESHOLDS = (50, 80, 95, 100)
ENFORCEMENTS = ("soft", "hard", "shadow")
QUOTA_SCOPES = ("ORG", "APP")
PERIODS = tuple(period.value for period in Period)
UNUSABLE_ORDERING_LABEL = "unusable-model-ordering"  # the only label of an ordering in which nothing is usable
MAX_SHOWN_CHARACTERS = 64  # of an unusable value in a message

QuotaScope = Literal["ORG", "APP"]
Enforcement = Literal["soft", "hard", "shadow"]


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    """The settings of one scope after inheritance and defaults."""

    zone: ZoneInfo
    quota_scope: QuotaScope
    shards: int
    period: Period
    ordering: tuple[str, ...]
    quotas: Mapping[str, int]  # pico-dollars; also of labels outside the ordering. A label without one is unlimited
    is_sticky: bool
    enforcement: Enforcement
    tight_pct: int
    normal_secs: float
    tight_secs: float
    thresholds: tuple[int, ...]
    version: int  # of two settings of one scope, the one with the higher version holds
    problems: tuple[str, ...] = ()  # one line for each unusable value, to be logged
    org_name: str | None = None  # for messages; unknown where the settings come from a snapshot
    app_name: str | None = None

    @property
    def calendar(self) -> tuple[ZoneInfo, Period, QuotaScope, int]:
        """The settings that only an org has, and that change only between periods."""
        return self.zone, self.period, self.quota_scope, self.shards

    def with_calendar_of(self, other: EffectiveSettings) -> EffectiveSettings:
        return replace(self, zone=other.zone, period=other.period, quota_scope=other.quota_scope, shards=other.shards)


def resolve_settings(
    org: Item | None, app: Item | None, defaults: DefaultsConfig, thresholds: tuple[int, ...], now: float
) -> EffectiveSettings:
    """A pure function, so that all processes that read the same items get the same settings."""
    problems: list[str] = []
    org_item, app_item = SettingsItem(org, "org", problems), SettingsItem(app, "app", problems)
    settled = SettingsItem(_find_settled(org, now), "org: settled", problems)
    zone = read_first((settled, org_item), "timezone", read_zone) or load_zone(defaults.timezone)
    quota_scope = cast(
        QuotaScope, read_first((settled, org_item), "quota_scope", make_choice_reader(QUOTA_SCOPES)) or "APP"
    )
    app_over_org = (app_item, org_item)
    budget_items = (org_item,) if quota_scope == "ORG" else app_over_org
    ordering, quotas = _read_budget(budget_items, problems)
    normal = (
        read_first(app_over_org, "refresh_interval_normal_secs", read_seconds) or defaults.refresh_interval_normal_secs
    )
    tight = (
        read_first(app_over_org, "refresh_interval_tight_secs", read_seconds) or defaults.refresh_interval_tight_secs
    )
    is_sticky = read_first(budget_items, "sticky_fallback_enabled", read_bool)
    alerts = read_first(app_over_org, "alert_thresholds_pct", read_percents)
    enforcement = read_first(budget_items, "enforcement", make_choice_reader(ENFORCEMENTS)) or "soft"
    return EffectiveSettings(
        zone,
        quota_scope,
        # Of an org that cannot be read, or is not there, the fewest: whatever its count is, readers find them.
        shards=org_item.read("agg_shard_count", read_shard_count)
        or (defaults.agg_shard_count if org else min(SHARD_COUNTS)),
        period=Period(read_first((settled, org_item), "period", make_choice_reader(PERIODS)) or "day"),
        ordering=ordering,
        quotas=MappingProxyType(quotas),
        is_sticky=is_sticky is not False,
        enforcement=cast(Enforcement, enforcement),
        tight_pct=read_first(app_over_org, "tight_mode_threshold_pct", make_percent_reader(100))
        or defaults.tight_mode_threshold_pct,
        normal_secs=float(normal),
        tight_secs=float(min(tight, normal)),  # an app's normal interval may be shorter than its org's tight one
        thresholds=thresholds if alerts is None else alerts,
        version=sum(item.read("version", read_version) or 0 for item in budget_items),
        problems=tuple(problems),
        org_name=find_name(org, "org_name"),
        app_name=find_name(app, "app_name"),
    )


def find_change_time(org: Item | None, now: float) -> float | None:
    """When a pending change of time zone, period or quota_scope takes effect; None if there is none."""
    return None if org is None or _find_settled(org, now) is None else float(cast(int, org["settled_until_epoch"]))


def _find_settled(org: Item | None, now: float) -> Item | None:
    """The calendar from before a change of the org, while it still holds."""
    if org is None:
        return None
    settled, until = org.get("settled"), org.get("settled_until_epoch")
    is_pending = isinstance(settled, Mapping) and is_number(until) and now < cast(Decimal, until)
    return cast(Item, settled) if is_pending else None


# Money.


def _read_budget(items: Sequence[SettingsItem], problems: list[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    ordering_value = read_first(items, "model_ordering", lambda value: (value,))
    ordering = () if ordering_value is None else _read_ordering(ordering_value[0], problems)
    quotas_value = read_first(items, "quotas", lambda value: (value,))
    if quotas_value is None and not ordering:
        return ordering, {}
    if quotas_value is None or not isinstance(quotas_value[0], Mapping):
        found = "none" if quotas_value is None else format_value(quotas_value[0])
        problems.append(f"quotas: expected a mapping, found {found}; nothing may be spent")
        return ordering or (UNUSABLE_ORDERING_LABEL,), dict.fromkeys(ordering or (UNUSABLE_ORDERING_LABEL,), 0)
    quotas = _read_quotas(quotas_value[0], problems)
    if ordering == (UNUSABLE_ORDERING_LABEL,):
        quotas[UNUSABLE_ORDERING_LABEL] = 0
    return ordering, quotas


def _read_ordering(value: Any, problems: list[str]) -> tuple[str, ...]:
    entries = value if isinstance(value, list) else [value]
    labels = list(dict.fromkeys(entry for entry in entries if isinstance(entry, str) and is_label(entry)))
    if not isinstance(value, list) or not labels:
        problems.append(f"model_ordering: expected a list of labels, found {format_value(value)}; nothing may be spent")
        return (UNUSABLE_ORDERING_LABEL,)
    if len(labels) < len(entries):
        problems.append(
            f"model_ordering: entries that are no label, or repeated, are left out of {format_value(value)}"
        )
    return tuple(labels)


def _read_quotas(values: Mapping[Any, Any], problems: list[str]) -> dict[str, int]:
    quotas = {}
    for label, value in values.items():
        if not isinstance(label, str) or not is_label(label):
            problems.append(f"quotas: {format_value(label)} is no label")
            continue
        quotas[label] = value * PICO_PER_MICRO if is_whole(value, 0, MAX_QUOTA_MICROS) else 0
        if not is_whole(value, 0, MAX_QUOTA_MICROS):
            expected = f"expected whole micro-USD from 0 to {MAX_QUOTA_MICROS}"
            problems.append(f"quotas.{label}: {expected}, found {format_value(value)}; nothing may be spent on it")
    return quotas


# Reading one attribute.


@dataclass(frozen=True, slots=True)
class SettingsItem:
    """An item or none, and the list of the problems found in it."""

    item: Item | None
    whose: str
    problems: list[str]

    def read(self, name: str, convert: Callable[[Any], T]) -> T | None:
        """The converted value; None if it is missing or unusable."""
        value = None if self.item is None else self.item.get(name)
        if value is None:
            return None
        try:
            return convert(value)
        except ValueError as failure:
            self.problems.append(f"{self.whose}: {name}: {failure}; ignored")
            return None


def read_first(items: Iterable[SettingsItem], name: str, convert: Callable[[Any], T]) -> T | None:
    """The first usable value, in the order of the items."""
    return next((value for item in items if (value := item.read(name, convert)) is not None), None)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def read_zone(value: Any) -> ZoneInfo:
    return load_zone(value if isinstance(value, str) else "")


def make_choice_reader(options: Sequence[str]) -> Callable[[Any], str]:
    def read_choice(value: Any) -> str:
        if value not in options:
            raise ValueError(f"expected one of {', '.join(options)}, found {format_value(value)}")
        return str(value)

    return read_choice


def read_seconds(value: Any) -> int | Decimal:
    """Seconds with at most MAX_DECIMALS decimal places, as the store limits the precision of numbers."""
    if (
        not is_number(value)
        or not Decimal("0.001") <= value <= MAX_REFRESH_SECONDS
        or _count_decimals(value) > MAX_DECIMALS
    ):
        expected = f"0.001 to {MAX_REFRESH_SECONDS} seconds with at most {MAX_DECIMALS} decimals"
        raise ValueError(f"expected {expected}, found {format_value(value)}")
    return cast(Decimal, value)


def _count_decimals(value: int | Decimal) -> int:
    """The decimal places of a finite number."""
    return -cast(int, Decimal(value).as_tuple().exponent)


def make_percent_reader(maximum: int) -> Callable[[Any], int]:
    def read_percent(value: Any) -> int:
        if not is_whole(value, 1, maximum):
            raise ValueError(f"expected a whole number from 1 to {maximum}, found {format_value(value)}")
        return int(value)

    return read_percent


def read_percents(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of percentages, found {format_value(value)}")
    return tuple(sorted(set(map(make_percent_reader(MAX_ALERT_PERCENT), value))))


def read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, found {format_value(value)}")
    return value


def read_shard_count(value: Any) -> int:
    if value not in SHARD_COUNTS:
        raise ValueError(f"expected one of {', '.join(map(str, SHARD_COUNTS))}, found {format_value(value)}")
    return int(value)


def read_version(value: Any) -> int:
    if not is_whole(value, 0, 10**15):
        raise ValueError(f"expected a whole number, found {format_value(value)}")
    return int(value)


def format_value(value: Any) -> str:
    """A value for a message, quoted if it is text, and shortened."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."
