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
from price_keeper.clock import Clock, SystemClock
from price_keeper.commands.places import select_config, open_selected_store
from price_keeper.commands.progress import Progress
from price_keeper.commands.shared import CommandError, print_json, print_lines
from price_keeper.commands.spend import JOURNAL_NOTE, check_period, resolve_org_filter, build_region_finder
from price_keeper.commands.whole_file import open_atomically
from price_keeper.config import Config
from price_keeper.errors import PriceKeeperError
from price_keeper.recording.entries import UsageCounts
from price_keeper.reporting import focus, money
from price_keeper.reporting.query import Report, report
from price_keeper.reporting.records import as_csv, csv_text, moment, numbers, row_record
from price_keeper.reporting.stretches import stretches
from price_keeper.reporting.tenants import registered
from price_keeper.reporting.totals import DIMENSIONS, Row, only, rows, total


def export(args: Namespace) -> int:
    if args.billing_account and args.format != "focus":
        raise CommandError("--billing-account is for --format focus alone")
    check_period(args.when)
    path: Path = args.out
    _check_place(path, force=args.force)
    config, clock = select_config(args), SystemClock()
    try:
        with open_atomically(path, 0o666, replaces=args.force) as file:
            summary = asyncio.run(_exported(config, args, clock, file))
    except FileExistsError:
        raise _is_there(path) from None
    except OSError as failure:
        raise PriceKeeperError(f"cannot write {path}: {failure.strerror}; name another place with --out") from None
    _tell(summary, path, args)
    return 0


def _check_place(path: Path, *, force: bool) -> None:
    if path.exists() and not path.is_file():
        raise CommandError(f"--out: {path} is no file; name one that is to be written")
    if path.exists() and not force:
        raise _is_there(path)


def _is_there(path: Path) -> PriceKeeperError:
    return PriceKeeperError(f"{path} is there already; --force replaces it, --out names another file")


@dataclasses.dataclass(slots=True)
class _Summary:
    """What holds of all the pieces together."""

    as_of: float
    filters: dict[str, str | None]
    first: date = date.max
    last: date = date.min
    is_final: bool = True
    rows: int = 0
    counts: UsageCounts = dataclasses.field(default_factory=UsageCounts)
    notes: dict[str, None] = dataclasses.field(default_factory=dict)  # each once, in their order

    def add(self, found: Report, told: list[Row]) -> None:
        self.first, self.last = min(self.first, found.first), max(self.last, found.last)
        self.is_final = self.is_final and found.is_final
        self.rows += len(told)
        self.counts = self.counts.plus(total(row.counts for row in told))
        self.notes.update(dict.fromkeys(found.notes))

    def record(self) -> dict[str, Any]:
        return {
            "from": self.first.isoformat(),
            "to": self.last.isoformat(),
            "as_of": moment(self.as_of),
            "is_final": self.is_final,
            "total": numbers(self.counts),
            "notes": [JOURNAL_NOTE, *self.notes],
        }


class _Form(Protocol):
    """How a file is written, piece by piece."""

    def piece(self, found: Report, told: list[Row]) -> str: ...

    def end(self, summary: _Summary) -> str: ...


class _Csv:
    def __init__(self) -> None:
        self._is_begun = False

    def piece(self, found: Report, told: list[Row]) -> str:
        has_header, self._is_begun = not self._is_begun, True
        return as_csv(found, told, DIMENSIONS, has_header=has_header)

    def end(self, _: _Summary) -> str:
        return ""


class _Focus:
    def __init__(self, regions: focus.RegionOf, account: str | None) -> None:
        self._regions = regions
        self._account = account
        self._is_begun = False

    def piece(self, found: Report, _: list[Row]) -> str:
        has_header, self._is_begun = not self._is_begun, True
        return csv_text(focus.COLUMNS, focus.records(found, self._regions, self._account), has_header=has_header)

    def end(self, _: _Summary) -> str:
        return ""


class _Json:
    """The one document of `spend --json`, a row on each line."""

    def __init__(self) -> None:
        self._before = f'{{"by": {json.dumps(DIMENSIONS)}, "rows": [\n'  # of the next row

    def piece(self, found: Report, told: list[Row]) -> str:
        text = ""
        for row in told:
            text += self._before + json.dumps(row_record(found, row, DIMENSIONS))
            self._before = ",\n"
        return text

    def end(self, summary: _Summary) -> str:
        begin = "" if summary.rows else self._before
        rest = json.dumps({"filters": summary.filters, **summary.record()})
        return f"{begin}\n], {rest[1:]}\n"


def _form(config: Config, args: Namespace) -> _Form:
    if args.format == "focus":
        return _Focus(build_region_finder(config), args.billing_account)
    return _Json() if args.format == "json" else _Csv()


async def _exported(config: Config, args: Namespace, clock: Clock, file: TextIO) -> _Summary:
    now, form = clock.now(), _form(config, args)
    zone = load_zone(config.defaults.timezone)
    pieces = list(stretches(args.when, now))
    async with open_selected_store(config.store, clock) as store:
        names = await registered(store)
        org = resolve_org_filter(args.org, names)
        summary = _Summary(now, {"org": org, "app": args.app, "label": args.label})
        with Progress(clock.monotonic) as progress:
            for number, asked in enumerate(pieces):
                progress.update(f"{asked.text}: piece {number + 1} of {len(pieces)}, {summary.rows:,} rows so far")
                found = await report(store, asked, org, names, zone, now)
                found = dataclasses.replace(found, spent=only(found.spent, args.app, args.label))
                told = sorted(rows(found.spent, DIMENSIONS), key=_place)
                file.write(form.piece(found, told))
                summary.add(found, told)
    file.write(form.end(summary))
    return summary


def _place(row: Row) -> tuple[str, ...]:
    """By day, org, app and label."""
    org, app, label, day = row.keys
    return str(day), str(org), str(app or ""), str(label)


def _tell(summary: _Summary, path: Path, args: Namespace) -> None:
    if args.json:
        print_json({"file": str(path), "format": args.format, "rows": summary.rows, **summary.record()})
        return
    cost = money.shown(summary.counts.pico)
    print_lines([f"{path}: {summary.rows:,} rows, {cost}, {summary.first} to {summary.last}", JOURNAL_NOTE, *summary.notes])
