"""Whether calls get to Bedrock, as the last of them met it: for readiness, metrics and the log.

What is said of a call that fails is for its caller; here it is said once, and why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from email.utils import formatdate
from typing import Final

from proxy.clock import Clock
from proxy.errors import UpstreamAway
from proxy.forwarding.upstream import CannotConnect, Endpoint, Pool

TOLD_SECONDS: Final = 10.0  # between two lines in the log about one endpoint that cannot be reached
REFUSED_SECONDS: Final = 15.0  # for which a refusal of our credentials stands, unless others are found

_log = logging.getLogger("proxy.forwarding")


class Reach:
    def __init__(self, clock: Clock, has_credentials: Callable[[], object]) -> None:
        """`has_credentials` raises UpstreamAway where there are none to sign with."""
        self._clock = clock
        self._has_credentials = has_credentials
        self._away: dict[Endpoint, Pool] = {}
        self._known: set[Endpoint] = set()
        self._told: dict[Endpoint, float] = {}
        self._refused_until = 0.0

    # What the forwarder tells.

    def reached(self, endpoint: Endpoint) -> None:
        self._known.add(endpoint)
        self._away.pop(endpoint, None)

    def missed(self, pool: Pool, why: Exception) -> None:
        endpoint, now = pool.endpoint, self._clock.monotonic()
        self._known.add(endpoint)
        self._away[endpoint] = pool
        if now - self._told.get(endpoint, now - TOLD_SECONDS) >= TOLD_SECONDS:
            self._told[endpoint] = now
            _log.warning("%s:%d gets no calls: %s", endpoint.host, endpoint.port, why)

    def refused(self, endpoint: Endpoint, why: str) -> None:
        """Our credentials, or what was signed with them."""
        now = self._clock.monotonic()
        if now >= self._refused_until:
            told = "%s refuses the sidecar's own AWS credentials: %s; by our clock it is %s"
            _log.error(told, endpoint.host, why, formatdate(self._clock.now(), usegmt=True))
        self._refused_until = now + REFUSED_SECONDS

    def forgets(self, endpoint: Endpoint) -> None:
        """Calls go there no more."""
        self._away.pop(endpoint, None)
        self._known.discard(endpoint)
        self._told.pop(endpoint, None)

    def renewed(self) -> None:
        """Others are signed with from now on."""
        self._refused_until = 0.0

    # What can be told.

    @property
    def is_refused(self) -> bool:
        return self._clock.monotonic() < self._refused_until

    @property
    def places_away(self) -> int:
        return len(self._away)

    async def check(self) -> str | None:
        """For readiness. Whether what was away is back is found out here too, as perhaps nobody calls any more."""
        self._has_credentials()
        if self.is_refused:
            raise UpstreamAway("Bedrock refuses the sidecar's own AWS credentials; the log says why")
        await asyncio.gather(*map(self._look, tuple(self._away.values())))
        if not self._away:
            return None
        if len(self._away) == len(self._known):
            raise UpstreamAway("Bedrock cannot be reached; the log says why")
        return f"{len(self._away)} of {len(self._known)} endpoints of Bedrock cannot be reached; the log says why"

    async def _look(self, pool: Pool) -> None:
        try:
            connection = await pool.connect()
        except (CannotConnect, UnicodeError) as failure:
            self.missed(pool, failure)
        else:
            pool.free(connection)
            self.reached(pool.endpoint)
