"""What putting an org and putting an app share: the settings go out, and a first secret may come back."""

from __future__ import annotations

import shlex

from price_keeper.commands.admin import ORG_MISSING_HINT, AdminClient, ApiRecord
from price_keeper.commands.asking import ApiOutcomeUnknown, check_response_shape
from price_keeper.commands.settings_file import SettingsFile
from price_keeper.commands.settings_shown import SettingsView
from price_keeper.commands.shared import print_json, print_lines
from price_keeper.control.terms import RETRIEVAL_TOKEN_HEADER

_LOST = (
    "{why}. Put it again; if no way to fetch a secret is told then, the answer that was lost had it, and "
    "price-keeper rotate makes another secret"
)


def written(admin: AdminClient, path: str, file: SettingsFile) -> tuple[bool, ApiRecord]:
    """Whether it is new, and what is told of it."""
    try:
        with file.locate_mistakes():
            status, told = admin.request_with_status("PUT", path, file.body, ORG_MISSING_HINT)
    except ApiOutcomeUnknown as failure:
        raise ApiOutcomeUnknown(_LOST.format(why=failure)) from None
    return status == 201, told


def tell_put(
    admin: AdminClient, path: str, told: ApiRecord, above: ApiRecord | None = None, *, is_new: bool, as_json: bool
) -> None:
    if as_json:
        print_json(told)
        return
    try:
        with check_response_shape(admin.api.url):
            shown = SettingsView(told, above)
            lines = [f"{shown.title}: {'made' if is_new else 'changed'}", *shown.format_lines()[1:]]
        print_lines(lines)
    finally:  # it is told once, whatever else cannot be read
        if "secret_retrieval_token" in told:
            print_lines(_how_to_fetch(f"{admin.api.url}{path}/credentials/secret", told))


def _how_to_fetch(url: str, told: ApiRecord) -> list[str]:
    """What is secret goes to curl by its input: the arguments of a process are for all to see."""
    shown = shlex.quote(f"{RETRIEVAL_TOKEN_HEADER}: {told['secret_retrieval_token']}")
    until = told.get("secret_retrieval_expires_at")
    return [
        "",
        f"The secret of {told.get('client_id')} can be fetched once, until {until}:",
        f"echo {shown} | curl -sf -H @- {shlex.quote(url)}",
    ]
