"""From an org's own counters and its apps' counters of one day to who spent what, each call once. Pure.

What an org's own counter holds depends on its `quota_scope` when the calls were made. Under ORG it is every call of the
org, those of its apps too; what is left without them is of callers without an app. Under APP it is the calls of callers
without an app alone, beside those of the apps. Nothing in a counter says which, and `quota_scope` may have changed
since. Whether the own counter holds the apps is therefore decided so:

- if in some label the two come to exactly the same, in all nine counts, it does;
- else what the org's `quota_scope` is now tells.

With one kind of counter alone there is no question. What may contradict the decision is told as a note: an own counter
that is lower than the apps it ought to hold, or one that is not lower than the apps it stands beside in any label. On
the day of a change itself the two overlap by an amount that nobody knows; the apps' own spend is exact on any day.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from price_keeper.recording.entries import UsageCounts

Labels = Mapping[str, UsageCounts]


class Doubt(Enum):
    """What a reader should know of a day; the text goes behind the org's name."""

    HELD_APPS = "its own counter equals its apps' sum, so it was taken for their total, as under quota_scope ORG"
    LOWER_THAN_APPS = (
        "its own counter is lower than its apps' sum, as when quota_scope is changed: "
        "calls of callers without an app may be missing"
    )
    MAY_HOLD_APPS = (
        "its own counter was taken for calls of callers without an app, as under quota_scope APP; "
        "if that was ORG then, what the apps spent is told twice"
    )


class Share(NamedTuple):
    app: str | None  # None: of callers without an app
    label: str
    counts: UsageCounts


class Shares(NamedTuple):
    shares: list[Share]
    doubt: Doubt | None


def shares(own: Labels, apps: Mapping[str, Labels], quota_scope: str) -> Shares:
    """Of one org on one day."""
    sums = _sums(apps)
    of_apps = [Share(app, label, counts) for app, labels in apps.items() for label, counts in labels.items()]
    if not any(label in sums for label in own):
        return Shares([*of_apps, *_without_app(own)], None)
    equal = any(own.get(label) == counts for label, counts in sums.items())
    if quota_scope == "APP" and not equal:
        return Shares([*of_apps, *_without_app(own)], None if _is_lower_anywhere(own, sums) else Doubt.MAY_HOLD_APPS)
    rest = {label: _minus(counts, sums.get(label, UsageCounts())) for label, counts in own.items()}
    return Shares([*of_apps, *_without_app(rest)], _doubt(own, sums, quota_scope))


def _doubt(own: Labels, sums: Labels, quota_scope: str) -> Doubt | None:
    if _is_lower_anywhere(own, sums):
        return Doubt.LOWER_THAN_APPS
    return Doubt.HELD_APPS if quota_scope == "APP" else None


def _sums(apps: Mapping[str, Labels]) -> dict[str, UsageCounts]:
    sums: dict[str, UsageCounts] = {}
    for labels in apps.values():
        for label, counts in labels.items():
            sums[label] = sums[label].plus(counts) if label in sums else counts
    return sums


def _without_app(labels: Labels) -> Iterator[Share]:
    return (Share(None, label, counts) for label, counts in labels.items() if any(counts))


def _minus(whole: UsageCounts, part: UsageCounts) -> UsageCounts:
    return UsageCounts._make(max(0, many - few) for many, few in zip(whole, part, strict=True))


def _is_lower_anywhere(own: Labels, sums: Labels) -> bool:
    return any(_is_lower(own.get(label, UsageCounts()), counts) for label, counts in sums.items())


def _is_lower(own: UsageCounts, apps: UsageCounts) -> bool:
    return any(few < many for few, many in zip(own, apps, strict=True))
