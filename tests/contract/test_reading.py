"""Reading many items and whole partitions, on every engine."""

from __future__ import annotations

import pytest
from price_keeper.errors import InvalidStoreRequest
from price_keeper.stores.contract import Between, Key, Prefix, Put, Query, Store, iterate_rows

SORT_KEYS = [
    "APP#A",
    "APP#a",
    "APP#b",
    "APP#b#1",
    "APP$",
    "APP",
    "DAY#20261118",
    "DAY#20261119",
    "é",
    "\U0001f4b6",
    "\uffee",
]
IN_ORDER = sorted(SORT_KEYS, key=lambda text: text.encode())


@pytest.fixture
async def partition(store: Store, pk: str) -> str:
    for number, sk in enumerate(SORT_KEYS):
        await store.put(Put(Key("config", pk, sk), {"n": number}))
    await store.put(Put(Key("config", pk + "!", "APP#z"), {"n": -1}))
    return pk


async def _sort_keys(store: Store, query: Query) -> list[str]:
    page = await store.query(query)
    assert page.cursor is None
    return [row.key.sk for row in page.rows]


RANGES = {
    "all": (None, lambda sk: True),
    "prefix": (Prefix("APP#"), lambda sk: sk.startswith("APP#")),
    "prefix of none": (Prefix("nothing"), lambda sk: False),
    "prefix at the top": (Prefix("\U0001f4b6"), lambda sk: sk.startswith("\U0001f4b6")),
    "from": (Between(low="APP#b"), lambda sk: sk.encode() >= b"APP#b"),
    "up to": (Between(high="DAY#20261118"), lambda sk: sk.encode() <= b"DAY#20261118"),
    "between": (Between("APP", "APP#b"), lambda sk: b"APP" <= sk.encode() <= b"APP#b"),
    "open": (Between(), lambda sk: True),
}


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("sort", "belongs"), RANGES.values(), ids=RANGES.keys())
async def test_range_is_in_byte_order(store, partition, sort, belongs, descending) -> None:
    expected = [sk for sk in IN_ORDER if belongs(sk)]
    query = Query("config", partition, sort, descending=descending, consistent=True)
    assert await _sort_keys(store, query) == (expected[::-1] if descending else expected)


async def test_rows_have_key_and_item(store: Store, partition: str) -> None:
    page = await store.query(Query("config", partition, Prefix("DAY#"), limit=5, consistent=True))
    assert page.rows == (
        (Key("config", partition, "DAY#20261118"), {"n": 6}),
        (Key("config", partition, "DAY#20261119"), {"n": 7}),
    )


async def test_newest_rows_up_to_limit(store: Store, partition: str) -> None:
    page = await store.query(
        Query("config", partition, Between(high="DAY#20261118zzz"), descending=True, limit=1, consistent=True)
    )
    assert [row.key.sk for row in page.rows] == ["DAY#20261118"]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 10, 11, 12])
async def test_pages_cover_everything_once(store: Store, partition: str, size: int, descending: bool) -> None:
    query = Query("config", partition, descending=descending, consistent=True)
    found = [row.key.sk async for row in iterate_rows(store, query, page_size=size)]
    assert found == (IN_ORDER[::-1] if descending else IN_ORDER)


async def test_page_starts_after_deleted_key(store: Store, partition: str) -> None:
    page = await store.query(Query("config", partition, after="APP#aa", limit=1, consistent=True))
    assert [row.key.sk for row in page.rows] == ["APP#b"]


async def test_partition_larger_than_one_answer_is_read(store: Store, pk: str) -> None:
    """DynamoDB answers with at most 1 MB; the store then asks for the rest."""
    for number in range(8):
        await store.put(Put(Key("audit", pk, f"{number}"), {"text": "x" * 300_000}))
    page = await store.query(Query("audit", pk, consistent=True))
    assert [row.key.sk for row in page.rows] == [str(number) for number in range(8)]
    assert page.cursor is None
    page = await store.query(Query("audit", pk, limit=7, consistent=True))
    assert len(page.rows) == 7


async def test_many_items_are_returned_in_requested_order(store: Store, pk: str) -> None:
    present = [Key("daily-total", f"{pk}#{number}", "DAY#20261118") for number in range(0, 250, 2)]
    for number, key in enumerate(present):
        await store.put(Put(key, {"n": number}))
    other = Key("revoked-tokens", pk)
    await store.put(Put(other, {"n": -1}))
    asked = [Key("daily-total", f"{pk}#{number}", "DAY#20261118") for number in range(250)]
    asked = [other, *reversed(asked), other, asked[0]]
    asked.insert(100, Key("revoked-tokens", f"{pk}#none"))  # tables in turn
    found = await store.get_many(asked, consistent=True)
    expected = {key: {"n": number} for number, key in enumerate(present)} | {other: {"n": -1}}
    assert found == [expected.get(key) for key in asked]
    assert await store.get_many([]) == []


BAD_QUERIES = [
    Query("revoked-tokens", "p"),
    Query("nowhere", "p"),
    Query("config", ""),
    Query("config", "p", limit=0),
    Query("config", "p", Prefix("")),
    Query("config", "p", Between(low="")),
    Query("config", "p", after=""),
    Query("config", "p", Between("b", "a")),
    Query("config", "p", Between("b", "c"), after="a"),
    Query("config", "p", Prefix("b"), after="a"),
]


@pytest.mark.parametrize("query", BAD_QUERIES, ids=repr)
async def test_invalid_query_is_rejected(store: Store, query: Query) -> None:
    with pytest.raises(InvalidStoreRequest):
        await store.query(query)


async def test_invalid_read_is_rejected(store: Store) -> None:
    with pytest.raises(InvalidStoreRequest):
        await store.get(Key("config", "p"))
    with pytest.raises(InvalidStoreRequest):
        await store.get_many([Key("config", "p", "s"), Key("revoked-tokens", "p", "s")])
