"""Whether the process lives, and whether it can do its work: for probes, load balancers and people."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from price_keeper.clock import Clock
from price_keeper.errors import StoreAccessDenied, Refusal, StoreError, StoreMisconfigured, StoreUnavailable, StoreThrottled

# Each asks one thing that the work needs, and raises when it is not there. Text that it returns is told as well: of
# something that is not as it should be, and with which the work goes on.
Check: TypeAlias = "Callable[[], Awaitable[object]]"
Checks: TypeAlias = "Mapping[str, Check]"

CHECK_SECONDS = 3.0  # a probe gives up soon after, and a process that stops does not wait for it
REMEMBERED_SECONDS = 1.0  # whoever asks meanwhile costs the store nothing

# Anybody may ask. What the store itself said may name files, tables and hosts; it is for the log. The first that fits.
_TOLD: tuple[tuple[type[Exception], str], ...] = (
    (StoreAccessDenied, "the store refuses our credentials"),
    (StoreUnavailable, "the store is away"),
    (StoreThrottled, "the store asks to slow down"),
    (StoreMisconfigured, "the store is not as it should be"),
    (StoreError, "the store cannot be used"),
    (Exception, "this cannot be checked"),
)

_log = logging.getLogger("price_keeper.control")


class Found(NamedTuple):
    text: str
    is_good: bool = True


class Readiness:
    """Of a process that starts; it is ready once it has started, and not any more once it stops."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._checks: Checks = {}
        self._more: Callable[[], Checks] = dict
        self._phase: str | None = "starting"
        self._looking: asyncio.Task[dict[str, Found]] | None = None
        self._good_until = 0.0
        self._logged: dict[str, str] = {}

    def started(self, checks: Checks, more: Callable[[], Checks] = dict) -> None:
        """`more` are those that there is something to say of at times alone."""
        self._checks, self._more = checks, more
        self._phase = self._looking = None

    def stop(self) -> None:
        """From now on it is not ready, so that nobody sends it anything new while it drains."""
        self._phase = "stopping"

    async def told(self) -> dict[str, Any]:
        found = dict(await self._found())
        if self._phase is not None:
            found["process"] = Found(self._phase, is_good=False)
        is_ready = all(each.is_good for each in found.values())
        checks = {name: each.text for name, each in found.items()}
        return {"status": "ready" if is_ready else "not ready", "checks": checks}

    async def _found(self) -> Mapping[str, Found]:
        """All who ask at about the same time share one look; it goes on when one of them leaves."""
        looking = self._looking
        if looking is None or (looking.done() and self._clock.monotonic() >= self._good_until):
            looking = self._looking = asyncio.create_task(self._look({**self._checks, **self._more()}))
        return await asyncio.shield(looking)

    async def _look(self, checks: Checks) -> dict[str, Found]:
        found = await asyncio.gather(*(self._of(name, check) for name, check in checks.items()))
        self._good_until = self._clock.monotonic() + REMEMBERED_SECONDS
        return dict(zip(checks, found, strict=True))

    async def _of(self, name: str, check: Check) -> Found:
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                told = await check()
        except TimeoutError:
            return Found(f"no answer in {CHECK_SECONDS:g} seconds", is_good=False)
        except Refusal as failure:  # what it says is for callers, and told them as well
            return Found(failure.message, is_good=False)
        except Exception as failure:
            return self._in_trouble(name, failure)
        self._logged.pop(name, None)
        return Found(told if isinstance(told, str) else "ok")

    def _in_trouble(self, name: str, failure: Exception) -> Found:
        """The log is told when it begins, and when it becomes another."""
        told = next(text for kind, text in _TOLD if isinstance(failure, kind))
        if self._logged.get(name) != told:
            self._logged[name] = told
            fault = None if isinstance(failure, StoreError) else failure
            _log.warning("not ready: %s: %s: %s", name, told, failure, exc_info=fault)
        return Found(f"{told}; the log says why", is_good=False)
