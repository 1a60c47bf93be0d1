"""`price-keeper override`: a person says which label is in force, for the rest of the period at most."""

from __future__ import annotations

import asyncio
import getpass
import re
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from proxy.calendar_days import Span, span
from proxy.clock import SystemClock
from proxy.commands.app import add_app_option, shown_app
from proxy.commands.org import apps_of, org_named, shown_org
from proxy.commands.places import NotAsked, add_places, config_of, opened
from proxy.commands.settings_shown import say
from proxy.commands.shared import Commands, actor, add_json_option, print_json
from proxy.config import Config
from proxy.errors import ConfigError
from proxy.model import Scope
from proxy.reporting.settings_shown import Shown, local, utc
from proxy.selection.overrides import Override, audited, clear_override, override_of, set_override
from proxy.stores import schema
from proxy.stores.contract import Store

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WAIT = re.compile(r"\+([0-9]{1,6})([smhd])")


def add_to(commands: Commands) -> None:
    override = commands.add_parser("override", help="say by hand which label is in force")
    verbs = override.add_subparsers(metavar="WHAT", required=True)
    put = verbs.add_parser("set", help="put a label in force, up or down the ordering, until the period ends")
    clear = verbs.add_parser("clear", help="let the quotas decide again; exit code 1 if nobody said otherwise")
    show = verbs.add_parser("show", help="tell which override is in force")
    for parser, verb in ((put, _set), (clear, _clear), (show, _show)):
        parser.add_argument("org", metavar="ORG", help="the org's id or name")
        add_app_option(parser)
        add_json_option(parser)
        add_places(parser)
        parser.set_defaults(run=lambda chosen, verb=verb: asyncio.run(_on_its_scope(verb, chosen, config_of(chosen))))
    _add_what(put)


def _add_what(put: ArgumentParser) -> None:
    put.add_argument("label", metavar="LABEL", help="one of the ordering")
    put.add_argument("--reason", required=True, metavar="TEXT", help="for whoever wonders about it")
    put.add_argument(
        "--until", metavar="TIME", help="2026-11-18T15:00 in the org's time zone, or +2h; default: its end"
    )
    put.add_argument("--who", metavar="NAME", help="default: the user of this system")


@dataclass(frozen=True, slots=True)
class _Where:
    store: Store
    scope: Scope
    span: Span
    shown: Shown

    @property
    def zone(self) -> ZoneInfo:
        return self.shown.plan.zone


async def _on_its_scope(verb: Any, chosen: Namespace, config: Config) -> int:
    async with opened(config.store, SystemClock()) as store:
        above = await shown_org(store, await org_named(store, chosen.org), config)
        shown = await _of_the_quotas(store, above, chosen.app)
        plan = shown.plan
        where = _Where(store, Scope(shown.org, shown.app), span(plan.period, shown.now, plan.zone), shown)
        code: int = await verb(where, chosen)
        return code


async def _of_the_quotas(store: Store, above: Shown, app: str | None) -> Shown:
    """The org or app to which quotas apply, as asked for."""
    if above.plan.quota_scope == "ORG":
        if app is not None:
            raise NotAsked(f"quotas apply to the org {above.title} as a whole: leave out --app")
        return above
    if app is None:
        there = ", ".join(str(each.app) for each in await apps_of(store, above)) or "none yet"
        raise NotAsked(f"quotas apply to each app of {above.title}: name one with --app; there are: {there}")
    return await shown_app(store, above, app)


async def _set(where: _Where, chosen: Namespace) -> int:
    until = None if chosen.until is None else _until(chosen.until, where.zone, where.shown.now)
    override = await set_override(
        where.store,
        SystemClock(),
        where.scope,
        where.span,
        chosen.label,
        chosen.reason,
        _user() if chosen.who is None else chosen.who,
        until,
        ordering=where.shown.plan.ordering,
        beside=audited(actor(), "override.set", where.scope, SystemClock()),
    )
    _tell(where, chosen, override)
    if not chosen.json and until is not None and override.until < until:
        say(["It cannot last longer than the period, and was cut to its end."])
    return 0


async def _clear(where: _Where, chosen: Namespace) -> int:
    beside = audited(actor(), "override.clear", where.scope, SystemClock())
    is_cleared = await clear_override(where.store, where.scope, where.span, beside=beside)
    if chosen.json:
        print_json({"is_cleared": is_cleared})
    else:
        title = where.shown.title
        say([f"{title}: the quotas decide again" if is_cleared else f"{title}: there was no override"])
    return 0 if is_cleared else 1


async def _show(where: _Where, chosen: Namespace) -> int:
    item = await where.store.get(schema.sticky_state(where.scope, where.span.key), consistent=True)
    _tell(where, chosen, override_of(item, where.shown.now))
    return 0


def _tell(where: _Where, chosen: Namespace, override: Override | None) -> None:
    if chosen.json:
        print_json(_record(where, override))
    elif override is None:
        say([f"{where.shown.title}: no override; the quotas decide"])
    else:
        until = local(override.until, where.zone)
        say([f"{where.shown.title}: {override.label} until {until}, said {override.who}: {override.reason}"])


def _record(where: _Where, override: Override | None) -> dict[str, Any]:
    scope = {"org": where.scope.org, "app": where.scope.app, "period": where.span.key}
    if override is None:
        return {**scope, "override": None}
    told = {"label": override.label, "reason": override.reason, "who": override.who}
    return {**scope, "override": {**told, "until": utc(override.until), "version": override.version}}


def _until(text: str, zone: ZoneInfo, now: float) -> float:
    wait = _WAIT.fullmatch(text)
    if wait is not None:
        return now + int(wait[1]) * _SECONDS[wait[2]]
    try:
        at = datetime.fromisoformat(text)
        return (at.replace(tzinfo=zone) if at.tzinfo is None else at).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(["--until: expected a time as 2026-11-18T15:00, or a wait as +90m, +2h"]) from None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise ConfigError(["--who: this system has no name for its user; say who you are"]) from None
