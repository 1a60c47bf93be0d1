"""The embedded store: one SQLite file, shared by any number of processes on one machine.

One thread writes, another reads; SQLite's write-ahead log lets both work at once. The writer takes all waiting writes,
runs them in one `BEGIN IMMEDIATE` transaction, syncs once and then completes them together (group commit). An
acknowledged write survives `kill -9` and, with `synchronous=FULL`, a power cut.

`SqliteStore` is the store, and `BatchThread` the thread that serves the event loop. `sqlite_commit` applies the writes
of one commit; `sqlite_file` creates, opens and watches the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from price_keeper.errors import InvalidStoreRequest, StoreMisconfigured, StoreThrottled, StoreUnavailable
from price_keeper.stores import item_codec as codec
from price_keeper.stores.contract import Between, Delete, Item, Key, Page, Prefix, Put, Query, StoredRow, Update, Write
from price_keeper.stores.item_values import check_key, check_query, check_transaction, check_write
from price_keeper.stores.sqlite_commit import WriteGroup, freeze_write, load_item
from price_keeper.stores.sqlite_file import FileWatch, connect, prepare_file, translate_sqlite_error

_PROBE_KEY = Key("config", "PROBE", "PROBE")

_WriteJob = Callable[[WriteGroup], object]
_ReadJob = Callable[[sqlite3.Connection], object]


class SqliteStore:
    """The store in one SQLite file. Use it from one event loop. `now` is the wall clock, for idempotency tokens."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._path = path.absolute()  # `:memory:` too is an ordinary file name here
        self._now = now

    async def open(self) -> SqliteStore:
        watch = await asyncio.to_thread(_open_file, self._path)
        writer, reader = _SqliteWriter(self._path, watch, self._now), _SqliteReader(self._path, watch)
        self._writer = BatchThread("sqlite-writer", writer.run, writer.disconnect)
        self._reader = BatchThread("sqlite-reader", reader.run, reader.disconnect)
        return self

    async def close(self) -> None:
        await self._writer.close()
        await self._reader.close()

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        check_key(key)
        return cast("Item | None", await self._reader.submit(lambda connection: load_item(connection, key)))

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        for key in keys:
            check_key(key)
        wanted = tuple(keys)
        read = self._reader.submit(lambda connection: [load_item(connection, key) for key in wanted])
        return cast("list[Item | None]", await read)

    async def query(self, query: Query) -> Page:
        check_query(query)
        return cast(Page, await self._reader.submit(lambda connection: _run_query(connection, query)))

    async def put(self, put: Put) -> None:
        await self._write(put)

    async def update(self, update: Update) -> Item:
        return cast(Item, await self._write(update))

    async def exchange(self, update: Update) -> Item | None:
        check_write(update)
        frozen = freeze_write(update)
        return cast("Item | None", await self._writer.submit(lambda group: group.exchange(frozen)))

    async def delete(self, delete: Delete) -> Item | None:
        return cast("Item | None", await self._write(delete))

    async def _write(self, write: Put | Update | Delete) -> object:
        check_write(write)
        frozen = freeze_write(write)
        return await self._writer.submit(lambda group: group.write(frozen))

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        check_transaction(writes, token)
        frozen = tuple(freeze_write(write) for write in writes)
        await self._writer.submit(lambda group: group.transact(frozen, token))

    async def probe(self) -> None:
        """Raises what a write would raise: reads still succeed on a full disk."""
        await self.update(Update(_PROBE_KEY, set={"written_at": int(self._now())}))

    async def check_file(self) -> None:
        """Raises StoreUnavailable when the file is not the one that was opened; costs no write."""
        await self._reader.submit(lambda _: None)

    async def purge(self, expired_before: float) -> int:
        """Delete a batch of rows that expired before the given time, and return its size; 0 when there are none."""
        return cast(int, await self._writer.submit(lambda group: group.purge(int(expired_before))))


def _open_file(path: Path) -> FileWatch:
    prepare_file(path)
    return FileWatch(path)


def _run_query(connection: sqlite3.Connection, query: Query) -> Page:
    sql, arguments = _build_query_sql(query)
    fetched = connection.execute(sql, arguments).fetchall()
    has_more = query.limit is not None and len(fetched) > query.limit
    rows = tuple(
        StoredRow(Key(query.table, query.pk, sk), codec.decode_item(item)) for sk, item in fetched[: query.limit]
    )
    return Page(rows, rows[-1].key.sk if has_more else None)


def _build_query_sql(query: Query) -> tuple[str, list[Any]]:
    terms, arguments = ["pk=?"], [query.pk]
    for comparison, bound in _build_bounds(query):
        terms.append(f"sk{comparison}?")
        arguments.append(bound)
    order = "DESC" if query.descending else "ASC"
    sql = f'SELECT sk, item FROM "{query.table}" WHERE {" AND ".join(terms)} ORDER BY sk {order}'  # noqa: S608
    return (sql, arguments) if query.limit is None else (f"{sql} LIMIT {query.limit + 1}", arguments)


def _build_bounds(query: Query) -> list[tuple[str, str]]:
    bounds: list[tuple[str, str | None]] = []
    match query.sort:
        case Prefix(text):
            bounds = [(">=", text), ("<", first_after_prefix(text))]
        case Between(low, high):
            bounds = [(">=", low), ("<=", high)]
    bounds.append(("<" if query.descending else ">", query.after))
    return [(comparison, bound) for comparison, bound in bounds if bound is not None]


def first_after_prefix(prefix: str) -> str | None:
    """The first text, in the order of UTF-8 bytes, after every text that begins so; None when there is none."""
    for at in range(len(prefix) - 1, -1, -1):
        point = ord(prefix[at]) + 1
        if point == 0xD800:  # surrogates are not characters
            point = 0xE000
        if point <= 0x10FFFF:
            return prefix[:at] + chr(point)
    return None


class _ThreadConnection:
    """A connection of one thread, opened when it is first needed and kept."""

    def __init__(self, path: Path, watch: FileWatch) -> None:
        self._path = path
        self._watch = watch
        self._connection: sqlite3.Connection | None = None

    def get_connection(self) -> sqlite3.Connection:
        """Raises StoreUnavailable when the file is not the one that the store was opened with."""
        self.check_file()
        if self._connection is None:
            self._connection = connect(self._path)
            self._watch.on_connection_opened()
            try:
                self.check_file()
            except StoreUnavailable:
                self.disconnect()  # the connection may be open on the wrong file
                raise
        return self._connection

    def check_file(self) -> None:
        self._watch.check(self._connection)

    def disconnect(self) -> None:
        """Close the connection, which rolls back an open transaction. A connection that failed is never reused."""
        if self._connection is not None:
            self._watch.on_connection_closing()
            self._connection.close()
            self._connection = None


class _SqliteReader(_ThreadConnection):
    def run(self, reads: Sequence[_ReadJob]) -> list[object]:
        try:
            connection = self.get_connection()
        except sqlite3.Error as failure:
            return [translate_sqlite_error(failure, self._path)] * len(reads)
        return [self._run_read(read, connection) for read in reads]

    def _run_read(self, read: _ReadJob, connection: sqlite3.Connection) -> object:
        try:
            return read(connection)
        except sqlite3.Error as failure:
            return translate_sqlite_error(failure, self._path)
        except Exception as failure:  # a row that another program wrote must not fail the other reads of the batch
            return StoreMisconfigured(f"{self._path}: a row cannot be read: {type(failure).__name__}")


class _SqliteWriter(_ThreadConnection):
    def __init__(self, path: Path, watch: FileWatch, now: Callable[[], float]) -> None:
        super().__init__(path, watch)
        self._now = now

    def run(self, jobs: Sequence[_WriteJob]) -> list[object]:
        is_committing = False
        try:
            connection = self.get_connection()
            connection.execute("BEGIN IMMEDIATE")
            group = WriteGroup(connection, self._now())
            outcomes = [_run_write(job, group) for job in jobs]
            group.save()
            is_committing = True
            connection.execute("COMMIT")
            self.check_file()  # a commit to a deleted file must not be acknowledged
            return outcomes
        except StoreUnavailable as failure:
            return [StoreUnavailable(str(failure), maybe_applied=is_committing)] * len(jobs)
        except StoreMisconfigured as failure:
            return [failure] * len(jobs)
        except sqlite3.Error as failure:
            self.disconnect()
            # A commit that failed half-way may be applied from the write-ahead log when the file is next opened.
            return [translate_sqlite_error(failure, self._path, maybe_applied=is_committing)] * len(jobs)
        except Exception as failure:
            # One write failed in a way that no check anticipated: run them one by one, so that only this one fails.
            self.disconnect()
            if len(jobs) > 1:
                return [outcome for job in jobs for outcome in self.run([job])]
            return [InvalidStoreRequest(f"the write cannot be kept: {type(failure).__name__}")]


def _run_write(job: _WriteJob, group: WriteGroup) -> object:
    try:
        return job(group)
    except sqlite3.Error:
        raise  # an error of the file fails the whole group
    except Exception as failure:
        return failure


Work = TypeVar("Work")
Outcome = object  # an exception is raised to the caller; any other object is the result

MAX_QUEUED = 20_000  # back-pressure: beyond this the disk cannot catch up, and a longer queue does not help
MAX_BATCH = 1_000  # keeps a commit short, and limits how many writes one failing commit loses


class BatchThread(Generic[Work]):
    """A thread that runs submitted work in batches. `run` returns one outcome for each piece of work.

    `run`, and `finish` at the end, are called in the thread. Outcomes are delivered to futures of the event loop that
    created the object.
    """

    def __init__(
        self, name: str, run: Callable[[Sequence[Work]], Sequence[Outcome]], finish: Callable[[], None]
    ) -> None:
        self._run = run
        self._finish = finish
        self._queue: queue.SimpleQueue[tuple[Work, asyncio.Future[Outcome]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run_until_closed, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> asyncio.Future[Outcome]:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        if self._queue.qsize() >= MAX_QUEUED:
            raise StoreThrottled(f"{MAX_QUEUED} requests are waiting for the store already")
        answer: asyncio.Future[Outcome] = self._loop.create_future()
        self._queue.put((work, answer))
        return answer

    async def close(self) -> None:
        """Returns when everything submitted has been answered."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run_until_closed(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._take_batch()
            if batch:
                outcomes = self._run_batch([work for work, _ in batch])
                self._deliver([answer for _, answer in batch], outcomes)
        self._finish()

    def _take_batch(self) -> tuple[list[tuple[Work, asyncio.Future[Outcome]]], bool]:
        """Wait for the first piece of work, then take all that is queued. The flag is False after `close`."""
        batch = []
        try:
            entry = self._queue.get()
            while entry is not None:
                batch.append(entry)
                if len(batch) == MAX_BATCH:
                    return batch, True
                entry = self._queue.get_nowait()
        except queue.Empty:
            return batch, True
        return batch, False

    def _run_batch(self, works: Sequence[Work]) -> Sequence[Outcome]:
        try:
            return self._run(works)
        except Exception as failure:  # every caller must get an outcome
            return [failure] * len(works)

    def _deliver(self, answers: Sequence[asyncio.Future[Outcome]], outcomes: Sequence[Outcome]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits any longer
            self._loop.call_soon_threadsafe(_resolve, answers, outcomes)


def _resolve(answers: Sequence[asyncio.Future[Outcome]], outcomes: Sequence[Outcome]) -> None:
    for answer, outcome in zip(answers, outcomes, strict=True):
        if answer.done():  # its caller was cancelled
            continue
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
