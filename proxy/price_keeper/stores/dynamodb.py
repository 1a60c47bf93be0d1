"""The shared store: DynamoDB, or anything that speaks its protocol at an endpoint of its own."""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from enum import Enum
from typing import Any, TypeVar

import aioboto3
from aiobotocore.config import AioConfig
from botocore.exceptions import ClientError

from price_keeper.config.encryption import refusal
from price_keeper.errors import StoreError, StoreMisconfigured, StoreUnavailable, StoreThrottled, is_condition_failure
from price_keeper.stores import dynamodb_errors as errors
from price_keeper.stores.contract import Delete, Item, Key, Page, Put, Query, StoredRow, Update, Write
from price_keeper.stores.dynamodb_connections import Connections
from price_keeper.stores.dynamodb_credentials import Renewed, session
from price_keeper.stores.expressions import (
    TRANSACTION_VERBS,
    Request,
    item_from_wire,
    key_from_wire,
    key_to_wire,
    query_request,
    write_request,
)
from price_keeper.stores.values import check_key, check_query, check_transaction, check_write

CONNECT_SECONDS = 2.0  # within a region a connection takes milliseconds
ANSWER_SECONDS = 5.0  # DynamoDB answers in tens of milliseconds; past this the answer is lost
CONNECTIONS = 50  # calls at once; more wait their turn
CALL_SECONDS = 10.0  # of one call with all its attempts, and its wait for one of the connections
ATTEMPTS = 6  # of one call, the waits between them adding up to two and a half seconds at the most
FIRST_WAIT_SECONDS = 0.1
LONGEST_WAIT_SECONDS = 1.0
KEYS_PER_BATCH = 100  # BatchGetItem's own limit


_NOBODY = Key("config", "PROBE", "PROBE")

_Answer = TypeVar("_Answer")


class _Kind(Enum):
    """What a call without an answer leaves behind."""

    READ = "nothing: it may be made again"
    WRITE = "perhaps a write: it must not be made again"
    TRANSACTION = "perhaps a write, which knows its token: it may be made again"


_READ, _WRITE, _TRANSACTION = _Kind


def client_config() -> AioConfig:
    return AioConfig(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=ANSWER_SECONDS,
        max_pool_connections=CONNECTIONS,
        http_session_cls=Connections,
        # The client must never resend by itself: it cannot know which writes would be applied twice.
        retries={"total_max_attempts": 1},
        parameter_validation=False,
    )


class DynamoStore:
    """Use from one event loop. `sleep` is the clock's, so that waits can be simulated.

    `asking` is called when something is sent; what it returns, with the `Date` of the answer, whatever else that says.
    """

    def __init__(
        self,
        *,
        region: str,
        table_prefix: str,
        endpoint: str | None,
        sleep: Callable[[float], Awaitable[None]],
        asking: Callable[[], Callable[[str], None]] = lambda: _nothing,
        allow_insecure: bool = False,
    ) -> None:
        self._region = region
        self._prefix = table_prefix
        self._endpoint = endpoint
        self._sleep = sleep
        self._asking = asking
        self._allow_insecure = allow_insecure
        self._credentials = Renewed()
        self._open = AsyncExitStack()
        self.client: Any = None
        self._is_closed = False
        self._under_way: set[asyncio.Future[None]] = set()

    async def open(self) -> DynamoStore:
        try:
            client = aioboto3.Session(botocore_session=await session(self._credentials)).client(
                "dynamodb", region_name=self._region, endpoint_url=self._endpoint, config=client_config()
            )
            self.client = await self._open.enter_async_context(client)
        except errors.FAILURES as failure:
            raise errors.translate_error(failure) from None
        except ValueError as failure:  # of what stands in the shared configuration
            raise StoreMisconfigured(f"the address of DynamoDB: {failure}") from None
        why = None if self._allow_insecure else refusal(self.client.meta.endpoint_url, "store.allow_insecure")
        if why is not None:
            await self._open.aclose()
            raise StoreMisconfigured(f"the address of DynamoDB: {why}")
        self.client.meta.events.register("before-parse.dynamodb", errors.validate_response)
        return self

    async def close(self) -> None:
        self._is_closed = True
        while self._under_way:
            await asyncio.wait(self._under_way)
        await self._open.aclose()

    async def probe(self) -> None:
        """Raises what a read would."""
        await self.get(_NOBODY)

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        check_key(key)
        request = {"TableName": self._prefix + key.table, "Key": key_to_wire(key), "ConsistentRead": consistent}
        return await self._call("get_item", request, _READ, _item)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        for key in keys:
            check_key(key)
        wanted = list(dict.fromkeys(keys))
        found: dict[Key, Item] = {}
        for start in range(0, len(wanted), KEYS_PER_BATCH):
            found.update(await self._batch(wanted[start : start + KEYS_PER_BATCH], consistent))
        return [found.get(key) for key in keys]

    async def _batch(self, keys: Sequence[Key], consistent: bool) -> dict[Key, Item]:
        found: dict[Key, Item] = {}
        unasked, idle_attempts = _batch_request(keys, self._prefix, consistent), 0
        while idle_attempts < ATTEMPTS:
            await self._pause(idle_attempts)
            read, unasked = await self._call("batch_get_item", {"RequestItems": unasked}, _READ, self._batch_read)
            found.update(read)
            if not unasked:
                return found
            idle_attempts = 1 if read else idle_attempts + 1
        raise StoreThrottled("DynamoDB keeps leaving keys of a batch unread")

    def _batch_read(self, answer: Any) -> tuple[dict[Key, Item], Request]:
        found: dict[Key, Item] = {}
        for table, wires in answer.get("Responses", {}).items():
            name = table.removeprefix(self._prefix)
            found.update((key_from_wire(name, wire), item_from_wire(wire)) for wire in wires)
        return found, answer.get("UnprocessedKeys") or {}

    async def query(self, query: Query) -> Page:
        check_query(query)
        request = query_request(query, self._prefix)
        rows: list[StoredRow] = []
        while True:
            if query.limit is not None:
                request["Limit"] = query.limit - len(rows)
            found, last = await self._call("query", request, _READ, lambda answer: _rows(query.table, answer))
            rows += found
            if last is None:
                return Page(tuple(rows), None)
            if query.limit is not None and len(rows) >= query.limit:
                return Page(tuple(rows), key_from_wire(query.table, last).sk)
            request["ExclusiveStartKey"] = last

    async def put(self, put: Put) -> None:
        check_write(put)
        await self._call("put_item", write_request(put, self._prefix), _WRITE, _nothing)

    async def update(self, update: Update) -> Item:
        check_write(update)
        request = write_request(update, self._prefix) | {"ReturnValues": "ALL_NEW"}
        return await self._call("update_item", request, _WRITE, lambda answer: item_from_wire(answer["Attributes"]))

    async def delete(self, delete: Delete) -> Item | None:
        check_write(delete)
        request = write_request(delete, self._prefix) | {"ReturnValues": "ALL_OLD"}
        return await self._call("delete_item", request, _WRITE, _attributes)

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        check_transaction(writes, token)
        request = {
            "TransactItems": [{TRANSACTION_VERBS[type(write)]: write_request(write, self._prefix)} for write in writes],
            # With a token of its own even a transaction whose caller gave none can be resent after a lost answer.
            "ClientRequestToken": token or str(uuid.uuid4()),
        }
        await self._call("transact_write_items", request, _TRANSACTION, _nothing)

    async def _call(self, verb: str, request: Request, kind: _Kind, read: Callable[[Any], _Answer]) -> _Answer:
        """`read` takes from an answer what is wanted of it."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        done = asyncio.get_running_loop().create_future()
        self._under_way.add(done)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await self._attempt(verb, request, kind, read)
        except TimeoutError:
            away = f"no answer from DynamoDB in {CALL_SECONDS:g} seconds"
            raise StoreUnavailable(away, maybe_applied=kind is not _READ) from None
        finally:
            self._under_way.discard(done)
            done.set_result(None)

    async def _attempt(self, verb: str, request: Request, kind: _Kind, read: Callable[[Any], _Answer]) -> _Answer:
        trouble: StoreError = StoreUnavailable("not asked")
        was_unsure = False
        for attempt in range(ATTEMPTS):
            await self._pause(attempt)
            try:
                return read(await self._answer(verb, request))
            except errors.FAILURES as failure:
                trouble = errors.translate_error(failure)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as failure:
                what = f"an answer that makes no sense: {type(failure).__name__}"
                trouble = StoreUnavailable(what, maybe_applied=True)
            is_unsure = trouble.maybe_applied
            was_unsure |= is_unsure
            if not errors.is_transient(trouble) and (kind is _WRITE or not is_unsure):
                break
        if was_unsure and kind is not _READ:
            if not is_condition_failure(trouble):
                # An earlier attempt may have been carried out, whatever became of the last one.
                raise StoreUnavailable(str(trouble), maybe_applied=True) from None
            trouble.maybe_applied = True  # it was not, but may still be on its way
        raise trouble

    async def _answer(self, verb: str, request: Request) -> Any:
        answered = self._asking()
        try:
            answer = await getattr(self.client, verb)(**request)
        except ClientError as failure:
            answered(_date(failure.response))
            if errors.has_refused_credentials(failure):
                self._credentials.refused()
            raise
        answered(_date(answer))
        return answer

    async def _pause(self, attempt: int) -> None:
        """Full jitter: the fleet must not come back in step after a throttle."""
        if attempt:
            longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
            await self._sleep(random.uniform(0, longest))


def _batch_request(keys: Sequence[Key], prefix: str, consistent: bool) -> Request:
    by_table = itertools.groupby(sorted(keys), key=lambda key: key.table)
    return {
        prefix + table: {"Keys": [key_to_wire(key) for key in group], "ConsistentRead": consistent}
        for table, group in by_table
    }


def _nothing(_: Any) -> None:
    return None


def _date(answer: Any) -> str:
    return str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", ""))


def _item(answer: Any) -> Item | None:
    return item_from_wire(answer["Item"]) if "Item" in answer else None


def _attributes(answer: Any) -> Item | None:
    return item_from_wire(answer["Attributes"]) if answer.get("Attributes") else None


def _rows(table: str, answer: Any) -> tuple[list[StoredRow], Any]:
    return [StoredRow(key_from_wire(table, wire), item_from_wire(wire)) for wire in answer["Items"]], answer.get(
        "LastEvaluatedKey"
    ) or None
