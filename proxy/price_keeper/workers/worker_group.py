"""The first worker reports for all: it collects the other workers' readiness and metrics over their Unix sockets.

Each sample gets a label with its worker's number. The metrics of a worker that does not respond are left out, and
readiness reports that worker as not ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import aiohttp
import orjson

from price_keeper.control.readiness_checks import ReadinessChecks
from price_keeper.errors import WorkerUnavailable
from price_keeper.telemetry import build_info
from price_keeper.telemetry.metrics import WORKERS, WORKERS_UP, Metric, MetricsRegistry, format_metric_header
from price_keeper.workers.worker_slot import WorkerSlot

WORKER_TIMEOUT_SECONDS = 2.0  # for a response; below the timeouts of the probes and scrapers that wait for it

_BASE_URL = "http://localhost"
_HEADER_PREFIXES = ("# HELP ", "# TYPE ")


class WorkerGroup:
    """The other workers, as the first one reaches them: one session for each worker's number."""

    def __init__(self, sessions: dict[int, aiohttp.ClientSession]) -> None:
        self._sessions = sessions

    def build_checks(self) -> ReadinessChecks:
        return {f"worker {number}": partial(self._check_ready, number) for number in self._sessions}

    async def read_metrics(self) -> dict[int, str]:
        """The metrics of all workers that respond, by their numbers."""
        results = await asyncio.gather(*(self._read_worker_metrics(number) for number in self._sessions))
        return {number: text for number, text in zip(self._sessions, results, strict=True) if text is not None}

    async def _read_worker_metrics(self, number: int) -> str | None:
        try:
            status, body = await self._get(number, "/metrics")
            return body.decode() if status == 200 else None
        except (WorkerUnavailable, UnicodeDecodeError):
            return None

    async def _check_ready(self, number: int) -> str:
        status, body = await self._get(number, "/ready")
        try:
            checks = {str(name): str(text) for name, text in orjson.loads(body)["checks"].items()}
        except (orjson.JSONDecodeError, AttributeError, LookupError, TypeError):
            raise WorkerUnavailable("its response is malformed") from None
        failing = "; ".join(f"{name}: {text}" for name, text in checks.items() if text != "ok")
        if status != 200:
            raise WorkerUnavailable(failing or "not ready")
        return failing or "ok"

    async def _get(self, number: int, path: str) -> tuple[int, bytes]:
        try:
            async with self._sessions[number].get(f"{_BASE_URL}{path}") as response:
                return response.status, await response.read()
        except TimeoutError:
            raise WorkerUnavailable(f"no answer in {WORKER_TIMEOUT_SECONDS:g} seconds") from None
        except (aiohttp.ClientError, OSError):
            raise WorkerUnavailable("its socket does not respond") from None


class GroupTelemetry(MetricsRegistry):
    """The first worker's metrics with those of the other workers. Each sample is labelled with its worker's number; the
    samples of a worker that does not respond are missing."""

    def __init__(self, group: WorkerGroup, workers: int) -> None:
        super().__init__()
        self._group = group
        self._workers = workers

    async def scrape(self) -> str:
        texts = {0: self.render_own(), **await self._group.read_metrics()}
        return (
            merge_samples(texts) + render_unlabelled(WORKERS, self._workers) + render_unlabelled(WORKERS_UP, len(texts))
        )


def render_unlabelled(metric: Metric, value: int) -> str:
    """A sample of the group, and therefore without a worker's number."""
    return f"{format_metric_header(metric)}{metric.name} {value}\n"


@asynccontextmanager
async def open_worker_group(slot: WorkerSlot) -> AsyncIterator[WorkerGroup]:
    """Yield the sessions to the other workers; none unless this is the first worker."""
    timeout = aiohttp.ClientTimeout(total=WORKER_TIMEOUT_SECONDS)
    async with AsyncExitStack() as stack:
        sessions = {}
        for number in slot.other_numbers:
            connector = aiohttp.UnixConnector(str(slot.socket_path(number)), force_close=True)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
            sessions[number] = await stack.enter_async_context(session)
        yield WorkerGroup(sessions)


def build_telemetry(slot: WorkerSlot, group: WorkerGroup) -> MetricsRegistry:
    telemetry = GroupTelemetry(group, slot.count) if slot.is_first and slot.shares_port else MetricsRegistry()
    build_info.register_build_info(telemetry)
    if not slot.shares_port:
        telemetry.add(WORKERS, lambda: 1)
        telemetry.add(WORKERS_UP, lambda: 1)
    return telemetry


def merge_samples(texts: Mapping[int, str]) -> str:
    """Merge the exposition texts of several workers: each metric has one header, followed by the samples of all."""
    headers: dict[str, dict[str, None]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        name = ""
        for line in text.splitlines():
            if line.startswith(_HEADER_PREFIXES):
                name = line.split(" ", 3)[2]
                headers.setdefault(name, {}).setdefault(line)
            elif line:
                samples.setdefault(name, []).append(_add_worker_label(line, number))
    return "".join(f"{line}\n" for name in headers for line in (*headers[name], *samples.get(name, ())))


def _add_worker_label(line: str, number: int) -> str:
    """Add the label to `name value` or `name{labels} value`; a name has neither braces nor spaces."""
    name_end = next(at for at, letter in enumerate(line) if letter in "{ ")
    worker = f'worker="{number}"'
    return (
        f"{line[:name_end]}{{{worker}}}{line[name_end:]}"
        if line[name_end] == " "
        else f"{line[:name_end]}{{{worker},{line[name_end + 1 :]}"
    )
