"""The export in FOCUS, held row by row to the rules of FOCUS 1.3 for the dataset Cost and Usage.

The rules come from the specification (github.com/FinOps-Open-Cost-and-Usage-Spec/FOCUS_Spec), written down here
without looking at the export: columns, types, allowed values, and what goes with what.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from fractions import Fraction
from io import StringIO
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.ledger.ledger_entries import UsageCounts
from price_keeper.price_dimensions import COUNT_FIELDS
from price_keeper.reports import focus_export
from price_keeper.reports.focus_export import iterate_focus_records
from price_keeper.reports.org_directory import OrgInfo
from price_keeper.reports.report_formats import format_csv
from price_keeper.reports.report_rows import SpendEntry
from price_keeper.reports.spend_report import SpendReport

from tests.support.effort import tries

# Feature level "Mandatory" in each version; 1.4 drops two which 1.3 has deprecated.
MANDATORY_1_2 = {
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart",
    "ContractedCost", "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit",
    "ProviderName", "PublisherName", "ServiceCategory", "ServiceName",
}  # fmt: skip
MANDATORY_1_3 = MANDATORY_1_2 | {"HostProviderName", "ServiceProviderName"}
MANDATORY_1_4 = MANDATORY_1_3 - {"ProviderName", "PublisherName"}
# Of the others those that this export could have; no column of FOCUS may have a name that FOCUS does not know.
OPTIONAL = {
    "AvailabilityZone", "BillingAccountType", "ChargeFrequency", "ConsumedQuantity", "ConsumedUnit",
    "ContractedUnitPrice", "InvoiceDetailId", "InvoiceId", "ListUnitPrice", "PricingCategory", "PricingCurrency",
    "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType", "ServiceSubcategory", "SkuId", "SkuMeter",
    "SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags",
}  # fmt: skip
NULLABLE = {
    "BillingAccountName", "ChargeClass", "ChargeDescription", "ConsumedQuantity", "ConsumedUnit", "PricingCategory",
    "PricingQuantity", "PricingUnit", "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType", "SkuId",
    "SkuMeter", "SkuPriceId", "SubAccountId", "SubAccountName", "Tags",
}  # fmt: skip
COSTS = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost")
QUANTITIES = ("ConsumedQuantity", "PricingQuantity")
TIMES = ("BillingPeriodEnd", "BillingPeriodStart", "ChargePeriodEnd", "ChargePeriodStart")
ALLOWED = {
    "ChargeCategory": {"Usage", "Purchase", "Tax", "Credit", "Adjustment"},
    "ChargeClass": {"Correction", None},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {"Standard", "Dynamic", "Committed", "Other"},
    "ServiceCategory": {
        "AI and Machine Learning", "Analytics", "Business Applications", "Compute", "Databases", "Developer Tools",
        "Multicloud", "Identity", "Integration", "Internet of Things", "Management and Governance", "Media",
        "Migration", "Mobile", "Networking", "Security", "Storage", "Web", "Other",
    },
    "ServiceSubcategory": {
        "AI Platforms", "Bots", "Generative AI", "Machine Learning", "Natural Language Processing",
        "Other (AI and Machine Learning)",
    },
}  # fmt: skip
# One is null exactly when the other is.
TOGETHER = [
    ("ConsumedQuantity", "ConsumedUnit"),
    ("PricingQuantity", "PricingUnit"),
    ("RegionId", "RegionName"),
    ("ResourceId", "ResourceType"),
    ("SubAccountId", "SubAccountName"),
    ("SkuId", "SkuPriceId"),
]
# Of usage that corrects nothing these are never null; the first four must be, were there no SkuPriceId.
OF_USAGE = ("ConsumedQuantity", "PricingQuantity", "PricingCategory", "SkuMeter", "SkuId", "SkuPriceId")
NUMBER = re.compile(r"-?\d+(\.\d+)?")  # no exponent, no sign but minus, no commas
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
UNIT = re.compile(r"(\d+ )?[A-Z][A-Za-z]*(-[A-Z][A-Za-z]*)?(/[A-Z][A-Za-z]*)?")
COLUMN = re.compile(r"(x_)?[A-Z][A-Za-z0-9]{0,47}")

Row = Mapping[str, str | None]


def faults(text: str) -> list[str]:
    """Everything that is against the rules in a file."""
    reader = csv.DictReader(StringIO(text), strict=True)
    columns = list(reader.fieldnames or ())
    found = list(_of_columns(columns))
    if found:
        return found
    keys = set()
    for number, cells in enumerate(reader, start=1):
        assert None not in cells, "a row is longer than the head"
        row = {name: cell or None for name, cell in cells.items()}  # an empty cell is null
        found += [f"row {number}: {fault}" for fault in _of_row(row)]
        keys.add((row["SubAccountId"], row["ResourceId"], row["SkuId"], row["ChargePeriodStart"]))
        if len(keys) < number:
            found.append(f"row {number}: tells again what another row tells")
    return found


def _of_columns(columns: list[str]) -> Iterator[str]:
    own = [name for name in columns if not name.startswith("x_")]
    custom = [name for name in columns if name.startswith("x_")]
    yield from (f"{name} is missing" for name in sorted(MANDATORY_1_3 - set(own)))
    yield from (f"{name} is no column of FOCUS" for name in sorted(set(own) - MANDATORY_1_3 - OPTIONAL))
    yield from (f"{name} is no name for a column" for name in columns if not COLUMN.fullmatch(name))
    if columns != [*sorted(own), *sorted(custom)]:
        yield "columns are not by the alphabet, FOCUS's own before custom ones"
    if len(set(columns)) < len(columns):
        yield "a column is there twice"


def _of_row(row: Row) -> Iterator[str]:
    for name, value in row.items():
        if value is None and name not in NULLABLE and not name.startswith("x_"):
            yield f"{name} is null"
        if value is not None and not value.strip():
            yield f"{name} is blank"
    yield from _of_formats(row)
    yield from _of_relations(row)
    yield from _of_periods(row)
    yield from _of_tags(row["Tags"])


def _of_formats(row: Row) -> Iterator[str]:
    for name in (*COSTS, *QUANTITIES):
        if row[name] is not None and not NUMBER.fullmatch(row[name] or ""):
            yield f"{name} is no number: {row[name]}"
    for name in TIMES:
        if not MOMENT.fullmatch(row[name] or ""):
            yield f"{name} is no moment in UTC: {row[name]}"
    for name, allowed in ALLOWED.items():
        if row[name] not in allowed:
            yield f"{name} cannot be {row[name]!r}"
    for name in ("ConsumedUnit", "PricingUnit"):
        if row[name] is not None and not UNIT.fullmatch(row[name] or ""):
            yield f"{name} is no unit: {row[name]}"
    if not re.fullmatch("[A-Z]{3}", row["BillingCurrency"] or ""):
        yield "BillingCurrency is no currency of ISO 4217"


def _of_relations(row: Row) -> Iterator[str]:
    for one, other in TOGETHER:
        if (row[one] is None) != (row[other] is None):
            yield f"{one} and {other} are null together"
    if row["ChargeCategory"] == "Usage" and row["ChargeClass"] is None:
        yield from (f"{name} of usage is null" for name in OF_USAGE if row[name] is None)
    if row["ResourceName"] is not None and row["ResourceId"] in (None, row["ResourceName"]):
        yield "ResourceName needs a ResourceId, and does not repeat it"
    if row["ProviderName"] != row["InvoiceIssuerName"] and Fraction(row["BilledCost"] or 0):
        yield "BilledCost must be 0 where a third party is paid"
    if len({row[name] for name in COSTS}) > 1:
        yield "costs differ, though there are no discounts"
    if row["ServiceCategory"] != "AI and Machine Learning":
        yield "ServiceSubcategory belongs to AI and Machine Learning"


def _of_periods(row: Row) -> Iterator[str]:
    begins, ends = _moment(row["BillingPeriodStart"]), _moment(row["BillingPeriodEnd"])
    charged, until = _moment(row["ChargePeriodStart"]), _moment(row["ChargePeriodEnd"])
    if (begins.day, begins.hour, begins.minute, begins.second) != (1, 0, 0, 0):
        yield "BillingPeriodStart does not begin a month of UTC"
    if ends != datetime(begins.year + begins.month // 12, begins.month % 12 + 1, 1, tzinfo=UTC):
        yield "BillingPeriodEnd does not end that month, exclusively"
    if not begins <= charged < until:
        yield "ChargePeriodStart lies outside"
    if charged >= ends:
        yield "ChargePeriodStart lies after the billing period"


def _of_tags(text: str | None) -> Iterator[str]:
    if text is None:
        return
    keys = json.loads(text, object_pairs_hook=lambda pairs: pairs)
    if len({key for key, _ in keys}) < len(keys):
        yield "a tag is there twice"
    if not all(value is None or isinstance(value, (str, int, float, bool)) for _, value in keys):
        yield "a tag's value is an object or a list"


def _moment(text: str | None) -> datetime:
    return datetime.fromisoformat(text or "")


ACME, BETA = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b", "11111111-2222-4333-8444-555555555555"
COUNTS = UsageCounts(9, 1, 100, 50, 20, 10, 5, 3, 12_345_678_901)


def report(
    *spent: SpendEntry, zone: str = "Europe/Berlin", apps: Mapping[tuple[str, str], str] | None = None
) -> SpendReport:
    tenants = {
        ACME: OrgInfo(ACME, 'Acme, "the" org', ZoneInfo(zone), "ORG"),
        BETA: OrgInfo(BETA, None, ZoneInfo("UTC"), "APP"),
    }
    days = [each.day for each in spent] or [date(2026, 11, 18)]
    return SpendReport(0.0, min(days), max(days), False, True, list(spent), tenants, apps or {}, [])


def export_rows(
    *spent: SpendEntry, region: str | None = "us-east-1", account: str | None = None, **how: object
) -> list[dict]:
    text = format_csv(
        focus_export.FOCUS_COLUMNS, iterate_focus_records(report(*spent, **how), lambda _: region, account)
    )  # type: ignore[arg-type]
    assert faults(text) == []
    return list(csv.DictReader(StringIO(text)))


def spent(app: str | None, label: str, day: date = date(2026, 11, 18), counts: UsageCounts = COUNTS) -> SpendEntry:
    return SpendEntry(ACME, app, label, day, counts)


def test_every_mandatory_focus_column_is_present() -> None:
    assert set(focus_export.FOCUS_COLUMNS) >= MANDATORY_1_2 | MANDATORY_1_3 | MANDATORY_1_4
    assert len(MANDATORY_1_2) == len(MANDATORY_1_4) == 21


def test_focus_row_of_app_and_label() -> None:
    (row,) = export_rows(spent("shop", "premium"), apps={(ACME, "shop"): "Shop front"})
    assert row["BilledCost"] == row["EffectiveCost"] == row["ListCost"] == row["ContractedCost"] == "0.012345678901"
    assert (row["ChargePeriodStart"], row["ChargePeriodEnd"]) == ("2026-11-17T23:00:00Z", "2026-11-18T23:00:00Z")
    assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    assert (row["ConsumedQuantity"], row["ConsumedUnit"], row["PricingQuantity"]) == ("185", "Tokens", "185")
    assert (row["SubAccountId"], row["SubAccountName"]) == (ACME, 'Acme, "the" org')
    assert (row["ResourceId"], row["ResourceName"], row["ResourceType"]) == (
        f"{ACME}/shop",
        "Shop front",
        "Application",
    )
    assert json.loads(row["Tags"]) == {"org": ACME, "app": "shop", "label": "premium"}
    assert (row["SkuId"], row["RegionId"]) == ("premium", "us-east-1")
    assert {name: row[name] for name in row if name.startswith("x_")} == {
        "x_CacheReadTokens": "20",
        "x_CacheWriteFiveMinuteTokens": "10",
        "x_CacheWriteOneHourTokens": "5",
        "x_DataGeneratorName": "Bedrock Price Keeper",
        "x_EstimatedRequests": "1",
        "x_GuardrailUnits": "3",
        "x_Images": "0",
        "x_InputTokens": "100",
        "x_OrgDay": "2026-11-18",
        "x_OrgTimeZone": "Europe/Berlin",
        "x_OutputTokens": "50",
        "x_Requests": "9",
        "x_RoutedRequests": "0",
        "x_SearchUnits": "0",
        "x_ToolCalls": "0",
        "x_VideoSeconds": "0",
    }


def test_focus_row_of_caller_without_app_has_no_resource() -> None:
    (row,) = export_rows(spent(None, "premium"))
    assert row["ResourceId"] == row["ResourceName"] == row["ResourceType"] == ""
    assert json.loads(row["Tags"]) == {"org": ACME, "label": "premium"}


def test_focus_row_of_non_token_usage_has_its_unit() -> None:
    guarded, job = export_rows(spent("shop", "guardrails"), spent("shop", "async-jobs"))[::-1]
    assert (guarded["ConsumedQuantity"], guarded["ConsumedUnit"], guarded["SkuMeter"]) == (
        "3",
        "Units",
        "Guardrail Units",
    )
    assert (job["ConsumedQuantity"], job["ConsumedUnit"], job["SkuMeter"]) == ("9", "Requests", "Asynchronous Jobs")


def test_focus_account_and_region_are_empty_if_unknown() -> None:
    (row,) = export_rows(spent("shop", "premium"), account="123456789012", region=None)
    assert (row["BillingAccountId"], row["BillingAccountName"]) == ("123456789012", "")
    assert row["RegionId"] == row["RegionName"] == ""
    (row,) = export_rows(spent("shop", "premium"))
    assert (row["BillingAccountId"], row["BillingAccountName"]) == ("price-keeper", "Bedrock Price Keeper")


def test_org_without_name_is_shown_by_id() -> None:
    (row,) = export_rows(SpendEntry(BETA, None, "premium", date(2026, 11, 18), COUNTS))
    assert (row["SubAccountId"], row["SubAccountName"]) == (BETA, BETA)


def test_name_is_escaped_against_spreadsheet_formulas() -> None:
    found = report(spent("shop", "premium"), apps={(ACME, "shop"): "-2+3"})
    found.orgs[ACME] = OrgInfo(ACME, "=HYPERLINK(1)", ZoneInfo("UTC"), "ORG")
    (row,) = iterate_focus_records(found, lambda _: None, None)
    assert (row["SubAccountName"], row["ResourceName"]) == ("'=HYPERLINK(1)", "'-2+3")


@pytest.mark.parametrize(
    ("zone", "day", "begins", "hours", "month"),
    [
        ("Europe/Berlin", date(2026, 10, 25), "2026-10-24T22:00:00Z", 25, "2026-10"),
        ("America/New_York", date(2026, 3, 8), "2026-03-08T05:00:00Z", 23, "2026-03"),
        ("Asia/Tokyo", date(2026, 11, 1), "2026-10-31T15:00:00Z", 24, "2026-10"),
        ("America/Los_Angeles", date(2026, 11, 30), "2026-11-30T08:00:00Z", 24, "2026-11"),
        ("Pacific/Kiritimati", date(2027, 1, 1), "2026-12-31T10:00:00Z", 24, "2026-12"),
        ("UTC", date(2026, 12, 31), "2026-12-31T00:00:00Z", 24, "2026-12"),
    ],
)
def test_org_day_in_utc_and_its_billing_month(zone: str, day: date, begins: str, hours: int, month: str) -> None:
    (row,) = export_rows(spent("shop", "premium", day), zone=zone)
    assert row["ChargePeriodStart"] == begins
    length = datetime.fromisoformat(row["ChargePeriodEnd"]) - datetime.fromisoformat(begins)
    assert length.total_seconds() == hours * 3600
    assert row["BillingPeriodStart"] == f"{month}-01T00:00:00Z"


def test_export_without_rows_has_only_header() -> None:
    assert export_rows() == []


@given(
    st.lists(
        st.builds(
            SpendEntry,
            st.sampled_from([ACME, BETA]),
            st.sampled_from([None, "shop", "-"]),
            st.sampled_from(["premium", "guardrails", "async-jobs", "unlabelled.claude"]),
            st.dates(date(2025, 12, 1), date(2027, 1, 31)),
            st.builds(
                UsageCounts,
                **dict.fromkeys(COUNT_FIELDS, st.integers(0, 10**12)),
                pico=st.integers(0, 10**20),
            ),
        ),
        unique_by=lambda each: each[:4],
    ),
    st.sampled_from(["UTC", "Europe/Berlin", "Africa/Cairo", "Pacific/Kiritimati", "Etc/GMT+12"]),
)
@settings(max_examples=tries(200))
def test_random_spend_keeps_focus_rules_and_adds_up(made: list[SpendEntry], zone: str) -> None:
    rows = export_rows(*made, zone=zone)
    assert sum(Fraction(row["BilledCost"]) for row in rows) * 10**12 == sum(each.counts.pico for each in made)


GOOD = format_csv(
    focus_export.FOCUS_COLUMNS, iterate_focus_records(report(spent("shop", "premium")), lambda _: "us-east-1", None)
)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("BilledCost,", "Billedcost,", "BilledCost is missing"),
        ("ListCost,", "ListPrice,", "ListPrice is no column of FOCUS"),
        ("x_Requests", "requests", "requests is no name for a column"),
        ("Standard,185,Tokens", "Standard,,Tokens", "PricingQuantity and PricingUnit are null together"),
        ("Standard,185,Tokens", "Standard,1.85E2,Tokens", "PricingQuantity is no number"),
        ("2026-11-17T23:00:00Z", "2026-11-17T23:00:00+00:00", "ChargePeriodStart is no moment in UTC"),
        ("2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z", "does not begin a month"),
        ("2026-12-01T00:00:00Z", "2026-11-30T23:59:59Z", "does not end that month"),
        (",Usage,", ",Use,", "ChargeCategory cannot be 'Use'"),
        ("USD", "$", "no currency"),
        ("us-east-1,us-east-1", ",us-east-1", "RegionId and RegionName are null together"),
        ("AWS,AWS,0.012345678901", "AWS,Amazon,0.012345678901", "BilledCost must be 0"),
        (",Amazon Bedrock,", ", ,", "ServiceName is blank"),
        (",Amazon Bedrock,", ",,", "ServiceName is null"),
        ('""label"": ""premium""', '""org"": ""premium""', "a tag is there twice"),
    ],
)
def test_focus_rules_detect_violations(old: str, new: str, fault: str) -> None:
    assert faults(GOOD) == []
    assert old in GOOD
    assert any(fault in found for found in faults(GOOD.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("counts", "cells"),
    [
        (UsageCounts(1, pico=5, images=3), ("Images", "3", "Images")),
        (UsageCounts(1, pico=5, video_seconds=6), ("Seconds", "6", "Seconds")),
        (UsageCounts(1, 0, 10, pico=5, images=3), ("Tokens", "10", "Tokens")),
    ],
)
def test_pieces_are_the_quantity_of_a_row_without_tokens(counts: UsageCounts, cells: tuple[str, str, str]) -> None:
    (row,) = export_rows(spent("shop", "pictures", counts=counts))
    assert (row["SkuMeter"], row["PricingQuantity"], row["PricingUnit"]) == cells
