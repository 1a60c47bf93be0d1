"""How many pages may stay connected. Each takes a connection of the control port, and little else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from price_keeper.control.calls import Principal
from price_keeper.control.connections import DEFAULT_PORT_LIMITS, ControlPortLimits
from price_keeper.control.problems import ERROR_CODES, ApiError

# Together well below the connections that one address may have, as all have one behind a proxy. Where these are fewer,
# there are fewer pages.
OF_ADMINS = 24
OF_CLIENTS = 16  # of all together, who must not keep administrators out
OF_ONE_CLIENT = 4
AGAIN_SECONDS = 30.0


class Listeners:
    def __init__(self, limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> None:
        def scale_bound(most: int) -> int:
            return max(1, most * limits.max_per_network // DEFAULT_PORT_LIMITS.max_per_network)

        self._of_admins, self._of_clients, self._of_one_client = map(scale_bound, (OF_ADMINS, OF_CLIENTS, OF_ONE_CLIENT))
        self._clients: Counter[str] = Counter()
        self._admins = 0

    def __len__(self) -> int:
        return self._admins + self._clients.total()

    @contextmanager
    def one_more(self, principal: Principal) -> Iterator[None]:
        """Raises Problem."""
        if not self._has_room(principal):
            why = "too many pages are kept up to date; this one has to ask for itself"
            raise ApiError(503, ERROR_CODES[503], why, retry_after=AGAIN_SECONDS)
        self._count(principal, 1)
        try:
            yield
        finally:
            self._count(principal, -1)

    def _has_room(self, principal: Principal) -> bool:
        if principal.is_admin:
            return self._admins < self._of_admins
        return self._clients.total() < self._of_clients and self._clients[principal.name] < self._of_one_client

    def _count(self, principal: Principal, more: int) -> None:
        if principal.is_admin:
            self._admins += more
            return
        self._clients[principal.name] += more
        if not self._clients[principal.name]:
            del self._clients[principal.name]
