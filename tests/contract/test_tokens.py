"""A transaction sent twice with one token is carried out once."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest
from price_keeper.errors import InvalidStoreRequest, TransactionFailed
from price_keeper.stores.contract import ItemExists, ItemMissing, Key, Put, Store, Update

from tests.support.engines import Engines


def _addition(pk: str, amount: int = 1) -> Update:
    return Update(Key("rate-buckets", pk, "BUCKET#rpm"), add={"tc": amount})


async def test_transaction_sent_again_changes_nothing_and_succeeds(exact_store: Store, pk: str) -> None:
    token = str(uuid4())
    for _ in range(3):
        await exact_store.transact([_addition(pk)], token=token)
    assert await exact_store.get(_addition(pk).key, consistent=True) == {"tc": 1}
    await exact_store.transact([_addition(pk)], token=str(uuid4()))
    await exact_store.transact([_addition(pk)])
    await exact_store.transact([_addition(pk)])
    assert await exact_store.get(_addition(pk).key, consistent=True) == {"tc": 4}


async def test_transaction_sent_concurrently_is_applied_once(exact_store: Store, pk: str) -> None:
    token = str(uuid4())
    await asyncio.gather(*(exact_store.transact([_addition(pk)], token=token) for _ in range(10)))
    assert await exact_store.get(_addition(pk).key, consistent=True) == {"tc": 1}


async def test_equivalent_transaction_counts_as_same(exact_store: Store, pk: str) -> None:
    token, key = str(uuid4()), _addition(pk).key
    await exact_store.transact([Update(key, add={"tc": 5, "tk": -5}, set={"m": {"a": 1, "b": 2}})], token=token)
    again = Update(key, add={"tk": Decimal("-5.0"), "tc": Decimal("5.000000")}, set={"m": {"b": 2, "a": 1}})
    await exact_store.transact([again], token=token)
    assert await exact_store.get(key, consistent=True) == {"tc": 5, "tk": -5, "m": {"a": 1, "b": 2}}


async def test_condition_is_not_checked_again(exact_store: Store, pk: str) -> None:
    token, key = str(uuid4()), Key("request-dedup", pk, "MARKER")
    creation = [Put(key, {"made": 1}, ItemMissing())]
    await exact_store.transact(creation, token=token)
    await exact_store.transact(creation, token=token)
    with pytest.raises(TransactionFailed):
        await exact_store.transact(creation, token=str(uuid4()))


async def test_refused_transaction_may_be_sent_again(exact_store: Store, pk: str) -> None:
    token, key = str(uuid4()), Key("request-dedup", pk, "MARKER")
    update = [Update(key, set={"seen": True}, condition=ItemExists())]
    with pytest.raises(TransactionFailed):
        await exact_store.transact(update, token=token)
    await exact_store.put(Put(key, {}))
    await exact_store.transact(update, token=token)
    assert await exact_store.get(key, consistent=True) == {"seen": True}


async def test_other_writes_under_same_token_are_rejected(exact_store: Store, pk: str) -> None:
    token = str(uuid4())
    await exact_store.transact([_addition(pk)], token=token)
    with pytest.raises(InvalidStoreRequest):
        await exact_store.transact([_addition(pk, 2)], token=token)
    assert await exact_store.get(_addition(pk).key, consistent=True) == {"tc": 1}


@pytest.mark.parametrize("token", ["", "x" * 37])
async def test_token_has_1_to_36_characters(store: Store, pk: str, token: str) -> None:
    with pytest.raises(InvalidStoreRequest):
        await store.transact([_addition(pk)], token=token)


async def test_moto_still_ignores_tokens(engines: Engines, tmp_path: Path, pk: str) -> None:
    """Why the tests above do not run on moto. When this fails, moto has learnt it: let it join them."""
    token = str(uuid4())
    async with engines.open("moto", tmp_path) as store:
        await store.transact([_addition(pk)], token=token)
        await store.transact([_addition(pk)], token=token)
        assert await store.get(_addition(pk).key, consistent=True) == {"tc": 2}


async def test_sqlite_forgets_token_after_ten_minutes(engines: Engines, tmp_path: Path, pk: str) -> None:
    now = 1_000_000.0
    async with engines.open("sqlite", tmp_path, now=lambda: now) as store:
        await store.transact([_addition(pk)], token="t")
        now += 599
        await store.transact([_addition(pk)], token="t")
        assert await store.get(_addition(pk).key) == {"tc": 1}
        now += 2
        await store.transact([_addition(pk)], token="t")
        assert await store.get(_addition(pk).key) == {"tc": 2}
