"""The composition root: the one place where configuration becomes running parts."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from proxy import dataplane
from proxy.alerts.composed import add_to as add_alerts
from proxy.alerts.composed import opened_alerts
from proxy.auth.clients import Clients
from proxy.auth.tokens import Tokens
from proxy.clock import Clock, SystemClock
from proxy.config import Address, Config
from proxy.config import Store as StoreConfig
from proxy.control import api
from proxy.control.composed import parts_of
from proxy.control.health import Readiness
from proxy.control.probes import probes
from proxy.control.serving import Control, listening
from proxy.metering.price_updates import add_to as add_prices
from proxy.recording.composed import opened_recording
from proxy.selection.standings import Standings
from proxy.stores.contract import Store
from proxy.stores.sqlite import SqliteStore
from proxy.tasks import Tasks
from proxy.telemetry import Telemetry

if TYPE_CHECKING:
    from proxy.stores.dynamodb import DynamoStore

PURGE_INTERVAL_SECONDS = 300.0
PURGE_MARGIN_SECONDS = 86_400.0  # so that a clock set ahead for a moment deletes nothing that counts
DRAIN_SECONDS = 20.0  # with what else stopping takes, within the half minute that Kubernetes gives a pod to end

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("proxy.app")

OnStarted: TypeAlias = "Callable[[Started], Awaitable[None]]"


async def open_sqlite(config: StoreConfig, clock: Clock) -> SqliteStore:
    return await SqliteStore(Path(config.path), clock.now).open()


async def open_dynamodb(config: StoreConfig, clock: Clock) -> DynamoStore:
    from proxy.stores.dynamodb import DynamoStore  # 50 MB and 0.2 s that SQLite's users need not pay

    store = DynamoStore(
        region=config.region, table_prefix=config.table_prefix, endpoint=config.endpoint, sleep=clock.sleep
    )
    return await store.open()


@asynccontextmanager
async def opened_store(config: StoreConfig, clock: Clock, tasks: Tasks) -> AsyncIterator[Store]:
    store: Store
    if config.engine == "sqlite":
        embedded = await open_sqlite(config, clock)
        tasks.every("purge", PURGE_INTERVAL_SECONDS, lambda: _purge(embedded, clock), jitter=0.2)
        store = embedded
    else:
        store = await open_dynamodb(config, clock)
    try:
        yield store
    finally:
        await tasks.stop()
        await store.close()


async def _purge(store: SqliteStore, clock: Clock) -> None:
    while await store.purge(clock.now() - PURGE_MARGIN_SECONDS):
        pass


@dataclass(frozen=True, slots=True)
class Started:
    """What a process that has just started can tell: where it listens, and how to get a token from it."""

    data: Address
    control: Address
    tokens: Tokens
    store: Store


async def run(config: Config, environ: Mapping[str, str], on_started: OnStarted, clock: Clock | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains; while it still starts, it just ends."""
    clock = clock or SystemClock()
    stop = Stop()
    asyncio.get_running_loop().set_default_executor(Aside())
    tokens = dataplane.tokens_of(config, environ, clock)
    readiness = Readiness()
    async with AsyncExitStack() as running, stop.breaks_off_the_start():
        telemetry = Telemetry()
        served = Control(api.routes(readiness, telemetry), clock.now)
        control = await running.enter_async_context(listening(served, config.listen.control))
        if config.listen.health is not None:
            alone = Control(probes(readiness, telemetry), clock.now)
            await running.enter_async_context(listening(alone, config.listen.health))
        tasks = await running.enter_async_context(Tasks(clock))
        store = await running.enter_async_context(opened_store(config.store, clock, tasks))
        bedrock = await _bedrock(config, environ, clock, tasks, running)
        recording = await running.enter_async_context(opened_recording(config, store, clock))
        tariffs = await dataplane.prices(config, store, clock, tasks)
        forwarder = dataplane.forwarding(bedrock, clock, tasks)
        alerts = await running.enter_async_context(opened_alerts(config, environ, store, clock, tasks))
        standings = Standings(config, store, recording.recorder, clock, tasks, alerts)
        revocation = dataplane.revocation(config, store, clock, tasks)
        clients = Clients(store, clock.now)
        handler = dataplane.pipeline(
            config,
            store,
            tokens,
            revocation,
            bedrock,
            clock,
            forwarder,
            recording.recorder,
            tariffs,
            standings,
            tasks,
            clients,
        )
        listener, port = await dataplane.listening(handler, config, clock, tasks)
        gc.freeze()  # what is here now stays; the collector need not look at it again
        recording.start(config, tasks)
        recording.add_to(telemetry)
        standings.add_to(telemetry)
        revocation.add_to(telemetry)
        add_prices(telemetry, tariffs)
        add_alerts(telemetry, alerts)
        served.started(parts_of(config, environ, store, clock, standings, tokens, revocation, clients))
        readiness.started({"store": store.probe, "journal": recording.recorder.check})
        await on_started(Started(Address(config.listen.data.host, port), control, tokens, store))
        await stop.comes()
        readiness.stop()
        served.stop()
        await listener.drain(DRAIN_SECONDS, forwarder.close)
        await recording.finish()


async def _bedrock(
    config: Config, environ: Mapping[str, str], clock: Clock, tasks: Tasks, running: AsyncExitStack
) -> dataplane.Bedrock:
    if config.upstream.endpoint == dataplane.SIMULATED:
        return await running.enter_async_context(dataplane.simulated(clock))
    return await dataplane.real(config.upstream, environ, clock, tasks)


class Stop:
    """SIGTERM and SIGINT: they break off what goes on inside `breaks_off_the_start`, until somebody waits for them."""

    def __init__(self) -> None:
        self._came = asyncio.Event()
        self._start: asyncio.Timeout | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._come)
        loop.add_signal_handler(signal.SIGHUP, _cannot_reload)

    @asynccontextmanager
    async def breaks_off_the_start(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as start:
                self._start = start
                yield
        except TimeoutError:
            if not start.expired():
                raise

    async def comes(self) -> None:
        self._start = None
        await self._came.wait()

    def _come(self) -> None:
        self._came.set()
        if self._start is not None:
            self._start.reschedule(0)
            self._start = None


def _cannot_reload() -> None:
    _log.warning("SIGHUP: a running process cannot take on a new configuration yet; restart it")


class Aside(ThreadPoolExecutor):
    """For `asyncio.to_thread`: threads that the end of the process does not wait for.

    Some work may never end, as that of a provider of credentials; for what must be done, its owner waits.
    """

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*arguments, **named))
                except BaseException as failure:  # it is for whoever waits
                    future.set_exception(failure)

        Thread(target=do, daemon=True).start()
        return future
