"""What holds for an org or an app: its own settings over its org's over the defaults. Pure.

    whose           settings
    the org's       timezone, quota_scope, period, agg_shard_count
    the budget's    model_ordering, quotas, sticky_fallback_enabled, enforcement: an app's own go over its org's, unless
                    quota_scope is ORG and there is one budget for all
    either's        the rest: an app's own go over its org's

What cannot be used in an item written by hand is passed over. Where that is money, nothing may be spent: a label of
the ordering without a usable quota has none left, and an ordering of which nothing can be used lets no label through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast
from zoneinfo import ZoneInfo

from price_keeper.calendar_days import Period, load_zone
from price_keeper.config.keys import DefaultsConfig
from price_keeper.model import PICO_PER_MICRO, is_label
from price_keeper.stores.contract import Item
from price_keeper.stores.schema import SHARD_COUNTS

T = TypeVar("T")

MOST_MICROS = 10**15  # of a quota: a thousand million dollars
MOST_SECONDS = 86_400
MOST_DECIMALS = 3
MOST_PERCENT = 999  # an alert may well come when a soft quota is passed
THRESHOLDS = (50, 80, 95, 100)
ENFORCEMENTS = ("soft", "hard", "shadow")
QUOTA_SCOPES = ("ORG", "APP")
PERIODS = tuple(period.value for period in Period)
NO_LABEL = "unusable-model-ordering"  # stands alone in an ordering of which nothing can be used
MOST_SHOWN = 64  # characters of what was found instead

QuotaScope = Literal["ORG", "APP"]
Enforcement = Literal["soft", "hard", "shadow"]


@dataclass(frozen=True, slots=True)
class Plan:
    zone: ZoneInfo
    quota_scope: QuotaScope
    shards: int
    period: Period
    ordering: tuple[str, ...]
    quotas: Mapping[str, int]  # pico-dollars; also of labels outside the ordering
    is_sticky: bool
    enforcement: Enforcement
    tight_pct: int
    normal_secs: float
    tight_secs: float
    thresholds: tuple[int, ...]
    version: int  # of two plans of one scope, the one with the higher version holds
    passed_over: tuple[str, ...] = ()  # one line each, for whoever reads items to warn of

    @property
    def calendar(self) -> tuple[ZoneInfo, Period, QuotaScope, int]:
        """What only an org can say, and change from one period to the next."""
        return self.zone, self.period, self.quota_scope, self.shards

    def with_calendar_of(self, other: Plan) -> Plan:
        return replace(self, zone=other.zone, period=other.period, quota_scope=other.quota_scope, shards=other.shards)


def plan_of(org: Item | None, app: Item | None, defaults: DefaultsConfig, thresholds: tuple[int, ...], now: float) -> Plan:
    """A function of its arguments alone, so that a whole fleet that reads the same items goes by the same plan."""
    told: list[str] = []
    whole, own = Reading(org, "org", told), Reading(app, "app", told)
    settled = Reading(_settled(org, now), "org: settled", told)
    zone = first((settled, whole), "timezone", zone_of) or load_zone(defaults.timezone)
    quota_scope = cast(QuotaScope, first((settled, whole), "quota_scope", one_of(QUOTA_SCOPES)) or "APP")
    either = (own, whole)
    budget = (whole,) if quota_scope == "ORG" else either
    ordering, quotas = _budget(budget, told)
    normal = first(either, "refresh_interval_normal_secs", seconds) or defaults.refresh_interval_normal_secs
    tight = first(either, "refresh_interval_tight_secs", seconds) or defaults.refresh_interval_tight_secs
    is_sticky = first(budget, "sticky_fallback_enabled", truth)
    alerts = first(either, "alert_thresholds_pct", percents)
    enforcement = first(budget, "enforcement", one_of(ENFORCEMENTS)) or "soft"
    return Plan(
        zone,
        quota_scope,
        shards=whole.read("agg_shard_count", shard_count) or defaults.agg_shard_count,
        period=Period(first((settled, whole), "period", one_of(PERIODS)) or "day"),
        ordering=ordering,
        quotas=MappingProxyType(quotas),
        is_sticky=is_sticky is not False,
        enforcement=cast(Enforcement, enforcement),
        tight_pct=first(either, "tight_mode_threshold_pct", percent(100)) or defaults.tight_mode_threshold_pct,
        normal_secs=float(normal),
        tight_secs=float(min(tight, normal)),  # an app may have made the one shorter than the org has the other
        thresholds=thresholds if alerts is None else alerts,
        version=sum(item.read("version", _count) or 0 for item in budget),
        passed_over=tuple(told),
    )


def turns_at(org: Item | None, now: float) -> float | None:
    """When another time zone, period or quota_scope will hold than now, for those who keep plans."""
    return None if org is None or _settled(org, now) is None else float(cast(int, org["settled_until_epoch"]))


def _settled(org: Item | None, now: float) -> Item | None:
    """What held before the org was changed, while it still holds."""
    if org is None:
        return None
    settled, until = org.get("settled"), org.get("settled_until_epoch")
    is_waiting = isinstance(settled, Mapping) and is_number(until) and now < cast(Decimal, until)
    return cast(Item, settled) if is_waiting else None


# Money.


def _budget(items: Sequence[Reading], told: list[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    written = first(items, "model_ordering", lambda value: (value,))
    ordering = () if written is None else _ordering(written[0], told)
    found = first(items, "quotas", lambda value: (value,))
    if found is not None and not isinstance(found[0], Mapping):
        told.append(f"quotas: expected a mapping, found {shown(found[0])}; nothing may be spent")
        return ordering or (NO_LABEL,), dict.fromkeys(ordering or (NO_LABEL,), 0)
    quotas = {} if found is None else _quotas(found[0], told)
    for label in ordering:
        if label not in quotas:
            told.append(f"quotas: none for {label}, so nothing may be spent on it")
            quotas[label] = 0
    return ordering, quotas


def _ordering(written: Any, told: list[str]) -> tuple[str, ...]:
    entries = written if isinstance(written, list) else [written]
    good = list(dict.fromkeys(entry for entry in entries if isinstance(entry, str) and is_label(entry)))
    if not isinstance(written, list) or not good:
        told.append(f"model_ordering: expected a list of labels, found {shown(written)}; nothing may be spent")
        return (NO_LABEL,)
    if len(good) < len(entries):
        told.append(f"model_ordering: what is no label, or stands there twice, is left out of {shown(written)}")
    return tuple(good)


def _quotas(written: Mapping[Any, Any], told: list[str]) -> dict[str, int]:
    quotas = {}
    for label, value in written.items():
        if not isinstance(label, str) or not is_label(label):
            told.append(f"quotas: {shown(label)} is no label")
            continue
        quotas[label] = value * PICO_PER_MICRO if is_whole(value, 0, MOST_MICROS) else 0
        if not is_whole(value, 0, MOST_MICROS):
            expected = f"expected whole micro-USD from 0 to {MOST_MICROS}"
            told.append(f"quotas.{label}: {expected}, found {shown(value)}; nothing may be spent on it")
    return quotas


# Reading one attribute.


@dataclass(frozen=True, slots=True)
class Reading:
    """One item, or none, and a list for what cannot be used in it."""

    item: Item | None
    whose: str
    told: list[str]

    def read(self, name: str, as_what: Callable[[Any], T]) -> T | None:
        """None if it is not there or cannot be used."""
        value = None if self.item is None else self.item.get(name)
        if value is None:
            return None
        try:
            return as_what(value)
        except ValueError as failure:
            self.told.append(f"{self.whose}: {name}: {failure}; passed over")
            return None


def first(items: Iterable[Reading], name: str, as_what: Callable[[Any], T]) -> T | None:
    return next((value for item in items if (value := item.read(name, as_what)) is not None), None)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def zone_of(value: Any) -> ZoneInfo:
    return load_zone(value if isinstance(value, str) else "")


def one_of(options: Sequence[str]) -> Callable[[Any], str]:
    def chosen(value: Any) -> str:
        if value not in options:
            raise ValueError(f"expected one of {', '.join(options)}, found {shown(value)}")
        return str(value)

    return chosen


def seconds(value: Any) -> int | Decimal:
    """Of few digits, since no store keeps any number of them."""
    if not is_number(value) or not Decimal("0.001") <= value <= MOST_SECONDS or _decimals(value) > MOST_DECIMALS:
        expected = f"0.001 to {MOST_SECONDS} seconds with at most {MOST_DECIMALS} decimals"
        raise ValueError(f"expected {expected}, found {shown(value)}")
    return cast(Decimal, value)


def _decimals(value: int | Decimal) -> int:
    """Of a finite number."""
    return -cast(int, Decimal(value).as_tuple().exponent)


def percent(most: int) -> Callable[[Any], int]:
    def checked(value: Any) -> int:
        if not is_whole(value, 1, most):
            raise ValueError(f"expected a whole number from 1 to {most}, found {shown(value)}")
        return int(value)

    return checked


def percents(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of percentages, found {shown(value)}")
    return tuple(sorted(set(map(percent(MOST_PERCENT), value))))


def truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, found {shown(value)}")
    return value


def shard_count(value: Any) -> int:
    if value not in SHARD_COUNTS:
        raise ValueError(f"expected one of {', '.join(map(str, SHARD_COUNTS))}, found {shown(value)}")
    return int(value)


def _count(value: Any) -> int:
    if not is_whole(value, 0, 10**15):
        raise ValueError(f"expected a whole number, found {shown(value)}")
    return int(value)


def shown(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
