"""Attributes one org's spend of one day to its apps and to callers without an app, each call once. Pure.

What an org's own counter holds depends on its `quota_scope` when the calls were made. Under ORG it holds every call of
the org, including those of its apps; the difference is spend of callers without an app. Under APP it holds only the
calls of callers without an app. A counter does not record which, and `quota_scope` may have changed since. The rules:

- if for some label both are equal in all counts that every version writes, the org's counter includes its apps;
- otherwise the org's current `quota_scope` decides.

With only one kind of counter there is nothing to decide. Evidence against the decision is reported as an
AttributionCaveat: an org's counter that is lower than the sum of the apps that it should include, or one that is not
lower than the sum of the separate apps in any label. On the day of a change the two overlap by an unknown amount. The
apps' own spend is exact on any day.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from price_keeper.ledger.ledger_entries import UsageCounts

CountsByLabel = Mapping[str, UsageCounts]


class AttributionCaveat(Enum):
    """Why the attribution of a day is uncertain. The report shows the text after the org's name."""

    INCLUDED_APPS = "its own counter equals its apps' sum, so it was taken for their total, as under quota_scope ORG"
    LOWER_THAN_APPS = (
        "its own counter is lower than its apps' sum, as when quota_scope is changed: "
        "calls of callers without an app may be missing"
    )
    MAY_INCLUDE_APPS = (
        "its own counter was taken for calls of callers without an app, as under quota_scope APP; "
        "if it was ORG then, the spend of the apps is counted twice"
    )


class AppSpend(NamedTuple):
    app: str | None  # None: of callers without an app
    label: str
    counts: UsageCounts


class Attribution(NamedTuple):
    spend: list[AppSpend]
    caveat: AttributionCaveat | None


def attribute_spend(
    org_counts: CountsByLabel, app_counts: Mapping[str, CountsByLabel], quota_scope: str
) -> Attribution:
    """The spend of one org on one day by app, with the caveat about it if there is one."""
    app_sums = _sum_apps(app_counts)
    app_spend = [AppSpend(app, label, counts) for app, labels in app_counts.items() for label, counts in labels.items()]
    if not any(label in app_sums for label in org_counts):
        return Attribution([*app_spend, *_iterate_spend_without_app(org_counts)], None)
    is_equal = any(
        label in org_counts and org_counts[label].up_to_pico() == counts.up_to_pico()
        for label, counts in app_sums.items()
    )
    if quota_scope == "APP" and not is_equal:
        return Attribution(
            [*app_spend, *_iterate_spend_without_app(org_counts)],
            None if _is_lower_anywhere(org_counts, app_sums) else AttributionCaveat.MAY_INCLUDE_APPS,
        )
    remainder = {label: _subtract(counts, app_sums.get(label, UsageCounts())) for label, counts in org_counts.items()}
    return Attribution(
        [*app_spend, *_iterate_spend_without_app(remainder)], _find_caveat(org_counts, app_sums, quota_scope)
    )


def _find_caveat(org_counts: CountsByLabel, app_sums: CountsByLabel, quota_scope: str) -> AttributionCaveat | None:
    if _is_lower_anywhere(org_counts, app_sums):
        return AttributionCaveat.LOWER_THAN_APPS
    return AttributionCaveat.INCLUDED_APPS if quota_scope == "APP" else None


def _sum_apps(app_counts: Mapping[str, CountsByLabel]) -> dict[str, UsageCounts]:
    sums: dict[str, UsageCounts] = {}
    for labels in app_counts.values():
        for label, counts in labels.items():
            sums[label] = sums[label].plus(counts) if label in sums else counts
    return sums


def _iterate_spend_without_app(labels: CountsByLabel) -> Iterator[AppSpend]:
    return (AppSpend(None, label, counts) for label, counts in labels.items() if any(counts))


def _subtract(whole: UsageCounts, part: UsageCounts) -> UsageCounts:
    return UsageCounts._make(max(0, many - few) for many, few in zip(whole, part, strict=True))


def _is_lower_anywhere(org_counts: CountsByLabel, app_sums: CountsByLabel) -> bool:
    return any(_is_lower(org_counts.get(label, UsageCounts()), counts) for label, counts in app_sums.items())


def _is_lower(org_counts: UsageCounts, app_counts: UsageCounts) -> bool:
    return any(few < many for few, many in zip(org_counts.up_to_pico(), app_counts.up_to_pico(), strict=True))
