"""A report in the FinOps Open Cost and Usage Specification, so that it stands beside the cloud's own bill. Pure.

Version 1.3: it has the columns of 1.2, by which AWS exports its bill, as well as those which 1.4 has in their stead.
`docs/spend.md` says what each column is. An empty cell is null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from price_keeper.calendar_days import find_day_span
from price_keeper.config.prices import ASYNC_JOB_LABEL, GUARDRAIL_LABEL
from price_keeper.recording.entries import UsageCounts
from price_keeper.reporting.money import format_exact_usd
from price_keeper.reporting.query import SpendReport
from price_keeper.reporting.records import harmless, moment
from price_keeper.reporting.totals import SpendEntry, sum_token_counts

VERSION = "1.3"
LEDGER = "price-keeper"  # for the billing account, where nobody says which one of AWS's it is
GENERATOR = "Bedrock Price Keeper"
# As AWS names itself. The issuer of the invoice has the same name: FOCUS takes another one for a third party, whose
# charges must have a BilledCost of 0.
PROVIDER = "AWS"

# FOCUS has its own columns first, then those of others, which begin with x_; both by the alphabet.
COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd",
    "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "EffectiveCost", "HostProviderName",
    "InvoiceIssuerName", "ListCost", "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName",
    "PublisherName", "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory",
    "ServiceName", "ServiceProviderName", "ServiceSubcategory", "SkuId", "SkuMeter", "SkuPriceId", "SubAccountId",
    "SubAccountName", "Tags",
    "x_CacheReadTokens", "x_CacheWriteFiveMinuteTokens", "x_CacheWriteOneHourTokens", "x_DataGeneratorName",
    "x_EstimatedRequests", "x_GuardrailUnits", "x_InputTokens", "x_OrgDay", "x_OrgTimeZone", "x_OutputTokens",
    "x_Requests",
)  # fmt: skip

_ALWAYS = {
    "BillingCurrency": "USD",
    "ChargeCategory": "Usage",
    "ChargeClass": None,  # nothing here corrects what was billed before
    "ChargeFrequency": "Usage-Based",
    "HostProviderName": PROVIDER,
    "InvoiceIssuerName": PROVIDER,
    "PricingCategory": "Standard",
    "ProviderName": PROVIDER,
    "PublisherName": PROVIDER,
    "ServiceCategory": "AI and Machine Learning",
    "ServiceName": "Amazon Bedrock",
    "ServiceProviderName": PROVIDER,
    "ServiceSubcategory": "Generative AI",
    "x_DataGeneratorName": GENERATOR,
}

Record = Mapping[str, str | int | None]
RegionOf = Callable[[str], str | None]


class _Measure(NamedTuple):
    meter: str
    unit: str
    of: Callable[[UsageCounts], int]


_TOKENS = _Measure("Tokens", "Tokens", sum_token_counts)
_OTHERS = {
    GUARDRAIL_LABEL: _Measure("Guardrail Units", "Units", lambda counts: counts.guardrail_units),
    ASYNC_JOB_LABEL: _Measure("Asynchronous Jobs", "Requests", lambda counts: counts.requests),
}


def records(report: SpendReport, region_of: RegionOf, account: str | None) -> Iterator[Record]:
    """One for each org, app, label and day. `region_of` tells where a label is called, None where that may differ."""
    for spent in sorted(report.spent, key=lambda each: (each.day, each.org, each.app or "", each.label)):
        yield {
            **_ALWAYS,
            **_costs(spent.counts),
            **_account(report, spent, account),
            **_periods(report, spent),
            **_usage(spent),
            **_resource(report, spent, region_of(spent.label)),
            **_own(report, spent),
        }


def _costs(counts: UsageCounts) -> Record:
    """The one price that is known is the one the call was charged at: no discount comes after it."""
    cost = format_exact_usd(counts.pico)
    return dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost)


def _account(report: SpendReport, spent: SpendEntry, account: str | None) -> Record:
    return {
        "BillingAccountId": account or LEDGER,
        "BillingAccountName": None if account else GENERATOR,
        "SubAccountId": spent.org,
        "SubAccountName": harmless(report.orgs[spent.org].title),
    }


def _periods(report: SpendReport, spent: SpendEntry) -> Record:
    """The org's day in UTC, and the month of UTC in which it begins, since that is how AWS bills."""
    day = find_day_span(spent.day, report.orgs[spent.org].zone)
    begins = datetime.fromtimestamp(day.start, UTC).replace(day=1, hour=0, minute=0, second=0)
    years, month = divmod(begins.month, 12)
    ends = begins.replace(year=begins.year + years, month=month + 1)
    return {
        "BillingPeriodStart": moment(begins.timestamp()),
        "BillingPeriodEnd": moment(ends.timestamp()),
        "ChargePeriodStart": moment(day.start),
        "ChargePeriodEnd": moment(day.end),
    }


def _usage(spent: SpendEntry) -> Record:
    measure = _OTHERS.get(spent.label, _TOKENS)
    quantity = measure.of(spent.counts)
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


def _resource(report: SpendReport, spent: SpendEntry, region: str | None) -> Record:
    where = {"RegionId": region, "RegionName": region}
    tags = {"org": spent.org, "app": spent.app, "label": spent.label}
    told = {"Tags": json.dumps({key: value for key, value in tags.items() if value is not None})}
    if spent.app is None:
        return {**where, **told, "ResourceId": None, "ResourceName": None, "ResourceType": None}
    return {
        **where,
        **told,
        "ResourceId": f"{spent.org}/{spent.app}",
        "ResourceName": harmless(report.app_names.get((spent.org, spent.app))),
        "ResourceType": "Application",
    }


def _own(report: SpendReport, spent: SpendEntry) -> Record:
    counts = spent.counts
    return {
        "x_CacheReadTokens": counts.cache_read_tokens,
        "x_CacheWriteFiveMinuteTokens": counts.cache_write_5m_tokens,
        "x_CacheWriteOneHourTokens": counts.cache_write_1h_tokens,
        "x_EstimatedRequests": counts.estimated_requests,
        "x_GuardrailUnits": counts.guardrail_units,
        "x_InputTokens": counts.input_tokens,
        "x_OrgDay": spent.day.isoformat(),
        "x_OrgTimeZone": report.orgs[spent.org].zone.key,
        "x_OutputTokens": counts.output_tokens,
        "x_Requests": counts.requests,
    }
