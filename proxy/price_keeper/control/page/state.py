"""What the status page keeps in memory: samples, what was just found out, and who listens."""

from __future__ import annotations

import asyncio
from typing import Any

from price_keeper.control.connections import DEFAULT_PORT_LIMITS, ControlPortLimits
from price_keeper.control.page.history import SpendHistory
from price_keeper.control.page.listeners import Listeners
from price_keeper.control.page.shared import Shared

TICK_SECONDS = 2.0  # how often what is shown is found out anew, however many look
STORED_SECONDS = 10.0  # as above, of what the store has to be asked for


class PageState:
    def __init__(self, tick_seconds: float = TICK_SECONDS, limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> None:
        self.tick_seconds = tick_seconds
        self.history = SpendHistory()
        self.listeners = Listeners(limits)
        self.boards: Shared[dict[str, Any]] = Shared(tick_seconds)
        self.places: Shared[Any] = Shared(STORED_SECONDS)
        self.happened: Shared[list[dict[str, Any]]] = Shared(STORED_SECONDS)
        self.closed = asyncio.Event()

    def close(self) -> None:
        """Ends all that listen, so that nobody waits for them."""
        self.closed.set()
