"""The contract of a store: its operations, what each guarantees, and the values that they take.

Callers describe conditions, writes and queries with the classes of this module. Each engine translates them: the SQLite
engine evaluates them in memory, the DynamoDB engine sends them as expressions. `tests/contract/` runs one suite against
every engine.

Start with `Store`. The exceptions of a store are the subclasses of `StoreError` in `price_keeper.errors`.
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

# Limits are the same on every engine, so that a request that works on a laptop also works in the fleet.
MAX_TRANSACTION_WRITES = 100
MAX_TRANSACTION_BYTES = 4 * 1024 * 1024
MAX_ITEM_BYTES = 400 * 1024
MAX_PARTITION_KEY_BYTES = 2048
MAX_SORT_KEY_BYTES = 1024
MAX_TOKEN_CHARACTERS = 36


class Key(NamedTuple):
    """The primary key of an item. `sk` is empty for tables without a sort key."""

    table: str
    pk: str
    sk: str = ""


# Conditions apply to the top-level attributes of one item. A comparison with an attribute that is missing, or whose
# type differs from the value's, is false.


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
    """For a write that may replace a row that has expired but is not deleted yet."""
    return any_of(ItemMissing(), at_most(EXPIRY_ATTRIBUTE, int(now)))


def ignore_expired(item: Item | None, now: float) -> Item | None:
    """The item, or None if it has expired. Engines delete expired rows late, so readers of such rows call this."""
    if item is None:
        return None
    expiry = item.get(EXPIRY_ATTRIBUTE)
    return None if isinstance(expiry, (int, Decimal)) and expiry <= now else item


# Writes. They never name the key's own attributes (PK, SK).


@dataclass(frozen=True, slots=True)
class Put:
    """Replaces the whole item."""

    key: Key
    item: Item
    condition: Condition | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """Changes attributes of an item, and creates the item if it is missing.

    `add` increments an attribute, where a missing one counts as 0; sums are exact to 38 digits. `set_if_missing` does
    not change an attribute that exists. An update names each attribute at most once.
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
    """A condition on an item that the transaction does not change."""

    key: Key
    condition: Condition


Write: TypeAlias = "Put | Update | Delete | ConditionCheck"


# Queries read a partition in the order of its sort keys, compared by their UTF-8 bytes.


@dataclass(frozen=True, slots=True)
class Prefix:
    text: str


@dataclass(frozen=True, slots=True)
class Between:
    """A range of sort keys, both ends inclusive; None leaves that side open."""

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
    """One page of rows. Pass `cursor` as `Query.after` to read the next one; None means that this is the last page."""

    rows: tuple[StoredRow, ...]
    cursor: str | None


class Store(Protocol):
    """The operations that every engine offers.

    Each one may raise StoreUnavailable (of which StoreAccessDenied is a subclass), StoreThrottled, StoreMisconfigured
    or InvalidStoreRequest; see `price_keeper.errors`. A write that raises an exception without `maybe_applied` was not
    applied, and will not be.
    An engine retries for a few seconds where a retry cannot apply a write twice. A caller that is cancelled while it
    waits for a write cannot know whether the write was applied.
    Items are returned as new objects, without their key. Numbers are int where whole, else Decimal, never float.
    """

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        """The item, expired or not. With `consistent`, it reflects every write acknowledged before the call."""

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        """The items of any number of keys, in the order of the keys. Each is read separately; this is no snapshot."""

    async def query(self, query: Query) -> Page:
        """Up to `limit` rows of one partition, in order; without a limit, all of them."""

    async def put(self, put: Put) -> None:
        """Write the whole item. Raises ConditionFailed. Never resent after a lost response."""

    async def update(self, update: Update) -> Item:
        """Apply the update and return the new item. Raises ConditionFailed. Never resent after a lost response."""

    async def exchange(self, update: Update) -> Item | None:
        """Like `update`, but returns the item as it was before it."""

    async def delete(self, delete: Delete) -> Item | None:
        """Delete the item and return it. Of several concurrent callers exactly one gets it. Raises ConditionFailed."""

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        """Apply all writes or none, isolated from every other write: up to 100 writes, each on a different item.

        Raises TransactionFailed with a reason for each write. `token` is an idempotency key: sending the same writes
        again within ten minutes of success succeeds and changes nothing; the same token with other writes raises
        InvalidStoreRequest.
        """

    async def probe(self) -> None:
        """Raises what an operation would raise if the store were used now. Costs one small request."""

    async def close(self) -> None:
        """Wait for operations in progress, then close. No operation may be called afterwards."""


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
