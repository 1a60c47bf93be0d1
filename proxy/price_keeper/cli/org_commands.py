"""`price-keeper org` and `price-keeper app`: put, show and list the settings of orgs and apps, through the control API;
an org's administrator key.

The first put also prints how the new client secret is fetched, once.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from uuid import uuid4

from price_keeper.cli.access_commands import fetch_secret
from price_keeper.cli.api_client import (
    ORG_MISSING_HINT,
    AdminClient,
    ApiOutcomeUnknown,
    ApiRecord,
    build_scope_path,
    check_response_shape,
    fetch_app,
    fetch_org,
    read_visible_text,
    resolve_org_id,
)
from price_keeper.cli.atomic_file import open_atomically
from price_keeper.cli.output import CommandError, format_columns, print_json, print_lines
from price_keeper.cli.settings_file import SettingsFile
from price_keeper.cli.settings_view import SettingsView, format_warning
from price_keeper.control.api_constants import RETRIEVAL_TOKEN_HEADER
from price_keeper.errors import PriceKeeperError


def run_org_put(args: Namespace) -> int:
    admin, file = AdminClient(args), SettingsFile(args.file)
    path = build_scope_path(_resolve_org_to_put(admin, args.org))
    is_new, record = put_settings(admin, path, file)
    print_put_result(admin, path, record, is_new=is_new, as_json=args.json)
    if not args.json:
        _warn_about_apps(admin, path, record)
    return 0


def _resolve_org_to_put(admin: AdminClient, text: str) -> str:
    try:
        return resolve_org_id(admin, text)
    except CommandError as failure:
        raise CommandError(f"{failure}. A new org needs an id of its own, a UUID such as {uuid4()}") from None


def _warn_about_apps(admin: AdminClient, path: str, org_record: ApiRecord) -> None:
    """Warn about each app whose own quotas, which replace all quotas of its org, do not fit the org's new ordering."""
    apps = admin.fetch_list(f"{path}/apps", "apps", ORG_MISSING_HINT)
    with check_response_shape(admin.api.url):
        org_view = SettingsView(org_record)
        lines = [
            format_warning(f"app {each['app']}: {line}")
            for each in apps
            for line in _list_app_problems(SettingsView(each, org_record), org_view)
        ]
    print_lines(lines)


def _list_app_problems(app_view: SettingsView, org_view: SettingsView) -> list[str]:
    """The problems of an app's settings that its org's do not have, and the labels that are unlimited for it alone."""
    return [
        *(line for line in app_view.problems if line not in org_view.problems),
        *(
            f"{label} is unlimited, because the app's own quotas do not name it"
            for label in app_view.unlimited_labels
            if label not in org_view.unlimited_labels
        ),
    ]


def run_org_show(args: Namespace) -> int:
    admin = AdminClient(args)
    record = fetch_org(admin, args.org)
    if args.json:
        print_json(record)
        return 0
    with check_response_shape(admin.api.url):
        lines = SettingsView(record).format_lines()
    print_lines(lines)
    return 0


def run_org_list(args: Namespace) -> int:
    admin = AdminClient(args)
    orgs = admin.fetch_list("/api/v1/orgs", "orgs")
    if args.json:
        print_json(orgs)
        return 0
    with check_response_shape(admin.api.url):
        rows = [_build_org_row(SettingsView(each)) for each in orgs]
    headers = ("Org", "Id", "Time zone", "Quotas", "Ordering")
    print_lines(format_columns(headers, rows) if rows else ["no orgs yet; price-keeper org put makes one"])
    return 0


def _build_org_row(view: SettingsView) -> tuple[str, ...]:
    in_force = view.record["in_force"]
    quotas = f"{'for the org' if view.applies_to_org else 'for each app'}, by {in_force['period']}"
    return view.name, str(view.record["org"]), str(in_force["timezone"]), quotas, view.ordering or "no budget"


def run_org_key(args: Namespace) -> int:
    admin = AdminClient(args)
    org = resolve_org_id(admin, args.org)
    path = f"{build_scope_path(org)}/admin-key"
    if args.remove:
        response = admin.request("DELETE", path, hints=ORG_MISSING_HINT)
        if args.json:
            print_json(response)
        else:
            print_lines([f"{org}: it has no administrator key any more"])
        return 0
    try:
        response = admin.request("POST", path, {"grace_hours": args.grace}, ORG_MISSING_HINT)
    except ApiOutcomeUnknown as failure:
        raise ApiOutcomeUnknown(f"{failure}. Run it again: a key that was made is lost with the response") from None
    key = read_visible_text(response, "admin_key", admin.api.url)
    if args.json:
        print_json(response)
    else:
        print_lines([key])
    return 0


def run_app_put(args: Namespace) -> int:
    admin, file = AdminClient(args), SettingsFile(args.file)
    secret_file: Path | None = args.secret_file
    if secret_file is not None:
        _check_secret_file(secret_file)
    org_record = fetch_org(admin, args.org)
    path = build_scope_path(org_record["org"], args.app)
    is_new, record = put_settings(admin, path, file)
    if secret_file is not None:
        record = _save_secret(admin, path, record, secret_file)
    print_put_result(admin, path, record, org_record, is_new=is_new, as_json=args.json)
    return 0


def _check_secret_file(file: Path) -> None:
    """Before anything is changed: the secret can be fetched only once."""
    if file.exists():
        raise PriceKeeperError(f"{file} is there already; name another file with --secret-file")
    if not os.access(file.absolute().parent, os.W_OK):
        raise PriceKeeperError(f"cannot write {file}: there is no such folder, or it cannot be written to")


def _save_secret(admin: AdminClient, path: str, record: ApiRecord, file: Path) -> ApiRecord:
    """Fetch the secret of a new app into the file, readable by its owner alone, as `token --secret-file` reads it."""
    if "secret_retrieval_token" not in record:
        note = f"{file} is not written: the app has a secret already, and price-keeper rotate makes another"
        print(note, file=sys.stderr)
        return record
    client = fetch_secret(admin.api, f"{path}/credentials", record, _NOT_SAVED)
    try:
        with open_atomically(file, 0o600) as opened:
            opened.write(f"{client['client_secret']}\n")
    except OSError as failure:
        raise PriceKeeperError(_NOT_SAVED.format(why=f"cannot write {file}: {failure.strerror}")) from None
    kept = {name: value for name, value in record.items() if not name.startswith("secret_retrieval_")}
    return {**kept, "secret_file": str(file)}


def run_app_show(args: Namespace) -> int:
    admin = AdminClient(args)
    org_record = fetch_org(admin, args.org)
    record = fetch_app(admin, org_record["org"], args.app)
    if args.json:
        print_json(record)
        return 0
    with check_response_shape(admin.api.url):
        lines = SettingsView(record, org_record).format_lines()
    print_lines(lines)
    return 0


def run_app_list(args: Namespace) -> int:
    admin = AdminClient(args)
    org_record = fetch_org(admin, args.org)
    apps = admin.fetch_list(f"{build_scope_path(org_record['org'])}/apps", "apps", ORG_MISSING_HINT)
    if args.json:
        print_json(apps)
        return 0
    with check_response_shape(admin.api.url):
        rows = [_build_app_row(SettingsView(each, org_record)) for each in apps]
        title = SettingsView(org_record).title
    headers = ("App", "Id", "Ordering", "Enforcement")
    print_lines(
        format_columns(headers, rows) if rows else [f"the org {title} has no apps yet; price-keeper app put makes one"]
    )
    return 0


def _build_app_row(view: SettingsView) -> tuple[str, ...]:
    return (
        view.name,
        str(view.record["app"]),
        view.ordering or "no budget",
        str(view.record["in_force"]["enforcement"]),
    )


_NOT_SAVED = "the app is made, but its secret is not saved: {why}. price-keeper rotate makes another"
_LOST_ANSWER = (
    "{why}. Put it again; if that prints no way to fetch a secret, it was in the lost response, and "
    "price-keeper rotate creates another secret"
)


def put_settings(admin: AdminClient, path: str, file: SettingsFile) -> tuple[bool, ApiRecord]:
    """Whether the org or app was created, and the API's record of it."""
    try:
        with file.locate_mistakes():
            status, record = admin.request_with_status("PUT", path, file.body, ORG_MISSING_HINT)
    except ApiOutcomeUnknown as failure:
        raise ApiOutcomeUnknown(_LOST_ANSWER.format(why=failure)) from None
    return status == 201, record


def print_put_result(
    admin: AdminClient,
    path: str,
    record: ApiRecord,
    org_record: ApiRecord | None = None,
    *,
    is_new: bool,
    as_json: bool,
) -> None:
    if as_json:
        print_json(record)
        return
    try:
        with check_response_shape(admin.api.url):
            view = SettingsView(record, org_record)
            lines = [f"{view.title}: {'made' if is_new else 'changed'}", *view.format_lines()[1:]]
        print_lines(lines)
    finally:  # the retrieval token is returned only once, so print it even if the rest of the response is malformed
        if "secret_file" in record:
            print_lines(["", f"The secret of {record.get('client_id')} is in {record['secret_file']}"])
        if "secret_retrieval_token" in record:
            print_lines(format_fetch_command(f"{admin.api.url}{path}/credentials/secret", record))


def format_fetch_command(url: str, record: ApiRecord) -> list[str]:
    """The retrieval token goes to curl on standard input, since other users can see the arguments of a process."""
    header = shlex.quote(f"{RETRIEVAL_TOKEN_HEADER}: {record['secret_retrieval_token']}")
    until = record.get("secret_retrieval_expires_at")
    return [
        "",
        f"The secret of {record.get('client_id')} can be fetched once, until {until}:",
        f"echo {header} | curl -sf -H @- {shlex.quote(url)}",
    ]
