"""The first worker speaks for all: it asks the others for what its own control port is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import aiohttp
import orjson

from price_keeper import build
from price_keeper.control.health import Checks
from price_keeper.errors import WorkerUnavailable
from price_keeper.telemetry import WORKERS, WORKERS_UP, Metric, MetricsRegistry, format_metric_header
from price_keeper.workers.place import WorkerSlot
from price_keeper.workers.samples import merged

SECONDS = 2.0  # for an answer: who asks for our own waits no longer than some

_HOST = "http://localhost"


class Crew:
    def __init__(self, sessions: dict[int, aiohttp.ClientSession]) -> None:
        self._sessions = sessions

    def checks(self) -> Checks:
        return {f"worker {number}": partial(self._check, number) for number in self._sessions}

    async def texts(self) -> dict[int, str]:
        """The metrics of all that answer."""
        found = await asyncio.gather(*(self._text(number) for number in self._sessions))
        return {number: text for number, text in zip(self._sessions, found, strict=True) if text is not None}

    async def _text(self, number: int) -> str | None:
        try:
            status, body = await self._asked(number, "/metrics")
            return body.decode() if status == 200 else None
        except (WorkerUnavailable, UnicodeDecodeError):
            return None

    async def _check(self, number: int) -> str:
        status, body = await self._asked(number, "/ready")
        try:
            checks = {str(name): str(text) for name, text in orjson.loads(body)["checks"].items()}
        except (orjson.JSONDecodeError, AttributeError, LookupError, TypeError):
            raise WorkerUnavailable("what it says cannot be understood") from None
        told = "; ".join(f"{name}: {text}" for name, text in checks.items() if text != "ok")
        if status != 200:
            raise WorkerUnavailable(told or "not ready")
        return told or "ok"

    async def _asked(self, number: int, path: str) -> tuple[int, bytes]:
        try:
            async with self._sessions[number].get(f"{_HOST}{path}") as answer:
                return answer.status, await answer.read()
        except TimeoutError:
            raise WorkerUnavailable(f"no answer in {SECONDS:g} seconds") from None
        except (aiohttp.ClientError, OSError):
            raise WorkerUnavailable("it is not there") from None


class CrewTelemetry(MetricsRegistry):
    """Each sample tells whose it is; those of a worker that does not answer are missing."""

    def __init__(self, crew: Crew, workers: int) -> None:
        super().__init__()
        self._crew = crew
        self._workers = workers

    async def scrape(self) -> str:
        texts = {0: self.render_own(), **await self._crew.texts()}
        return merged(texts) + of_all(WORKERS, self._workers) + of_all(WORKERS_UP, len(texts))


def of_all(metric: Metric, value: int) -> str:
    """No worker's own, so without a worker's number."""
    return f"{format_metric_header(metric)}{metric.name} {value}\n"


@asynccontextmanager
async def opened_crew(slot: WorkerSlot) -> AsyncIterator[Crew]:
    """Empty for any but the first."""
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with AsyncExitStack() as opened:
        sessions = {}
        for number in slot.other_numbers:
            connector = aiohttp.UnixConnector(str(slot.socket_path(number)), force_close=True)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
            sessions[number] = await opened.enter_async_context(session)
        yield Crew(sessions)


def telemetry_of(slot: WorkerSlot, crew: Crew) -> MetricsRegistry:
    telemetry = CrewTelemetry(crew, slot.count) if slot.is_first and slot.shares_port else MetricsRegistry()
    build.register_build_info(telemetry)
    if not slot.shares_port:
        telemetry.add(WORKERS, lambda: 1)
        telemetry.add(WORKERS_UP, lambda: 1)
    return telemetry
