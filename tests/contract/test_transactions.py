"""All or nothing, on every engine."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from uuid import uuid4

import pytest
from price_keeper.errors import ConditionFailed, InvalidStoreRequest, ReasonCode, TransactionFailed
from price_keeper.stores.contract import (
    AttributeExists,
    ConditionCheck,
    Delete,
    ItemExists,
    ItemMissing,
    Key,
    Put,
    Query,
    Store,
    Update,
    at_least,
    equals,
)


async def test_transaction_with_every_kind_of_write(store: Store, pk: str) -> None:
    await store.put(Put(Key("config", pk, "old"), {"a": 1}))
    await store.put(Put(Key("config", pk, "guard"), {"version": 7}))
    await store.transact(
        [
            Put(Key("request-dedup", pk, "MARKER"), {"until": 5}, ItemMissing()),
            Update(Key("usage-agg-sharded", pk, "DAY#20261118"), add={"cost_usd_micros": Decimal("0.000001")}),
            Delete(Key("config", pk, "old"), ItemExists()),
            ConditionCheck(Key("config", pk, "guard"), equals("version", 7)),
        ]
    )
    assert await store.get(Key("request-dedup", pk, "MARKER"), consistent=True) == {"until": 5}
    assert await store.get(Key("usage-agg-sharded", pk, "DAY#20261118"), consistent=True) == {
        "cost_usd_micros": Decimal("0.000001")
    }
    assert await store.get(Key("config", pk, "old"), consistent=True) is None
    assert await store.get(Key("config", pk, "guard"), consistent=True) == {"version": 7}


@pytest.mark.parametrize("failing", range(4))
async def test_any_failing_write_prevents_all(store: Store, pk: str, failing: int) -> None:
    keys = [Key("sessions", pk, str(number)) for number in range(4)]
    before = [{"n": number} for number in range(4)]
    for key, item in zip(keys, before, strict=True):
        await store.put(Put(key, item))
    conditions = [ItemMissing() if number == failing else ItemExists() for number in range(4)]
    with pytest.raises(TransactionFailed) as refused:
        await store.transact(
            [
                Put(keys[0], {"new": 1}, conditions[0]),
                Update(keys[1], add={"n": 1}, condition=conditions[1]),
                Delete(keys[2], conditions[2]),
                ConditionCheck(keys[3], conditions[3]),
            ]
        )
    assert await store.get_many(keys, consistent=True) == before
    codes = [reason.code for reason in refused.value.reasons]
    assert codes == [ReasonCode.CONDITION_FAILED if number == failing else ReasonCode.NONE for number in range(4)]
    assert refused.value.reasons[failing].item == before[failing]


async def test_each_failing_write_has_its_reason(store: Store, pk: str) -> None:
    await store.put(Put(Key("sessions", pk, "a"), {"n": 1}))
    with pytest.raises(TransactionFailed) as refused:
        await store.transact(
            [
                ConditionCheck(Key("sessions", pk, "a"), at_least("n", 2)),
                Put(Key("sessions", pk, "b"), {}),
                ConditionCheck(Key("sessions", pk, "c"), ItemExists()),
            ]
        )
    reasons = [(reason.code, reason.item) for reason in refused.value.reasons]
    assert reasons == [
        (ReasonCode.CONDITION_FAILED, {"n": 1}),
        (ReasonCode.NONE, None),
        (ReasonCode.CONDITION_FAILED, None),
    ]


async def test_transaction_holds_hundred_writes(store: Store, pk: str) -> None:
    writes = [Put(Key("sessions", pk, f"{number:03}"), {}) for number in range(101)]
    await store.transact(writes[:100])
    assert len((await store.query(Query("sessions", pk, consistent=True))).rows) == 100
    for bad in (writes, [], [writes[0], Delete(writes[0].key)]):
        with pytest.raises(InvalidStoreRequest):
            await store.transact(bad)


async def test_concurrent_transactions_are_atomic(exact_store: Store, pk: str) -> None:
    """Transfers between accounts, each on the condition that the money is there: none is made or lost."""
    accounts = [Key("rate-buckets", pk, str(number)) for number in range(4)]
    for key in accounts:
        await exact_store.put(Put(key, {"money": 10}))

    async def transfer(number: int) -> bool:
        source, target = accounts[number % 4], accounts[(number * 7 + 1) % 4]
        if source == target:
            return False
        try:
            await exact_store.transact(
                [Update(source, add={"money": -4}, condition=at_least("money", 4)), Update(target, add={"money": 4})]
            )
        except TransactionFailed:
            return False
        return True

    done = await asyncio.gather(*(transfer(number) for number in range(60)))
    found = await exact_store.get_many(accounts, consistent=True)
    amounts = [item["money"] for item in found if item is not None]
    assert sum(amounts) == 40  # type: ignore[arg-type]
    assert min(amounts) >= 0  # type: ignore[type-var]
    assert any(done)


async def test_concurrent_single_writes_all_count(exact_store: Store, pk: str) -> None:
    key = Key("usage-agg-sharded", pk, "DAY#20261118")
    one = Update(key, add={"requests": 1, "cost_usd_micros": Decimal("0.25")})
    seen = await asyncio.gather(*(exact_store.update(one) for _ in range(100)))
    assert sorted(item["requests"] for item in seen) == list(range(1, 101))  # type: ignore[type-var]
    assert await exact_store.get(key, consistent=True) == {"requests": 100, "cost_usd_micros": 25}


async def test_concurrent_creations_have_one_winner(exact_store: Store, pk: str) -> None:
    key = Key("request-dedup", pk, "MARKER")
    attempts = (exact_store.put(Put(key, {"winner": number}, ItemMissing())) for number in range(30))
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    assert [type(outcome).__name__ for outcome in outcomes].count("ConditionFailed") == 29
    found = await exact_store.get(key, consistent=True)
    assert found == {"winner": outcomes.index(None)}


async def test_concurrent_deletes_return_item_once(exact_store: Store, pk: str) -> None:
    key = Key("secret-retrieval-tokens", pk)
    await exact_store.put(Put(key, {"sealed": b"x"}))
    outcomes = await asyncio.gather(*(exact_store.delete(Delete(key)) for _ in range(30)))
    assert [outcome for outcome in outcomes if outcome is not None] == [{"sealed": b"x"}]


async def test_of_many_who_exchange_one_gets_what_stood_there(exact_store: Store, pk: str) -> None:
    key = Key("secret-retrieval-tokens", pk)
    await exact_store.put(Put(key, {"sealed": b"x"}))
    update = Update(key, remove=("sealed",), set={"used": True}, condition=AttributeExists("sealed"))
    outcomes = await asyncio.gather(*(exact_store.exchange(update) for _ in range(30)), return_exceptions=True)
    assert [each for each in outcomes if not isinstance(each, ConditionFailed)] == [{"sealed": b"x"}]


async def test_one_invalid_write_refuses_transaction(store: Store, pk: str) -> None:
    good = Put(Key("sessions", pk, "good"), {"a": 1})
    token = str(uuid4())
    with pytest.raises(InvalidStoreRequest):
        await store.transact([good, Put(Key("sessions", pk, "bad"), {"a": 0.5})], token=token)  # type: ignore[dict-item]
    assert await store.get(good.key, consistent=True) is None
    await store.transact([good], token=token)


async def test_transaction_holds_four_megabytes(store: Store, pk: str) -> None:
    writes = [Put(Key("sessions", pk, f"{number:02}"), {"text": "x" * 400_000}) for number in range(11)]
    with pytest.raises(InvalidStoreRequest):
        await store.transact(writes)
