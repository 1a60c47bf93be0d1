"""The file of the embedded store: how it is created and opened, and how its loss or replacement is noticed.

SQLite does not check whether the file that it opened still exists: it keeps writing to a deleted file, and acknowledged
writes are lost when the process ends. `FileWatch` compares device, inode and size before each batch, and raises
StoreUnavailable while the file is not the one that was opened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from contextlib import closing
from enum import Enum
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple, TypeAlias

from price_keeper.errors import StoreError, StoreMisconfigured, StoreReadOnly, StoreUnavailable
from price_keeper.stores.contract import Key
from price_keeper.stores.schema import TABLES

SCHEMA_VERSION = 1
APPLICATION_ID = 0x42504B31  # distinguishes this product's files from those of other programs
BUSY_TIMEOUT_SECONDS = 10.0  # how long another process may lock the file before it counts as unavailable


def prepare_file(path: Path) -> None:
    """Create the file and its tables where they are missing. Raises StoreMisconfigured for another program's file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        path.chmod(0o600)  # the file holds hashes of secrets
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
    """The tables that the file lacks. Creates nothing."""
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
        raise StoreMisconfigured(f"cannot read {path}: {failure.strerror}") from None
    except sqlite3.DatabaseError as failure:
        raise translate_sqlite_error(failure, path) from None
    return [name for name in TABLES if name not in present]


def has_item(path: Path, key: Key) -> bool:
    """Whether the item exists. Creates nothing; a missing file has no items."""
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
    uri = f"{path.absolute().as_uri()}?mode=rw"  # does not create a file: a deleted one must not come back empty
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("BEGIN")  # one consistent read, as another process may be creating the tables
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
    """Switch the file to the write-ahead log, for good.

    SQLite calls no busy handler here, so processes that create the same file at the same time have to retry.
    """
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
    if (getattr(failure, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_READONLY:
        why = f"{path} is read-only ({failure}): see who owns it, and how its disk is mounted"
        return StoreReadOnly(why, maybe_applied=maybe_applied)
    return StoreUnavailable(f"{path}: {failure}", maybe_applied=maybe_applied)


_RETRIES = 20  # a checkpoint of another process leaves the file half-written for a moment
_RETRY_SECONDS = 0.05

_log = logging.getLogger("price_keeper.stores")

FileId: TypeAlias = "tuple[int, int]"  # device and inode
LogIds: TypeAlias = "tuple[FileId | None, FileId | None]"


class _FileStat(NamedTuple):
    """What changes in a file when a process writes to it. A checkpoint never shrinks it, unless it was vacuumed."""

    size: int
    modified_ns: int


class _Header(Enum):
    OURS = 1
    UNFINISHED = 2  # counts more pages than the file has, as after `kill -9` in a checkpoint; the log has the rest
    FOREIGN = 3


class FileWatch:
    """Notices that the file was deleted, replaced, cut or overwritten while in use.

    The threads of one store share it, and call `check` with their own connections. It never opens the file itself:
    closing it again would drop the locks that SQLite holds on it in this process.
    """

    def __init__(self, path: Path) -> None:
        """The file must exist."""
        self._path = path
        real = os.path.realpath(path)  # SQLite keeps its logs next to the target of a symbolic link
        self._log_paths = (f"{real}-wal", f"{real}-shm")
        self._uri = f"{Path(real).as_uri()}?mode=ro&immutable=1"
        stat = path.stat()
        self._file_id = stat.st_dev, stat.st_ino
        self._last_stat = _FileStat(stat.st_size, stat.st_mtime_ns)
        self._lock = threading.Lock()
        self._connections = 0
        self._log_ids: LogIds | None = None
        self._trouble = ""
        self._is_damaged = False
        self._is_log_emptied = False

    def on_connection_opened(self) -> None:
        """Call after a connection has read the file: its logs exist from then on."""
        with self._lock:
            self._connections += 1
            if self._log_ids is None:
                self._log_ids = self._read_log_ids()

    def on_connection_closing(self) -> None:
        """Call before a connection closes: the last one removes the logs."""
        with self._lock:
            self._connections -= 1
            if not self._connections:
                self._log_ids = None

    def check(self, connection: sqlite3.Connection | None) -> None:
        """Raises StoreUnavailable while the file, or a log that is in use, is not the one that was opened."""
        with self._lock:
            trouble = self._find_trouble()
            if trouble and not self._is_damaged and not self._is_log_emptied and connection is not None:
                self._is_log_emptied = _truncate_log(connection)
                trouble = self._find_trouble()  # also finishes a checkpoint that another process left unfinished
            if trouble != self._trouble:
                self._trouble = trouble
                self._log_change()
            self._is_log_emptied = self._is_log_emptied and bool(trouble)
        if trouble:
            raise StoreUnavailable(trouble)

    def _log_change(self) -> None:
        if self._trouble:
            _log.error("store: %s", self._trouble)
        else:
            _log.warning("store: %s is back in its place; reads and writes work again", self._path)

    def _find_trouble(self) -> str:
        if self._is_damaged:  # even if the file has grown again: its log belongs to an earlier state
            return self._describe_damage()
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return f"{self._path} was deleted or renamed while in use: move it back, or restore a backup and restart"
        except OSError as failure:
            return f"{self._path} cannot be checked: {failure.strerror}"
        if (stat.st_dev, stat.st_ino) != self._file_id:
            return f"{self._path} was replaced by another file while in use: restart to use it, or move the former back"
        if self._log_ids is not None and self._read_log_ids() != self._log_ids:
            return (
                f"{self._log_paths[0]} or -shm was deleted or replaced while in use: restart;"
                " what was acknowledged is in the store's file itself"
            )
        state = _FileStat(stat.st_size, stat.st_mtime_ns)
        if state != self._last_stat:
            header = _Header.FOREIGN if state.size < self._last_stat.size else self._read_header()
            self._is_damaged = header is _Header.FOREIGN
            if self._is_damaged:
                return self._describe_damage()
            if header is _Header.UNFINISHED:
                return (
                    f"{self._path} is half-written: another process stopped while it copied the log there. Nothing is"
                    " lost; if it stays so, stop every process that uses the file and start again, and leave its -wal"
                )
            self._last_stat = state
        return ""

    def _read_log_ids(self) -> LogIds:
        return _read_file_id(self._log_paths[0]), _read_file_id(self._log_paths[1])

    def _describe_damage(self) -> str:
        return (
            f"{self._path} was cut, vacuumed or overwritten while in use: stop every process that uses it, restore the"
            " file without its -wal and -shm unless it was vacuumed, and start again"
        )

    def _read_header(self) -> _Header:
        """The state of the file itself, without its log. Retries only if the file was healthy at the last check."""
        found = _Header.OURS
        for attempt in range(1 if self._trouble else _RETRIES):
            if attempt:
                sleep(_RETRY_SECONDS)
            try:
                return _Header.OURS if self._has_our_header() else _Header.FOREIGN
            except sqlite3.DatabaseError as failure:
                is_short = getattr(failure, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT
                found = _Header.UNFINISHED if is_short else _Header.FOREIGN
        return found

    def _has_our_header(self) -> bool:
        """`immutable` ignores the log. SQLite refuses a header that counts more pages than the file has."""
        with closing(sqlite3.connect(self._uri, uri=True)) as raw:
            (owner,) = raw.execute("PRAGMA application_id").fetchone()
        return owner in (APPLICATION_ID, 0)  # 0: a new file, whose id is still in the log alone


def _read_file_id(path: str) -> FileId | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _truncate_log(connection: sqlite3.Connection) -> bool:
    """Copy acknowledged writes from the log into the opened file, wherever that file is now.

    A log that stays behind with writes in it would be applied to the next file that is put in its place.
    """
    try:
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error:
        return False
    return not busy
