"""The shared store: DynamoDB, or a compatible service at a configured endpoint.

Reads and transactions are retried; transactions carry an idempotency token. A single write whose response was lost is
never resent: the caller gets StoreUnavailable with `maybe_applied`. Every call ends within
`CALL_TIMEOUT_SECONDS`.

`StrictResponseSession` drops a connection on which data arrived without a pending request. aiohttp would take that data
for the response to the next request: a read would return another item, and a write that was never applied would look
successful.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import aioboto3
from aiobotocore.config import AioConfig
from aiohttp import ServerDisconnectedError, TCPConnector
from aiohttp.client_proto import ResponseHandler
from botocore.exceptions import ClientError

from price_keeper.aws_session import HostnameCheckingSession
from price_keeper.config.value_checks import explain_insecure_url
from price_keeper.errors import StoreError, StoreMisconfigured, StoreThrottled, StoreUnavailable, is_condition_failure
from price_keeper.stores import dynamodb_errors as errors
from price_keeper.stores.contract import Delete, Item, Key, Page, Put, Query, StoredRow, Update, Write
from price_keeper.stores.dynamodb_credentials import StoreCredentials, create_session
from price_keeper.stores.dynamodb_expressions import (
    TRANSACTION_VERBS,
    Request,
    build_query_request,
    build_write_request,
    item_from_wire,
    key_from_wire,
    key_to_wire,
)
from price_keeper.stores.item_values import check_key, check_query, check_transaction, check_write

CONNECT_TIMEOUT_SECONDS = 2.0  # within a region a connection takes milliseconds
READ_TIMEOUT_SECONDS = 5.0  # DynamoDB answers in tens of milliseconds; after this the response counts as lost
MAX_CONNECTIONS = 50  # concurrent calls; further calls wait for a connection
CALL_TIMEOUT_SECONDS = 10.0  # of one call, with all its attempts and its wait for a connection
MAX_ATTEMPTS = 6  # of one call; the waits between them add up to at most two and a half seconds
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 1.0
KEYS_PER_BATCH = 100  # BatchGetItem's own limit


_PROBE_KEY = Key("config", "PROBE", "PROBE")

_Parsed = TypeVar("_Parsed")


class _CallKind(Enum):
    """What a call that got no response may have changed, and thus whether it may be retried."""

    READ = "nothing: it may be retried"
    WRITE = "possibly applied: it must not be retried"
    TRANSACTION = "possibly applied, with an idempotency token: it may be retried"


_READ, _WRITE, _TRANSACTION = _CallKind


def build_client_config() -> AioConfig:
    return AioConfig(
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        read_timeout=READ_TIMEOUT_SECONDS,
        max_pool_connections=MAX_CONNECTIONS,
        http_session_cls=StrictResponseSession,
        # The client must never retry by itself: it cannot know which writes would be applied twice.
        retries={"total_max_attempts": 1},
        parameter_validation=False,
    )


class DynamoStore:
    """The store on DynamoDB. Use it from one event loop. `sleep` is the clock's, so that tests can simulate waits.

    `on_request` is called when a request is sent. The callback that it returns gets the `Date` header of the response,
    whether or not the response is an error; the clock comparison uses it.
    """

    def __init__(
        self,
        *,
        region: str,
        table_prefix: str,
        endpoint: str | None,
        sleep: Callable[[float], Awaitable[None]],
        on_request: Callable[[], Callable[[str], None]] = lambda: _ignore,
        allow_insecure: bool = False,
    ) -> None:
        self._region = region
        self._prefix = table_prefix
        self._endpoint = endpoint
        self._sleep = sleep
        self._on_request = on_request
        self._allow_insecure = allow_insecure
        self._credentials = StoreCredentials()
        self._exit_stack = AsyncExitStack()
        self.client: Any = None
        self._is_closed = False
        self._in_flight: set[asyncio.Future[None]] = set()

    async def open(self) -> DynamoStore:
        try:
            client = aioboto3.Session(botocore_session=await create_session(self._credentials)).client(
                "dynamodb", region_name=self._region, endpoint_url=self._endpoint, config=build_client_config()
            )
            self.client = await self._exit_stack.enter_async_context(client)
        except errors.FAILURES as failure:
            raise errors.translate_error(failure) from None
        except ValueError as failure:  # botocore rejects an endpoint of the shared AWS configuration
            raise StoreMisconfigured(f"the address of DynamoDB: {failure}") from None
        problem = (
            None
            if self._allow_insecure
            else explain_insecure_url(self.client.meta.endpoint_url, "store.allow_insecure")
        )
        if problem is not None:
            await self._exit_stack.aclose()
            raise StoreMisconfigured(f"the address of DynamoDB: {problem}")
        self.client.meta.events.register("before-parse.dynamodb", errors.validate_response)
        return self

    async def close(self) -> None:
        self._is_closed = True
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        await self._exit_stack.aclose()

    async def probe(self) -> None:
        """Raises what a read would."""
        await self.get(_PROBE_KEY)

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        check_key(key)
        request = {"TableName": self._prefix + key.table, "Key": key_to_wire(key), "ConsistentRead": consistent}
        return await self._call("get_item", request, _READ, _parse_item)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        for key in keys:
            check_key(key)
        wanted = list(dict.fromkeys(keys))
        items: dict[Key, Item] = {}
        for start in range(0, len(wanted), KEYS_PER_BATCH):
            items.update(await self._get_batch(wanted[start : start + KEYS_PER_BATCH], consistent))
        return [items.get(key) for key in keys]

    async def _get_batch(self, keys: Sequence[Key], consistent: bool) -> dict[Key, Item]:
        items: dict[Key, Item] = {}
        remaining, idle_attempts = _build_batch_request(keys, self._prefix, consistent), 0
        while idle_attempts < MAX_ATTEMPTS:
            await self._back_off(idle_attempts)
            read, remaining = await self._call("batch_get_item", {"RequestItems": remaining}, _READ, self._parse_batch)
            items.update(read)
            if not remaining:
                return items
            idle_attempts = 1 if read else idle_attempts + 1
        raise StoreThrottled("DynamoDB repeatedly left keys of a batch unread")

    def _parse_batch(self, response: Any) -> tuple[dict[Key, Item], Request]:
        items: dict[Key, Item] = {}
        for table, wires in response.get("Responses", {}).items():
            name = table.removeprefix(self._prefix)
            items.update((key_from_wire(name, wire), item_from_wire(wire)) for wire in wires)
        return items, response.get("UnprocessedKeys") or {}

    async def query(self, query: Query) -> Page:
        check_query(query)
        request = build_query_request(query, self._prefix)
        rows: list[StoredRow] = []
        while True:
            if query.limit is not None:
                request["Limit"] = query.limit - len(rows)
            fetched, last = await self._call("query", request, _READ, lambda answer: _parse_rows(query.table, answer))
            rows += fetched
            if last is None:
                return Page(tuple(rows), None)
            if query.limit is not None and len(rows) >= query.limit:
                return Page(tuple(rows), key_from_wire(query.table, last).sk)
            request["ExclusiveStartKey"] = last

    async def put(self, put: Put) -> None:
        check_write(put)
        await self._call("put_item", build_write_request(put, self._prefix), _WRITE, _ignore)

    async def update(self, update: Update) -> Item:
        check_write(update)
        request = build_write_request(update, self._prefix) | {"ReturnValues": "ALL_NEW"}
        return await self._call("update_item", request, _WRITE, lambda answer: item_from_wire(answer["Attributes"]))

    async def exchange(self, update: Update) -> Item | None:
        check_write(update)
        request = build_write_request(update, self._prefix) | {"ReturnValues": "ALL_OLD"}
        return await self._call("update_item", request, _WRITE, _parse_attributes)

    async def delete(self, delete: Delete) -> Item | None:
        check_write(delete)
        request = build_write_request(delete, self._prefix) | {"ReturnValues": "ALL_OLD"}
        return await self._call("delete_item", request, _WRITE, _parse_attributes)

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        check_transaction(writes, token)
        request = {
            "TransactItems": [
                {TRANSACTION_VERBS[type(write)]: build_write_request(write, self._prefix)} for write in writes
            ],
            # With a token of its own even a transaction whose caller gave none can be resent after a lost answer.
            "ClientRequestToken": token or str(uuid.uuid4()),
        }
        await self._call("transact_write_items", request, _TRANSACTION, _ignore)

    async def _call(self, verb: str, request: Request, kind: _CallKind, parse: Callable[[Any], _Parsed]) -> _Parsed:
        """Send one request, with retries where `kind` allows them. `parse` extracts the result from the response."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        done = asyncio.get_running_loop().create_future()
        self._in_flight.add(done)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
                return await self._call_with_retries(verb, request, kind, parse)
        except TimeoutError:
            message = f"no answer from DynamoDB in {CALL_TIMEOUT_SECONDS:g} seconds"
            raise StoreUnavailable(message, maybe_applied=kind is not _READ) from None
        finally:
            self._in_flight.discard(done)
            done.set_result(None)

    async def _call_with_retries(
        self, verb: str, request: Request, kind: _CallKind, parse: Callable[[Any], _Parsed]
    ) -> _Parsed:
        error: StoreError = StoreUnavailable("not asked")
        was_maybe_applied = False
        for attempt in range(MAX_ATTEMPTS):
            await self._back_off(attempt)
            try:
                return parse(await self._send(verb, request))
            except errors.FAILURES as failure:
                error = errors.translate_error(failure)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as failure:
                message = f"malformed response of DynamoDB: {type(failure).__name__}"
                error = StoreUnavailable(message, maybe_applied=True)
            is_maybe_applied = error.maybe_applied
            was_maybe_applied |= is_maybe_applied
            if not errors.is_transient(error) and (kind is _WRITE or not is_maybe_applied):
                break
        if was_maybe_applied and kind is not _READ:
            if not is_condition_failure(error):
                # An earlier attempt may have been applied, even if the last one was not.
                raise StoreUnavailable(str(error), maybe_applied=True) from None
            error.maybe_applied = True  # an earlier attempt may still be in flight
        raise error

    async def _send(self, verb: str, request: Request) -> Any:
        on_response = self._on_request()
        try:
            response = await getattr(self.client, verb)(**request)
        except ClientError as failure:
            on_response(_get_date(failure.response))
            if errors.has_refused_credentials(failure):
                self._credentials.on_refused()
            raise
        on_response(_get_date(response))
        return response

    async def _back_off(self, attempt: int) -> None:
        """Wait with full jitter, so that the fleet does not retry in step after throttling."""
        if attempt:
            longest = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
            await self._sleep(random.uniform(0, longest))


def _build_batch_request(keys: Sequence[Key], prefix: str, consistent: bool) -> Request:
    by_table = itertools.groupby(sorted(keys), key=lambda key: key.table)
    return {
        prefix + table: {"Keys": [key_to_wire(key) for key in group], "ConsistentRead": consistent}
        for table, group in by_table
    }


def _ignore(_: Any) -> None:
    return None


def _get_date(response: Any) -> str:
    return str(response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", ""))


def _parse_item(response: Any) -> Item | None:
    return item_from_wire(response["Item"]) if "Item" in response else None


def _parse_attributes(response: Any) -> Item | None:
    return item_from_wire(response["Attributes"]) if response.get("Attributes") else None


def _parse_rows(table: str, response: Any) -> tuple[list[StoredRow], Any]:
    return [StoredRow(key_from_wire(table, wire), item_from_wire(wire)) for wire in response["Items"]], response.get(
        "LastEvaluatedKey"
    ) or None


_REQUEST_ID_HEADER = "x-amzn-requestid"  # unique for each response
_MAX_REMEMBERED_IDS = 100  # of one connection


class _StrictResponseHandler(ResponseHandler):
    def __init__(self, loop: AbstractEventLoop) -> None:
        super().__init__(loop)
        self._seen_request_ids: deque[str] = deque(maxlen=_MAX_REMEMBERED_IDS)
        self._is_response_expected = False  # True from a request until its response begins
        self._has_unsolicited_data = False

    def set_response_params(self, **params: Any) -> None:
        self._is_response_expected = True
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        if data and not self._is_response_expected and (self._payload is None or self._payload.is_eof()):
            self._has_unsolicited_data = True
        super().data_received(data)

    def is_connected(self) -> bool:
        """aiohttp calls this before each reuse. False once data has arrived without a pending request."""
        return super().is_connected() and not (self._has_unsolicited_data or self._buffer or self._tail)

    def feed_data(self, data: Any, size: int = 0) -> None:
        request_id = data[0].headers.get(_REQUEST_ID_HEADER, "")
        if request_id in self._seen_request_ids:  # a repeated response, not the one to the pending request
            self.set_exception(ServerDisconnectedError("a response that was received before"))
            if self.transport is not None:
                self.transport.abort()
        elif self.exception() is None:
            self._is_response_expected = False
            if request_id:
                self._seen_request_ids.append(request_id)
            super().feed_data(data, size)


def _create_handler(loop: AbstractEventLoop) -> ResponseHandler:
    return _StrictResponseHandler(loop)


class StrictResponseSession(HostnameCheckingSession):
    def _create_connector(self, proxy_url: str | None) -> TCPConnector:
        connector: TCPConnector = super()._create_connector(proxy_url)
        connector._factory = partial(_create_handler, connector._loop)
        return connector
