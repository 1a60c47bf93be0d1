"""`price-keeper apply`: bring orgs and apps to the state that YAML files describe.

    files -> DesiredOrg, DesiredApp -> compared with what the control API shows -> one PUT for each that differs

A setting that an entry omits stays as it is; null returns it to its default. An entry without an id is found by its
name. A new one then gets an id that follows from its name, so that two applies at once, or one whose answer was lost,
make one org and not two. A PUT carries the ETag of what was compared, so that it never undoes another change.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

from price_keeper.budgets.org_settings import read_quota
from price_keeper.cli.api_client import (
    AdminClient,
    ApiOutcomeUnknown,
    ApiRecord,
    ApiRefusal,
    build_scope_path,
    check_response_shape,
)
from price_keeper.cli.org_commands import format_fetch_command
from price_keeper.cli.output import print_json, print_lines
from price_keeper.cli.settings_file import LocatedSettings, SettingsFile
from price_keeper.cli.terminal import GREEN, RED, YELLOW, paint
from price_keeper.domain import PICO_PER_MICRO, format_dollars, is_app_id, is_org_id
from price_keeper.errors import ConfigError

FILE_SUFFIXES = (".yaml", ".yml", ".json")
MAX_APP_ID_LENGTH = 64
_ORG_NAMESPACE = UUID("6c1f0a52-9d0e-5a55-8f0e-2d6a7f3c4b11")  # of the ids that follow from the names of orgs
_ORG_KEYS, _APP_KEYS = ("id", "apps"), ("id",)


@dataclass(frozen=True, slots=True)
class DesiredApp:
    """An app's entry. `settings` are those that it names, amounts in micro-USD."""

    entry: LocatedSettings
    id: str | None
    name: str | None
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DesiredOrg(DesiredApp):
    apps: Sequence[DesiredApp] = ()


@dataclass(slots=True)
class Change:
    """One org or app, compared. `before` is None if it is not there yet; `after` is what will be put. One whose making
    was interrupted has no credentials, and a put of the same settings makes them."""

    kind: str
    org: str
    app: str | None
    entry: LocatedSettings
    before: Mapping[str, Any] | None
    after: Mapping[str, Any]
    etag: str | None
    is_id_generated: bool
    has_credentials: bool
    answer: ApiRecord = field(default_factory=dict)

    @property
    def action(self) -> str:
        if self.before is None:
            return "make"
        return "keep" if self.before == self.after and self.has_credentials else "change"

    @property
    def path(self) -> str:
        return build_scope_path(self.org, self.app)

    @property
    def title(self) -> str:
        name = self.after.get(f"{self.kind}_name") or (self.before or {}).get(f"{self.kind}_name") or "?"
        return f"{self.kind} {name} ({self.org if self.app is None else f'{self.org} / {self.app}'})"

    def list_differences(self) -> list[tuple[str, Any, Any]]:
        """The path of each setting that differs, and its values; None where it is not set."""
        before, after = _flatten(self.before or {}), _flatten(self.after)
        names = [*after, *(name for name in before if name not in after)]
        return [(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]


def run_apply(args: Namespace) -> int:
    admin, orgs = AdminClient(args), load_desired_state(args.file)
    changes: list[Change] = []
    try:
        for change in _compare(admin, orgs):
            if change.action != "keep" and not args.dry_run:
                _put(admin, change)
            changes.append(change)
            if not args.json:
                _print_change(admin, change, is_dry_run=args.dry_run)
    finally:  # a retrieval token is returned only once, so print it even if a later entry fails
        if args.json and changes:
            print_json({"is_dry_run": args.dry_run, "changes": [_build_record(change) for change in changes]})
    if not args.json:
        _print_summary(changes, is_dry_run=args.dry_run)
    return 0


# Reading files.


def load_desired_state(path: Path) -> list[DesiredOrg]:
    """The entries of a file, of standard input (-), or of a folder's files. Raises ConfigError with all mistakes."""
    orgs: list[DesiredOrg] = []
    mistakes: list[str] = []
    for name in _list_files(path):
        try:
            orgs += _read_file(SettingsFile(name))
        except ConfigError as failure:
            mistakes += failure.problems
    mistakes += _find_duplicates(orgs)
    if mistakes:
        raise ConfigError(mistakes)
    return orgs


def find_amounts_without_unit(path: Path) -> list[tuple[LocatedSettings, str, int]]:
    """Each quota that is written as a bare number: the settings it stands in, its label, and its micro-USD. The files
    are those of `apply`, or of `org put` and `app put`. Raises ConfigError with every mistake that needs no server."""
    found: list[tuple[LocatedSettings, str, int]] = []
    mistakes: list[str] = []
    for name in _list_files(path):
        try:
            file = SettingsFile(name)
            if isinstance(file.body, dict) and "orgs" not in file.body:
                _read_quotas(file, file.body.get("quotas"), mistakes)
                entries: list[LocatedSettings] = [file]
            else:
                entries = [each.entry for org in _read_file(file) for each in (org, *org.apps)]
        except ConfigError as failure:
            mistakes += failure.problems
            continue
        for entry in entries:
            quotas = entry.body.get("quotas")
            amounts = quotas.items() if isinstance(quotas, dict) else ()
            found += [(entry, label, amount) for label, amount in amounts if type(amount) is int]
    if mistakes:
        raise ConfigError(mistakes)
    return found


def _list_files(path: Path) -> list[str]:
    if not path.is_dir():
        return [str(path)]
    names = sorted(str(each) for each in path.iterdir() if each.suffix in FILE_SUFFIXES and each.is_file())
    if not names:
        raise ConfigError([f"{path}: there is no file in it that ends in {', '.join(FILE_SUFFIXES)}"])
    return names


def _read_file(file: LocatedSettings) -> list[DesiredOrg]:
    body, mistakes = file.body, []
    if not isinstance(body, dict) or set(body) - {"orgs"} or not (entries := file.list_children("orgs")):
        raise ConfigError([file.format_mistake((), "expected `orgs:` and below it a list of orgs, and nothing else")])
    orgs = []
    for entry in entries:
        app_entries = entry.list_children("apps")
        if app_entries is None:
            mistakes.append(entry.format_mistake(("apps",), "expected a list of apps"))
        apps = [_read_entry(each, "app", _APP_KEYS, mistakes) for each in app_entries or []]
        org = _read_entry(entry, "org", _ORG_KEYS, mistakes)
        orgs.append(DesiredOrg(org.entry, org.id, org.name, org.settings, apps))
    if mistakes:
        raise ConfigError(mistakes)
    return orgs


def _read_entry(entry: LocatedSettings, kind: str, own_keys: Sequence[str], mistakes: list[str]) -> DesiredApp:
    body = entry.body
    if not isinstance(body, dict):
        mistakes.append(entry.format_mistake((), f"expected the settings of an {kind}"))
        return DesiredApp(entry, None, None, {})
    settings = {name: value for name, value in body.items() if name not in own_keys}
    settings["quotas"] = _read_quotas(entry, settings.get("quotas"), mistakes)
    if "quotas" not in body:
        del settings["quotas"]
    name, identifier = settings.get(f"{kind}_name"), body.get("id")
    if identifier is not None:
        is_valid = isinstance(identifier, str) and (is_org_id if kind == "org" else is_app_id)(identifier)
        if not is_valid:
            expected = "a UUID in lower case" if kind == "org" else "1 to 64 letters, digits or any of ._-"
            mistakes.append(entry.format_mistake(("id",), f"expected {expected}"))
    elif not isinstance(name, str) or not name:
        mistakes.append(entry.format_mistake((), f"expected an id or an {kind}_name, by which it is found"))
    return DesiredApp(entry, identifier, name if isinstance(name, str) else None, settings)


def _read_quotas(entry: LocatedSettings, quotas: Any, mistakes: list[str]) -> Any:
    if not isinstance(quotas, dict):
        return quotas  # the control API says what is wrong with it
    read = {}
    for label, amount in quotas.items():
        try:
            read[label] = read_quota(amount)
        except ValueError as failure:
            mistakes.append(entry.format_mistake(("quotas", label), str(failure)))
    return read


def _find_duplicates(orgs: Sequence[DesiredOrg]) -> Iterator[str]:
    for entries in (orgs, *(org.apps for org in orgs)):
        for key in ("id", "name"):
            seen: set[str] = set()
            for each in entries:
                value = getattr(each, key)
                if value is not None and value.casefold() in seen:
                    yield each.entry.format_mistake((), f'"{value}" is described twice')
                seen.add((value or "").casefold())


# Comparing.


def _compare(admin: AdminClient, orgs: Sequence[DesiredOrg]) -> Iterator[Change]:
    """The change of each org and then of its apps. The caller applies each before it takes the next."""
    shown_orgs = admin.fetch_list("/api/v1/orgs", "orgs")
    with check_response_shape(admin.api.url):
        org_names = {str(each["org"]): each["org_name"] for each in shown_orgs}
    org_ids: dict[str, str] = {}
    for desired in orgs:
        org = _choose_id(desired, org_names, _build_org_id, org_ids)
        yield _compare_one(admin, "org", org, None, desired, is_there=org in org_names)
        app_names: dict[str, Any] = {}
        if desired.apps and org in org_names:
            shown_apps = admin.fetch_list(f"{build_scope_path(org)}/apps", "apps")
            with check_response_shape(admin.api.url):
                app_names = {str(each["app"]): each["settings"].get("app_name") for each in shown_apps}
        app_ids: dict[str, str] = {}
        for entry in desired.apps:
            app = _choose_id(entry, app_names, _build_app_id, app_ids)
            yield _compare_one(admin, "app", org, app, entry, is_there=app in app_names)


def _compare_one(
    admin: AdminClient, kind: str, org: str, app: str | None, desired: DesiredApp, *, is_there: bool
) -> Change:
    before, etag, has_credentials = None, None, False
    if is_there:
        record = admin.request("GET", build_scope_path(org, app))
        etag = admin.api.etag
        with check_response_shape(admin.api.url):
            before = dict(record["settings"])
            has_credentials = record.get("has_credentials", True)  # an older control service does not say
    merged = {**(before or {}), **desired.settings}
    after = {name: _normalize(name, value) for name, value in merged.items() if value is not None}
    return Change(kind, org, app, desired.entry, before, after, etag, desired.id is None, has_credentials)


def _normalize(name: str, value: Any) -> Any:
    """The form in which the control API shows a setting, so that the same settings compare equal."""
    if name == "alert_thresholds_pct" and isinstance(value, list) and all(type(each) is int for each in value):
        return sorted(set(value))
    if name == "limits" and isinstance(value, dict):
        return {key: each for key, each in value.items() if each is not None}
    return value


def _choose_id(
    desired: DesiredApp,
    names: Mapping[str, Any],
    build_id: Callable[[DesiredApp, Mapping[str, Any]], str],
    chosen: dict[str, str],
) -> str:
    """The id of an entry, which is added to `chosen`. Raises ConfigError if an entry before it has the same."""
    identifier = desired.id or _find_by_name(desired, names) or build_id(desired, names)
    if identifier in chosen:
        text = f'its id, {identifier}, is also that of "{chosen[identifier]}"; give it another'
        raise ConfigError([desired.entry.format_mistake((), text)])
    chosen[identifier] = desired.name or identifier
    return identifier


def _find_by_name(desired: DesiredApp, names: Mapping[str, Any]) -> str | None:
    """The id of what has this name. Raises ConfigError if several have."""
    wanted = (desired.name or "").casefold()
    found = sorted(each for each, name in names.items() if isinstance(name, str) and name.casefold() == wanted)
    if len(found) > 1:
        text = f'several are called "{desired.name}"; give the id of one: {", ".join(found)}'
        raise ConfigError([desired.entry.format_mistake((), text)])
    return found[0] if found else None


def _build_org_id(desired: DesiredApp, names: Mapping[str, Any]) -> str:
    return _check_free(desired, str(uuid5(_ORG_NAMESPACE, (desired.name or "").casefold())), names)


def _build_app_id(desired: DesiredApp, names: Mapping[str, Any]) -> str:
    """The name in letters, digits and hyphens; a name without any of them is hashed."""
    name = (desired.name or "").casefold()
    slug = re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:MAX_APP_ID_LENGTH].strip("-")
    return _check_free(desired, slug or f"app-{sha256(name.encode()).hexdigest()[:12]}", names)


def _check_free(desired: DesiredApp, identifier: str, names: Mapping[str, Any]) -> str:
    if identifier in names:
        text = f'the id that follows from its name, {identifier}, belongs to "{names[identifier]}"; give it an id'
        raise ConfigError([desired.entry.format_mistake((), text)])
    return identifier


# Changing.

_LOST_ANSWER = (
    "{why}. Apply it again: what was made is found by its name; if that prints no way to fetch a secret, it was in the "
    "lost response, and price-keeper rotate creates another secret"
)


def _put(admin: AdminClient, change: Change) -> None:
    condition = {"If-None-Match": "*"} if change.before is None else {"If-Match": change.etag or "*"}
    try:
        with change.entry.locate_mistakes():
            _, change.answer = admin.request_with_status("PUT", change.path, change.after, None, condition)
    except ApiOutcomeUnknown as failure:
        raise ApiOutcomeUnknown(f"{change.title}: {_LOST_ANSWER.format(why=failure)}") from None
    except ApiRefusal as refused:
        raise ApiRefusal(refused.status, f"{change.title}: {refused}", refused.retry_after, refused.details) from None


# Printing.

_DONE = {"make": "made", "change": "changed", "keep": "unchanged"}
_PLANNED = {"make": "would be made", "change": "would be changed", "keep": "unchanged"}
_ACTION_COLORS = {"make": GREEN, "change": YELLOW, "keep": ""}


def _print_change(admin: AdminClient, change: Change, *, is_dry_run: bool) -> None:
    verb = (_PLANNED if is_dry_run else _DONE)[change.action]
    print_lines([f"{change.title}: " + paint(verb, _ACTION_COLORS[change.action])])
    for name, before, after in change.list_differences():
        sign, color = ("+", GREEN) if before is None else ("-", RED) if after is None else ("~", YELLOW)
        values = " -> ".join(_format_value(name, value) for value in (before, after) if value is not None)
        print_lines([paint(f"  {sign} {name}: {values}", color)])
    if "secret_retrieval_token" in change.answer:
        print_lines(format_fetch_command(f"{admin.api.url}{change.path}/credentials/secret", change.answer))
        print_lines([""])


def _print_summary(changes: Sequence[Change], *, is_dry_run: bool) -> None:
    verbs = _PLANNED if is_dry_run else _DONE
    counts = {action: sum(change.action == action for change in changes) for action in verbs}
    print_lines([", ".join(f"{counts[action]} {verb}" for action, verb in verbs.items())])


def _build_record(change: Change) -> dict[str, Any]:
    secret = {name: value for name, value in change.answer.items() if name.startswith(("client_id", "secret_"))}
    return {
        "kind": change.kind,
        "org": change.org,
        "app": change.app,
        "is_id_generated": change.is_id_generated and change.before is None,
        "action": change.action,
        "before": change.before,
        "after": change.after,
        **secret,
    }


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Quotas one by one, as they are what is looked at; all other settings as they are."""
    flat = {name: value for name, value in settings.items() if name != "quotas" or not isinstance(value, dict)}
    quotas = settings.get("quotas")
    return flat | ({f"quotas.{label}": amount for label, amount in quotas.items()} if isinstance(quotas, dict) else {})


def _format_value(name: str, value: Any) -> str:
    if name.startswith("quotas.") and isinstance(value, int):
        return format_dollars(value * PICO_PER_MICRO)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
