"""Whether the process lives, and whether it can do its work: for probes, load balancers and people."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from proxy.errors import PriceKeeperError

# Each asks one thing that the work needs, and raises when it is not there.
Checks = Mapping[str, Callable[[], Awaitable[object]]]

CHECK_SECONDS = 3.0  # a probe gives up soon after, and a process that stops does not wait for it


class Readiness:
    """Of a process that starts; it is ready once it has started, and not any more once it stops."""

    def __init__(self) -> None:
        self._checks: Checks = {}
        self._phase: str | None = "starting"

    def started(self, checks: Checks) -> None:
        self._checks = checks
        self._phase = None

    def stop(self) -> None:
        """From now on it is not ready, so that nobody sends it anything new while it drains."""
        self._phase = "stopping"

    async def troubles(self) -> dict[str, str | None]:
        found = {name: await _trouble(check) for name, check in self._checks.items()}
        return found | {"process": self._phase} if self._phase is not None else found


async def _trouble(check: Callable[[], Awaitable[object]]) -> str | None:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await check()
    except TimeoutError:
        return f"no answer in {CHECK_SECONDS:g} seconds"
    except PriceKeeperError as failure:
        return str(failure)
    return None
