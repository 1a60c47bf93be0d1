"""Reading and writing single items, on every engine."""

from __future__ import annotations

from decimal import Decimal

import pytest
from price_keeper.errors import ConditionFailed, InvalidStoreRequest
from price_keeper.stores.contract import (
    AttributeExists,
    AttributeMissing,
    Condition,
    Delete,
    ItemExists,
    ItemMissing,
    Key,
    Put,
    Store,
    Update,
    above,
    all_of,
    any_of,
    at_least,
    at_most,
    below,
    equals,
    ignore_expired,
    missing_or_expired,
)

EVERY_KIND = {
    "text": "häßlich \U0001f4b6 \x00 '\"",
    "empty": "",
    "yes": True,
    "no": False,
    "whole": -(10**37),
    "huge": 12345678901234567890123456789012345678,
    "round": 10**40,
    "fraction": Decimal("0.00000012345678901234567890123456789012345678"),
    "micros": Decimal("1234567.890123"),
    "bytes": b"\x00\xff\x7f",
    "list": ["a", 1, Decimal("1.5"), True, b"\x01", ["nested"], {"N": "not a number"}],
    "map": {"M": {"B": "text"}, "n": 10**30, "b": b"", "empty": {}},
    "none": [],
}


async def test_item_is_read_as_written(store: Store, pk: str) -> None:
    key = Key("config", pk, "CONFIG")
    await store.put(Put(key, EVERY_KIND))
    found = await store.get(key, consistent=True)
    assert found == EVERY_KIND
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in EVERY_KIND.items()}


async def test_missing_item_is_none(store: Store, pk: str) -> None:
    assert await store.get(Key("config", pk, "CONFIG")) is None
    assert await store.get(Key("revoked-tokens", pk)) is None
    assert await store.delete(Delete(Key("config", pk, "CONFIG"))) is None


async def test_put_replaces_whole_item(store: Store, pk: str) -> None:
    key = Key("config", pk, "CONFIG")
    await store.put(Put(key, {"a": 1, "b": 2}))
    await store.put(Put(key, {"b": 3}))
    assert await store.get(key, consistent=True) == {"b": 3}


async def test_tables_keep_items_apart(store: Store, pk: str) -> None:
    await store.put(Put(Key("config", pk, "X"), {"a": 1}))
    await store.put(Put(Key("audit", pk, "X"), {"a": 2}))
    assert await store.get(Key("config", pk, "X"), consistent=True) == {"a": 1}


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, Decimal("1.0")), (Decimal("1.50"), Decimal("1.5")), (0, Decimal("-0")), (100, Decimal("1E+2"))],
)
async def test_equal_numbers_have_one_form(store: Store, pk: str, one: int | Decimal, other: Decimal) -> None:
    key = Key("config", pk, "CONFIG")
    await store.put(Put(key, {"n": other}))
    found = await store.get(key, consistent=True)
    assert found == {"n": one}
    assert type(found["n"]) is type(one)


async def test_update_creates_and_changes(store: Store, pk: str) -> None:
    key = Key("config", pk, "CONFIG")
    made = await store.update(Update(key, set={"a": "x", "gone": 1}, set_if_missing={"first": 1}, add={"n": 5}))
    assert made == {"a": "x", "gone": 1, "first": 1, "n": 5}
    after = await store.update(
        Update(key, set={"a": [1]}, set_if_missing={"first": 2}, add={"n": -7}, remove=("gone", "never there"))
    )
    assert after == {"a": [1], "first": 1, "n": -2}
    assert await store.get(key, consistent=True) == after


async def test_counters_are_exact_to_38_digits(store: Store, pk: str) -> None:
    key = Key("usage-agg-sharded", pk, "DAY#20261118")
    await store.update(Update(key, add={"big": 10**37, "small": Decimal("0.000001")}))
    await store.update(Update(key, add={"big": 1, "small": Decimal("12345678901234567890123456789.000001")}))
    assert await store.get(key, consistent=True) == {
        "big": 10**37 + 1,
        "small": Decimal("12345678901234567890123456789.000002"),
    }


async def test_exchange_returns_item_as_it_was_before(store: Store, pk: str) -> None:
    key = Key("secret-retrieval-tokens", pk)
    update = Update(key, set={"used": True}, remove=("sealed",), condition=AttributeExists("sealed"))
    with pytest.raises(ConditionFailed) as refused:
        await store.exchange(update)
    assert refused.value.item is None
    await store.put(Put(key, {"sealed": b"x", "used": False}))
    assert await store.exchange(update) == {"sealed": b"x", "used": False}
    assert await store.get(key, consistent=True) == {"used": True}
    with pytest.raises(ConditionFailed) as refused:
        await store.exchange(update)
    assert refused.value.item == {"used": True}
    assert await store.exchange(Update(Key("config", pk, "new"), set={"a": 1})) is None


async def test_delete_returns_former_item(store: Store, pk: str) -> None:
    key = Key("secret-retrieval-tokens", pk)
    await store.put(Put(key, {"secret": b"sealed"}))
    assert await store.delete(Delete(key, ItemExists())) == {"secret": b"sealed"}
    assert await store.get(key, consistent=True) is None
    with pytest.raises(ConditionFailed) as refused:
        await store.delete(Delete(key, ItemExists()))
    assert refused.value.item is None


STORED = {"n": 5, "d": Decimal("1.5"), "s": "mm", "b": b"mm", "t": True, "l": [1], "expires_at_epoch": 100}

HOLDING: list[Condition] = [
    ItemExists(),
    AttributeExists("n"),
    AttributeMissing("x"),
    equals("n", 5),
    equals("n", Decimal("5.0")),
    equals("s", "mm"),
    equals("t", True),
    at_most("n", 5),
    at_least("n", 5),
    below("n", Decimal("5.00000001")),
    above("n", -1),
    above("d", 1),
    below("s", "mn"),
    below("s", "mmm"),
    above("s", "Z"),
    below("s", "é"),
    above("b", b"ml"),
    below("b", b"\xff"),
    all_of(equals("n", 5), AttributeExists("s")),
    any_of(equals("n", 6), equals("s", "mm")),
    all_of(any_of(AttributeMissing("n"), above("n", 4)), any_of(AttributeExists("x"), at_most("d", 2))),
    missing_or_expired(100.0),
    all_of(missing_or_expired(100.0)),
    any_of(
        all_of(any_of(equals("n", 5))), all_of(AttributeExists("x"), any_of(AttributeExists("y"), AttributeExists("n")))
    ),
]

FAILING: list[Condition] = [
    ItemMissing(),
    AttributeExists("x"),
    AttributeMissing("n"),
    equals("n", 6),
    equals("x", 0),
    below("n", 5),
    above("n", 5),
    below("x", 1),
    at_least("x", -1),
    above("s", "mm"),
    all_of(equals("n", 5), AttributeExists("x")),
    any_of(equals("n", 6), equals("s", "m")),
    missing_or_expired(99.9),
]


OF_ANOTHER_KIND: list[Condition] = [
    equals("n", "5"),
    equals("t", 1),
    equals("n", True),
    equals("s", b"mm"),
    below("s", 9),
    at_least("s", b"a"),
    above("n", "4"),
]


@pytest.mark.parametrize("condition", HOLDING, ids=repr)
async def test_true_condition_allows_write(store: Store, pk: str, condition: Condition) -> None:
    key = Key("config", pk, "CONFIG")
    await store.put(Put(key, STORED))
    assert (await store.update(Update(key, set={"done": True}, condition=condition)))["done"] is True
    await store.put(Put(key, STORED, condition))
    assert await store.delete(Delete(key, condition)) == STORED


@pytest.mark.parametrize("condition", FAILING, ids=repr)
async def test_false_condition_keeps_item(store: Store, pk: str, condition: Condition) -> None:
    key = Key("config", pk, "CONFIG")
    await store.put(Put(key, STORED))
    await _refuses_to_write(store, key, condition)


@pytest.mark.parametrize("condition", OF_ANOTHER_KIND, ids=repr)
async def test_values_of_different_types_never_compare(exact_store: Store, pk: str, condition: Condition) -> None:
    key = Key("config", pk, "CONFIG")
    await exact_store.put(Put(key, STORED))
    await _refuses_to_write(exact_store, key, condition)


async def _refuses_to_write(store: Store, key: Key, condition: Condition) -> None:
    attempts = (
        lambda: store.put(Put(key, {"done": True}, condition)),
        lambda: store.update(Update(key, set={"done": True}, condition=condition)),
        lambda: store.delete(Delete(key, condition)),
    )
    for attempt in attempts:
        with pytest.raises(ConditionFailed) as refused:
            await attempt()
        assert refused.value.item == STORED
    assert await store.get(key, consistent=True) == STORED


ON_NOTHING: list[tuple[Condition, bool]] = [
    (ItemMissing(), True),
    (AttributeMissing("n"), True),
    (missing_or_expired(0), True),
    (any_of(ItemMissing(), equals("n", 1)), True),
    (ItemExists(), False),
    (AttributeExists("n"), False),
    (below("n", 1), False),
    (equals("n", 0), False),
]


@pytest.mark.parametrize(("condition", "does_hold"), ON_NOTHING, ids=repr)
async def test_conditions_on_missing_item(store: Store, pk: str, condition: Condition, does_hold: bool) -> None:
    key = Key("config", pk, "CONFIG")
    if does_hold:
        await store.put(Put(key, {"a": 1}, condition))
        assert await store.get(key, consistent=True) == {"a": 1}
        return
    with pytest.raises(ConditionFailed) as refused:
        await store.put(Put(key, {"a": 1}, condition))
    assert refused.value.item is None
    assert await store.get(key, consistent=True) is None


def _nested(depth: int) -> list[object]:
    return [] if depth == 0 else [_nested(depth - 1)]


UNKEEPABLE = {
    "a float": {"a": 0.1},
    "a none": {"a": None},
    "a set": {"a": {"x"}},
    "39 digits": {"a": 10**38 + 1},
    "39 digits behind the point": {"a": Decimal("1." + "1" * 38)},
    "not a number": {"a": Decimal("NaN")},
    "infinite": {"a": Decimal("-Infinity")},
    "too large": {"a": Decimal("1E126")},
    "too small": {"a": Decimal("1E-131")},
    "a lone surrogate": {"a": "\ud800"},
    "a float deep inside": {"a": [{"b": [0.5]}]},
    "too deep": {"a": _nested(40)},
    "too big": {"a": "x" * 409_601},
    "the key's own name": {"PK": "x"},
    "no name": {"": 1},
    "a name that is a lone surrogate": {"\ud800": 1},
    "a name that is no text": {1: 1},
    "a nested name that is no text": {"a": {1: 1}},
    "too big with its key": {"a": "x" * (409_600 - 5)},
}


@pytest.mark.parametrize("item", UNKEEPABLE.values(), ids=UNKEEPABLE.keys())
async def test_inexact_value_is_rejected(store: Store, pk: str, item: dict[str, object]) -> None:
    key = Key("config", pk, "CONFIG")
    with pytest.raises(InvalidStoreRequest):
        await store.put(Put(key, item))  # type: ignore[arg-type]
    with pytest.raises(InvalidStoreRequest):
        await store.update(Update(key, set=item))  # type: ignore[arg-type]
    with pytest.raises(InvalidStoreRequest):
        await store.transact([Put(key, item)])  # type: ignore[arg-type]
    assert await store.get(key, consistent=True) is None


BAD_WRITES = {
    "no change": Update(Key("config", "p", "s")),
    "an attribute twice": Update(Key("config", "p", "s"), set={"a": 1}, add={"a": 1}),
    "adding text": Update(Key("config", "p", "s"), add={"a": "1"}),  # type: ignore[dict-item]
    "adding a bool": Update(Key("config", "p", "s"), add={"a": True}),
    "no partition key": Put(Key("config", "", "s"), {}),
    "no sort key": Put(Key("config", "p"), {}),
    "a sort key too many": Put(Key("revoked-tokens", "p", "s"), {}),
    "a partition key too long": Put(Key("config", "ü" * 1025, "s"), {}),
    "a sort key too long": Put(Key("config", "p", "x" * 1025), {}),
    "no such table": Put(Key("conf", "p", "s"), {}),
    "an order of truths": Delete(Key("config", "p", "s"), below("a", True)),
    "an empty condition": Delete(Key("config", "p", "s"), all_of()),
    "a condition on the key": Delete(Key("config", "p", "s"), equals("PK", "p")),
}


@pytest.mark.parametrize("write", BAD_WRITES.values(), ids=BAD_WRITES.keys())
async def test_invalid_write_is_rejected(store: Store, write: Put | Update | Delete) -> None:
    verbs = {Put: store.put, Update: store.update, Delete: store.delete}
    with pytest.raises(InvalidStoreRequest):
        await verbs[type(write)](write)  # type: ignore[operator]
    with pytest.raises(InvalidStoreRequest):
        await store.transact([write])


async def test_add_to_non_number_is_rejected(store: Store, pk: str) -> None:
    key = Key("config", pk, "CONFIG")
    await store.put(Put(key, {"a": "text"}))
    with pytest.raises(InvalidStoreRequest):
        await store.update(Update(key, add={"a": 1}))
    with pytest.raises(InvalidStoreRequest):
        await store.transact([Update(key, add={"a": 1}), Put(Key("config", pk, "OTHER"), {})])
    assert await store.get(key, consistent=True) == {"a": "text"}
    assert await store.get(Key("config", pk, "OTHER"), consistent=True) is None


async def test_returned_items_are_independent_copies(store: Store, pk: str) -> None:
    key = Key("config", pk, "CONFIG")
    given = {"l": [1], "m": {"a": 1}}
    await store.put(Put(key, given))
    first = await store.update(Update(key, add={"n": 1}))
    first["l"].append(2)  # type: ignore[union-attr]
    assert await store.get(key, consistent=True) == {"l": [1], "m": {"a": 1}, "n": 1}


@pytest.mark.parametrize(("expiry", "is_live"), [(99, False), (100, False), (101, True), (Decimal("100.5"), True)])
def test_item_is_expired_from_its_expiry_on(expiry: int | Decimal, is_live: bool) -> None:
    item = {"expires_at_epoch": expiry}
    assert ignore_expired(item, 100.0) == (item if is_live else None)
    assert ignore_expired({"a": 1}, 100.0) == {"a": 1}
    assert ignore_expired(None, 100.0) is None


async def test_far_future_expiry_is_kept(store: Store, pk: str) -> None:
    await store.put(Put(Key("config", pk, "CONFIG"), {"expires_at_epoch": 2**63}))
    assert await store.get(Key("config", pk, "CONFIG"), consistent=True) == {"expires_at_epoch": 2**63}
