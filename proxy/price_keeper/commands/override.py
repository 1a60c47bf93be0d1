"""`price-keeper override`: a person says which label is in force, for the rest of the period at most."""

from __future__ import annotations

import getpass
import re
import time
from argparse import Namespace
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from price_keeper.commands.admin import AdminClient, ApiRecord, fetch_app, list_app_ids, fetch_org, build_scope_path
from price_keeper.commands.asking import check_response_shape
from price_keeper.commands.settings_shown import SettingsView, parse_time, format_local_time
from price_keeper.commands.shared import CommandError, print_json, print_lines
from price_keeper.errors import ConfigError, PriceKeeperError
from price_keeper.selection.overrides import MAX_REASON_LENGTH, MAX_WHO_LENGTH

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WAIT = re.compile(r"\+([0-9]{1,6})([smhd])")


@dataclass(frozen=True, slots=True)
class _Where:
    admin: AdminClient
    path: str
    title: str
    zone: ZoneInfo

    def ask(self, method: str, below: str, body: Any = None) -> ApiRecord:
        with self.admin.convert_mistakes():
            return self.admin.request(method, f"{self.path}/{below}", body)


def _where(args: Namespace) -> _Where:
    admin = AdminClient(args)
    above = fetch_org(admin, args.org)
    with check_response_shape(admin.api.url):
        shown = _of_the_quotas(admin, SettingsView(above), args.app)
        return _Where(admin, build_scope_path(above["org"], args.app), shown.title, shown.zone)


def _of_the_quotas(admin: AdminClient, above: SettingsView, app: str | None) -> SettingsView:
    """The org or app to which quotas apply, as asked for."""
    org = above.record["org"]
    if above.applies_to_org:
        if app is not None:
            raise CommandError(f"quotas apply to the org {above.title} as a whole: leave out --app")
        return above
    if app is None:
        there = list_app_ids(admin, org)
        raise CommandError(f"quotas apply to each app of {above.title}: name one with --app; there are: {there}")
    return SettingsView(fetch_app(admin, org, app), above.record)


def put(args: Namespace) -> int:
    where = _where(args)
    until = None if args.until is None else _until(args.until, where.zone)
    who = _user() if args.who is None else args.who
    _check_length("--reason", args.reason, MAX_REASON_LENGTH)
    _check_length("--who", who, MAX_WHO_LENGTH)
    wanted = {"label": args.label, "reason": args.reason, "who": who}
    told = where.ask("PUT", "override", wanted if until is None else {**wanted, "until": _utc(until)})
    _tell(where, told, as_json=args.json)
    with check_response_shape(where.admin.api.url):
        is_cut = until is not None and parse_time(told["override"]["until"]) < until
    if is_cut and not args.json:
        print_lines(["It cannot last longer than the period, and was cut to its end."])
    return 0


def _check_length(option: str, text: str, longest: int) -> None:
    """Of what is far too long the API reads nothing, and may not get to say so."""
    if len(text) > longest:
        raise CommandError(f"{option}: expected 1 to {longest} printable characters, found {len(text)}")


def clear(args: Namespace) -> int:
    where = _where(args)
    told = where.ask("DELETE", "override")
    with check_response_shape(where.admin.api.url):
        is_cleared = bool(told["is_cleared"])
    if args.json:
        print_json(told)
    else:
        print_lines([f"{where.title}: {'the quotas decide again' if is_cleared else 'there was no override'}"])
    return 0 if is_cleared else 1


def show(args: Namespace) -> int:
    where = _where(args)
    selection = where.ask("GET", "model-selection?force_check=true")
    with check_response_shape(where.admin.api.url):
        if selection["is_stale"]:
            raise PriceKeeperError("the store did not answer, so nobody knows which override is in force; try again")
        told = {**selection["scope"], "period": selection["period"], "override": selection["override"]}
    _tell(where, told, as_json=args.json)
    return 0


def _tell(where: _Where, told: ApiRecord, *, as_json: bool) -> None:
    if as_json:
        print_json(told)
        return
    with check_response_shape(where.admin.api.url):
        override = told["override"]
        if override is None:
            line = "no override; the quotas decide"
        else:
            until = format_local_time(parse_time(override["until"]), where.zone)
            line = f"{override['label']} until {until}, said {override['who']}: {override['reason']}"
    print_lines([f"{where.title}: {line}"])


def _until(text: str, zone: ZoneInfo) -> float:
    wait = _WAIT.fullmatch(text)
    if wait is not None:
        return time.time() + int(wait[1]) * _SECONDS[wait[2]]
    try:
        at = datetime.fromisoformat(text)
        return (at.replace(tzinfo=zone) if at.tzinfo is None else at).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(["--until: expected a time as 2026-11-18T15:00, or a wait as +90m, +2h"]) from None


def _utc(at_epoch: float) -> str:
    try:
        return datetime.fromtimestamp(at_epoch, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    except (ValueError, OverflowError):
        raise ConfigError(["--until: expected a time of this age"]) from None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise ConfigError(["--who: this system has no name for its user; say who you are"]) from None
