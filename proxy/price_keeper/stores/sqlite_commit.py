"""Applies the writes of one SQLite commit in memory, and saves each changed item once, at the end.

Each write sees the effects of the writes before it. A failed condition or a rejected transaction has no effect on the
group. Idempotency tokens of transactions are kept for ten minutes, as DynamoDB keeps them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from hashlib import sha256
from typing import Any, TypeVar

from price_keeper.errors import CancellationReason, ConditionFailed, InvalidStoreRequest, ReasonCode, TransactionFailed
from price_keeper.stores import item_codec as codec
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    AllOf,
    AnyOf,
    AttributeExists,
    AttributeMissing,
    Compare,
    ConditionCheck,
    Delete,
    Item,
    ItemExists,
    ItemMissing,
    Key,
    Put,
    Update,
    Value,
    Write,
)
from price_keeper.stores.item_values import apply_update, evaluate_condition, normalize_number
from price_keeper.stores.schema import TABLES

_MAX_SQLITE_INTEGER = 2**63  # an expiry time beyond SQLite's largest integer counts as none

TOKEN_SECONDS = 600  # as long as DynamoDB remembers a transaction's token
MAX_PURGED_ROWS = 1_000  # of one purge, so that it never blocks writers for long


def load_item(connection: sqlite3.Connection, key: Key) -> dict[str, Value] | None:
    row = connection.execute(
        f'SELECT item FROM "{key.table}" WHERE pk=? AND sk=?',  # noqa: S608 - a name from TABLES
        (key.pk, key.sk),
    ).fetchone()
    return None if row is None else codec.decode_item(row[0])


# The names of the parts of a transaction in its digest. Digests are stored in the file, and a process of another
# version may resend a transaction, so these names stay the same whatever the classes are called.
_DIGEST_NAMES: Mapping[type, str] = {
    Put: "Put",
    Update: "Update",
    Delete: "Delete",
    ConditionCheck: "Check",
    ItemExists: "ItemExists",
    ItemMissing: "ItemMissing",
    AttributeExists: "Exists",
    AttributeMissing: "Missing",
    Compare: "Compare",
    AllOf: "AllOf",
    AnyOf: "AnyOf",
}


@dataclass(frozen=True, slots=True)
class _UsedToken:
    digest: bytes
    until: float


class WriteGroup:
    """The items of one commit, as the writes so far left them. `save` writes each changed item once."""

    def __init__(self, connection: sqlite3.Connection, now: float) -> None:
        self._connection = connection
        self._now = now
        self._items: dict[Key, dict[str, Value] | None] = {}
        self._changed: set[Key] = set()
        self._tokens: dict[str, _UsedToken] = {}

    def write(self, write: Put | Update | Delete) -> Item | None:
        before, after = self._apply(write)
        match write:
            case Put():
                return None
            case Update():
                return _copy_item(after)
            case Delete():
                return _copy_item(before)

    def exchange(self, update: Update) -> Item | None:
        return _copy_item(self._apply(update)[0])

    def _apply(self, write: Put | Update | Delete) -> tuple[dict[str, Value] | None, dict[str, Value] | None]:
        """Apply one write; return the item before and after it."""
        before = self._get_item(write.key)
        if not evaluate_condition(write.condition, before):
            raise ConditionFailed(_copy_item(before))
        after = _compute_item(write, before)
        self._set_item(write.key, after)
        return before, after

    def transact(self, writes: Sequence[Write], token: str | None) -> None:
        digest = sha256(repr(_canonicalize(writes)).encode()).digest() if token is not None else b""
        if token is not None and self._was_applied(token, digest):
            return
        before = [self._get_item(write.key) for write in writes]
        verdicts = [evaluate_condition(write.condition, item) for write, item in zip(writes, before, strict=True)]
        if not all(verdicts):
            raise TransactionFailed([_build_reason(*pair) for pair in zip(verdicts, before, strict=True)])
        # All new items are computed before the first one is set: an invalid write must leave no effect of the others.
        after = [_compute_item(write, item) for write, item in zip(writes, before, strict=True)]
        for write, item in zip(writes, after, strict=True):
            if not isinstance(write, ConditionCheck):
                self._set_item(write.key, item)
        if token is not None:
            self._tokens[token] = _UsedToken(digest, self._now + TOKEN_SECONDS)

    def purge(self, expired_before: int) -> int:
        self.save()
        deleted = 0
        for table in TABLES:
            deleted += self._connection.execute(
                f'DELETE FROM "{table}" WHERE (pk, sk) IN'  # noqa: S608
                f' (SELECT pk, sk FROM "{table}" WHERE expires_at < ? LIMIT ?)',
                (expired_before, MAX_PURGED_ROWS - deleted),
            ).rowcount
        self._connection.execute("DELETE FROM transaction_tokens WHERE until < ?", (self._now,))
        self._items.clear()
        return deleted

    def save(self) -> None:
        for key in self._changed:
            item = self._items[key]
            if item is None:
                self._connection.execute(
                    f'DELETE FROM "{key.table}" WHERE pk=? AND sk=?',  # noqa: S608
                    (key.pk, key.sk),
                )
            else:
                self._connection.execute(
                    f'INSERT OR REPLACE INTO "{key.table}" (pk, sk, expires_at, item) VALUES (?,?,?,?)',  # noqa: S608
                    (key.pk, key.sk, _get_expiry(item), codec.encode_item(item).decode()),
                )
        self._changed.clear()
        self._connection.executemany(
            "INSERT OR REPLACE INTO transaction_tokens (token, digest, until) VALUES (?,?,?)",
            [(token, kept.digest, kept.until) for token, kept in self._tokens.items()],
        )
        self._tokens.clear()

    def _get_item(self, key: Key) -> dict[str, Value] | None:
        if key not in self._items:
            self._items[key] = load_item(self._connection, key)
        return self._items[key]

    def _set_item(self, key: Key, item: dict[str, Value] | None) -> None:
        self._items[key] = item
        self._changed.add(key)

    def _was_applied(self, token: str, digest: bytes) -> bool:
        kept = self._tokens.get(token)
        if kept is None:
            row = self._connection.execute(
                "SELECT digest, until FROM transaction_tokens WHERE token=?", (token,)
            ).fetchone()
            kept = _UsedToken(*row) if row is not None else None
        if kept is None or kept.until <= self._now:
            return False
        if kept.digest != digest:
            raise InvalidStoreRequest("this token was used for a transaction of other writes")
        return True


def _compute_item(write: Write, before: dict[str, Value] | None) -> dict[str, Value] | None:
    match write:
        case Put():
            return dict(write.item)
        case Update():
            return apply_update(write, before)
        case Delete():
            return None
        case ConditionCheck():
            return before


def _build_reason(did_hold: bool, item: Item | None) -> CancellationReason:
    return (
        CancellationReason(ReasonCode.NONE)
        if did_hold
        else CancellationReason(ReasonCode.CONDITION_FAILED, _copy_item(item))
    )


def _copy_item(item: Mapping[str, Value] | None) -> dict[str, Value] | None:
    """A copy for a caller, since callers must not share lists and maps."""
    if item is None:
        return None
    return {name: deepcopy(value) if type(value) in (list, dict) else value for name, value in item.items()}


def _get_expiry(item: Item) -> int | None:
    expiry = item.get(EXPIRY_ATTRIBUTE)
    return expiry if type(expiry) is int and abs(expiry) < _MAX_SQLITE_INTEGER else None


_AnyWrite = TypeVar("_AnyWrite", bound="Put | Update | Delete | ConditionCheck")


def freeze_write(write: _AnyWrite) -> _AnyWrite:
    """A copy with its own lists and maps: the caller may change the original ones while the write is queued."""
    if isinstance(write, Put):
        return replace(write, item=_copy_item(write.item) or {})
    if isinstance(write, Update):
        return replace(write, set=_copy_item(write.set) or {}, set_if_missing=_copy_item(write.set_if_missing) or {})
    return write


def _canonicalize(value: Any) -> Any:
    """A canonical form, equal for equal writes: 5 and 5.000000, attributes in any order."""
    if isinstance(value, bool | str | bytes) or value is None:
        return value
    if isinstance(value, int | Decimal):
        return ("number", str(normalize_number(value)))
    if isinstance(value, Mapping):
        return sorted((name, _canonicalize(part)) for name, part in value.items())
    if isinstance(value, list | tuple):
        return [_canonicalize(part) for part in value]
    return (_DIGEST_NAMES[type(value)], [_canonicalize(getattr(value, field.name)) for field in fields(value)])
