"""Cache of the labels that apps defined themselves, for inference profiles.

An app's labels are read when a call names one or the app's chain may hold one, and once for all concurrent callers.
While the store is away the last known labels hold. The cache is bounded by apps and by labels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from price_keeper.budgets.budget_state import NEVER
from price_keeper.clock import Clock
from price_keeper.config import LabelConfig
from price_keeper.config.config_sections import PSEUDO_LABELS
from price_keeper.domain import Caller, Scope, is_label
from price_keeper.errors import StoreError
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Prefix, Query, Store
from price_keeper.tasks import Tasks
from price_keeper.usage.inference_profiles import (
    NO_PROFILES,
    UNREAD_PROFILES,
    AppProfiles,
    InferenceProfile,
    parse_profile,
)

PROFILES_MADE_ATTRIBUTE = (
    "profiles_made"  # how many an app has ever had, on its item; one that never had any needs no further read
)
STALE_SECONDS = 60.0  # after which a call waits until they are read again
REFRESH_SECONDS = 50.0  # after which a call has them read again, and goes on
STORE_RETRY_SECONDS = 3.0  # while the store is away
LOAD_TIMEOUT_SECONDS = 2.0  # for the store, of a call
MAX_APPS = 20_000
MAX_LABELS_IN_ALL = 100_000  # own labels, of all apps together

_AppKey = tuple[str, str]  # of an org and an app
_Rows = dict[str, tuple[Item, "InferenceProfile | None"]]  # by label; None: it cannot be used

_log = logging.getLogger("price_keeper.selection")


@dataclass(slots=True)
class _AppEntry:
    labels: AppProfiles = UNREAD_PROFILES
    rows: _Rows = field(default_factory=dict)
    read_began_at: float = -NEVER  # the reading that told of them, by the monotonic clock like all times here
    refresh_at: float = -NEVER
    stale_at: float = -NEVER
    load_done: asyncio.Event | None = None
    is_load_slow: bool = False  # somebody has waited in vain for the reading that is under way
    is_stale: bool = False  # the store could not be asked when it was time to


class AppLabelCache:
    """`on_new` hears of an app whose own labels are others than was known."""

    def __init__(
        self,
        labels: Mapping[str, LabelConfig],
        store: Store,
        clock: Clock,
        tasks: Tasks,
        on_change: Callable[[Scope, AppProfiles], None],
    ) -> None:
        self._reserved_names = _list_reserved_names(labels)
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._on_change = on_change
        self._entries: dict[_AppKey, _AppEntry] = {}
        self._row_count = 0  # of all rows that are kept

    def apply_config(self, labels: Mapping[str, LabelConfig]) -> None:
        """Those of another configuration, which may have names that were an app's own, or leave names to apps."""
        before, self._reserved_names = self._reserved_names, _list_reserved_names(labels)
        changed_names = before ^ self._reserved_names
        for name, entry in tuple(self._entries.items()):
            if not changed_names.isdisjoint(entry.rows):
                scope, rows = Scope(*name), entry.rows
                for label in changed_names & rows.keys():
                    rows[label] = self._parse_row(scope, label, rows[label][0], None)
                entry.labels = _build_labels(rows)
                self._on_change(scope, entry.labels)

    def cached(self, caller: Caller) -> AppProfiles | None:
        """Without asking anybody; None if the store has to be asked first."""
        if caller.app is None:
            return NO_PROFILES
        name = (caller.org, caller.app)
        entry = self._entries.get(name)
        if entry is None:
            return None
        moment = self._clock.monotonic()
        if moment >= entry.stale_at and not entry.is_load_slow:
            return None
        if moment >= entry.refresh_at:
            self._start_loading(name, entry)
        return entry.labels

    async def load(self, caller: Caller) -> AppProfiles:
        """Asks the store, and waits for a while. UNREAD if it does not answer and nothing was known."""
        if caller.app is None:
            return NO_PROFILES
        name = (caller.org, caller.app)
        entry = self._get_or_add(name)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_SECONDS):
                await self._start_loading(name, entry).wait()
        except TimeoutError:
            entry.is_load_slow = entry.load_done is not None
        return self._entries.get(name, entry).labels  # room may have been made meanwhile

    async def get(self, caller: Caller) -> AppProfiles:
        return self.cached(caller) or await self.load(caller)

    def last_read(self, scope: Scope) -> AppProfiles | None:
        """What was read last, whenever that was; None if nothing was."""
        entry = self._entries.get((scope.org, scope.app or ""))
        return None if entry is None or entry.labels is UNREAD_PROFILES else entry.labels

    def invalidate(self, scope: Scope) -> None:
        """By this process: the next call that names one has them read again."""
        entry = self._entries.get((scope.org, scope.app or ""))
        if entry is not None:
            entry.read_began_at, entry.refresh_at, entry.stale_at = self._clock.monotonic(), -NEVER, -NEVER

    async def refresh(self, scope: Scope, app: Item | None, read_began_at: float) -> None:
        """`app` is the app's item as it was read then. Raises StoreError."""
        rows = await read_label_rows(self._store, scope, app)
        name = (scope.org, scope.app or "")
        entry = self._get_or_add(name)
        if read_began_at < entry.read_began_at and entry.labels is not UNREAD_PROFILES:
            return  # what somebody else read later holds, or they were changed meanwhile
        entry.read_began_at, entry.refresh_at, entry.stale_at, entry.is_stale = (
            read_began_at,
            read_began_at + REFRESH_SECONDS,
            read_began_at + STALE_SECONDS,
            False,
        )
        before = entry.rows
        self._entries[name] = self._entries.pop(name)  # the one read longest ago is the first to go
        if entry.labels is UNREAD_PROFILES or {label: item for label, (item, _) in before.items()} != rows:
            entry.rows = {label: self._parse_row(scope, label, item, before.get(label)) for label, item in rows.items()}
            entry.labels = _build_labels(entry.rows)
            self._row_count += len(entry.rows) - len(before)
            self._evict()
            self._on_change(scope, entry.labels)

    def _parse_row(
        self, scope: Scope, label: str, item: Item, last_row: tuple[Item, InferenceProfile | None] | None
    ) -> tuple[Item, InferenceProfile | None]:
        """What did not change stays the same, with all that is kept for it."""
        if last_row is not None and last_row[0] == item:
            return last_row
        try:
            if label in self._reserved_names:
                raise ValueError("the configuration has that name")
            return item, parse_profile(label, item)
        except ValueError as failure:
            _log.warning("%s: the own label %s cannot be used: %s", scope.key, label, failure)
            return item, None

    def _get_or_add(self, name: _AppKey) -> _AppEntry:
        found = self._entries.get(name)
        if found is None:
            found = self._entries[name] = _AppEntry()
            self._evict()
        return found

    def _evict(self) -> None:
        while len(self._entries) > 1 and (len(self._entries) > MAX_APPS or self._row_count > MAX_LABELS_IN_ALL):
            self._row_count -= len(self._entries.pop(next(iter(self._entries))).rows)

    def _start_loading(self, name: _AppKey, entry: _AppEntry) -> asyncio.Event:
        if entry.load_done is None:
            entry.load_done, entry.is_load_slow = asyncio.Event(), False
            self._tasks.spawn(self._load(name, entry, entry.load_done))
        return entry.load_done

    async def _load(self, name: _AppKey, entry: _AppEntry, done: asyncio.Event) -> None:
        scope, began = Scope(*name), self._clock.monotonic()
        entry.refresh_at = began + STORE_RETRY_SECONDS
        try:
            app = await self._store.get(schema.app_config_key(*name), consistent=True)
            await self.refresh(scope, app, began)
        except Exception as failure:  # of whatever kind: those who wait must get an answer
            if not entry.is_stale:
                reason = str(failure) if isinstance(failure, StoreError) else type(failure).__name__
                _log.warning("the own labels of %s cannot be read, and what is known holds: %s", scope.key, reason)
            entry.stale_at, entry.is_stale = NEVER, True  # nobody is to wait for a store that is away
        finally:
            entry.load_done, entry.is_load_slow = None, False
            done.set()


def _list_reserved_names(labels: Mapping[str, LabelConfig]) -> frozenset[str]:
    """What the configuration calls something is never an app's, whichever of the two came first."""
    return frozenset((*labels, *(label.model for label in labels.values()), *PSEUDO_LABELS))


def _build_labels(rows: _Rows) -> AppProfiles:
    usable = [profile for _, profile in rows.values() if profile is not None]
    return AppProfiles(usable) if usable else NO_PROFILES


async def read_label_rows(store: Store, scope: Scope, app: Item | None) -> dict[str, Item]:
    """By label. `app` is the app's item. Raises StoreError."""
    if scope.app is None or not (app or {}).get(PROFILES_MADE_ATTRIBUTE):
        return {}
    prefix = schema.app_profiles_prefix(scope.app)
    page = await store.query(Query("config", schema.org_config_key(scope.org).pk, Prefix(prefix), consistent=True))
    found = {row.key.sk.removeprefix(prefix): row.item for row in page.rows}
    return {label: item for label, item in found.items() if is_label(label)}


async def read_label_names(store: Store, scope: Scope, app: Item | None) -> list[str]:
    """Of those that can be used, but for what the configuration has under the same name. Raises StoreError."""
    return [label for label, item in (await read_label_rows(store, scope, app)).items() if _is_usable(label, item)]


def _is_usable(label: str, item: Item) -> bool:
    try:
        parse_profile(label, item)
    except ValueError:
        return False
    return True
