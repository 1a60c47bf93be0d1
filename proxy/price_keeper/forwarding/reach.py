"""Whether calls get to Bedrock, as the last of them met it: for readiness, metrics and the log.

What is said of a call that fails is for its caller; here it is said once, and why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from email.utils import formatdate
from typing import Final

from price_keeper.clock import Clock
from price_keeper.errors import UpstreamUnavailable
from price_keeper.forwarding.upstream import CannotConnect, UpstreamEndpoint, ConnectionPool

TOLD_SECONDS: Final = 10.0  # between two lines in the log about one endpoint that cannot be reached
REFUSED_SECONDS: Final = 15.0  # for which a refusal of our credentials stands, unless others are found
LOOK_SECONDS: Final = 1.0  # for one place that says nothing: readiness waits for two such looks at most

# What is expired or signed wrongly is so everywhere; this a region says too that the account has not enabled.
NOT_KNOWN_THERE: Final = "UnrecognizedClientException"

_REFUSED: Final = "Bedrock refuses the sidecar's own AWS credentials; the log says why"
_AWAY: Final = "Bedrock cannot be reached; the log says why"

_log = logging.getLogger("price_keeper.forwarding")


class Reach:
    def __init__(
        self, clock: Clock, has_credentials: Callable[[], str | None], pool_of: Callable[[UpstreamEndpoint], ConnectionPool]
    ) -> None:
        """`has_credentials` raises UpstreamAway where there are none to sign with, and else tells what is
        wrong with them."""
        self._clock = clock
        self._has_credentials = has_credentials
        self._pool_of = pool_of
        self._expected: frozenset[UpstreamEndpoint] = frozenset()
        self._away: dict[UpstreamEndpoint, ConnectionPool] = {}
        self._known: set[UpstreamEndpoint] = set()
        self._told: dict[UpstreamEndpoint, float] = {}
        self._refused_until: dict[UpstreamEndpoint | None, float] = {}  # by None: everywhere

    def expects(self, endpoints: Collection[UpstreamEndpoint]) -> None:
        """What the configuration has calls go to, tried or not. Others are apps' own, and may be of use to nobody."""
        self._expected = frozenset(endpoints)

    # What the forwarder tells.

    def reached(self, endpoint: UpstreamEndpoint) -> None:
        self._known.add(endpoint)
        self._away.pop(endpoint, None)

    def missed(self, pool: ConnectionPool, why: Exception) -> None:
        endpoint, now = pool.endpoint, self._clock.monotonic()
        self._known.add(endpoint)
        self._away[endpoint] = pool
        if now - self._told.get(endpoint, now - TOLD_SECONDS) >= TOLD_SECONDS:
            self._told[endpoint] = now
            _log.warning("%s:%d gets no calls: %s", endpoint.host, endpoint.port, why)

    def refused(self, endpoint: UpstreamEndpoint, why: str) -> None:
        """Our credentials, or what was signed with them."""
        now, where = self._clock.monotonic(), endpoint if why.startswith(NOT_KNOWN_THERE) else None
        if now >= self._refused_until.get(where, 0.0):
            told = "%s refuses the sidecar's own AWS credentials: %s; by our clock it is %s"
            _log.error(told, endpoint.host, why, formatdate(self._clock.now(), usegmt=True))
        self._refused_until[where] = now + REFUSED_SECONDS

    def forgets(self, endpoint: UpstreamEndpoint) -> None:
        """Calls go there no more; if some do after all, the log is told no sooner for that."""
        self._away.pop(endpoint, None)
        self._known.discard(endpoint)
        self._refused_until.pop(endpoint, None)

    def renewed(self) -> None:
        """Others are signed with from now on."""
        self._refused_until.clear()

    # What can be told.

    @property
    def is_refused(self) -> bool:
        return bool(self._refusing())

    def _refusing(self) -> set[UpstreamEndpoint | None]:
        now = self._clock.monotonic()
        return {where for where, until in self._refused_until.items() if now < until}

    @property
    def places_away(self) -> int:
        return len(self._away)

    async def check(self) -> str | None:
        """For readiness. Whether what was away is back is found out here too, as perhaps nobody calls any more; and
        whether anything else is there, as one who is not ready will not be called."""
        trouble = self._has_credentials()
        refusing = self._refusing()
        if None in refusing:
            raise UpstreamUnavailable(_REFUSED)
        await self._look_at(self._away.values())
        if self._known <= refusing | self._away.keys():
            await self._look_at(map(self._pool_of, self._expected - self._known if self._known else ()))
        refusing &= self._known
        troubled = refusing | self._away.keys()
        if not troubled:
            return trouble
        if len(troubled) == len(self._known):
            raise UpstreamUnavailable(_REFUSED if refusing else _AWAY)
        what = "do not take the sidecar's own AWS credentials" if refusing - self._away.keys() else "cannot be reached"
        return f"{len(troubled)} of {len(self._known)} endpoints of Bedrock {what}; the log says why"

    async def _look_at(self, pools: Iterable[ConnectionPool]) -> None:
        await asyncio.gather(*map(self._look, tuple(pools)))

    async def _look(self, pool: ConnectionPool) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                connection = await pool.connect()
        except TimeoutError:
            self.missed(pool, CannotConnect(f"no answer in {LOOK_SECONDS:g} seconds"))
        except (CannotConnect, UnicodeError) as failure:
            self.missed(pool, failure)
        else:
            pool.release(connection)
            self.reached(pool.endpoint)
