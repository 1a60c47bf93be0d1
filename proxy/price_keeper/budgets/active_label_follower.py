"""Follows active labels and overrides that other processes change, for the scopes that this process serves.

The sticky state of a scope that served a call is read again LOOK_SECONDS after it was last read, of many scopes in one
request. A scope that served none since is left alone until its next call. No call waits for it. Start with
`ActiveLabelFollower.run`.
"""

from __future__ import annotations

import logging
from typing import Final

from price_keeper.budgets.budget_refresh import BudgetRefresher
from price_keeper.budgets.budget_state import RefreshState
from price_keeper.clock import Clock
from price_keeper.errors import StoreError
from price_keeper.stores import schema
from price_keeper.stores.contract import Store

LOOK_SECONDS: Final = 4.75
TICK_SECONDS: Final = 0.25  # both together: a change is read within 5 s

_log = logging.getLogger("price_keeper.selection")


class ActiveLabelFollower:
    def __init__(self, store: Store, clock: Clock, refresher: BudgetRefresher) -> None:
        self._store = store
        self._clock = clock
        self._refresher = refresher
        self._followed: list[RefreshState] = []

    def follow(self, refresh: RefreshState) -> None:
        """The scope serves a call, and is not followed yet."""
        refresh.is_followed = True
        self._followed.append(refresh)

    async def run(self) -> None:
        """Once: read the sticky states that are due."""
        if not self._followed:
            return
        moment, due, remaining = self._clock.monotonic(), list[RefreshState](), list[RefreshState]()
        for refresh in self._followed:
            # A refresh in progress reads the sticky state too.
            if moment >= refresh.sticky_read_at + LOOK_SECONDS and not self._refresher.is_reading(refresh):
                refresh.is_followed = refresh.has_served
                if refresh.has_served:
                    due.append(refresh)
                refresh.has_served = False
            if refresh.is_followed:
                remaining.append(refresh)
        self._followed = remaining
        if due:
            await self._look(due, moment)

    async def _look(self, due: list[RefreshState], moment: float) -> None:
        keys = [schema.sticky_state_key(refresh.budget.scope, refresh.budget.span.key) for refresh in due]
        for refresh in due:
            refresh.sticky_read_at = moment
        try:
            items = await self._store.get_many(keys, consistent=True)
        except StoreError as failure:
            _log.debug("the active labels of %d scopes cannot be read; they are read again: %s", len(due), failure)
            return
        for refresh, item in zip(due, items, strict=True):
            if refresh.sticky_read_at == moment:  # otherwise a refresh has read it later
                self._refresher.apply_sticky_item(refresh, item)
