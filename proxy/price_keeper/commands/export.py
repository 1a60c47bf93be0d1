"""`price-keeper export`: what was spent over many days, into a file, a week at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from argparse import Namespace
from datetime import date
from pathlib import Path
from typing import Any, Protocol, TextIO

from price_keeper.calendar_days import load_zone
from price_keeper.cli.atomic_file import open_atomically
from price_keeper.cli.output import CommandError, Progress, print_json, print_lines
from price_keeper.cli.store_selection import open_selected_store, select_config
from price_keeper.clock import Clock, SystemClock
from price_keeper.commands.spend import JOURNAL_NOTE, build_region_finder, check_period, resolve_org_filter
from price_keeper.config import Config
from price_keeper.errors import PriceKeeperError
from price_keeper.recording.entries import UsageCounts
from price_keeper.reporting import focus, money
from price_keeper.reporting.query import SpendReport, build_report
from price_keeper.reporting.records import (
    build_count_record,
    build_row_record,
    format_csv,
    format_csv_report,
    format_time,
)
from price_keeper.reporting.stretches import split_period
from price_keeper.reporting.tenants import load_org_names
from price_keeper.reporting.totals import DIMENSIONS, ReportRow, filter_spend, group_spend, sum_counts


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
        raise CommandError(f"--out: {path} is no file; name one that is to be written")
    if path.exists() and not force:
        raise _build_exists_error(path)


def _build_exists_error(path: Path) -> PriceKeeperError:
    return PriceKeeperError(f"{path} is there already; --force replaces it, --out names another file")


@dataclasses.dataclass(slots=True)
class _ExportSummary:
    """What holds of all the pieces together."""

    as_of: float
    filters: dict[str, str | None]
    first: date = date.max
    last: date = date.min
    is_final: bool = True
    rows: int = 0
    counts: UsageCounts = dataclasses.field(default_factory=UsageCounts)
    notes: dict[str, None] = dataclasses.field(default_factory=dict)  # each once, in their order

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
    """How a file is written, piece by piece."""

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
    def __init__(self, find_region: focus.FindRegion, account: str | None) -> None:
        self._find_region = find_region
        self._account = account
        self._is_begun = False

    def format_part(self, report: SpendReport, _: list[ReportRow]) -> str:
        has_header, self._is_begun = not self._is_begun, True
        return format_csv(
            focus.FOCUS_COLUMNS,
            focus.iterate_focus_records(report, self._find_region, self._account),
            has_header=has_header,
        )

    def format_end(self, _: _ExportSummary) -> str:
        return ""


class _JsonFormat:
    """The one document of `spend --json`, a row on each line."""

    def __init__(self) -> None:
        self._separator = f'{{"by": {json.dumps(DIMENSIONS)}, "rows": [\n'  # of the next row

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
