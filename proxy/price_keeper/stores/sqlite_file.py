"""The embedded store's file: how it is made, opened and looked at, and what its troubles mean."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from time import monotonic, sleep

from price_keeper.errors import StoreError, StoreMisconfigured, StoreUnavailable
from price_keeper.stores.contract import Key
from price_keeper.stores.schema import TABLES

SCHEMA_VERSION = 1
APPLICATION_ID = 0x42504B31  # what tells our files from others'
BUSY_TIMEOUT_SECONDS = 10.0  # how long another process may hold the file before we call it unavailable


def prepare_file(path: Path) -> None:
    """Makes the file and its tables where they are missing; StoreMisconfigured when the file is not ours to use."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        path.chmod(0o600)  # hashes of secrets live here
        connection = connect(path)
    except OSError as failure:
        raise StoreMisconfigured(f"cannot make {path}: {failure.strerror}") from None
    except sqlite3.DatabaseError as failure:
        raise translate_sqlite_error(failure, path) from None
    try:
        _enable_write_ahead_log(connection)
        _make_tables(connection, path)
    except sqlite3.DatabaseError as failure:
        raise translate_sqlite_error(failure, path) from None
    finally:
        connection.close()


def find_missing_tables(path: Path) -> list[str]:
    """What a check finds absent, without making anything."""
    try:
        if not path.exists():
            return list(TABLES)
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_SECONDS)
        try:
            present = _list_tables(connection)
            _check_ownership(connection, path)
        finally:
            connection.close()
    except OSError as failure:
        raise StoreMisconfigured(f"cannot look at {path}: {failure.strerror}") from None
    except sqlite3.DatabaseError as failure:
        raise translate_sqlite_error(failure, path) from None
    return [name for name in TABLES if name not in present]


def has_item(path: Path, key: Key) -> bool:
    """Without making anything; nothing is in a file that is not there."""
    if key.table in find_missing_tables(path):
        return False
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_SECONDS)
        ) as connection:
            query = f'SELECT 1 FROM "{key.table}" WHERE pk=? AND sk=?'  # noqa: S608 - a table of the schema
            rows = connection.execute(query, (key.pk, key.sk))
            return rows.fetchone() is not None
    except sqlite3.DatabaseError as failure:
        raise translate_sqlite_error(failure, path) from None


def connect(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=rw"  # never makes a file: one that was deleted must not come back empty
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("BEGIN")  # one look, while others may be making the tables
        _check_ownership(connection, path)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA journal_size_limit=67108864")
    return connection


def _list_tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}


def _check_ownership(connection: sqlite3.Connection, path: Path) -> None:
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if owner != APPLICATION_ID and _list_tables(connection):
        raise StoreMisconfigured(f"{path} is another program's database")
    if version > SCHEMA_VERSION:
        versions = f"(schema {version}; this one knows {SCHEMA_VERSION})"
        raise StoreMisconfigured(f"{path} was made by a newer version {versions}")


def _enable_write_ahead_log(connection: sqlite3.Connection) -> None:
    """The file remembers it. SQLite asks no busy handler here, so that several who make one file must ask again."""
    until = monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as failure:
            if failure.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or monotonic() > until:
                raise
            sleep(0.01)


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")
    _check_ownership(connection, path)
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
    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute("COMMIT")


def translate_sqlite_error(failure: sqlite3.Error, path: Path, *, maybe_applied: bool = False) -> StoreError:
    if getattr(failure, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
        return StoreMisconfigured(f"{path} is no SQLite database")
    return StoreUnavailable(f"{path}: {failure}", maybe_applied=maybe_applied)
