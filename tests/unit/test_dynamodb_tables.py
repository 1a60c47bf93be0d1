"""What goes wrong while tables are looked at is an error of the store, with or without an answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError
from price_keeper.errors import StoreUnavailable
from price_keeper.stores.dynamodb_tables import read_table_states


class NotFound(Exception):
    pass


class SilentClient:
    exceptions = SimpleNamespace(ResourceNotFoundException=NotFound)

    async def describe_table(self, **_: Any) -> Any:
        raise ReadTimeoutError(endpoint_url="http://127.0.0.1:9")  # whose `response` is None


async def never(_: float) -> None:
    raise AssertionError("a time-out is not tried again")


async def test_timeout_while_tables_are_read_is_unavailable_store() -> None:
    with pytest.raises(StoreUnavailable, match="no answer from DynamoDB"):
        await read_table_states(SilentClient(), "t-", never)
