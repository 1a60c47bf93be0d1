"""What commands ask of the control API as its administrator: by his key, page by page, and for orgs by their names."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import quote

from price_keeper.cli.output import CommandError
from price_keeper.cli.shared_arguments import ADMIN_KEY_VARIABLE
from price_keeper.commands.asking import (
    MAX_RESPONSE_BYTES,
    ApiRefusal,
    ControlApiClient,
    check_response_shape,
    read_secret,
)
from price_keeper.config.problems import escape_line
from price_keeper.control.terms import API_KEY_HEADER, MAX_PAGE_SIZE
from price_keeper.errors import ConfigError, PriceKeeperError
from price_keeper.model import is_org_id
from price_keeper.reporting.tenants import resolve_org

MAX_PAGES = 1000  # of a list: a hundred thousand orgs
MAX_LISTED_BYTES = 4 * MAX_RESPONSE_BYTES
ORG_MISSING_HINT = {404: "price-keeper org put makes it, price-keeper org list tells which there are"}
_STATUS_HINTS: Mapping[int, str] = {
    401: f"the right one comes from the variable {ADMIN_KEY_VARIABLE}, or from --key-file FILE",
    403: "its configuration says which key is the right one (auth.admin_api_key_env, _file) and where it listens",
    409: "look at it again, then do it again",
    412: "look at it again, then do it again",
}

ApiRecord: TypeAlias = "dict[str, Any]"
StatusHints: TypeAlias = "Mapping[int, str]"


def build_scope_path(org: str, app: str | None = None) -> str:
    return f"/api/v1/orgs/{org}" + ("" if app is None else f"/apps/{quote(app)}")


class AdminClient:
    def __init__(self, args: Namespace) -> None:
        key = read_secret(args.key_file, ADMIN_KEY_VARIABLE, "an admin key")
        if key is None:
            raise CommandError(f"the admin key comes from the variable {ADMIN_KEY_VARIABLE}, or from --key-file FILE")
        self.api = ControlApiClient(args.api)
        self._auth_headers = {API_KEY_HEADER: key}

    def request(self, method: str, path: str, body: Any = None, hints: StatusHints | None = None) -> ApiRecord:
        """`hints` say what to do after a refusal, by its status. Raises as Api.ask."""
        return self.request_with_status(method, path, body, hints)[1]

    def request_with_status(
        self, method: str, path: str, body: Any = None, hints: StatusHints | None = None
    ) -> tuple[int, ApiRecord]:
        """As `ask`, with the status."""
        try:
            return self.api.request_with_status(method, path, body, self._auth_headers)
        except ApiRefusal as refused:
            hint = {**_STATUS_HINTS, **(hints or {})}.get(refused.status)
            if hint is None or refused.retry_after is not None:
                raise
            raise ApiRefusal(refused.status, f"{refused}; {hint}", None, refused.details) from None

    def fetch_list(self, path: str, name: str, hints: StatusHints | None = None) -> list[ApiRecord]:
        """What stands in a list under this name, to its end."""
        records: list[ApiRecord] = []
        last_cursor, bytes_read_before = "", self.api.bytes_read
        for _ in range(MAX_PAGES):
            cursor_query = f"&cursor={quote(last_cursor, safe='')}" if last_cursor else ""
            page = self.request("GET", f"{path}?limit={MAX_PAGE_SIZE}{cursor_query}", hints=hints)
            with check_response_shape(self.api.url):
                records += [dict(each) for each in page[name]]
                is_too_long = len(page[name]) > MAX_PAGE_SIZE
                cursor = page.get("cursor")
            if cursor is None:
                return records
            if not isinstance(cursor, str) or cursor <= last_cursor:  # it would never end
                raise PriceKeeperError(f"{self.api.url} lists what does not go on behind {last_cursor!r}")
            if is_too_long or self.api.bytes_read - bytes_read_before > MAX_LISTED_BYTES:
                break
            last_cursor = cursor
        raise PriceKeeperError(f"{self.api.url} lists more than can be taken: it was given up after {len(records)}")

    @contextmanager
    def convert_mistakes(self) -> Iterator[None]:
        """Around what may be a mistake in the command: each is a line of its own."""
        try:
            yield
        except ApiRefusal as refused:
            if refused.status != 400:
                raise
            lines = [f"{path}: {text}" if path else text for path, text in refused.details]
            raise ConfigError([escape_line(line) for line in lines]) from None


def resolve_org_id(admin: AdminClient, text: str) -> str:
    """The id of the org with this id or name. Raises NotAsked."""
    if is_org_id(text.lower()):
        return text.lower()
    orgs = admin.fetch_list("/api/v1/orgs", "orgs")
    with check_response_shape(admin.api.url):
        names = {str(org["org"]): org["org_name"] for org in orgs}
        try:
            org = resolve_org(text, names)
        except ValueError as failure:
            raise CommandError(escape_line(str(failure))) from None
        if not is_org_id(org):
            raise ValueError("this is no id")
    return org


def fetch_org(admin: AdminClient, text: str) -> ApiRecord:
    """The settings of the org with this id or name, and what holds of them."""
    org = resolve_org_id(admin, text)
    record = admin.request("GET", build_scope_path(org), hints=ORG_MISSING_HINT)
    if record.get("org") != org:
        raise PriceKeeperError(f"{admin.api.url} answered for another org than {org}")
    return record


def fetch_app(admin: AdminClient, org: str, app: str) -> ApiRecord:
    try:
        return admin.request("GET", build_scope_path(org, app))
    except ApiRefusal as refused:
        if refused.status != 404:
            raise
        hint = f"there are: {list_app_ids(admin, org)}"
        raise ApiRefusal(404, f"{refused}; {hint}") from None


def list_app_ids(admin: AdminClient, org: str) -> str:
    """For whoever named none, or one that is not there."""
    apps = admin.fetch_list(f"{build_scope_path(org)}/apps", "apps", ORG_MISSING_HINT)
    with check_response_shape(admin.api.url):
        return escape_line(", ".join(str(each["app"]) for each in apps)) or "none yet"
