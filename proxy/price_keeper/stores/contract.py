"""The contract of a store: its operations, what each guarantees, and the values that they take.

Callers describe conditions, writes and queries with the classes of this module. Each engine translates them: SQLite
evaluates them in memory, DynamoDB gets them as expressions. `tests/contract/` runs one suite against every engine.

Start with `Store`. What a store may raise is in `price_keeper.errors` under `StoreError`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Literal, NamedTuple, Protocol, TypeAlias

Scalar: TypeAlias = "str | int | Decimal | bool | bytes"
Value: TypeAlias = "Scalar | list[Value] | dict[str, Value]"
Item: TypeAlias = "Mapping[str, Value]"

EXPIRY_ATTRIBUTE = "expires_at_epoch"

# The store's own limits, the same on every engine, so that what works on a laptop works in the fleet.
MAX_TRANSACTION_WRITES = 100
MAX_TRANSACTION_BYTES = 4 * 1024 * 1024
MAX_ITEM_BYTES = 400 * 1024
MAX_PARTITION_KEY_BYTES = 2048
MAX_SORT_KEY_BYTES = 1024
MAX_TOKEN_CHARACTERS = 36


class Key(NamedTuple):
    """Where an item stands. `sk` stays empty for tables that have no sort key."""

    table: str
    pk: str
    sk: str = ""


# Conditions speak of one item's top-level attributes. A comparison with an attribute that is missing, or of another
# kind than the value, does not hold.


@dataclass(frozen=True, slots=True)
class ItemExists:
    pass


@dataclass(frozen=True, slots=True)
class ItemMissing:
    pass


@dataclass(frozen=True, slots=True)
class AttributeExists:
    attribute: str


@dataclass(frozen=True, slots=True)
class AttributeMissing:
    attribute: str


Operator: TypeAlias = Literal["=", "<", "<=", ">", ">="]


@dataclass(frozen=True, slots=True)
class Compare:
    attribute: str
    operator: Operator
    value: Scalar


@dataclass(frozen=True, slots=True)
class AllOf:
    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    parts: tuple[Condition, ...]


Condition: TypeAlias = "ItemExists | ItemMissing | AttributeExists | AttributeMissing | Compare | AllOf | AnyOf"


def equals(attribute: str, value: Scalar) -> Compare:
    return Compare(attribute, "=", value)


def below(attribute: str, value: Scalar) -> Compare:
    return Compare(attribute, "<", value)


def at_most(attribute: str, value: Scalar) -> Compare:
    return Compare(attribute, "<=", value)


def above(attribute: str, value: Scalar) -> Compare:
    return Compare(attribute, ">", value)


def at_least(attribute: str, value: Scalar) -> Compare:
    return Compare(attribute, ">=", value)


def all_of(*parts: Condition) -> AllOf:
    return AllOf(parts)


def any_of(*parts: Condition) -> AnyOf:
    return AnyOf(parts)


def missing_or_expired(now: float) -> Condition:
    """For a write that may take the place of a row whose time is over but which nobody has deleted yet."""
    return any_of(ItemMissing(), at_most(EXPIRY_ATTRIBUTE, int(now)))


def ignore_expired(item: Item | None, now: float) -> Item | None:
    """The item, unless its time is over. Engines delete expired rows late, so every reader of such rows asks this."""
    if item is None:
        return None
    expiry = item.get(EXPIRY_ATTRIBUTE)
    return None if isinstance(expiry, (int, Decimal)) and expiry <= now else item


# Writes. Attribute names are never the key's own.


@dataclass(frozen=True, slots=True)
class Put:
    """Replaces the whole item."""

    key: Key
    item: Item
    condition: Condition | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """Changes attributes of an item, which is made if it is not there.

    `add` counts up from what stands there, a missing attribute being 0, and is exact to 38 digits.
    `set_if_missing` leaves an attribute alone that is there. An attribute may be named once in all.
    """

    key: Key
    set: Mapping[str, Value] = field(default_factory=dict)
    set_if_missing: Mapping[str, Value] = field(default_factory=dict)
    add: Mapping[str, int | Decimal] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    condition: Condition | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    key: Key
    condition: Condition | None = None


@dataclass(frozen=True, slots=True)
class ConditionCheck:
    """A condition on an item which the transaction leaves as it is."""

    key: Key
    condition: Condition


Write: TypeAlias = "Put | Update | Delete | ConditionCheck"


# Reading a partition in the order of its sort keys (by their UTF-8 bytes).


@dataclass(frozen=True, slots=True)
class Prefix:
    text: str


@dataclass(frozen=True, slots=True)
class Between:
    """Both ends belong to the range; None leaves that side open."""

    low: str | None = None
    high: str | None = None


@dataclass(frozen=True, slots=True)
class Query:
    table: str
    pk: str
    sort: Prefix | Between | None = None
    descending: bool = False
    limit: int | None = None
    after: str | None = None
    consistent: bool = False


class StoredRow(NamedTuple):
    key: Key
    item: Item


@dataclass(frozen=True, slots=True)
class Page:
    """`cursor` is where the next page begins (`Query.after`); None when there is certainly no more."""

    rows: tuple[StoredRow, ...]
    cursor: str | None


class Store(Protocol):
    """Every verb may raise StoreUnavailable, Throttled, StoreMisconfigured or Rejected (see `price_keeper.errors`).

    A write that raises anything without `maybe_applied` has written nothing, and never will. An engine waits and
    tries again by itself where that cannot write twice, within a few seconds. A caller that is cancelled while it
    waits for a write does not know whether it was written.
    Items come back as new objects, without their key. Numbers are int where whole, else Decimal, never float.
    """

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        """The item, expired or not. `consistent`: it holds every write acknowledged before the call."""

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        """The items in the order of the keys, however many; each as from its own get, not as one snapshot."""

    async def query(self, query: Query) -> Page:
        """Up to `limit` rows of one partition, in order; without a limit, all of them."""

    async def put(self, put: Put) -> None:
        """Raises ConditionFailed. Never resent after a lost answer."""

    async def update(self, update: Update) -> Item:
        """The item as it stands after the write. Raises ConditionFailed. Never resent after a lost answer."""

    async def delete(self, delete: Delete) -> Item | None:
        """The item that stood there; of any number of deleters one gets it. Raises ConditionFailed."""

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        """All or nothing, isolated from every other write, up to 100 writes, each on an item of its own.

        Raises TransactionFailed with a reason for each write. With a `token`, sending the same writes again within
        ten minutes of success does nothing and succeeds; the same token with other writes is Rejected.
        """

    async def probe(self) -> None:
        """Raises what the work would, were it to use the store now. Costs one small request."""

    async def close(self) -> None:
        """Waits for what was begun. No verb may be called afterwards."""


async def iterate_rows(store: Store, query: Query, page_size: int = 500) -> AsyncIterator[StoredRow]:
    """All rows of a query, holding one page at a time."""
    after: str | None = query.after
    while True:
        page = await store.query(replace(query, after=after, limit=page_size))
        for row in page.rows:
            yield row
        if page.cursor is None:
            return
        after = page.cursor


def iterate_attributes(condition: Condition | None) -> Iterable[str]:
    match condition:
        case AttributeExists(name) | AttributeMissing(name) | Compare(name, _, _):
            yield name
        case AllOf(parts) | AnyOf(parts):
            for part in parts:
                yield from iterate_attributes(part)
