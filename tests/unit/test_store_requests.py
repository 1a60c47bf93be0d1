"""The counting proxy before DynamoDB charges what DynamoDB would."""

from __future__ import annotations

from typing import Any

import pytest

from bench.store_requests import StoreProxy
from tests.support.engines import PREFIX

TOTALS, SHARDS = f"{PREFIX}daily-total", f"{PREFIX}usage-agg-sharded"


def build_row(number: int, size: int = 1) -> dict[str, Any]:
    return {"PK": {"S": "p"}, "SK": {"S": f"{number}"}, "x": {"S": "x" * size}}


def count(operation: str, asked: dict[str, Any], answer: dict[str, Any], *, is_refused: bool = False) -> StoreProxy:
    proxy = StoreProxy("http://127.0.0.1:1")
    proxy.count(operation, asked, answer, is_refused=is_refused)
    return proxy


@pytest.mark.parametrize(("is_consistent", "units"), [(True, 4), (False, 2)])
def test_batch_of_keys_counts_each_key_and_large_items_more(is_consistent: bool, units: float) -> None:
    keys = {"Keys": [{}] * 3, "ConsistentRead": is_consistent}
    answer = {"Responses": {SHARDS: [build_row(1), build_row(2, 4096)]}}  # the third does not exist
    proxy = count("BatchGetItem", {"RequestItems": {SHARDS: keys}}, answer)
    assert proxy.items == {("BatchGetItem", "usage-agg-sharded"): 3}
    assert (proxy.read_units, proxy.write_units) == (units, 0)
    assert proxy.requests == {"BatchGetItem usage-agg-sharded": 1}


@pytest.mark.parametrize(("rows", "units"), [(0, 0.5), (41, 0.5), (42, 1)])
def test_query_counts_bytes_of_all_rows_together(rows: int, units: float) -> None:
    proxy = count("Query", {"TableName": TOTALS}, {"Items": [build_row(number, 90) for number in range(rows)]})
    assert proxy.items["Query", "daily-total"] == rows
    assert proxy.read_units == units


def test_transaction_counts_items_by_table_and_units_that_engine_reports() -> None:
    writes = [{"Put": {"TableName": TOTALS}}, *[{"Update": {"TableName": SHARDS}}] * 2]
    consumed = [{"CapacityUnits": 2.0}, {"CapacityUnits": 4.0}]
    proxy = count("TransactWriteItems", {"TransactItems": writes}, {"ConsumedCapacity": consumed})
    assert proxy.items == {("TransactWriteItems", "daily-total"): 1, ("TransactWriteItems", "usage-agg-sharded"): 2}
    assert (proxy.read_units, proxy.write_units) == (0, 6)


def test_refused_request_counts_as_request_alone() -> None:
    proxy = count("PutItem", {"TableName": TOTALS}, {"__type": "refused"}, is_refused=True)
    assert proxy.refused == proxy.requests == {"PutItem daily-total": 1}
    assert (dict(proxy.items), proxy.write_units) == ({}, 0)
