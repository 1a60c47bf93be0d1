"""Checks and reads what a request carries: transfer coding, ids in the path, query, headers and the JSON body.

Bodies are bounded in size, depth, number of values and time, and all bodies under way share byte budgets. JSON that two
parsers could read differently, as with duplicate names, is rejected.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, NoReturn

from aiohttp import web
from multidict import CIMultiDict

from price_keeper.control.api_errors import ERROR_CODES, ApiError, invalid_request
from price_keeper.control.api_types import ApiRoute
from price_keeper.domain import is_app_id, is_org_id

MAX_QUERY_VALUE_LENGTH = 1000  # characters of one value; aiohttp bounds the whole line
_ID_RULES: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "org": (is_org_id, "an org id is a UUID in lower case"),
    "app": (is_app_id, "an app id is 1 to 64 letters, digits or any of ._-, and neither . nor .."),
}


def check_transfer_encoding(codings: list[str]) -> None:
    """What stands before us may undo another coding, and see another body than we do."""
    if codings and [each.strip().lower() for each in codings] != ["chunked"]:
        message = "a body comes with a Content-Length, or in chunks alone"
        raise ApiError(400, ERROR_CODES[400], message, headers={"Connection": "close"})


def check_path_ids(path: Mapping[str, str]) -> None:
    mistakes = [
        (name, _ID_RULES[name][1])
        for name, value in path.items()
        if name in _ID_RULES and not _ID_RULES[name][0](value)
    ]
    if mistakes:
        raise invalid_request("the path names nothing that can be there", *mistakes)


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
    """Of a header that came twice nobody can say which one is meant."""
    for name in ("If-Match", "If-None-Match", "X-Retrieval-Token", "Authorization"):
        if len(request.headers.getall(name, [])) > 1:
            raise invalid_request(f"{name} comes only once")
    return CIMultiDict(request.headers)


MAX_ANONYMOUS_BODY_BYTES = (
    20 * 1024
)  # a refresh token may be long; reading more of anybody would keep everybody else waiting
SMALL_BODY_BYTES = 4 * 1024  # a few fields, none of which is long
# Of all bodies that are on their way: a sidecar has little memory.
ANONYMOUS_BUDGET_BYTES = 4 * 1024 * 1024  # of strangers, of whom there are as many as connections
CLIENTS_BUDGET_BYTES = 2 * 1024 * 1024
PER_CLIENT_BUDGET_BYTES = 512 * 1024  # of those who are known, or one of them could keep the others waiting
ADMIN_BUDGET_BYTES = 512 * 1024  # whom nobody keeps waiting
MAX_JSON_DEPTH = 12  # a body of ours has four
MAX_JSON_VALUES = 4096  # names and values: a hundred usages have 1900, quotas of a thousand labels 2000
BUSY_RETRY_AFTER_SECONDS = 1.0  # after which some of the bodies under way are read
BODY_TIMEOUT_SECONDS = 30.0  # for a body to arrive, so that a slow one does not stay for ever


class ByteBudget:
    """Bytes that bodies may take up until they are read. Each takes what it says it has, or all that it might have."""

    def __init__(self, max_bytes: int, max_per_caller: int | None = None) -> None:
        self._available = max_bytes
        self._max_per_caller = max_bytes if max_per_caller is None else max_per_caller
        self._reserved_by: Counter[str] = Counter()

    @contextmanager
    def reserve(self, size: int, caller: str = "") -> Iterator[None]:
        """Raises Problem."""
        if size > self._available or size + self._reserved_by[caller] > self._max_per_caller:
            # What is still to come is not read, so nothing else can come on this connection.
            message = "too many bodies are on their way to this process"
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
    """Apart for strangers, for those who are known and for the administrator, so that none keeps the others waiting."""

    def __init__(self) -> None:
        self.anonymous = ByteBudget(ANONYMOUS_BUDGET_BYTES)
        self.clients = ByteBudget(CLIENTS_BUDGET_BYTES, PER_CLIENT_BUDGET_BYTES)
        self.admin = ByteBudget(ADMIN_BUDGET_BYTES)


async def read_json_body(request: web.BaseRequest, max_bytes: int, byte_budget: ByteBudget, caller: str) -> Any:
    """Raises Problem."""
    _check_body_headers(request, max_bytes)
    length = request.content_length
    with byte_budget.reserve(max_bytes if length is None else length, caller):
        return parse_json(await _read_before_timeout(request, max_bytes))


async def _read_before_timeout(request: web.BaseRequest, max_bytes: int) -> bytes:
    """Raises Problem."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # so that an error can still be answered
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            return await _read_bytes(request, max_bytes)
    except TimeoutError:
        raise ApiError(
            408, ERROR_CODES[408], "the body did not arrive in time", headers={"Connection": "close"}
        ) from None
    except (web.RequestPayloadError, ConnectionError):
        raise invalid_request("the body is not what its head says") from None


async def _read_bytes(request: web.BaseRequest, max_bytes: int) -> bytes:
    raw = bytearray()
    while chunk := await request.content.readany():
        raw += chunk
        if len(raw) > max_bytes:
            raise body_too_large(max_bytes)
    return bytes(raw)


def _check_body_headers(request: web.BaseRequest, max_bytes: int) -> None:
    types = request.headers.getall("Content-Type", [])
    if len(types) != 1 or not _is_json_type(types[0]) or "Content-Encoding" in request.headers:
        raise ApiError(415, ERROR_CODES[415], "a body is of content type application/json, in UTF-8 and not compressed")
    if request.headers.get("Expect", "100-continue").lower() != "100-continue":
        raise ApiError(417, ERROR_CODES[417], "nothing is to be expected but 100-continue")
    if (request.content_length or 0) > max_bytes:
        raise body_too_large(max_bytes)


def body_too_large(max_bytes: int) -> ApiError:
    # What is still to come is not read, so nothing else can come on this connection.
    return ApiError(
        413, ERROR_CODES[413], f"a body has at most {max_bytes} bytes here", headers={"Connection": "close"}
    )


def _is_json_type(value: str) -> bool:
    kind, _, rest = value.partition(";")
    return kind.strip().lower() == "application/json" and rest.replace(" ", "").lower() in (
        "",
        "charset=utf-8",
        'charset="utf-8"',
    )


def parse_json(raw: bytes) -> Any:
    """Numbers with a point are Decimals. Raises Problem."""
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
        reason = failure.msg if isinstance(failure, json.JSONDecodeError) else "it cannot be read in one way only"
        raise invalid_request(f"the body is not good JSON: {reason}") from None
    _check_nesting(value)
    return value


def _reject_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name stands there twice")
    return members


def _reject_constant(_: str) -> NoReturn:
    raise ValueError("not a number")


def _check_nesting(value: Any) -> None:
    """How deep and how many they are, since each is looked at while nobody else is answered; and that all text is."""
    level, count = [value], 0
    for _ in range(MAX_JSON_DEPTH):
        level = [part for each in level for part in _get_children(each)]
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
