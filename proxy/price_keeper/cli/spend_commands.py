"""`price-keeper spend` and `export`: what was spent, read from the store, for people and for other programs.

`spend` prints a table, JSON, CSV or FOCUS. `export` writes a file, a week at a time, so memory does not grow with the
period; the file appears when it is complete.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from textwrap import wrap
from typing import Any, Protocol, TextIO

from price_keeper.cli.atomic_file import open_atomically
from price_keeper.cli.output import CommandError, Progress, print_json, print_lines
from price_keeper.cli.store_selection import open_selected_store, select_config
from price_keeper.cli.terminal import can_show, get_terminal_width, is_colored
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import Config
from price_keeper.errors import PriceKeeperError
from price_keeper.ledger.ledger_entries import UsageCounts
from price_keeper.org_calendar import load_zone
from price_keeper.reports import focus_export, money
from price_keeper.reports.org_directory import load_org_names, resolve_org
from price_keeper.reports.report_formats import (
    build_count_record,
    build_json_report,
    build_row_record,
    format_csv,
    format_csv_report,
    format_time,
)
from price_keeper.reports.report_period import ReportPeriod, check_report_period, split_period
from price_keeper.reports.report_rows import DIMENSIONS, NO_APP, ReportRow, filter_spend, group_spend, sum_counts
from price_keeper.reports.spend_report import SpendReport, build_report
from price_keeper.reports.spend_table import TableStyle, format_table
from price_keeper.reports.terminal_text import make_printable

JOURNAL_NOTE = (
    "Exact as of the last flush: what still waits in journals (up to about 15 seconds of calls) is not in it."
)
TOTALS_NOTE = (
    "By totals, which may lack the last minute or two of spend, and as much between an org and its apps; "
    "--consistent reads all that was flushed."
)
_TABLE_CHARACTERS = "▏▎▍▌▋▊▉█─…"


def run_spend(args: Namespace) -> int:
    if args.focus and args.by:
        raise CommandError("--by is not for --focus, which has a row for each org, app, label and day")
    if args.billing_account and not args.focus:
        raise CommandError("--billing-account is for --focus alone")
    check_period(args.when)
    config, clock = select_config(args), SystemClock()
    report, org = asyncio.run(_read_report(config, args, clock))
    spent = filter_spend(report.spent, args.app, args.label)
    if args.focus:
        regions = build_region_finder(config)
        records = focus_export.iterate_focus_records(
            dataclasses.replace(report, spent=spent), regions, args.billing_account
        )
        _print_csv(format_csv(focus_export.FOCUS_COLUMNS, records), report)
        return 0
    by = args.by or _choose_group_by(args)
    report_rows = group_spend(spent, by)
    if args.json:
        filters = {"org": org, "app": args.app, "label": args.label}
        print_json(build_json_report(report, report_rows, by, filters, [_get_note(report), *report.notes]))
    elif args.csv:
        _print_csv(format_csv_report(report, report_rows, by), report)
    else:
        _print_table(args, report, report_rows, by)
    return 0


def check_period(period: ReportPeriod) -> None:
    try:
        check_report_period(period, SystemClock().now())
    except ValueError as failure:
        raise CommandError(str(failure)) from None


async def _read_report(config: Config, args: Namespace, clock: Clock) -> tuple[SpendReport, str | None]:
    async with open_selected_store(config.store, clock) as store:
        names = await load_org_names(store)
        org = resolve_org_filter(args.org, names)
        zone = load_zone(config.defaults.timezone)
        now, reads_shards = clock.now(), args.consistent
        return await build_report(store, args.when, org, names, zone, now, reads_shards=reads_shards), org


def resolve_org_filter(text: str | None, names: Mapping[str, str | None]) -> str | None:
    try:
        return None if text is None else resolve_org(text, names)
    except ValueError as failure:
        raise CommandError(str(failure)) from None


def build_region_finder(config: Config) -> focus_export.FindRegion:
    """Finds the region of a label: None if it may be called in several. Calls without a label may go to any of them."""
    label_regions = {
        name: {endpoint.region for endpoint in label.endpoints} or {config.upstream.region}
        for name, label in config.labels.items()
    }
    all_regions = {config.upstream.region}.union(*label_regions.values())

    def find_region(label: str) -> str | None:
        regions = label_regions.get(label, all_regions)
        return next(iter(regions)) if len(regions) == 1 else None

    return find_region


def _choose_group_by(args: Namespace) -> tuple[str, ...]:
    """For programs all dimensions; for people those that differ between rows, or the days if none differs."""
    if args.json or args.csv:
        return DIMENSIONS
    filters = {"org": args.org, "app": args.app, "label": args.label}
    return tuple(name for name, value in filters.items() if value is None) or ("day",)


def _print_csv(text: str, report: SpendReport) -> None:
    """Print UTF-8 whatever the locale; notes go to standard error, so that they do not corrupt the CSV."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print(text, end="")
    for note in (_get_note(report), *report.notes):
        print(note, file=sys.stderr)


def _print_table(args: Namespace, report: SpendReport, report_rows: Sequence[ReportRow], by: Sequence[str]) -> None:
    style = _detect_style()
    title = _format_title(args, report)
    lines = wrap(title if report_rows else f"{title}: nothing", style.width)
    lines += ["", *format_table(report_rows, by, _build_org_names(report), style)] if report_rows else []
    notes = [_get_note(report), *([] if report_rows else _list_alternatives(args, report)), *report.notes]
    lines += ["", *(line for note in notes for line in wrap(make_printable(note), style.width))]
    encoding = sys.stdout.encoding or "ascii"
    for line in lines:
        print(line.encode(encoding, "replace").decode(encoding))


def _get_note(report: SpendReport) -> str:
    return JOURNAL_NOTE if report.is_exact else TOTALS_NOTE


def _format_title(args: Namespace, report: SpendReport) -> str:
    period: ReportPeriod = args.when
    days = str(report.first) if report.first == report.last else f"{report.first} to {report.last}"
    if period.text in ("today", "yesterday"):
        zones = "" if report.first == report.last else f"{report.first} or {report.last}, by the org's time zone"
        days = f"{period.text} ({zones or days})"
    filters = [f"{name} {value}" for name in ("org", "app", "label") if (value := getattr(args, name)) is not None]
    so_far = ", so far" if report.is_running else ""
    return make_printable(f"Spend of {', '.join([*filters, days])}{so_far}")


def _list_alternatives(args: Namespace, report: SpendReport) -> list[str]:
    """The values with spend, for a filter that matched nothing."""
    filtered = [name for name in ("app", "label") if getattr(args, name) is not None]
    alternatives = {name: sorted({str(getattr(each, name) or NO_APP) for each in report.spent}) for name in filtered}
    return [f"{name.capitalize()}s with spend: {', '.join(values)}." for name, values in alternatives.items() if values]


def _build_org_names(report: SpendReport) -> dict[tuple[str, str], str]:
    """The name to show for each org id, with the start of the id where two orgs have the same name."""
    name_counts = Counter(info.name for info in report.orgs.values())
    return {
        ("org", org): tenant.name if name_counts[tenant.name] == 1 else f"{tenant.name} ({org[:8]})"
        for org, tenant in report.orgs.items()
        if tenant.name is not None
    }


def _detect_style() -> TableStyle:
    return TableStyle(
        width=get_terminal_width(),
        is_colored=is_colored(sys.stdout),
        is_unicode=can_show(_TABLE_CHARACTERS, sys.stdout),
    )


def run_export(args: Namespace) -> int:
    if args.billing_account and args.format != "focus":
        raise CommandError("--billing-account is for --format focus alone")
    check_period(args.when)
    path: Path = args.out
    _check_output_file(path, force=args.force)
    config, clock = select_config(args), SystemClock()
    try:
        with open_atomically(path, 0o666, overwrite=args.force) as file:
            summary = asyncio.run(_export(config, args, clock, file))
    except FileExistsError:
        raise _build_exists_error(path) from None
    except OSError as failure:
        raise PriceKeeperError(f"cannot write {path}: {failure.strerror}; name another place with --out") from None
    _print_summary(summary, path, args)
    return 0


def _check_output_file(path: Path, *, force: bool) -> None:
    if path.exists() and not path.is_file():
        raise CommandError(f"--out: {path} is not a file; name the file to write")
    if path.exists() and not force:
        raise _build_exists_error(path)


def _build_exists_error(path: Path) -> PriceKeeperError:
    return PriceKeeperError(f"{path} is there already; --force replaces it, --out names another file")


@dataclasses.dataclass(slots=True)
class _ExportSummary:
    """Totals and notes of all parts of an export."""

    as_of: float
    filters: dict[str, str | None]
    first: date = date.max
    last: date = date.min
    is_final: bool = True
    rows: int = 0
    counts: UsageCounts = dataclasses.field(default_factory=UsageCounts)
    notes: dict[str, None] = dataclasses.field(default_factory=dict)  # an ordered set

    def add(self, report: SpendReport, report_rows: list[ReportRow]) -> None:
        self.first, self.last = min(self.first, report.first), max(self.last, report.last)
        self.is_final = self.is_final and report.is_final
        self.rows += len(report_rows)
        self.counts = self.counts.plus(sum_counts(row.counts for row in report_rows))
        self.notes.update(dict.fromkeys(report.notes))

    def to_record(self) -> dict[str, Any]:
        return {
            "from": self.first.isoformat(),
            "to": self.last.isoformat(),
            "as_of": format_time(self.as_of),
            "is_final": self.is_final,
            "total": build_count_record(self.counts),
            "notes": [JOURNAL_NOTE, *self.notes],
        }


class _ExportFormat(Protocol):
    """Formats a file part by part."""

    def format_part(self, report: SpendReport, report_rows: list[ReportRow]) -> str: ...

    def format_end(self, summary: _ExportSummary) -> str: ...


class _CsvFormat:
    def __init__(self) -> None:
        self._is_begun = False

    def format_part(self, report: SpendReport, report_rows: list[ReportRow]) -> str:
        has_header, self._is_begun = not self._is_begun, True
        return format_csv_report(report, report_rows, DIMENSIONS, has_header=has_header)

    def format_end(self, _: _ExportSummary) -> str:
        return ""


class _FocusFormat:
    def __init__(self, find_region: focus_export.FindRegion, account: str | None) -> None:
        self._find_region = find_region
        self._account = account
        self._is_begun = False

    def format_part(self, report: SpendReport, _: list[ReportRow]) -> str:
        has_header, self._is_begun = not self._is_begun, True
        return format_csv(
            focus_export.FOCUS_COLUMNS,
            focus_export.iterate_focus_records(report, self._find_region, self._account),
            has_header=has_header,
        )

    def format_end(self, _: _ExportSummary) -> str:
        return ""


class _JsonFormat:
    """The same JSON document as `spend --json`, with one row on each line."""

    def __init__(self) -> None:
        self._separator = f'{{"by": {json.dumps(DIMENSIONS)}, "rows": [\n'  # precedes the next row

    def format_part(self, report: SpendReport, report_rows: list[ReportRow]) -> str:
        text = ""
        for row in report_rows:
            text += self._separator + json.dumps(build_row_record(report, row, DIMENSIONS))
            self._separator = ",\n"
        return text

    def format_end(self, summary: _ExportSummary) -> str:
        begin = "" if summary.rows else self._separator
        rest = json.dumps({"filters": summary.filters, **summary.to_record()})
        return f"{begin}\n], {rest[1:]}\n"


def _create_format(config: Config, args: Namespace) -> _ExportFormat:
    if args.format == "focus":
        return _FocusFormat(build_region_finder(config), args.billing_account)
    return _JsonFormat() if args.format == "json" else _CsvFormat()


async def _export(config: Config, args: Namespace, clock: Clock, file: TextIO) -> _ExportSummary:
    now, export_format = clock.now(), _create_format(config, args)
    zone = load_zone(config.defaults.timezone)
    periods = list(split_period(args.when, now))
    async with open_selected_store(config.store, clock) as store:
        names = await load_org_names(store)
        org = resolve_org_filter(args.org, names)
        summary = _ExportSummary(now, {"org": org, "app": args.app, "label": args.label})
        with Progress(clock.monotonic) as progress:
            for number, period in enumerate(periods):
                progress.update(f"{period.text}: piece {number + 1} of {len(periods)}, {summary.rows:,} rows so far")
                report = await build_report(store, period, org, names, zone, now)
                report = dataclasses.replace(report, spent=filter_spend(report.spent, args.app, args.label))
                report_rows = sorted(group_spend(report.spent, DIMENSIONS), key=_build_sort_key)
                file.write(export_format.format_part(report, report_rows))
                summary.add(report, report_rows)
    file.write(export_format.format_end(summary))
    return summary


def _build_sort_key(row: ReportRow) -> tuple[str, ...]:
    """By day, org, app and label."""
    org, app, label, day = row.keys
    return str(day), str(org), str(app or ""), str(label)


def _print_summary(summary: _ExportSummary, path: Path, args: Namespace) -> None:
    if args.json:
        print_json({"file": str(path), "format": args.format, "rows": summary.rows, **summary.to_record()})
        return
    cost = money.format_usd(summary.counts.pico)
    print_lines(
        [f"{path}: {summary.rows:,} rows, {cost}, {summary.first} to {summary.last}", JOURNAL_NOTE, *summary.notes]
    )
