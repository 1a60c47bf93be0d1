"""What putting an org and putting an app share: the settings go out, and a first secret may come back."""

from __future__ import annotations

import shlex

from price_keeper.cli.api_client import (
    ORG_MISSING_HINT,
    AdminClient,
    ApiOutcomeUnknown,
    ApiRecord,
    check_response_shape,
)
from price_keeper.cli.output import print_json, print_lines
from price_keeper.cli.settings_file import SettingsFile
from price_keeper.cli.settings_view import SettingsView
from price_keeper.control.terms import RETRIEVAL_TOKEN_HEADER

_LOST_ANSWER = (
    "{why}. Put it again; if no way to fetch a secret is told then, the answer that was lost had it, and "
    "price-keeper rotate makes another secret"
)


def put_settings(admin: AdminClient, path: str, file: SettingsFile) -> tuple[bool, ApiRecord]:
    """Whether it is new, and what is told of it."""
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
    finally:  # it is told once, whatever else cannot be read
        if "secret_retrieval_token" in record:
            print_lines(_format_fetch_command(f"{admin.api.url}{path}/credentials/secret", record))


def _format_fetch_command(url: str, record: ApiRecord) -> list[str]:
    """What is secret goes to curl by its input: the arguments of a process are for all to see."""
    header = shlex.quote(f"{RETRIEVAL_TOKEN_HEADER}: {record['secret_retrieval_token']}")
    until = record.get("secret_retrieval_expires_at")
    return [
        "",
        f"The secret of {record.get('client_id')} can be fetched once, until {until}:",
        f"echo {header} | curl -sf -H @- {shlex.quote(url)}",
    ]
