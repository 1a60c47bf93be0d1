"""Rows of a report: spend grouped by org, app, label or day, in descending order of cost. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from typing import NamedTuple

from price_keeper.price_dimensions import UsageCounts

DIMENSIONS = ("org", "app", "label", "day")
NO_APP = "-"  # shown in place of an app for callers without one

RowKey = str | date | None


class SpendEntry(NamedTuple):
    """Spend of one app, or of callers without an app (None), for one label and day."""

    org: str
    app: str | None
    label: str
    day: date
    counts: UsageCounts


class ReportRow(NamedTuple):
    keys: tuple[RowKey, ...]
    counts: UsageCounts


def group_spend(entries: Iterable[SpendEntry], by: Sequence[str]) -> list[ReportRow]:
    sums: dict[tuple[RowKey, ...], UsageCounts] = {}
    for each in entries:
        keys = tuple(getattr(each, name) for name in by)
        sums[keys] = sums[keys].plus(each.counts) if keys in sums else each.counts
    return _sort_rows([ReportRow(keys, counts) for keys, counts in sums.items()], by)


def sum_counts(counts: Iterable[UsageCounts]) -> UsageCounts:
    result = UsageCounts()
    for each in counts:
        result = result.plus(each)
    return result


def filter_spend(entries: Iterable[SpendEntry], app: str | None, label: str | None) -> list[SpendEntry]:
    """Entries of this app and label. None matches all; NO_APP matches callers without an app."""
    return [
        each
        for each in entries
        if (app is None or (each.app or NO_APP) == app) and (label is None or each.label == label)
    ]


def parse_dimensions(text: str) -> tuple[str, ...]:
    """Raises ValueError that lists the dimensions. `app` implies `org`, as app ids are unique only within an org."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown:
        raise ValueError(f"there is no {unknown[0]!r} to go by; there are {', '.join(DIMENSIONS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"{text!r} names something twice")
    if "app" in names and "org" not in names:
        names.insert(names.index("app"), "org")
    return tuple(names)


def _sort_rows(rows: list[ReportRow], by: Sequence[str]) -> list[ReportRow]:
    """Sort by group, each level in descending order of its total cost; days are in order of time."""
    weights: defaultdict[tuple[RowKey, ...], int] = defaultdict(int)
    for row in rows:
        for depth in range(1, len(by) + 1):
            weights[row.keys[:depth]] += row.counts.pico

    def build_sort_key(row: ReportRow) -> list[tuple[int, str]]:
        return [
            (0 if name == "day" else -weights[row.keys[: depth + 1]], str(row.keys[depth] or ""))
            for depth, name in enumerate(by)
        ]

    return sorted(rows, key=build_sort_key)
