"""The shared store: DynamoDB, or anything that speaks its protocol at an endpoint of its own."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aioboto3
from aiobotocore.config import AioConfig

from proxy.errors import StoreError, StoreUnavailable, Throttled
from proxy.stores import dynamodb_errors as errors
from proxy.stores.contract import Delete, Item, Key, Page, Put, Query, Row, Update, Write
from proxy.stores.expressions import (
    TRANSACTION_VERBS,
    Request,
    item_from_wire,
    key_from_wire,
    key_to_wire,
    query_request,
    write_request,
)
from proxy.stores.values import check_key, check_query, check_transaction, check_write

CONNECT_SECONDS = 2.0  # within a region a connection takes milliseconds
ANSWER_SECONDS = 5.0  # DynamoDB answers in tens of milliseconds; past this the answer is lost
CONNECTIONS = 50  # calls at once; more wait their turn
ATTEMPTS = 5  # of one call, the waits between them adding up to about two seconds at the most
FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 1.0
KEYS_PER_BATCH = 100  # BatchGetItem's own limit


def client_config() -> AioConfig:
    return AioConfig(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=ANSWER_SECONDS,
        max_pool_connections=CONNECTIONS,
        # The client must never resend by itself: it cannot know which writes would be applied twice.
        retries={"total_max_attempts": 1},
        parameter_validation=False,
    )


class DynamoStore:
    """Use from one event loop. `sleep` is the clock's, so that waits can be simulated."""

    def __init__(
        self,
        *,
        region: str,
        table_prefix: str,
        endpoint: str | None,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._region = region
        self._prefix = table_prefix
        self._endpoint = endpoint
        self._sleep = sleep
        self._open = AsyncExitStack()
        self.client: Any = None

    async def open(self) -> DynamoStore:
        self.client = await self._open.enter_async_context(
            aioboto3.Session().client(
                "dynamodb", region_name=self._region, endpoint_url=self._endpoint, config=client_config()
            )
        )
        self.client.meta.events.register("before-parse.dynamodb", errors.require_sense)
        return self

    async def close(self) -> None:
        self.client = None
        await self._open.aclose()

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        check_key(key)
        request = {"TableName": self._prefix + key.table, "Key": key_to_wire(key), "ConsistentRead": consistent}
        answer = await self._call("get_item", request, may_resend=True)
        return item_from_wire(answer["Item"]) if "Item" in answer else None

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
        unasked = _batch_request(keys, self._prefix, consistent)
        for attempt in range(ATTEMPTS):
            await self._pause(attempt)
            answer = await self._call("batch_get_item", {"RequestItems": unasked}, may_resend=True)
            for table, wires in answer.get("Responses", {}).items():
                name = table.removeprefix(self._prefix)
                found.update((key_from_wire(name, wire), item_from_wire(wire)) for wire in wires)
            unasked = answer.get("UnprocessedKeys")
            if not unasked:
                return found
        raise Throttled("DynamoDB keeps leaving keys of a batch unread")

    async def query(self, query: Query) -> Page:
        check_query(query)
        request = query_request(query, self._prefix)
        rows: list[Row] = []
        while True:
            if query.limit is not None:
                request["Limit"] = query.limit - len(rows)
            answer = await self._call("query", request, may_resend=True)
            rows += [Row(key_from_wire(query.table, wire), item_from_wire(wire)) for wire in answer["Items"]]
            last = answer.get("LastEvaluatedKey")
            if not last:
                return Page(tuple(rows), None)
            if query.limit is not None and len(rows) >= query.limit:
                return Page(tuple(rows), key_from_wire(query.table, last).sk)
            request["ExclusiveStartKey"] = last

    async def put(self, put: Put) -> None:
        check_write(put)
        await self._call("put_item", write_request(put, self._prefix), may_resend=False)

    async def update(self, update: Update) -> Item:
        check_write(update)
        request = write_request(update, self._prefix) | {"ReturnValues": "ALL_NEW"}
        answer = await self._call("update_item", request, may_resend=False)
        return item_from_wire(answer["Attributes"])

    async def delete(self, delete: Delete) -> Item | None:
        check_write(delete)
        request = write_request(delete, self._prefix) | {"ReturnValues": "ALL_OLD"}
        answer = await self._call("delete_item", request, may_resend=False)
        return item_from_wire(answer["Attributes"]) if answer.get("Attributes") else None

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        check_transaction(writes, token)
        request = {
            "TransactItems": [{TRANSACTION_VERBS[type(write)]: write_request(write, self._prefix)} for write in writes],
            # With a token of its own even a transaction whose caller gave none can be resent after a lost answer.
            "ClientRequestToken": token or str(uuid.uuid4()),
        }
        await self._call("transact_write_items", request, may_resend=True)

    async def _call(self, verb: str, request: Request, *, may_resend: bool) -> Any:
        """`may_resend`: carrying the request out twice would do no harm."""
        trouble: StoreError = StoreUnavailable("the store is closed")
        was_unsure = False
        for attempt in range(ATTEMPTS):
            await self._pause(attempt)
            try:
                return await getattr(self.client, verb)(**request)
            except errors.FAILURES as failure:
                trouble = errors.translated(failure)
                is_unsure = isinstance(trouble, StoreUnavailable) and trouble.maybe_applied
                was_unsure |= is_unsure
                if not (errors.is_passing(trouble) or (is_unsure and may_resend)):
                    break
        if was_unsure and isinstance(trouble, (StoreUnavailable, Throttled)):
            # An earlier attempt may have been carried out, whatever became of the last one.
            raise StoreUnavailable(str(trouble), maybe_applied=True) from None
        raise trouble

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
