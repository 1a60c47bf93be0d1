"""`price-keeper spend`: what was spent, by whom, on which label, for people and for other programs."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import wrap

from price_keeper.calendar_days import load_zone
from price_keeper.cli.output import CommandError, print_json
from price_keeper.cli.store_selection import open_selected_store, select_config
from price_keeper.cli.terminal import can_show, get_terminal_width, is_colored
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import Config
from price_keeper.reporting import focus
from price_keeper.reporting.days import ReportPeriod, check_report_period
from price_keeper.reporting.letters import make_printable
from price_keeper.reporting.query import SpendReport, build_report
from price_keeper.reporting.records import build_json_report, format_csv, format_csv_report
from price_keeper.reporting.table import TableStyle, format_table
from price_keeper.reporting.tenants import load_org_names, resolve_org
from price_keeper.reporting.totals import DIMENSIONS, NO_APP, ReportRow, filter_spend, group_spend

JOURNAL_NOTE = (
    "Exact as of the last flush: what still waits in journals (up to about 15 seconds of calls) is not in it."
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
        records = focus.iterate_focus_records(dataclasses.replace(report, spent=spent), regions, args.billing_account)
        _print_csv(format_csv(focus.FOCUS_COLUMNS, records), report)
        return 0
    by = args.by or _choose_group_by(args)
    report_rows = group_spend(spent, by)
    if args.json:
        filters = {"org": org, "app": args.app, "label": args.label}
        print_json(build_json_report(report, report_rows, by, filters, [JOURNAL_NOTE, *report.notes]))
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
        return await build_report(store, args.when, org, names, zone, clock.now()), org


def resolve_org_filter(text: str | None, names: Mapping[str, str | None]) -> str | None:
    try:
        return None if text is None else resolve_org(text, names)
    except ValueError as failure:
        raise CommandError(str(failure)) from None


def build_region_finder(config: Config) -> focus.FindRegion:
    """Where a label is called, if that is one place for certain. What has no label may be called where any is."""
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
    """For programs everything; for people what is not the same in every row, or the days if all of that is."""
    if args.json or args.csv:
        return DIMENSIONS
    filters = {"org": args.org, "app": args.app, "label": args.label}
    return tuple(name for name, value in filters.items() if value is None) or ("day",)


def _print_csv(text: str, report: SpendReport) -> None:
    """The same bytes wherever it is printed; what is to be said besides goes where it spoils nothing."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print(text, end="")
    for note in (JOURNAL_NOTE, *report.notes):
        print(note, file=sys.stderr)


def _print_table(args: Namespace, report: SpendReport, report_rows: Sequence[ReportRow], by: Sequence[str]) -> None:
    style = _detect_style()
    title = _format_title(args, report)
    lines = wrap(title if report_rows else f"{title}: nothing", style.width)
    lines += ["", *format_table(report_rows, by, _build_org_names(report), style)] if report_rows else []
    notes = [JOURNAL_NOTE, *([] if report_rows else _list_alternatives(args, report)), *report.notes]
    lines += ["", *(line for note in notes for line in wrap(make_printable(note), style.width))]
    encoding = sys.stdout.encoding or "ascii"
    for line in lines:
        print(line.encode(encoding, "replace").decode(encoding))


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
    """When a filter lets nothing through, what it might have been."""
    filtered = [name for name in ("app", "label") if getattr(args, name) is not None]
    alternatives = {name: sorted({str(getattr(each, name) or NO_APP) for each in report.spent}) for name in filtered}
    return [f"{name.capitalize()}s with spend: {', '.join(values)}." for name, values in alternatives.items() if values]


def _build_org_names(report: SpendReport) -> dict[tuple[str, str], str]:
    """With a piece of the id where two orgs have one name."""
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
