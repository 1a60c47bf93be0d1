"""Whether Bedrock can be reached and accepts the sidecar's credentials, for readiness, metrics and the log.

The forwarder reports each connect and each refusal here. A caller sees only its own error; the reason is logged here:
each endpoint that cannot be reached as an incident, a refusal of the credentials once, and again only when none came
for `REFUSAL_TTL_SECONDS`. Readiness reports it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from email.utils import formatdate
from typing import Final

from price_keeper.clock import Clock
from price_keeper.errors import UpstreamUnavailable
from price_keeper.telemetry.incident import Incident
from price_keeper.upstream.connection_pool import CannotConnect, ConnectionPool, UpstreamEndpoint

REFUSAL_TTL_SECONDS: Final = 15.0  # how long a refusal of the credentials counts, unless they are renewed
PROBE_TIMEOUT_SECONDS: Final = 1.0  # of one probe; a readiness check waits for two in sequence at most

# Expired or wrongly signed credentials are refused everywhere; this error also means a region that is not enabled.
UNKNOWN_CLIENT_ERROR: Final = "UnrecognizedClientException"

_REFUSED: Final = "Bedrock refuses the sidecar's own AWS credentials; the log says why"
_UNREACHABLE: Final = "Bedrock cannot be reached; the log says why"

_log = logging.getLogger("price_keeper.forwarding")


class UpstreamHealth:
    """What is known about each endpoint."""

    def __init__(
        self,
        clock: Clock,
        check_credentials: Callable[[], str | None],
        pool_of: Callable[[UpstreamEndpoint], ConnectionPool],
    ) -> None:
        """`check_credentials` raises UpstreamUnavailable if there are none to sign with, and returns a warning about
        others, or None."""
        self._clock = clock
        self._check_credentials = check_credentials
        self._pool_of = pool_of
        self._expected: frozenset[UpstreamEndpoint] = frozenset()
        self._unreachable: dict[UpstreamEndpoint, ConnectionPool] = {}
        self._tried: set[UpstreamEndpoint] = set()
        self._incidents: dict[UpstreamEndpoint, Incident] = {}
        self._refused_until: dict[UpstreamEndpoint | None, float] = {}  # None stands for all endpoints

    def set_expected(self, endpoints: Collection[UpstreamEndpoint]) -> None:
        """Set the configured endpoints, tried or not. Others belong to single apps and do not affect readiness."""
        self._expected = frozenset(endpoints)

    # Reports of the forwarder.

    def on_connected(self, endpoint: UpstreamEndpoint) -> None:
        self._tried.add(endpoint)
        if self._unreachable.pop(endpoint, None) is not None:
            self._incidents[endpoint].end("%s:%d can be reached again", endpoint.host, endpoint.port)

    def on_connect_failed(self, pool: ConnectionPool, error: Exception) -> None:
        endpoint = pool.endpoint
        self._tried.add(endpoint)
        self._unreachable[endpoint] = pool
        incident = self._incidents.setdefault(endpoint, Incident(_log, self._clock.monotonic))
        message = "cannot connect to %s:%d: %s; calls go to the next endpoint of their label, or fail with 503"
        incident.report(message, endpoint.host, endpoint.port, error)

    def on_credentials_refused(self, endpoint: UpstreamEndpoint, error: str) -> None:
        """Record that Bedrock refused the credentials, or what was signed with them."""
        now, where = self._clock.monotonic(), endpoint if error.startswith(UNKNOWN_CLIENT_ERROR) else None
        if now >= self._refused_until.get(where, 0.0):
            message = "%s refuses the sidecar's own AWS credentials: %s; by our clock it is %s"
            _log.error(message, endpoint.host, error, formatdate(self._clock.now(), usegmt=True))
        self._refused_until[where] = now + REFUSAL_TTL_SECONDS

    def forget(self, endpoint: UpstreamEndpoint) -> None:
        """Forget an endpoint that gets no more calls. Its incident is kept, for its log interval."""
        self._unreachable.pop(endpoint, None)
        self._tried.discard(endpoint)
        self._refused_until.pop(endpoint, None)

    def on_credentials_renewed(self) -> None:
        """Forget refusals, because other credentials sign from now on."""
        if self._refused_until:
            _log.warning("the sidecar signs with other AWS credentials now, after Bedrock had refused the former ones")
        self._refused_until.clear()

    # What readiness and metrics read.

    @property
    def has_refused_credentials(self) -> bool:
        return bool(self._list_refusing())

    def _list_refusing(self) -> set[UpstreamEndpoint | None]:
        now = self._clock.monotonic()
        return {where for where, until in self._refused_until.items() if now < until}

    @property
    def unreachable_count(self) -> int:
        return len(self._unreachable)

    async def check(self) -> str | None:
        """Readiness check: return a warning or None. Raises UpstreamUnavailable if no endpoint can serve calls.

        It probes endpoints that were unreachable, because no call may come to find out that they are back. If no tried
        endpoint works, it also probes the configured ones that were not tried, as a sidecar that is not ready gets no
        calls.
        """
        credentials_problem = self._check_credentials()
        refusing = self._list_refusing()
        if None in refusing:
            raise UpstreamUnavailable(_REFUSED)
        await self._probe_all(self._unreachable.values())
        if self._tried <= refusing | self._unreachable.keys():
            await self._probe_all(map(self._pool_of, self._expected - self._tried if self._tried else ()))
        refusing &= self._tried
        troubled = refusing | self._unreachable.keys()
        if not troubled:
            return credentials_problem
        if len(troubled) == len(self._tried):
            raise UpstreamUnavailable(_REFUSED if refusing else _UNREACHABLE)
        what = (
            "do not take the sidecar's own AWS credentials"
            if refusing - self._unreachable.keys()
            else "cannot be reached"
        )
        return f"{len(troubled)} of {len(self._tried)} endpoints of Bedrock {what}; the log says why"

    async def _probe_all(self, pools: Iterable[ConnectionPool]) -> None:
        await asyncio.gather(*map(self._probe, tuple(pools)))

    async def _probe(self, pool: ConnectionPool) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                connection = await pool.connect()
        except TimeoutError:
            self.on_connect_failed(pool, CannotConnect(f"no answer in {PROBE_TIMEOUT_SECONDS:g} seconds"))
        except (CannotConnect, UnicodeError) as failure:
            self.on_connect_failed(pool, failure)
        else:
            pool.release(connection)
            self.on_connected(pool.endpoint)
