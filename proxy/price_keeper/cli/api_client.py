"""Client of the control API for commands. `ControlApiClient` sends one request; `AdminClient` adds admin key and lists.

An error response raises ApiRefusal with the API's reason and a hint. A connection that breaks after the request was
sent raises ApiOutcomeUnknown, as the request may have been applied. The client follows no redirects and uses no proxy,
both of which would see secrets. Size and duration of a response are bounded. Responses may come from another version
or another service, so all code that reads one runs inside `check_response_shape`.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from price_keeper.cli.output import CommandError
from price_keeper.cli.shared_arguments import ADMIN_KEY_VARIABLE, API_URL_VARIABLE, DEFAULT_API_URL
from price_keeper.config.config_problems import escape_line
from price_keeper.config.value_checks import control_url as url_complaint
from price_keeper.control.api_constants import API_KEY_HEADER, MAX_PAGE_SIZE
from price_keeper.control.api_constants import MAX_BODY_BYTES as MOST_SENT
from price_keeper.domain import is_org_id
from price_keeper.errors import ConfigError, PriceKeeperError
from price_keeper.reports.org_directory import resolve_org

RESPONSE_TIMEOUT_SECONDS = 30.0  # longer than the slowest response takes to begin: a login with repeated conflicts
REQUEST_DEADLINE_SECONDS = 120.0  # until the response is complete, however slowly it arrives
# A page of a hundred orgs, each with a quota for each of a thousand labels, takes a third of this.
MAX_RESPONSE_BYTES = 64 * 1024 * 1024
MAX_REASON_CHARACTERS = 2000  # of the API's reason in an error message
_SECRET_PATTERN = re.compile(r"[ -~]{1,4096}")
_VISIBLE_PATTERN = re.compile(r"[!-~]+")


class ApiRefusal(PriceKeeperError):
    """The API refused the request.

    `retry_after` is the number of seconds before which a retry is useless. `details` holds (path, message) for each
    mistake in the request; an empty path stands for the whole request.
    """

    def __init__(
        self, status: int, message: str, retry_after: int | None = None, details: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.status = status
        self.retry_after = retry_after
        self.details = details
        super().__init__(message)


class ApiOutcomeUnknown(PriceKeeperError):
    """No complete response arrived, so the request may or may not have been applied."""


@contextmanager
def check_response_shape(source: str) -> Iterator[None]:
    """Turn errors of reading a response into a message: it may come from another version, or from another service."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as failure:
        raise PriceKeeperError(f"{source} answered what cannot be read here ({type(failure).__name__})") from None


def read_visible_text(response: Mapping[str, Any], name: str, source: str) -> str:
    """A token, secret or id of a response. It must be visible ASCII, since it is printed unchanged."""
    text = response.get(name)
    if not isinstance(text, str) or not _VISIBLE_PATTERN.fullmatch(text):
        raise PriceKeeperError(f"{source} answered no {name} of printable ASCII without spaces")
    return text


def read_secret(file: Path | None, variable: str, description: str) -> str | None:
    """The secret from the file if one is given, else from the environment variable; None if there is neither."""
    text = os.environ.get(variable, "") if file is None else _read_secret_file(file)
    text = text.strip()
    if not text and file is None:
        return None
    return validate_secret(text, str(file or variable), description)


def validate_secret(text: str, source: str, description: str) -> str:
    """The message never quotes the text, which may be a part of a secret."""
    if not _SECRET_PATTERN.fullmatch(text):
        raise CommandError(f"{source}: {description} is printable ASCII, on one line")
    return text


def _read_secret_file(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as failure:
        raise ConfigError([escape_line(f"{file}: cannot be read: {failure.strerror}")]) from None
    except UnicodeDecodeError:
        raise ConfigError([escape_line(f"{file}: not UTF-8 text")]) from None


class ControlApiClient:
    """Sends one request and returns its response. Follows no redirects and uses no proxy, which would see secrets."""

    def __init__(self, url: str | None) -> None:
        source = "--api" if url is not None else API_URL_VARIABLE
        self.bytes_read = 0
        self.etag: str | None = None  # of the last response
        self.url = (url if url is not None else os.environ.get(API_URL_VARIABLE) or DEFAULT_API_URL).rstrip("/")
        complaint = url_complaint(self.url)
        if complaint:
            raise CommandError(f"{source}: {complaint}")

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The JSON of the response. Raises ApiRefusal, ApiOutcomeUnknown, or PriceKeeperError if no server answers."""
        return self.request_with_status(method, path, body, headers)[1]

    def request_with_status(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """As `request`, with the status."""
        status, retry_after, content = self._exchange(method, path, body, headers or {})
        try:
            response = json.loads(content)
        except (ValueError, RecursionError):
            response = None
        if not isinstance(response, dict):
            raise PriceKeeperError(
                f"{self.url} is no control API of Bedrock Price Keeper: its answer is no JSON object"
            )
        if status in (200, 201):
            return status, response
        text = str(response.get("message", "no reason is given"))
        details = tuple(_iterate_details(response))
        raise ApiRefusal(
            status, self._describe_refusal(status, text, details, retry_after), retry_after, details or (("", text),)
        )

    def _exchange(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, int | None, bytes]:
        connection = self._create_connection()
        payload = None if body is None else _encode_body(body)
        content_type = {} if body is None else {"Content-Type": "application/json"}
        is_connected = False
        try:
            connection.connect()
            is_connected = True
            with _limit_duration(connection.sock):
                connection.request(method, path, payload, {**content_type, **headers, "Accept": "application/json"})
                response = connection.getresponse()
                content = response.read(MAX_RESPONSE_BYTES)
            self.bytes_read += len(content)
            self.etag = response.headers.get("ETag")
            return response.status, _parse_retry_after(response.headers.get("Retry-After", "")), content
        except ssl.SSLError as failure:
            reason = getattr(failure, "verify_message", None) or failure.reason or "no TLS"
            raise PriceKeeperError(f"{self.url}: {reason}") from None
        except (OSError, http.client.HTTPException) as failure:
            error_type = ApiOutcomeUnknown if is_connected else PriceKeeperError
            raise error_type(self._describe_no_answer(failure, method, is_connected)) from None
        finally:
            connection.close()

    def _create_connection(self) -> http.client.HTTPConnection:
        scheme, _, host = self.url.partition("://")
        connection_type = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        return connection_type(host, timeout=RESPONSE_TIMEOUT_SECONDS)

    def _describe_no_answer(self, failure: Exception, method: str, is_connected: bool) -> str:
        if not is_connected:
            reason = getattr(failure, "strerror", None) or "no answer"
            return (
                f"no server answers at {self.url} ({reason}): is price-keeper running there? "
                f"Say where the control API listens by --api or {API_URL_VARIABLE}"
            )
        caveat = "" if method == "GET" else "; it may have been done all the same"
        return f"{self.url} gave no whole answer ({type(failure).__name__}){caveat}"

    def _describe_refusal(
        self, status: int, text: str, details: tuple[tuple[str, str], ...], retry_after: int | None
    ) -> str:
        mistakes = "".join(f"; {path}: {message}" if path else f"; {message}" for path, message in details)
        advice = "" if retry_after is None else f"; try again in {retry_after} s"
        return escape_line(f"{self.url} answered {status}: {text}{mistakes}")[:MAX_REASON_CHARACTERS] + advice


@contextmanager
def _limit_duration(connection: socket.socket) -> Iterator[None]:
    """Shut the connection down at the deadline. A pending read then raises TimeoutError or fails in http.client."""
    is_expired = threading.Event()

    def shut_down() -> None:
        is_expired.set()
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # bypasses TLS, which would wait for the peer

    timer = threading.Timer(REQUEST_DEADLINE_SECONDS, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if is_expired.is_set():
        raise TimeoutError


def _parse_retry_after(header: str) -> int | None:
    return int(header) if re.fullmatch(r"[0-9]{1,6}", header) else None


def _iterate_details(response: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    details = response.get("details")
    for each in details if isinstance(details, list) else []:
        if isinstance(each, dict):
            yield str(each.get("path", "")), str(each.get("message", ""))


def _encode_body(body: Any) -> bytes:
    """Raises CommandError for a body that is too long: the API does not read it, and its response may be lost."""
    encoded = json.dumps(body, allow_nan=False).encode()
    if len(encoded) > MOST_SENT:
        raise CommandError(f"too long: {len(encoded)} bytes of JSON; the control API accepts at most {MOST_SENT}")
    return encoded


MAX_PAGES = 1000  # of a list: enough for a hundred thousand orgs
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
        """`hints` maps a status to advice for the error message. Raises what `ControlApiClient.request` raises."""
        return self.request_with_status(method, path, body, hints)[1]

    def request_with_status(
        self,
        method: str,
        path: str,
        body: Any = None,
        hints: StatusHints | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, ApiRecord]:
        """As `request`, with the status."""
        try:
            return self.api.request_with_status(method, path, body, {**self._auth_headers, **(headers or {})})
        except ApiRefusal as refused:
            hint = {**_STATUS_HINTS, **(hints or {})}.get(refused.status)
            if hint is None or refused.retry_after is not None:
                raise
            raise ApiRefusal(refused.status, f"{refused}; {hint}", None, refused.details) from None

    def fetch_list(self, path: str, name: str, hints: StatusHints | None = None) -> list[ApiRecord]:
        """All records of a paginated list; `name` is the field that holds them."""
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
            if not isinstance(cursor, str) or cursor <= last_cursor:  # the list would never end
                raise PriceKeeperError(
                    f"{self.api.url} returned a page of a list with a wrong cursor, after {last_cursor!r}"
                )
            if is_too_long or self.api.bytes_read - bytes_read_before > MAX_LISTED_BYTES:
                break
            last_cursor = cursor
        raise PriceKeeperError(f"{self.api.url} returned too long a list; gave up after {len(records)} entries")

    @contextmanager
    def convert_mistakes(self) -> Iterator[None]:
        """Turn a refusal that lists mistakes in the command's arguments into a usage error with one line for each."""
        try:
            yield
        except ApiRefusal as refused:
            if refused.status != 400:
                raise
            lines = [f"{path}: {text}" if path else text for path, text in refused.details]
            raise CommandError(*map(escape_line, lines)) from None


def resolve_org_id(admin: AdminClient, text: str) -> str:
    """The id of the org with this id or name. Raises CommandError if there is none, or more than one."""
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
    """The own and the effective settings of the org with this id or name."""
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
    """The app ids of an org, for an error message about a missing or unknown app."""
    apps = admin.fetch_list(f"{build_scope_path(org)}/apps", "apps", ORG_MISSING_HINT)
    with check_response_shape(admin.api.url):
        return escape_line(", ".join(str(each["app"]) for each in apps)) or "none yet"
