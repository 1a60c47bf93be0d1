"""Whether the process lives, and whether it can do its work: for probes, load balancers and people."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from proxy.errors import PriceKeeperError

# Each asks one thing that the work needs, and raises when it is not there. Text that it returns is told as well: of
# something that is not as it should be, and with which the work goes on.
Checks = Mapping[str, Callable[[], Awaitable[object]]]

CHECK_SECONDS = 3.0  # a probe gives up soon after, and a process that stops does not wait for it


class Found(NamedTuple):
    text: str
    is_good: bool = True


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

    async def told(self) -> dict[str, Any]:
        found = {name: await _found(check) for name, check in self._checks.items()}
        if self._phase is not None:
            found["process"] = Found(self._phase, is_good=False)
        is_ready = all(each.is_good for each in found.values())
        checks = {name: each.text for name, each in found.items()}
        return {"status": "ready" if is_ready else "not ready", "checks": checks}


async def _found(check: Callable[[], Awaitable[object]]) -> Found:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            told = await check()
    except TimeoutError:
        return Found(f"no answer in {CHECK_SECONDS:g} seconds", is_good=False)
    except PriceKeeperError as failure:
        return Found(str(failure), is_good=False)
    return Found(told if isinstance(told, str) else "ok")
