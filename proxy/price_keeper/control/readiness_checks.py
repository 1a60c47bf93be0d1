"""Readiness: run the checks of a process and report whether it can do its work.

Concurrent callers share one run (single-flight), and its results are cached briefly. A report never quotes the store's
errors, because anyone may read it; details are in the log.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from price_keeper.clock import Clock
from price_keeper.errors import (
    Refusal,
    StoreAccessDenied,
    StoreError,
    StoreMisconfigured,
    StoreReadOnly,
    StoreThrottled,
    StoreUnavailable,
)
from price_keeper.single_flight import SingleFlight

# A check raises if a dependency is unavailable. A text that it returns is reported as a warning: something is wrong,
# but the process can do its work.
ReadinessCheck: TypeAlias = "Callable[[], Awaitable[object]]"
ReadinessChecks: TypeAlias = "Mapping[str, ReadinessCheck]"

CHECK_TIMEOUT_SECONDS = 3.0  # probes time out soon after, and shutdown does not wait for a check
RESULT_TTL_SECONDS = 1.0  # frequent probes cost the store nothing

# Public texts by type of failure; the first match counts. The store's own message may name files, tables and hosts, so
# only the log has it.
_PUBLIC_TEXTS: tuple[tuple[type[Exception], str], ...] = (
    (StoreAccessDenied, "the store refuses our credentials"),
    (StoreReadOnly, "the store is read-only"),
    (StoreUnavailable, "the store is away"),
    (StoreThrottled, "the store asks to slow down"),
    (StoreMisconfigured, "the store is not as it should be"),
    (StoreError, "the store cannot be used"),
    (Exception, "this cannot be checked"),
)

_log = logging.getLogger("price_keeper.control")


class ReadinessResult(NamedTuple):
    text: str
    is_good: bool = True


class Readiness:
    """The readiness of a process: not ready before `start`, then as its checks say, and not ready after `stop`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._checks: ReadinessChecks = {}
        self._extra_checks: Callable[[], ReadinessChecks] = dict
        self._phase: str | None = "starting"
        self._single_flight = SingleFlight[None, Mapping[str, ReadinessResult]]()
        self._results: Mapping[str, ReadinessResult] = {}
        self._fresh_until = math.inf  # there is nothing to check before `start`
        self._logged_failures: dict[str, str] = {}

    def start(self, checks: ReadinessChecks, extra_checks: Callable[[], ReadinessChecks] = dict) -> None:
        """Report by these checks from now on. `extra_checks` is called at each run for checks that exist only at
        times."""
        self._checks, self._extra_checks = checks, extra_checks
        self._phase, self._fresh_until = None, -math.inf

    def stop(self) -> None:
        """Report "not ready" from now on, so that load balancers send no new requests while the process drains."""
        self._phase = "stopping"

    async def report(self) -> dict[str, Any]:
        results = dict(await self._get_results())
        if self._phase is not None:
            results["process"] = ReadinessResult(self._phase, is_good=False)
        is_ready = all(each.is_good for each in results.values())
        checks = {name: each.text for name, each in results.items()}
        return {"status": "ready" if is_ready else "not ready", "checks": checks}

    async def _get_results(self) -> Mapping[str, ReadinessResult]:
        """Cached results, or those of a run that all concurrent callers share. The run continues if a caller leaves."""
        if self._clock.monotonic() < self._fresh_until:
            return self._results
        return await self._single_flight.get_or_load(None, self._run_checks)

    async def _run_checks(self) -> Mapping[str, ReadinessResult]:
        checks = {**self._checks, **self._extra_checks()}
        results = await asyncio.gather(*(self._run_check(name, check) for name, check in checks.items()))
        self._results = dict(zip(checks, results, strict=True))
        self._fresh_until = self._clock.monotonic() + RESULT_TTL_SECONDS
        return self._results

    async def _run_check(self, name: str, check: ReadinessCheck) -> ReadinessResult:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_SECONDS):
                text = await check()
        except TimeoutError:
            return ReadinessResult(f"no answer in {CHECK_TIMEOUT_SECONDS:g} seconds", is_good=False)
        except Refusal as failure:  # its message is written for callers, so it may be public
            return ReadinessResult(failure.message, is_good=False)
        except Exception as failure:
            return self._report_failure(name, failure)
        if self._logged_failures.pop(name, None) is not None:
            _log.warning("ready again: %s", name)
        return ReadinessResult(text if isinstance(text, str) else "ok")

    def _report_failure(self, name: str, failure: Exception) -> ReadinessResult:
        """The public result of a failed check. Logs the failure when it begins and when it changes."""
        public_text = next(text for kind, text in _PUBLIC_TEXTS if isinstance(failure, kind))
        if self._logged_failures.get(name) != public_text:
            self._logged_failures[name] = public_text
            cause = None if isinstance(failure, StoreError) else failure
            _log.warning("not ready: %s: %s: %s", name, public_text, failure, exc_info=cause)
        return ReadinessResult(f"{public_text}; the log says why", is_good=False)
