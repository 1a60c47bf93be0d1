"""Keeps the own labels of each app that names one, or whose chain may have one.

They are read as often as settings are, and once for all who wait. While the store is away, what was known holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from price_keeper.clock import Clock
from price_keeper.config import LabelConfig
from price_keeper.config.prices import PSEUDO_LABELS
from price_keeper.errors import StoreError
from price_keeper.metering.profiles import NOTHING, UNREAD, Own, Profile, profile_of
from price_keeper.model import Caller, Scope, is_label
from price_keeper.selection.spent import NEVER
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Prefix, Query, Store
from price_keeper.tasks import Tasks

MADE = "profiles_made"  # how many an app has ever had, on its item; one that never had any needs no further read
SECONDS = 60.0  # after which a call waits until they are read again
SOON_SECONDS = 50.0  # after which a call has them read again, and goes on
ASK_AGAIN_SECONDS = 3.0  # while the store is away
WAIT_SECONDS = 2.0  # for the store, of a call
MOST_APPS = 20_000
MOST_KEPT = 100_000  # own labels, of all apps together

_Name = tuple[str, str]  # of an org and an app
_Rows = dict[str, tuple[Item, "Profile | None"]]  # by label; None: it cannot be used

_log = logging.getLogger("price_keeper.selection")


@dataclass(slots=True)
class _Kept:
    own: Own = UNREAD
    rows: _Rows = field(default_factory=dict)
    began: float = -NEVER  # the reading that told of them, by the monotonic clock like all times here
    due: float = -NEVER
    old: float = -NEVER
    reading: asyncio.Event | None = None
    is_slow: bool = False  # somebody has waited in vain for the reading that is under way
    is_stale: bool = False  # the store could not be asked when it was time to


class OwnLabels:
    """`on_new` hears of an app whose own labels are others than was known."""

    def __init__(
        self,
        labels: Mapping[str, LabelConfig],
        store: Store,
        clock: Clock,
        tasks: Tasks,
        on_new: Callable[[Scope, Own], None],
    ) -> None:
        self._taken = _taken(labels)
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._on_new = on_new
        self._kept: dict[_Name, _Kept] = {}
        self._count = 0  # of all rows that are kept

    def take_on(self, labels: Mapping[str, LabelConfig]) -> None:
        """Those of another configuration, which may have names that were an app's own, or leave names to apps."""
        before, self._taken = self._taken, _taken(labels)
        other = before ^ self._taken
        for name, kept in tuple(self._kept.items()):
            if not other.isdisjoint(kept.rows):
                scope, rows = Scope(*name), kept.rows
                for label in other & rows.keys():
                    rows[label] = self._row(scope, label, rows[label][0], None)
                kept.own = _own_of(rows)
                self._on_new(scope, kept.own)

    def known(self, caller: Caller) -> Own | None:
        """Without asking anybody; None if the store has to be asked first."""
        if caller.app is None:
            return NOTHING
        name = (caller.org, caller.app)
        kept = self._kept.get(name)
        if kept is None:
            return None
        moment = self._clock.monotonic()
        if moment >= kept.old and not kept.is_slow:
            return None
        if moment >= kept.due:
            self._read_soon(name, kept)
        return kept.own

    async def learned(self, caller: Caller) -> Own:
        """Asks the store, and waits for a while. UNREAD if it does not answer and nothing was known."""
        if caller.app is None:
            return NOTHING
        name = (caller.org, caller.app)
        kept = self._kept_of(name)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._read_soon(name, kept).wait()
        except TimeoutError:
            kept.is_slow = kept.reading is not None
        return self._kept.get(name, kept).own  # room may have been made meanwhile

    async def of(self, caller: Caller) -> Own:
        return self.known(caller) or await self.learned(caller)

    def so_far(self, scope: Scope) -> Own | None:
        """What was read last, whenever that was; None if nothing was."""
        kept = self._kept.get((scope.org, scope.app or ""))
        return None if kept is None or kept.own is UNREAD else kept.own

    def changed(self, scope: Scope) -> None:
        """By this process: the next call that names one has them read again."""
        kept = self._kept.get((scope.org, scope.app or ""))
        if kept is not None:
            kept.began, kept.due, kept.old = self._clock.monotonic(), -NEVER, -NEVER

    async def read(self, scope: Scope, app: Item | None, began: float) -> None:
        """`app` is the app's item as it was read then. Raises StoreError."""
        rows = await rows_of(self._store, scope, app)
        name = (scope.org, scope.app or "")
        kept = self._kept_of(name)
        if began < kept.began and kept.own is not UNREAD:
            return  # what somebody else read later holds, or they were changed meanwhile
        kept.began, kept.due, kept.old, kept.is_stale = began, began + SOON_SECONDS, began + SECONDS, False
        before = kept.rows
        self._kept[name] = self._kept.pop(name)  # the one read longest ago is the first to go
        if kept.own is UNREAD or {label: item for label, (item, _) in before.items()} != rows:
            kept.rows = {label: self._row(scope, label, item, before.get(label)) for label, item in rows.items()}
            kept.own = _own_of(kept.rows)
            self._count += len(kept.rows) - len(before)
            self._make_room()
            self._on_new(scope, kept.own)

    def _row(
        self, scope: Scope, label: str, item: Item, before: tuple[Item, Profile | None] | None
    ) -> tuple[Item, Profile | None]:
        """What did not change stays the same, with all that is kept for it."""
        if before is not None and before[0] == item:
            return before
        try:
            if label in self._taken:
                raise ValueError("the configuration has that name")
            return item, profile_of(label, item)
        except ValueError as failure:
            _log.warning("%s: the own label %s cannot be used: %s", scope.key, label, failure)
            return item, None

    def _kept_of(self, name: _Name) -> _Kept:
        found = self._kept.get(name)
        if found is None:
            found = self._kept[name] = _Kept()
            self._make_room()
        return found

    def _make_room(self) -> None:
        while len(self._kept) > 1 and (len(self._kept) > MOST_APPS or self._count > MOST_KEPT):
            self._count -= len(self._kept.pop(next(iter(self._kept))).rows)

    def _read_soon(self, name: _Name, kept: _Kept) -> asyncio.Event:
        if kept.reading is None:
            kept.reading, kept.is_slow = asyncio.Event(), False
            self._tasks.spawn(self._read(name, kept, kept.reading))
        return kept.reading

    async def _read(self, name: _Name, kept: _Kept, over: asyncio.Event) -> None:
        scope, began = Scope(*name), self._clock.monotonic()
        kept.due = began + ASK_AGAIN_SECONDS
        try:
            app = await self._store.get(schema.app_config_key(*name), consistent=True)
            await self.read(scope, app, began)
        except Exception as failure:  # of whatever kind: those who wait must get an answer
            if not kept.is_stale:
                what = str(failure) if isinstance(failure, StoreError) else type(failure).__name__
                _log.warning("the own labels of %s cannot be read, and what is known holds: %s", scope.key, what)
            kept.old, kept.is_stale = NEVER, True  # nobody is to wait for a store that is away
        finally:
            kept.reading, kept.is_slow = None, False
            over.set()


def _taken(labels: Mapping[str, LabelConfig]) -> frozenset[str]:
    """What the configuration calls something is never an app's, whichever of the two came first."""
    return frozenset((*labels, *(label.model for label in labels.values()), *PSEUDO_LABELS))


def _own_of(rows: _Rows) -> Own:
    usable = [profile for _, profile in rows.values() if profile is not None]
    return Own(usable) if usable else NOTHING


async def rows_of(store: Store, scope: Scope, app: Item | None) -> dict[str, Item]:
    """By label. `app` is the app's item. Raises StoreError."""
    if scope.app is None or not (app or {}).get(MADE):
        return {}
    prefix = schema.app_profiles_prefix(scope.app)
    page = await store.query(Query("config", schema.org_config_key(scope.org).pk, Prefix(prefix), consistent=True))
    found = {row.key.sk.removeprefix(prefix): row.item for row in page.rows}
    return {label: item for label, item in found.items() if is_label(label)}


async def own_names(store: Store, scope: Scope, app: Item | None) -> list[str]:
    """Of those that can be used, but for what the configuration has under the same name. Raises StoreError."""
    return [label for label, item in (await rows_of(store, scope, app)).items() if _is_usable(label, item)]


def _is_usable(label: str, item: Item) -> bool:
    try:
        profile_of(label, item)
    except ValueError:
        return False
    return True
