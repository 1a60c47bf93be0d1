"""Formats a report as JSON or CSV for other programs. Pure.

Money is exact in both. JSON has micro-dollars, exact as a string, as some programs lose digits of large numbers. CSV
has dollars, for sums in a spreadsheet. Names are escaped so that a spreadsheet does not run them as formulas.
"""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from io import StringIO
from typing import Any

from price_keeper.price_dimensions import UsageCounts
from price_keeper.reports import money
from price_keeper.reports.report_rows import ReportRow, RowKey, sum_counts
from price_keeper.reports.spend_report import SpendReport

_COUNT_COLUMNS = tuple("cost_usd" if name == "pico" else name for name in UsageCounts._fields)
NAME_COLUMNS = {"org": "org_name", "app": "app_name"}  # the column behind an id
# The first characters of a formula. Some spreadsheets also accept their full-width forms, and skip characters of the
# ignored categories before them.
_FORMULA_SIGNS = frozenset("=+-@\N{MINUS SIGN}")
_IGNORED_CATEGORIES = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp"))  # of Unicode's categories: controls, formats, spaces


def build_json_report(
    report: SpendReport,
    rows: Sequence[ReportRow],
    by: Sequence[str],
    filters: Mapping[str, str | None],
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        "from": report.first.isoformat(),
        "to": report.last.isoformat(),
        "as_of": format_time(report.as_of),
        "is_final": report.is_final,
        "filters": dict(filters),
        "by": list(by),
        "rows": [build_row_record(report, row, by) for row in rows],
        "total": build_count_record(sum_counts(row.counts for row in rows)),
        "notes": list(notes),
    }


def build_row_record(report: SpendReport, row: ReportRow, by: Sequence[str]) -> dict[str, Any]:
    return {**_build_keys(report, row, by), **build_count_record(row.counts)}


def format_csv_report(
    report: SpendReport, rows: Sequence[ReportRow], by: Sequence[str], *, has_header: bool = True
) -> str:
    columns = [column for name in by for column in (name, NAME_COLUMNS.get(name)) if column is not None]
    records = []
    for row in rows:
        keys = _build_keys(report, row, by)
        keys.update({column: escape_formula(keys[column]) for column in NAME_COLUMNS.values() if column in keys})
        records.append({**keys, **row.counts.by_name(), "cost_usd": money.format_exact_usd(row.counts.pico)})
    return format_csv([*columns, *_COUNT_COLUMNS], records, has_header=has_header)


def format_csv(columns: Sequence[str], records: Iterable[Mapping[str, Any]], *, has_header: bool = True) -> str:
    """None is an empty cell."""
    text = StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if has_header:
        writer.writeheader()
    writer.writerows({column: _to_one_line(value) for column, value in record.items()} for record in records)
    return text.getvalue()


def format_time(epoch: float) -> str:
    return datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _build_keys(report: SpendReport, row: ReportRow, by: Sequence[str]) -> dict[str, Any]:
    keys = dict(zip(by, row.keys, strict=True))
    named_keys: dict[str, Any] = {}
    for name, key in keys.items():
        named_keys[name] = key.isoformat() if isinstance(key, date) else key
        if name in NAME_COLUMNS:
            named_keys[NAME_COLUMNS[name]] = _find_name(report, name, keys)
    return named_keys


def _find_name(report: SpendReport, name: str, keys: Mapping[str, RowKey]) -> str | None:
    if name == "org":
        return report.orgs[str(keys["org"])].name
    return report.app_names.get((str(keys["org"]), str(keys["app"])))


def build_count_record(counts: UsageCounts) -> dict[str, Any]:
    return {**counts.by_name(), **money.build_text_record("cost_usd_micros", counts.pico)}


def _to_one_line(value: Any) -> Any:
    """Python's writer does not quote a lone carriage return, which readers take for the end of a row."""
    return value.replace("\r", " ") if isinstance(value, str) else value


def escape_formula(name: str | None) -> str | None:
    """Names are the only free text from users; a cell with one must not become a formula."""
    return f"'{name}" if name is not None and _is_formula(name) else name


def _is_formula(name: str) -> bool:
    if name[:1] in ("\t", "\r", "\n"):
        return True
    for character in name:
        if unicodedata.category(character) not in _IGNORED_CATEGORIES:
            return unicodedata.normalize("NFKC", character)[:1] in _FORMULA_SIGNS
    return False
