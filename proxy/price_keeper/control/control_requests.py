"""Check and read the parts of a request: target and host, path, query, headers and the JSON body.

Bodies are limited in size, depth, number of values and time, and all bodies being received share byte budgets. JSON
that two parsers could read differently, as with duplicate names, is rejected.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import Any, NoReturn
from urllib.parse import parse_qsl, unquote

from aiohttp import web
from multidict import CIMultiDict

from price_keeper.control.api_errors import ERROR_CODES, ApiError, forbidden, invalid_request, not_found
from price_keeper.control.api_types import FORM, JSON, ApiRoute
from price_keeper.domain import is_app_id, is_org_id
from price_keeper.server.request_building import find_host_error, find_target_error
from price_keeper.server.sockets import is_loopback

MAX_QUERY_VALUE_LENGTH = 1000  # characters of one value; aiohttp limits the whole line
MAX_ANONYMOUS_BODY_BYTES = 20 * 1024  # fits a long refresh token; more from unknown senders would delay everyone else
SMALL_BODY_BYTES = 4 * 1024  # a few short fields
# Byte budgets for all bodies being received; a sidecar has little memory. Separate, so that no group delays another.
ANONYMOUS_BUDGET_BYTES = 4 * 1024 * 1024  # unauthenticated senders, of which there are as many as connections
CLIENTS_BUDGET_BYTES = 2 * 1024 * 1024
PER_CLIENT_BUDGET_BYTES = 512 * 1024  # so that one client cannot delay the others
ADMIN_BUDGET_BYTES = 512 * 1024
MAX_JSON_DEPTH = 12  # the deepest body of the API has four levels
MAX_JSON_VALUES = 4096  # names and values: a hundred usages have 1900, quotas of a thousand labels 2000
MAX_FORM_PARAMETERS = 32  # a token request has six
BUSY_RETRY_AFTER_SECONDS = 1.0  # by then some of the bodies being received are complete
BODY_TIMEOUT_SECONDS = 30.0  # for a body to arrive
_NOT_HTTP = re.compile(rb"[\r\n]*[^ \r\n]+ +[^ \r\n]+ +(?!HTTP/)[A-Za-z]+/[0-9]")
_ID_RULES: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "org": (is_org_id, "an org id is a UUID in lower case"),
    "app": (is_app_id, "an app id is 1 to 64 letters, digits or any of ._-, and neither . nor .."),
}


def is_not_http(data: bytes) -> bool:
    """Whether the start of a request names another protocol: aiohttp's parser accepts RTSP's version as HTTP's."""
    return _NOT_HTTP.match(data) is not None


def check_request_target(version: tuple[int, int], target: str, hosts: list[str], is_for_loopback: bool) -> None:
    """Check protocol version, Host header and target. Raises ApiError for a request whose host is ambiguous, and, on a
    loopback port, for one that names another host."""
    mistake = None
    if version not in ((1, 0), (1, 1)):
        mistake = "this port speaks HTTP/1.1 and HTTP/1.0"
    elif len(hosts) > 1 or (not hosts and version == (1, 1)):
        mistake = "a request has one Host header"
    host = hosts[0].encode("utf-8", "surrogateescape") if hosts else b""
    mistake = mistake or find_host_error(host) or find_target_error(target.encode("utf-8", "surrogateescape"), host)
    if mistake is not None:
        raise invalid_request(mistake)
    if is_for_loopback:
        _check_loopback_host(hosts)


def _check_loopback_host(hosts: list[str]) -> None:
    """Raise ApiError if the Host header names neither localhost nor a loopback address.

    This prevents DNS rebinding: a web page whose host name resolves to 127.0.0.1 could otherwise read responses of this
    port through a browser on this machine.
    """
    for host in hosts:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower() != "localhost" and not is_loopback(name):
            raise forbidden("this port listens only on this machine: use localhost or a loopback address as the host")


def check_transfer_encoding(codings: list[str]) -> None:
    """Allow no transfer coding but chunked: a proxy in front may decode another one, and see a different body. Raises
    ApiError."""
    if codings and [coding.strip().lower() for coding in codings] != ["chunked"]:
        message = "a body needs a Content-Length or chunked transfer coding"
        raise ApiError(400, ERROR_CODES[400], message, headers={"Connection": "close"})


def read_path_parameters(template: str, raw_path: str) -> dict[str, str]:
    """The decoded parameters of a path that the router matched with a template. Raises ApiError (404) for one that is
    not UTF-8, which no resource's id is, and if the rest is spelled in another way than the template: a proxy in front
    may allow and deny paths by their spelling."""
    path = {}
    try:
        for expected, segment in zip(template.split("/"), raw_path.split("/"), strict=True):
            if expected.startswith("{"):
                path[expected[1:-1]] = unquote(segment, errors="strict")
            elif segment != expected:
                raise ValueError("another spelling")
    except ValueError:  # UnicodeDecodeError is one
        raise not_found("there is no such path") from None
    return path


def require_path(templates: Iterable[str], raw_path: str) -> None:
    """Raise ApiError (404) if the path is spelled like no template."""
    for template in templates:
        with suppress(ApiError):
            read_path_parameters(template, raw_path)
            return
    raise not_found("there is no such path")


def check_path_ids(path: Mapping[str, str]) -> None:
    mistakes = [
        (name, _ID_RULES[name][1])
        for name, value in path.items()
        if name in _ID_RULES and not _ID_RULES[name][0](value)
    ]
    if mistakes:
        raise invalid_request("the path has an invalid id", *mistakes)


def parse_query(request: web.BaseRequest, route: ApiRoute) -> dict[str, str]:
    query = request.rel_url.query
    mistakes = [(name[:64], "unknown") for name in dict.fromkeys(query) if name not in route.query_schemas]
    mistakes += [(name, "given twice") for name in route.query_schemas if len(query.getall(name, [])) > 1]
    mistakes += [
        (name, "too long")
        for name, schema in route.query_schemas.items()
        if len(query.get(name, "")) > schema.get("maxLength", MAX_QUERY_VALUE_LENGTH)
    ]
    if mistakes:
        raise invalid_request("the query cannot be used", *mistakes)
    return dict(query)


def read_headers(request: web.BaseRequest) -> CIMultiDict[str]:
    """The headers of a request. Raises ApiError if a header that decides something is repeated, because it is ambiguous
    then."""
    for name in ("If-Match", "If-None-Match", "X-Retrieval-Token", "Authorization"):
        if len(request.headers.getall(name, [])) > 1:
            raise invalid_request(f"{name} comes only once")
    return CIMultiDict(request.headers)


class ByteBudget:
    """Limits the memory of bodies being received. Each reserves its content-length, or the maximum if it has none."""

    def __init__(self, max_bytes: int, max_per_caller: int | None = None) -> None:
        self._available = max_bytes
        self._max_per_caller = max_bytes if max_per_caller is None else max_per_caller
        self._reserved_by: Counter[str] = Counter()

    @contextmanager
    def reserve(self, size: int, caller: str = "") -> Iterator[None]:
        """Reserve bytes within the block. Raises ApiError (503) if they exceed a limit."""
        if size > self._available or size + self._reserved_by[caller] > self._max_per_caller:
            # The body is not read, so the connection cannot be used again.
            message = "this process is receiving too many bodies; try again"
            raise ApiError(
                503, ERROR_CODES[503], message, retry_after=BUSY_RETRY_AFTER_SECONDS, headers={"Connection": "close"}
            )
        self._available -= size
        self._reserved_by[caller] += size
        try:
            yield
        finally:
            self._available += size
            self._reserved_by[caller] -= size
            if not self._reserved_by[caller]:
                del self._reserved_by[caller]


class BodyBudgets:
    """Separate budgets for unauthenticated senders, for clients and for the administrator."""

    def __init__(self) -> None:
        self.anonymous = ByteBudget(ANONYMOUS_BUDGET_BYTES)
        self.clients = ByteBudget(CLIENTS_BUDGET_BYTES, PER_CLIENT_BUDGET_BYTES)
        self.admin = ByteBudget(ADMIN_BUDGET_BYTES)


class FormBody(dict[str, str]):
    """The parameters of a form. One without a value is as if it were not there."""


async def read_body(request: web.BaseRequest, route: ApiRoute, byte_budget: ByteBudget, caller: str) -> Any:
    """Read and parse the body within the limits: JSON, or where the route takes one a form. Raises ApiError."""
    max_bytes = route.max_body_bytes
    is_form = route.form_schema is not None and _is_of_type(request.headers.getall("Content-Type", []), FORM)
    _check_body_headers(request, max_bytes, is_form=is_form)
    length = request.content_length
    with byte_budget.reserve(max_bytes if length is None else length, caller):
        raw = await _read_before_timeout(request, max_bytes)
        return parse_form(raw) if is_form else parse_json(raw)


def parse_form(raw: bytes) -> FormBody:
    """Raises ApiError for a parameter that is given twice, since the two could mean different things."""
    try:
        pairs = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FORM_PARAMETERS
        )
    except ValueError:  # UnicodeDecodeError is one
        raise invalid_request("the body is no form of UTF-8 text with few parameters") from None
    if len(dict(pairs)) < len(pairs):
        raise invalid_request("the form has a parameter twice")
    return FormBody((name, value) for name, value in pairs if value)


async def _read_before_timeout(request: web.BaseRequest, max_bytes: int) -> bytes:
    """Read the body, asking for it first if the client expects that. Raises ApiError."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # otherwise aiohttp would assume that a response has begun
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            return await _read_bytes(request, max_bytes)
    except TimeoutError:
        raise ApiError(
            408, ERROR_CODES[408], "the body did not arrive in time", headers={"Connection": "close"}
        ) from None
    except (web.RequestPayloadError, ConnectionError):
        raise invalid_request("the body is incomplete, or not encoded as its headers say") from None


async def _read_bytes(request: web.BaseRequest, max_bytes: int) -> bytes:
    raw = bytearray()
    while chunk := await request.content.readany():
        raw += chunk
        if len(raw) > max_bytes:
            raise body_too_large(max_bytes)
    return bytes(raw)


def _check_body_headers(request: web.BaseRequest, max_bytes: int, *, is_form: bool) -> None:
    is_json = _is_of_type(request.headers.getall("Content-Type", []), JSON)
    if not (is_json or is_form) or "Content-Encoding" in request.headers:
        raise ApiError(415, ERROR_CODES[415], "a body is of content type application/json, in UTF-8 and not compressed")
    if request.headers.get("Expect", "100-continue").lower() != "100-continue":
        raise ApiError(417, ERROR_CODES[417], "the only supported expectation is 100-continue")
    if (request.content_length or 0) > max_bytes:
        raise body_too_large(max_bytes)


def body_too_large(max_bytes: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(
        413, ERROR_CODES[413], f"a body has at most {max_bytes} bytes here", headers={"Connection": "close"}
    )


def _is_of_type(values: list[str], expected: str) -> bool:
    kind, _, rest = values[0].partition(";") if len(values) == 1 else ("", "", "")
    return kind.strip().lower() == expected and rest.replace(" ", "").lower() in (
        "",
        "charset=utf-8",
        'charset="utf-8"',
    )


def parse_json(raw: bytes) -> Any:
    """Parse JSON; numbers with a decimal point become Decimals. Raises ApiError."""
    try:
        value = json.loads(
            raw.decode(),
            object_pairs_hook=_reject_duplicate_names,
            parse_float=Decimal,
            parse_constant=_reject_constant,
        )
    except RecursionError:
        raise invalid_request(f"JSON is nested at most {MAX_JSON_DEPTH} deep here") from None
    except UnicodeDecodeError:
        raise invalid_request("the body is not UTF-8 text") from None
    except (ValueError, ArithmeticError) as failure:
        reason = failure.msg if isinstance(failure, json.JSONDecodeError) else "it is ambiguous"
        raise invalid_request(f"the body is not good JSON: {reason}") from None
    _check_nesting(value)
    return value


def _reject_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object has the same name twice")
    return members


def _reject_constant(_: str) -> NoReturn:
    raise ValueError("not a number")


def _check_nesting(value: Any) -> None:
    """Limit the depth and the number of values, because checking them blocks the event loop, and require that all
    strings can be encoded. Raises ApiError."""
    level, count = [value], 0
    for _ in range(MAX_JSON_DEPTH):
        level = [child for parent in level for child in _get_children(parent)]
        count += len(level)
        if not level:
            return
        if count > MAX_JSON_VALUES:
            raise invalid_request(f"a body has at most {MAX_JSON_VALUES} names and values here")
    raise invalid_request(f"JSON is nested at most {MAX_JSON_DEPTH} deep here")


def _get_children(value: Any) -> Iterable[Any]:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid_request("the body spells half a character, as \\ud800 alone") from None
    elif isinstance(value, Mapping):
        return (*value.keys(), *value.values())
    elif isinstance(value, list):
        return value
    return ()
