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
from price_keeper.clock import Clock, SystemClock
from price_keeper.commandline.terminal import can_show, is_colored, get_terminal_width
from price_keeper.commands.places import select_config, open_selected_store
from price_keeper.commands.shared import CommandError, print_json
from price_keeper.config import Config
from price_keeper.reporting import focus
from price_keeper.reporting.days import Asked, check
from price_keeper.reporting.letters import printable
from price_keeper.reporting.query import Report, report
from price_keeper.reporting.records import as_csv, as_json, csv_text
from price_keeper.reporting.table import Style, table
from price_keeper.reporting.tenants import org_called, registered
from price_keeper.reporting.totals import DIMENSIONS, NO_APP, Row, only, rows

JOURNALS = "Exact as of the last flush: what still waits in journals (up to about 15 seconds of calls) is not in it."
_UNICODE = "▏▎▍▌▋▊▉█─…"


def spend(args: Namespace) -> int:
    if args.focus and args.by:
        raise CommandError("--by is not for --focus, which has a row for each org, app, label and day")
    if args.billing_account and not args.focus:
        raise CommandError("--billing-account is for --focus alone")
    check_days(args.when)
    config, clock = select_config(args), SystemClock()
    found, org = asyncio.run(_found(config, args, clock))
    spent = only(found.spent, args.app, args.label)
    if args.focus:
        regions = regions_of(config)
        records = focus.records(dataclasses.replace(found, spent=spent), regions, args.billing_account)
        _print_csv(csv_text(focus.COLUMNS, records), found)
        return 0
    by = args.by or _default_by(args)
    told = rows(spent, by)
    if args.json:
        filters = {"org": org, "app": args.app, "label": args.label}
        print_json(as_json(found, told, by, filters, [JOURNALS, *found.notes]))
    elif args.csv:
        _print_csv(as_csv(found, told, by), found)
    else:
        _print_table(args, found, told, by)
    return 0


def check_days(asked: Asked) -> None:
    try:
        check(asked, SystemClock().now())
    except ValueError as failure:
        raise CommandError(str(failure)) from None


async def _found(config: Config, args: Namespace, clock: Clock) -> tuple[Report, str | None]:
    async with open_selected_store(config.store, clock) as store:
        names = await registered(store)
        org = org_asked_for(args.org, names)
        zone = load_zone(config.defaults.timezone)
        return await report(store, args.when, org, names, zone, clock.now()), org


def org_asked_for(text: str | None, names: Mapping[str, str | None]) -> str | None:
    try:
        return None if text is None else org_called(text, names)
    except ValueError as failure:
        raise CommandError(str(failure)) from None


def regions_of(config: Config) -> focus.RegionOf:
    """Where a label is called, if that is one place for certain. What has no label may be called where any is."""
    own = {
        name: {place.region for place in label.endpoints} or {config.upstream.region}
        for name, label in config.labels.items()
    }
    anywhere = {config.upstream.region}.union(*own.values())

    def region_of(label: str) -> str | None:
        regions = own.get(label, anywhere)
        return next(iter(regions)) if len(regions) == 1 else None

    return region_of


def _default_by(args: Namespace) -> tuple[str, ...]:
    """For programs everything; for people what is not the same in every row, or the days if all of that is."""
    if args.json or args.csv:
        return DIMENSIONS
    given = {"org": args.org, "app": args.app, "label": args.label}
    return tuple(name for name, value in given.items() if value is None) or ("day",)


def _print_csv(text: str, found: Report) -> None:
    """The same bytes wherever it is printed; what is to be said besides goes where it spoils nothing."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print(text, end="")
    for note in (JOURNALS, *found.notes):
        print(note, file=sys.stderr)


def _print_table(args: Namespace, found: Report, told: Sequence[Row], by: Sequence[str]) -> None:
    style = _style()
    title = _title(args, found)
    lines = wrap(title if told else f"{title}: nothing", style.width)
    lines += ["", *table(told, by, _org_names(found), style)] if told else []
    notes = [JOURNALS, *([] if told else _what_there_was(args, found)), *found.notes]
    lines += ["", *(line for note in notes for line in wrap(printable(note), style.width))]
    encoding = sys.stdout.encoding or "ascii"
    for line in lines:
        print(line.encode(encoding, "replace").decode(encoding))


def _title(args: Namespace, found: Report) -> str:
    asked: Asked = args.when
    days = str(found.first) if found.first == found.last else f"{found.first} to {found.last}"
    if asked.text in ("today", "yesterday"):
        zones = "" if found.first == found.last else f"{found.first} or {found.last}, by the org's time zone"
        days = f"{asked.text} ({zones or days})"
    given = [f"{name} {value}" for name in ("org", "app", "label") if (value := getattr(args, name)) is not None]
    so_far = ", so far" if found.is_running else ""
    return printable(f"Spend of {', '.join([*given, days])}{so_far}")


def _what_there_was(args: Namespace, found: Report) -> list[str]:
    """When a filter lets nothing through, what it might have been."""
    filtered = [name for name in ("app", "label") if getattr(args, name) is not None]
    there = {name: sorted({str(getattr(each, name) or NO_APP) for each in found.spent}) for name in filtered}
    return [f"{name.capitalize()}s with spend: {', '.join(values)}." for name, values in there.items() if values]


def _org_names(found: Report) -> dict[tuple[str, str], str]:
    """With a piece of the id where two orgs have one name."""
    bearers = Counter(tenant.name for tenant in found.tenants.values())
    return {
        ("org", org): tenant.name if bearers[tenant.name] == 1 else f"{tenant.name} ({org[:8]})"
        for org, tenant in found.tenants.items()
        if tenant.name is not None
    }


def _style() -> Style:
    return Style(width=get_terminal_width(), is_colored=is_colored(sys.stdout), is_unicode=can_show(_UNICODE, sys.stdout))
