"""What the status page keeps in memory: samples, what was just found out, and who listens."""

from __future__ import annotations

import asyncio
from typing import Any

from price_keeper.control.control_connections import DEFAULT_PORT_LIMITS, ControlPortLimits
from price_keeper.control.page.history import SpendHistory
from price_keeper.control.page.listeners import PageSubscriptions
from price_keeper.control.page.shared import SingleFlightCache

TICK_SECONDS = 2.0  # how often what is shown is found out anew, however many look
STORE_TTL_SECONDS = 10.0  # as above, of what the store has to be asked for


class PageState:
    def __init__(self, tick_seconds: float = TICK_SECONDS, limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> None:
        self.tick_seconds = tick_seconds
        self.spend_history = SpendHistory()
        self.subscriptions = PageSubscriptions(limits)
        self.board_cache: SingleFlightCache[dict[str, Any]] = SingleFlightCache(tick_seconds)
        self.list_cache: SingleFlightCache[Any] = SingleFlightCache(STORE_TTL_SECONDS)
        self.event_cache: SingleFlightCache[list[dict[str, Any]]] = SingleFlightCache(STORE_TTL_SECONDS)
        self.closed = asyncio.Event()

    def close(self) -> None:
        """Ends all that listen, so that nobody waits for them."""
        self.closed.set()
