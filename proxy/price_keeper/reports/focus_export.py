"""Formats a report by the FinOps Open Cost and Usage Specification (FOCUS), for comparison with the cloud bill. Pure.

Version 1.3: it has the columns of 1.2, which AWS exports, and those that replace them in 1.4. `docs/spend.md` explains
each column. An empty cell is null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from operator import attrgetter
from typing import NamedTuple

from price_keeper.config.config_sections import ASYNC_JOB_LABEL, GUARDRAIL_LABEL
from price_keeper.org_calendar import find_day_span
from price_keeper.price_dimensions import COUNTED_UNITS, PIECES, UsageCounts, sum_token_counts
from price_keeper.reports.money import format_exact_usd
from price_keeper.reports.report_formats import escape_formula, format_time
from price_keeper.reports.report_rows import SpendEntry
from price_keeper.reports.spend_report import SpendReport

FOCUS_VERSION = "1.3"
DEFAULT_BILLING_ACCOUNT = "price-keeper"  # if the user names no AWS account
GENERATOR_NAME = "Bedrock Price Keeper"
# The name that AWS uses for itself. The invoice issuer has the same name: FOCUS treats a different issuer as a third
# party, whose charges must have a BilledCost of 0.
PROVIDER_NAME = "AWS"

# FOCUS orders its own columns first, then custom columns, which begin with x_; both alphabetically.
FOCUS_COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd",
    "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "EffectiveCost", "HostProviderName",
    "InvoiceIssuerName", "ListCost", "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName",
    "PublisherName", "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory",
    "ServiceName", "ServiceProviderName", "ServiceSubcategory", "SkuId", "SkuMeter", "SkuPriceId", "SubAccountId",
    "SubAccountName", "Tags",
    *sorted([*(unit.focus_column for unit in COUNTED_UNITS), "x_DataGeneratorName", "x_OrgDay", "x_OrgTimeZone"]),
)  # fmt: skip

_CONSTANT_CELLS = {
    "BillingCurrency": "USD",
    "ChargeCategory": "Usage",
    "ChargeClass": None,  # no row corrects an earlier bill
    "ChargeFrequency": "Usage-Based",
    "HostProviderName": PROVIDER_NAME,
    "InvoiceIssuerName": PROVIDER_NAME,
    "PricingCategory": "Standard",
    "ProviderName": PROVIDER_NAME,
    "PublisherName": PROVIDER_NAME,
    "ServiceCategory": "AI and Machine Learning",
    "ServiceName": "Amazon Bedrock",
    "ServiceProviderName": PROVIDER_NAME,
    "ServiceSubcategory": "Generative AI",
    "x_DataGeneratorName": GENERATOR_NAME,
}

FocusRecord = Mapping[str, str | int | None]
FindRegion = Callable[[str], str | None]


class _Measure(NamedTuple):
    meter: str
    unit: str
    get_quantity: Callable[[UsageCounts], int]


_TOKEN_MEASURE = _Measure("Tokens", "Tokens", sum_token_counts)
_OTHER_MEASURES = {
    GUARDRAIL_LABEL: _Measure("Guardrail Units", "Units", lambda counts: counts.guardrail_units),
    ASYNC_JOB_LABEL: _Measure("Asynchronous Jobs", "Requests", lambda counts: counts.requests),
}


def iterate_focus_records(report: SpendReport, find_region: FindRegion, account: str | None) -> Iterator[FocusRecord]:
    """One record for each org, app, label and day. `find_region` returns None for a label with several regions."""
    for spent in sorted(report.spent, key=lambda each: (each.day, each.org, each.app or "", each.label)):
        yield {
            **_CONSTANT_CELLS,
            **_build_costs(spent.counts),
            **_build_account(report, spent, account),
            **_build_periods(report, spent),
            **_build_usage(spent),
            **_build_resource(report, spent, find_region(spent.label)),
            **_build_own_columns(report, spent),
        }


def _build_costs(counts: UsageCounts) -> FocusRecord:
    """All cost columns are equal: the only known price is the one of the call, and no discount follows."""
    cost = format_exact_usd(counts.pico)
    return dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost)


def _build_account(report: SpendReport, spent: SpendEntry, account: str | None) -> FocusRecord:
    return {
        "BillingAccountId": account or DEFAULT_BILLING_ACCOUNT,
        "BillingAccountName": None if account else GENERATOR_NAME,
        "SubAccountId": spent.org,
        "SubAccountName": escape_formula(report.orgs[spent.org].title),
    }


def _build_periods(report: SpendReport, spent: SpendEntry) -> FocusRecord:
    """The org's day in UTC, and the UTC month in which it begins, as AWS bills by UTC months."""
    day = find_day_span(spent.day, report.orgs[spent.org].zone)
    begins = datetime.fromtimestamp(day.start, UTC).replace(day=1, hour=0, minute=0, second=0)
    years, month = divmod(begins.month, 12)
    ends = begins.replace(year=begins.year + years, month=month + 1)
    return {
        "BillingPeriodStart": format_time(begins.timestamp()),
        "BillingPeriodEnd": format_time(ends.timestamp()),
        "ChargePeriodStart": format_time(day.start),
        "ChargePeriodEnd": format_time(day.end),
    }


def _build_usage(spent: SpendEntry) -> FocusRecord:
    measure = _OTHER_MEASURES.get(spent.label) or _find_measure(spent.counts)
    quantity = measure.get_quantity(spent.counts)
    return {
        "ChargeDescription": f"Amazon Bedrock {measure.meter.lower()}, label {spent.label}",
        "ConsumedQuantity": quantity,
        "ConsumedUnit": measure.unit,
        "PricingQuantity": quantity,
        "PricingUnit": measure.unit,
        "SkuId": spent.label,
        "SkuMeter": measure.meter,
        "SkuPriceId": spent.label,
    }


def _find_measure(counts: UsageCounts) -> _Measure:
    """Tokens, or the first of what is sold by the piece of a label without any."""
    if not sum_token_counts(counts):
        for unit in PIECES:
            if getattr(counts, unit.counter):
                return _Measure(unit.title, unit.focus_unit, attrgetter(unit.counter))
    return _TOKEN_MEASURE


def _build_resource(report: SpendReport, spent: SpendEntry, region: str | None) -> FocusRecord:
    region_cells = {"RegionId": region, "RegionName": region}
    tags = {"org": spent.org, "app": spent.app, "label": spent.label}
    tag_cells = {"Tags": json.dumps({key: value for key, value in tags.items() if value is not None})}
    if spent.app is None:
        return {**region_cells, **tag_cells, "ResourceId": None, "ResourceName": None, "ResourceType": None}
    return {
        **region_cells,
        **tag_cells,
        "ResourceId": f"{spent.org}/{spent.app}",
        "ResourceName": escape_formula(report.app_names.get((spent.org, spent.app))),
        "ResourceType": "Application",
    }


def _build_own_columns(report: SpendReport, spent: SpendEntry) -> FocusRecord:
    return {
        **{unit.focus_column: getattr(spent.counts, unit.counter) for unit in COUNTED_UNITS},
        "x_OrgDay": spent.day.isoformat(),
        "x_OrgTimeZone": report.orgs[spent.org].zone.key,
    }
