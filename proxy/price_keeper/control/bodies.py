"""Bodies of requests: JSON, bounded in size and depth, with nothing in it that could be read in two ways."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, NoReturn

from aiohttp import web

from price_keeper.control.problems import ERROR_CODES, ApiError, invalid_request

OF_STRANGERS = 20 * 1024  # a refresh token may be long; reading more of anybody would keep everybody else waiting
SMALL_BYTES = 4 * 1024  # a few fields, none of which is long
# Of all bodies that are on their way: a sidecar has little memory.
BYTES_AT_ONCE = 4 * 1024 * 1024  # of strangers, of whom there are as many as connections
OF_THE_KNOWN = 2 * 1024 * 1024
OF_ONE = 512 * 1024  # of those who are known, or one of them could keep the others waiting
OF_THE_ADMIN = 512 * 1024  # whom nobody keeps waiting
MOST_DEPTH = 12  # a body of ours has four
MOST_PARTS = 4096  # names and values: a hundred usages have 1900, quotas of a thousand labels 2000
BUSY_SECONDS = 1.0  # after which some of the bodies under way are read
SECONDS = 30.0  # for a body to arrive, so that a slow one does not stay for ever


class Budget:
    """Bytes that bodies may take up until they are read. Each takes what it says it has, or all that it might have."""

    def __init__(self, most: int, most_of_one: int | None = None) -> None:
        self._left = most
        self._most_of_one = most if most_of_one is None else most_of_one
        self._taken_by: Counter[str] = Counter()

    @contextmanager
    def taken(self, size: int, who: str = "") -> Iterator[None]:
        """Raises Problem."""
        if size > self._left or size + self._taken_by[who] > self._most_of_one:
            # What is still to come is not read, so nothing else can come on this connection.
            why = "too many bodies are on their way to this process"
            raise ApiError(503, ERROR_CODES[503], why, retry_after=BUSY_SECONDS, headers={"Connection": "close"})
        self._left -= size
        self._taken_by[who] += size
        try:
            yield
        finally:
            self._left += size
            self._taken_by[who] -= size
            if not self._taken_by[who]:
                del self._taken_by[who]


class Budgets:
    """Apart for strangers, for those who are known and for the administrator, so that none keeps the others waiting."""

    def __init__(self) -> None:
        self.strangers = Budget(BYTES_AT_ONCE)
        self.known = Budget(OF_THE_KNOWN, OF_ONE)
        self.admin = Budget(OF_THE_ADMIN)


async def body_of(request: web.BaseRequest, most: int, budget: Budget, who: str) -> Any:
    """Raises Problem."""
    _check_head(request, most)
    length = request.content_length
    with budget.taken(most if length is None else length, who):
        return parsed(await _whole(request, most))


async def _whole(request: web.BaseRequest, most: int) -> bytes:
    """Raises Problem."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # so that an error can still be answered
    try:
        async with asyncio.timeout(SECONDS):
            return await _read(request, most)
    except TimeoutError:
        raise ApiError(408, ERROR_CODES[408], "the body did not arrive in time", headers={"Connection": "close"}) from None
    except (web.RequestPayloadError, ConnectionError):
        raise invalid_request("the body is not what its head says") from None


async def _read(request: web.BaseRequest, most: int) -> bytes:
    raw = bytearray()
    while part := await request.content.readany():
        raw += part
        if len(raw) > most:
            raise body_too_large(most)
    return bytes(raw)


def _check_head(request: web.BaseRequest, most: int) -> None:
    types = request.headers.getall("Content-Type", [])
    if len(types) != 1 or not _is_json(types[0]) or "Content-Encoding" in request.headers:
        raise ApiError(415, ERROR_CODES[415], "a body is of content type application/json, in UTF-8 and not compressed")
    if request.headers.get("Expect", "100-continue").lower() != "100-continue":
        raise ApiError(417, ERROR_CODES[417], "nothing is to be expected but 100-continue")
    if (request.content_length or 0) > most:
        raise body_too_large(most)


def body_too_large(max_bytes: int) -> ApiError:
    # What is still to come is not read, so nothing else can come on this connection.
    return ApiError(413, ERROR_CODES[413], f"a body has at most {max_bytes} bytes here", headers={"Connection": "close"})


def _is_json(value: str) -> bool:
    kind, _, rest = value.partition(";")
    return kind.strip().lower() == "application/json" and rest.replace(" ", "").lower() in (
        "",
        "charset=utf-8",
        'charset="utf-8"',
    )


def parsed(raw: bytes) -> Any:
    """Numbers with a point are Decimals. Raises Problem."""
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_once_each, parse_float=Decimal, parse_constant=_no_number)
    except RecursionError:
        raise invalid_request(f"JSON is nested at most {MOST_DEPTH} deep here") from None
    except UnicodeDecodeError:
        raise invalid_request("the body is not UTF-8 text") from None
    except (ValueError, ArithmeticError) as failure:
        reason = failure.msg if isinstance(failure, json.JSONDecodeError) else "it cannot be read in one way only"
        raise invalid_request(f"the body is not good JSON: {reason}") from None
    _check_parts(value)
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _no_number(_: str) -> NoReturn:
    raise ValueError("not a number")


def _check_parts(value: Any) -> None:
    """How deep and how many they are, since each is looked at while nobody else is answered; and that all text is."""
    level, count = [value], 0
    for _ in range(MOST_DEPTH):
        level = [part for each in level for part in _parts(each)]
        count += len(level)
        if not level:
            return
        if count > MOST_PARTS:
            raise invalid_request(f"a body has at most {MOST_PARTS} names and values here")
    raise invalid_request(f"JSON is nested at most {MOST_DEPTH} deep here")


def _parts(value: Any) -> Iterable[Any]:
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
