"""The embedded store: one SQLite file, shared by any number of processes on one machine.

One thread writes, in groups: all writes that wait are carried out in one `BEGIN IMMEDIATE` transaction and made durable
by one sync, then answered together. Another thread reads; the write-ahead log keeps the two out of each other's way.
An acknowledged write survives `kill -9` and, with `synchronous=FULL`, a power cut.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from proxy.errors import (
    ConditionFailed,
    Reason,
    ReasonCode,
    Rejected,
    StoreError,
    StoreMisconfigured,
    StoreUnavailable,
    TransactionFailed,
)
from proxy.stores import sqlite_codec as codec
from proxy.stores.batching import BatchThread
from proxy.stores.contract import (
    EXPIRY,
    Between,
    Check,
    Delete,
    Item,
    Key,
    Page,
    Prefix,
    Put,
    Query,
    Row,
    Update,
    Value,
    Write,
)
from proxy.stores.evaluate import changed, holds
from proxy.stores.schema import TABLES
from proxy.stores.values import check_key, check_query, check_transaction, check_write

SCHEMA_VERSION = 1
BUSY_SECONDS = 10.0  # how long another process may hold the file before we call it unavailable
TOKEN_SECONDS = 600  # as long as DynamoDB remembers a transaction's token
PURGE_ROWS = 1_000  # expired rows deleted in one go, so that a purge never holds up writers for long

_Job = Callable[["_Group"], object]
_Read = Callable[[sqlite3.Connection], object]


class SqliteStore:
    """Use from one event loop. `now` is the wall clock, asked for the age of tokens."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._path = path
        self._now = now

    async def open(self) -> SqliteStore:
        await asyncio.to_thread(prepare, self._path)
        self._writer = BatchThread("sqlite-writer", _Writer(self._path, self._now).run)
        self._reader = BatchThread("sqlite-reader", _Reader(self._path).run)
        return self

    async def close(self) -> None:
        await self._writer.close()
        await self._reader.close()

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        check_key(key)
        return cast("Item | None", await self._reader.submit(lambda connection: _load(connection, key)))

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        for key in keys:
            check_key(key)
        wanted = tuple(keys)
        found = self._reader.submit(lambda connection: [_load(connection, key) for key in wanted])
        return cast("list[Item | None]", await found)

    async def query(self, query: Query) -> Page:
        check_query(query)
        return cast(Page, await self._reader.submit(lambda connection: _select(connection, query)))

    async def put(self, put: Put) -> None:
        check_write(put)
        await self._writer.submit(lambda group: group.write(put))

    async def update(self, update: Update) -> Item:
        check_write(update)
        return cast(Item, await self._writer.submit(lambda group: group.write(update)))

    async def delete(self, delete: Delete) -> Item | None:
        check_write(delete)
        return cast("Item | None", await self._writer.submit(lambda group: group.write(delete)))

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        check_transaction(writes, token)
        frozen = tuple(writes)
        await self._writer.submit(lambda group: group.transact(frozen, token))

    async def purge(self, expired_before: float) -> int:
        """Deletes some rows that expired before the given time; the number deleted, 0 when none are left."""
        return cast(int, await self._writer.submit(lambda group: group.purge(int(expired_before))))


def prepare(path: Path) -> None:
    """Makes the file and its tables where they are missing; StoreMisconfigured when the file is not ours to use."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # hashes of secrets live here
        connection = _connect(path)
    except OSError as failure:
        raise StoreMisconfigured(f"cannot make {path}: {failure.strerror}") from None
    except sqlite3.DatabaseError as failure:
        raise _translated(failure, path) from None
    try:
        _make_tables(connection, path)
    except sqlite3.DatabaseError as failure:
        raise _translated(failure, path) from None
    finally:
        connection.close()


def missing_tables(path: Path) -> list[str]:
    """What a check finds absent, without making anything."""
    if not path.exists():
        return list(TABLES)
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=BUSY_SECONDS)
        try:
            present = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
        finally:
            connection.close()
    except sqlite3.DatabaseError as failure:
        raise _translated(failure, path) from None
    return [name for name in TABLES if name not in present]


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA journal_size_limit=67108864")
    return connection


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise StoreMisconfigured(
            f"{path} was made by a newer version (schema {version}; this one knows {SCHEMA_VERSION})"
        )
    for table in TABLES:
        connection.execute(
            f'CREATE TABLE IF NOT EXISTS "{table}"'
            " (pk TEXT NOT NULL, sk TEXT NOT NULL, expires_at INTEGER, item TEXT NOT NULL, PRIMARY KEY (pk, sk))"
            " WITHOUT ROWID"
        )
        connection.execute(
            f'CREATE INDEX IF NOT EXISTS "{table}-expiry" ON "{table}" (expires_at) WHERE expires_at IS NOT NULL'
        )
    connection.execute(
        "CREATE TABLE IF NOT EXISTS transaction_tokens"
        " (token TEXT PRIMARY KEY, digest BLOB NOT NULL, until REAL NOT NULL) WITHOUT ROWID"
    )
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _translated(failure: sqlite3.Error, path: Path, *, maybe_applied: bool = False) -> StoreError:
    if getattr(failure, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
        return StoreMisconfigured(f"{path} is no SQLite database")
    return StoreUnavailable(f"{path}: {failure}", maybe_applied=maybe_applied)


def _load(connection: sqlite3.Connection, key: Key) -> dict[str, Value] | None:
    row = connection.execute(
        f'SELECT item FROM "{key.table}" WHERE pk=? AND sk=?',  # noqa: S608 - a name from TABLES
        (key.pk, key.sk),
    ).fetchone()
    return None if row is None else codec.decode(row[0])


def _select(connection: sqlite3.Connection, query: Query) -> Page:
    sql, arguments = _query_sql(query)
    found = connection.execute(sql, arguments).fetchall()
    has_more = query.limit is not None and len(found) > query.limit
    rows = tuple(Row(Key(query.table, query.pk, sk), codec.decode(item)) for sk, item in found[: query.limit])
    return Page(rows, rows[-1].key.sk if has_more else None)


def _query_sql(query: Query) -> tuple[str, list[Any]]:
    terms, arguments = ["pk=?"], [query.pk]
    for comparison, bound in _bounds(query):
        terms.append(f"sk{comparison}?")
        arguments.append(bound)
    order = "DESC" if query.descending else "ASC"
    sql = f'SELECT sk, item FROM "{query.table}" WHERE {" AND ".join(terms)} ORDER BY sk {order}'  # noqa: S608
    return (sql, arguments) if query.limit is None else (f"{sql} LIMIT {query.limit + 1}", arguments)


def _bounds(query: Query) -> list[tuple[str, str]]:
    bounds: list[tuple[str, str | None]] = []
    match query.sort:
        case Prefix(text):
            bounds = [(">=", text), ("<", after_prefix(text))]
        case Between(low, high):
            bounds = [(">=", low), ("<=", high)]
    bounds.append(("<" if query.descending else ">", query.after))
    return [(comparison, bound) for comparison, bound in bounds if bound is not None]


def after_prefix(prefix: str) -> str | None:
    """The first text, in the order of UTF-8 bytes, after every text that begins so; None when there is none."""
    for at in range(len(prefix) - 1, -1, -1):
        point = ord(prefix[at]) + 1
        if point == 0xD800:  # surrogates are no characters
            point = 0xE000
        if point <= 0x10FFFF:
            return prefix[:at] + chr(point)
    return None


class _Reader:
    """Runs in the reading thread, where its connection is made and stays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def run(self, reads: Sequence[_Read]) -> list[object]:
        try:
            if self._connection is None:
                self._connection = _connect(self._path)
        except sqlite3.Error as failure:
            return [_translated(failure, self._path)] * len(reads)
        return [self._read(self._connection, read) for read in reads]

    def _read(self, connection: sqlite3.Connection, read: _Read) -> object:
        try:
            return read(connection)
        except sqlite3.Error as failure:
            return _translated(failure, self._path)


class _Writer:
    """Runs in the writing thread, where its connection is made and stays."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._path = path
        self._now = now
        self._connection: sqlite3.Connection | None = None

    def run(self, jobs: Sequence[_Job]) -> list[object]:
        is_committing = False
        try:
            if self._connection is None:
                self._connection = _connect(self._path)
            self._connection.execute("BEGIN IMMEDIATE")
            group = _Group(self._connection, self._now())
            outcomes = [_outcome(job, group) for job in jobs]
            group.save()
            is_committing = True
            self._connection.execute("COMMIT")
            return outcomes
        except sqlite3.Error as failure:
            self._roll_back()
            # A commit that failed half-way may come back to life from the log when the file is next opened.
            return [_translated(failure, self._path, maybe_applied=is_committing)] * len(jobs)
        except Exception:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._connection is not None:
            # A connection that has failed is not trusted again; closing it also rolls back.
            self._connection.close()
            self._connection = None


def _outcome(job: _Job, group: _Group) -> object:
    try:
        return job(group)
    except sqlite3.Error:
        raise  # the file is in trouble, so the whole group is
    except Exception as failure:
        return failure


@dataclass(frozen=True, slots=True)
class _Token:
    digest: bytes
    until: float


class _Group:
    """The items of one commit, as the writes before this one left them; saved once each, however often they changed."""

    def __init__(self, connection: sqlite3.Connection, now: float) -> None:
        self._connection = connection
        self._now = now
        self._items: dict[Key, dict[str, Value] | None] = {}
        self._changed: set[Key] = set()
        self._tokens: dict[str, _Token] = {}

    def write(self, write: Put | Update | Delete) -> Item | None:
        before = self._item(write.key)
        if not holds(write.condition, before):
            raise ConditionFailed(_copied(before))
        after = _after(write, before)
        self._keep(write.key, after)
        match write:
            case Put():
                return None
            case Update():
                return _copied(after)
            case Delete():
                return _copied(before)

    def transact(self, writes: Sequence[Write], token: str | None) -> None:
        digest = sha256(repr(writes).encode()).digest() if token is not None else b""
        if token is not None and self._is_done(token, digest):
            return
        before = [self._item(write.key) for write in writes]
        verdicts = [holds(write.condition, item) for write, item in zip(writes, before, strict=True)]
        if not all(verdicts):
            raise TransactionFailed([_reason(*pair) for pair in zip(verdicts, before, strict=True)])
        # Every new item is computed before the first is kept: one that is Rejected must leave no trace of the others.
        after = [_after(write, item) for write, item in zip(writes, before, strict=True)]
        for write, item in zip(writes, after, strict=True):
            if not isinstance(write, Check):
                self._keep(write.key, item)
        if token is not None:
            self._tokens[token] = _Token(digest, self._now + TOKEN_SECONDS)

    def purge(self, expired_before: int) -> int:
        self.save()
        deleted = 0
        for table in TABLES:
            deleted += self._connection.execute(
                f'DELETE FROM "{table}" WHERE (pk, sk) IN'  # noqa: S608
                f' (SELECT pk, sk FROM "{table}" WHERE expires_at < ? LIMIT ?)',
                (expired_before, PURGE_ROWS - deleted),
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
                    (key.pk, key.sk, _expiry(item), codec.encode(item).decode()),
                )
        self._changed.clear()
        self._connection.executemany(
            "INSERT OR REPLACE INTO transaction_tokens (token, digest, until) VALUES (?,?,?)",
            [(token, kept.digest, kept.until) for token, kept in self._tokens.items()],
        )
        self._tokens.clear()

    def _item(self, key: Key) -> dict[str, Value] | None:
        if key not in self._items:
            self._items[key] = _load(self._connection, key)
        return self._items[key]

    def _keep(self, key: Key, item: dict[str, Value] | None) -> None:
        self._items[key] = item
        self._changed.add(key)

    def _is_done(self, token: str, digest: bytes) -> bool:
        kept = self._tokens.get(token)
        if kept is None:
            row = self._connection.execute(
                "SELECT digest, until FROM transaction_tokens WHERE token=?", (token,)
            ).fetchone()
            kept = _Token(*row) if row is not None else None
        if kept is None or kept.until <= self._now:
            return False
        if kept.digest != digest:
            raise Rejected("this token was used for a transaction of other writes")
        return True


def _after(write: Write, before: dict[str, Value] | None) -> dict[str, Value] | None:
    match write:
        case Put():
            return dict(write.item)
        case Update():
            return changed(write, before)
        case Delete():
            return None
        case Check():
            return before


def _reason(did_hold: bool, item: Item | None) -> Reason:
    return Reason(ReasonCode.NONE) if did_hold else Reason(ReasonCode.CONDITION_FAILED, _copied(item))


def _copied(item: Item | None) -> dict[str, Value] | None:
    """One of a group's items for a caller, who must not share lists and maps with another caller."""
    if item is None:
        return None
    return {name: deepcopy(value) if type(value) in (list, dict) else value for name, value in item.items()}


def _expiry(item: Item) -> int | None:
    expiry = item.get(EXPIRY)
    return expiry if type(expiry) is int else None
