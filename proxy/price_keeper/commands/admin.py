"""What commands ask of the control API as its administrator: by his key, page by page, and for orgs by their names."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import quote

from price_keeper.commandline.options import ADMIN_KEY_VARIABLE
from price_keeper.commands.asking import MAX_RESPONSE_BYTES, ControlApiClient, ApiRefusal, check_response_shape, read_secret
from price_keeper.commands.shared import CommandError
from price_keeper.config.problems import escape_line
from price_keeper.control.terms import API_KEY_HEADER, MAX_PAGE_SIZE
from price_keeper.errors import ConfigError, PriceKeeperError
from price_keeper.model import is_org_id
from price_keeper.reporting.tenants import org_called

MOST_PAGES = 1000  # of a list: a hundred thousand orgs
MOST_LISTED_BYTES = 4 * MAX_RESPONSE_BYTES
NO_ORG = {404: "price-keeper org put makes it, price-keeper org list tells which there are"}
_HINTS: Mapping[int, str] = {
    401: f"the right one comes from the variable {ADMIN_KEY_VARIABLE}, or from --key-file FILE",
    403: "its configuration says which key is the right one (auth.admin_api_key_env, _file) and where it listens",
    409: "look at it again, then do it again",
    412: "look at it again, then do it again",
}

Record: TypeAlias = "dict[str, Any]"
Hints: TypeAlias = "Mapping[int, str]"


def scope_path(org: str, app: str | None = None) -> str:
    return f"/api/v1/orgs/{org}" + ("" if app is None else f"/apps/{quote(app)}")


class Admin:
    def __init__(self, args: Namespace) -> None:
        key = read_secret(args.key_file, ADMIN_KEY_VARIABLE, "an admin key")
        if key is None:
            raise CommandError(f"the admin key comes from the variable {ADMIN_KEY_VARIABLE}, or from --key-file FILE")
        self.api = ControlApiClient(args.api)
        self._shown = {API_KEY_HEADER: key}

    def ask(self, method: str, path: str, body: Any = None, hints: Hints | None = None) -> Record:
        """`hints` say what to do after a refusal, by its status. Raises as Api.ask."""
        return self.exchange(method, path, body, hints)[1]

    def exchange(self, method: str, path: str, body: Any = None, hints: Hints | None = None) -> tuple[int, Record]:
        """As `ask`, with the status."""
        try:
            return self.api.request_with_status(method, path, body, self._shown)
        except ApiRefusal as refused:
            hint = {**_HINTS, **(hints or {})}.get(refused.status)
            if hint is None or refused.retry_after is not None:
                raise
            raise ApiRefusal(refused.status, f"{refused}; {hint}", None, refused.details) from None

    def every(self, path: str, name: str, hints: Hints | None = None) -> list[Record]:
        """What stands in a list under this name, to its end."""
        found: list[Record] = []
        after, read_before = "", self.api.bytes_read
        for _ in range(MOST_PAGES):
            more = f"&cursor={quote(after, safe='')}" if after else ""
            page = self.ask("GET", f"{path}?limit={MAX_PAGE_SIZE}{more}", hints=hints)
            with check_response_shape(self.api.url):
                found += [dict(each) for each in page[name]]
                is_too_long = len(page[name]) > MAX_PAGE_SIZE
                cursor = page.get("cursor")
            if cursor is None:
                return found
            if not isinstance(cursor, str) or cursor <= after:  # it would never end
                raise PriceKeeperError(f"{self.api.url} lists what does not go on behind {after!r}")
            if is_too_long or self.api.bytes_read - read_before > MOST_LISTED_BYTES:
                break
            after = cursor
        raise PriceKeeperError(f"{self.api.url} lists more than can be taken: it was given up after {len(found)}")

    @contextmanager
    def mistakes(self) -> Iterator[None]:
        """Around what may be a mistake in the command: each is a line of its own."""
        try:
            yield
        except ApiRefusal as refused:
            if refused.status != 400:
                raise
            lines = [f"{path}: {text}" if path else text for path, text in refused.details]
            raise ConfigError([escape_line(line) for line in lines]) from None


def org_named(admin: Admin, text: str) -> str:
    """The id of the org with this id or name. Raises NotAsked."""
    if is_org_id(text.lower()):
        return text.lower()
    orgs = admin.every("/api/v1/orgs", "orgs")
    with check_response_shape(admin.api.url):
        names = {str(org["org"]): org["org_name"] for org in orgs}
        try:
            org = org_called(text, names)
        except ValueError as failure:
            raise CommandError(escape_line(str(failure))) from None
        if not is_org_id(org):
            raise ValueError("this is no id")
    return org


def org_found(admin: Admin, text: str) -> Record:
    """The settings of the org with this id or name, and what holds of them."""
    org = org_named(admin, text)
    told = admin.ask("GET", scope_path(org), hints=NO_ORG)
    if told.get("org") != org:
        raise PriceKeeperError(f"{admin.api.url} answered for another org than {org}")
    return told


def app_found(admin: Admin, org: str, app: str) -> Record:
    try:
        return admin.ask("GET", scope_path(org, app))
    except ApiRefusal as refused:
        if refused.status != 404:
            raise
        hint = f"there are: {apps_there(admin, org)}"
        raise ApiRefusal(404, f"{refused}; {hint}") from None


def apps_there(admin: Admin, org: str) -> str:
    """For whoever named none, or one that is not there."""
    apps = admin.every(f"{scope_path(org)}/apps", "apps", NO_ORG)
    with check_response_shape(admin.api.url):
        return escape_line(", ".join(str(each["app"]) for each in apps)) or "none yet"
