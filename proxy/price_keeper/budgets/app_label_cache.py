"""Cache of the labels that apps defined themselves, for inference profiles.

An app's labels are read when a call names one or the app's chain may hold one, and once for all concurrent callers.
While the store is away the last known labels apply. The cache is bounded by apps and by labels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from price_keeper.budgets.budget_state import NEVER
from price_keeper.clock import Clock
from price_keeper.config import LabelConfig
from price_keeper.config.label_names import LabelNames
from price_keeper.domain import Caller, Scope, is_label
from price_keeper.single_flight import SingleFlight
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Prefix, Query, Store
from price_keeper.telemetry.logs import log_read_failure
from price_keeper.usage.inference_profiles import (
    NO_APP_LABELS,
    UNREAD_APP_LABELS,
    AppLabel,
    AppLabels,
    parse_profile,
)

# How many app labels an app has ever had, on its item. An app that never had any needs no further read.
PROFILES_MADE_ATTRIBUTE = "profiles_made"
STALE_SECONDS = 60.0  # after a read; then a call waits for the next one
REFRESH_SECONDS = 50.0  # after a read; then a call starts the next one in the background
STORE_RETRY_SECONDS = 3.0  # while the store does not answer
LOAD_TIMEOUT_SECONDS = 2.0  # for which a call waits for the store
MAX_APPS = 20_000
MAX_LABELS_IN_ALL = 100_000  # of all apps together

_AppKey = tuple[str, str]  # org and app
_Rows = dict[str, tuple[Item, "AppLabel | None"]]  # by label; None: the row is unusable

_log = logging.getLogger("price_keeper.selection")


@dataclass(slots=True)
class _AppEntry:
    """The cached labels of one app. Times are on the monotonic clock."""

    labels: AppLabels = UNREAD_APP_LABELS
    rows: _Rows = field(default_factory=dict)
    read_began_at: float = -NEVER  # of the read that these labels come from
    refresh_at: float = -NEVER
    stale_at: float = -NEVER
    is_load_slow: bool = False  # a call has waited in vain for the read in progress
    is_stale: bool = False  # the store did not answer when a read was due


class AppLabelCache:
    """Caches the labels of apps. `on_change` is called with an app whose labels differ from those cached before."""

    def __init__(
        self,
        labels: Mapping[str, LabelConfig],
        store: Store,
        clock: Clock,
        on_change: Callable[[Scope, AppLabels], None],
    ) -> None:
        self._configured = LabelNames(labels)
        self._store = store
        self._clock = clock
        self._on_change = on_change
        self._loads = SingleFlight[_AppKey, None]()
        self._entries: dict[_AppKey, _AppEntry] = {}  # bounded by apps and by labels, so not a cache of cachetools
        self._row_count = 0  # of all cached apps

    def apply_config(self, labels: Mapping[str, LabelConfig]) -> None:
        """Apply the labels of a reloaded configuration. A name that it has taken or freed changes what the apps' labels
        of this name mean."""
        before, self._configured = self._configured, LabelNames(labels)
        for name, entry in tuple(self._entries.items()):
            scope, rows = Scope(*name), entry.rows
            changed_labels = [label for label in rows if before.is_taken(label) != self._configured.is_taken(label)]
            if changed_labels:
                for label in changed_labels:
                    rows[label] = self._parse_row(scope, label, rows[label][0], None)
                entry.labels = _build_labels(rows)
                self._on_change(scope, entry.labels)

    def cached(self, caller: Caller) -> AppLabels | None:
        """The app's labels without waiting; None if the store has to be read first."""
        if caller.app is None:
            return NO_APP_LABELS
        key = (caller.org, caller.app)
        entry = self._entries.get(key)
        if entry is None:
            return None
        moment = self._clock.monotonic()
        if moment >= entry.stale_at and not entry.is_load_slow:
            return None
        if moment >= entry.refresh_at:
            self._start_loading(key, entry)
        return entry.labels

    async def load(self, caller: Caller) -> AppLabels:
        """Read the store, and wait for at most LOAD_TIMEOUT_SECONDS. UNREAD_APP_LABELS if it does not answer and
        nothing is cached."""
        if caller.app is None:
            return NO_APP_LABELS
        key = (caller.org, caller.app)
        entry = self._get_or_add(key)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_SECONDS):
                self._start_loading(key, entry)
                await self._loads.wait(key)
        except TimeoutError:
            self._entries.get(key, entry).is_load_slow = key in self._loads
        return self._entries.get(key, entry).labels  # the entry may have been evicted meanwhile

    async def get(self, caller: Caller) -> AppLabels:
        """The cached labels, or else those of the store."""
        return self.cached(caller) or await self.load(caller)

    def last_read(self, scope: Scope) -> AppLabels | None:
        """The labels that were read last, however old; None if they never were."""
        entry = self._entries.get((scope.org, scope.app or ""))
        return None if entry is None or entry.labels is UNREAD_APP_LABELS else entry.labels

    def invalidate(self, scope: Scope) -> None:
        """This process changed the app's labels: the next call that names one reads them again."""
        entry = self._entries.get((scope.org, scope.app or ""))
        if entry is not None:
            entry.read_began_at, entry.refresh_at, entry.stale_at = self._clock.monotonic(), -NEVER, -NEVER

    async def refresh(self, scope: Scope, app: Item | None, read_began_at: float) -> None:
        """Read the app's labels. `app` is the app's item, and `read_began_at` the time at which that was read. Raises
        StoreError."""
        rows = await read_label_rows(self._store, scope, app)
        key = (scope.org, scope.app or "")
        entry = self._get_or_add(key)
        if read_began_at < entry.read_began_at and entry.labels is not UNREAD_APP_LABELS:
            return  # a later read holds, or the labels were changed after this one
        entry.read_began_at, entry.refresh_at, entry.stale_at, entry.is_stale = (
            read_began_at,
            read_began_at + REFRESH_SECONDS,
            read_began_at + STALE_SECONDS,
            False,
        )
        before = entry.rows
        self._entries[key] = self._entries.pop(key)  # evicted in the order of their last read
        if entry.labels is UNREAD_APP_LABELS or {label: item for label, (item, _) in before.items()} != rows:
            entry.rows = {label: self._parse_row(scope, label, item, before.get(label)) for label, item in rows.items()}
            entry.labels = _build_labels(entry.rows)
            self._row_count += len(entry.rows) - len(before)
            self._evict()
            self._on_change(scope, entry.labels)

    def _parse_row(
        self, scope: Scope, label: str, item: Item, last_row: tuple[Item, AppLabel | None] | None
    ) -> tuple[Item, AppLabel | None]:
        """The row with its parsed profile. That of an unchanged row is reused, with all that is cached for it."""
        if last_row is not None and last_row[0] == item:
            return last_row
        try:
            if self._configured.is_taken(label):
                raise ValueError("the configuration has that name")
            return item, parse_profile(label, item)
        except ValueError as failure:
            _log.warning(
                "%s: the app label %s cannot be used: %s; correct it, or delete it, in the app's inference profiles",
                scope.key,
                label,
                failure,
            )
            return item, None

    def _get_or_add(self, key: _AppKey) -> _AppEntry:
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = _AppEntry()
            self._evict()
        return found

    def _evict(self) -> None:
        while len(self._entries) > 1 and (len(self._entries) > MAX_APPS or self._row_count > MAX_LABELS_IN_ALL):
            self._row_count -= len(self._entries.pop(next(iter(self._entries))).rows)

    def _start_loading(self, key: _AppKey, entry: _AppEntry) -> None:
        if key not in self._loads:
            entry.is_load_slow = False
            entry.refresh_at = self._clock.monotonic() + STORE_RETRY_SECONDS
            self._loads.start(key, lambda: self._load(key))

    async def _load(self, key: _AppKey) -> None:
        scope, began = Scope(*key), self._clock.monotonic()
        try:
            app = await self._store.get(schema.app_config_key(*key), consistent=True)
            await self.refresh(scope, app, began)
        except Exception as failure:  # whatever the failure, waiting calls need an answer
            entry = self._get_or_add(key)  # the one that the load began with may have been evicted
            if not entry.is_stale:
                log_read_failure(_log, f"the app labels of {scope.key}", "the last known ones apply", failure)
            # No call waits for a store that does not answer.
            entry.stale_at, entry.is_stale = NEVER, True
            entry.refresh_at = began + STORE_RETRY_SECONDS
        finally:
            self._get_or_add(key).is_load_slow = False


def _build_labels(rows: _Rows) -> AppLabels:
    usable = [profile for _, profile in rows.values() if profile is not None]
    return AppLabels(usable) if usable else NO_APP_LABELS


async def read_label_rows(store: Store, scope: Scope, app: Item | None) -> dict[str, Item]:
    """The rows of an app's labels, by label. `app` is the app's item. Raises StoreError."""
    if scope.app is None or not (app or {}).get(PROFILES_MADE_ATTRIBUTE):
        return {}
    prefix = schema.app_profiles_prefix(scope.app)
    page = await store.query(Query("config", schema.org_config_key(scope.org).pk, Prefix(prefix), consistent=True))
    found = {row.key.sk.removeprefix(prefix): row.item for row in page.rows}
    return {label: item for label, item in found.items() if is_label(label)}


async def read_label_names(store: Store, scope: Scope, app: Item | None) -> list[str]:
    """The usable labels of an app; names that the configuration has too are included. Raises StoreError."""
    return [label for label, item in (await read_label_rows(store, scope, app)).items() if _is_usable(label, item)]


def _is_usable(label: str, item: Item) -> bool:
    try:
        parse_profile(label, item)
    except ValueError:
        return False
    return True
