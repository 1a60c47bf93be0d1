"""How many pages may stay connected. Each takes a connection of the control port, and little else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from price_keeper.control.api_errors import ERROR_CODES, ApiError
from price_keeper.control.api_types import Principal
from price_keeper.control.control_connections import DEFAULT_PORT_LIMITS, ControlPortLimits

# Together well below the connections that one address may have, as all have one behind a proxy. Where these are fewer,
# there are fewer pages.
MAX_ADMIN_PAGES = 24
MAX_CLIENT_PAGES = 16  # of all together, who must not keep administrators out
MAX_PAGES_PER_CLIENT = 4
SUBSCRIBE_RETRY_SECONDS = 30.0


class PageSubscriptions:
    def __init__(self, limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> None:
        def scale_bound(most: int) -> int:
            return max(1, most * limits.max_per_network // DEFAULT_PORT_LIMITS.max_per_network)

        self._max_admin_pages, self._max_client_pages, self._max_pages_per_client = map(
            scale_bound, (MAX_ADMIN_PAGES, MAX_CLIENT_PAGES, MAX_PAGES_PER_CLIENT)
        )
        self._clients: Counter[str] = Counter()
        self._admins = 0

    def __len__(self) -> int:
        return self._admins + self._clients.total()

    @contextmanager
    def subscribe(self, principal: Principal) -> Iterator[None]:
        """Raises Problem."""
        if not self._has_room(principal):
            message = "too many pages are kept up to date; this one has to ask for itself"
            raise ApiError(503, ERROR_CODES[503], message, retry_after=SUBSCRIBE_RETRY_SECONDS)
        self._change_count(principal, 1)
        try:
            yield
        finally:
            self._change_count(principal, -1)

    def _has_room(self, principal: Principal) -> bool:
        if principal.is_admin:
            return self._admins < self._max_admin_pages
        return (
            self._clients.total() < self._max_client_pages
            and self._clients[principal.name] < self._max_pages_per_client
        )

    def _change_count(self, principal: Principal, change: int) -> None:
        if principal.is_admin:
            self._admins += change
            return
        self._clients[principal.name] += change
        if not self._clients[principal.name]:
            del self._clients[principal.name]
