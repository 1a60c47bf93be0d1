"""`price-keeper override`: set, clear and show a manual override of the active label, at most until the period ends."""

from __future__ import annotations

import getpass
import re
import time
from argparse import Namespace
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from price_keeper.budgets.active_label import MAX_REASON_LENGTH, MAX_WHO_LENGTH
from price_keeper.cli.api_client import (
    AdminClient,
    ApiRecord,
    build_scope_path,
    check_response_shape,
    fetch_app,
    fetch_org,
    list_app_ids,
)
from price_keeper.cli.command_parser import UsageError
from price_keeper.cli.output import CommandError, print_json, print_lines
from price_keeper.cli.settings_view import SettingsView, format_local_time, parse_time
from price_keeper.config.config_problems import did_you_mean
from price_keeper.errors import PriceKeeperError

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"\+([0-9]{1,6})([smhd])")


@dataclass(frozen=True, slots=True)
class _OverrideTarget:
    admin: AdminClient
    path: str
    title: str
    zone: ZoneInfo
    ordering: tuple[str, ...]

    def check_label(self, label: str) -> None:
        """Called before a missing option is reported: a mistyped label is what the user has to correct first."""
        if label not in self.ordering:
            known = did_you_mean(label, self.ordering) or f"there are {', '.join(self.ordering) or 'none'}"
            raise CommandError(f'label: "{label}" is not in the ordering; {known}')

    def request(self, method: str, subpath: str, body: Any = None) -> ApiRecord:
        with self.admin.convert_mistakes():
            return self.admin.request(method, f"{self.path}/{subpath}", body)


def _resolve_target(args: Namespace) -> _OverrideTarget:
    admin = AdminClient(args)
    org_record = fetch_org(admin, args.org)
    with check_response_shape(admin.api.url):
        view = _resolve_quota_scope(admin, SettingsView(org_record), args.app)
        path, ordering = build_scope_path(org_record["org"], args.app), tuple(view.record["in_force"]["model_ordering"])
        return _OverrideTarget(admin, path, view.title, view.zone, ordering)


def _resolve_quota_scope(admin: AdminClient, org_view: SettingsView, app: str | None) -> SettingsView:
    """The org or app to which quotas apply. Raises CommandError if the command names the other one."""
    org = org_view.record["org"]
    if org_view.applies_to_org:
        if app is not None:
            raise CommandError(f"quotas apply to the org {org_view.title} as a whole: leave out --app")
        return org_view
    if app is None:
        app_ids = list_app_ids(admin, org)
        raise CommandError(f"quotas apply to each app of {org_view.title}: name one with --app; there are: {app_ids}")
    return SettingsView(fetch_app(admin, org, app), org_view.record)


def run_override_set(args: Namespace) -> int:
    target = _resolve_target(args)
    if args.reason is None:
        target.check_label(args.label)
        raise UsageError(args.parser, "the following arguments are required: --reason")
    until = None if args.until is None else _parse_until(args.until, target.zone)
    who = _find_user_name() if args.who is None else args.who
    _check_length("--reason", args.reason, MAX_REASON_LENGTH)
    _check_length("--who", who, MAX_WHO_LENGTH)
    body = {"label": args.label, "reason": args.reason, "who": who}
    response = target.request("PUT", "override", body if until is None else {**body, "until": _format_utc_time(until)})
    _print_override(target, response, as_json=args.json)
    with check_response_shape(target.admin.api.url):
        is_shortened = until is not None and parse_time(response["override"]["until"]) < until
    if is_shortened and not args.json:
        print_lines(["It cannot last longer than the period, and was cut to its end."])
    return 0


def _check_length(option: str, text: str, max_length: int) -> None:
    """Check the length here: the API does not read a body that is far too long, and its response may be lost."""
    if len(text) > max_length:
        raise CommandError(f"{option}: expected 1 to {max_length} printable characters, found {len(text)}")


def run_override_clear(args: Namespace) -> int:
    target = _resolve_target(args)
    response = target.request("DELETE", "override")
    with check_response_shape(target.admin.api.url):
        is_cleared = bool(response["is_cleared"])
    if args.json:
        print_json(response)
    else:
        print_lines([f"{target.title}: {'the quotas decide again' if is_cleared else 'there was no override'}"])
    return 0 if is_cleared else 1


def run_override_show(args: Namespace) -> int:
    target = _resolve_target(args)
    selection = target.request("GET", "model-selection?force_check=true")
    with check_response_shape(target.admin.api.url):
        if selection["is_stale"]:
            raise PriceKeeperError("the store did not answer, so the override in force is unknown; try again")
        response = {**selection["scope"], "period": selection["period"], "override": selection["override"]}
    _print_override(target, response, as_json=args.json)
    return 0


def _print_override(target: _OverrideTarget, response: ApiRecord, *, as_json: bool) -> None:
    if as_json:
        print_json(response)
        return
    with check_response_shape(target.admin.api.url):
        override = response["override"]
        if override is None:
            line = "no override; the quotas decide"
        else:
            until = format_local_time(parse_time(override["until"]), target.zone)
            line = f"{override['label']} until {until}, said {override['who']}: {override['reason']}"
    print_lines([f"{target.title}: {line}"])


def _parse_until(text: str, zone: ZoneInfo) -> float:
    duration = _DURATION.fullmatch(text)
    if duration is not None:
        return time.time() + int(duration[1]) * _UNIT_SECONDS[duration[2]]
    try:
        at = datetime.fromisoformat(text)
        return (at.replace(tzinfo=zone) if at.tzinfo is None else at).timestamp()
    except (ValueError, OverflowError):
        raise CommandError("--until: expected a time as 2026-11-18T15:00, or a wait as +90m, +2h") from None


def _format_utc_time(at_epoch: float) -> str:
    try:
        return datetime.fromtimestamp(at_epoch, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    except (ValueError, OverflowError):
        raise CommandError("--until: expected a time of this age") from None


def _find_user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise CommandError("--who: this system has no name for its user; say who you are") from None
