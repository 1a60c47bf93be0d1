"""The composition root: the one place where configuration becomes running parts."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from aiohttp import web

from proxy import dataplane
from proxy.auth.keys import load_keys
from proxy.auth.tokens import Tokens
from proxy.clock import Clock, SystemClock
from proxy.config import Address, Config
from proxy.config import Store as StoreConfig
from proxy.control.health import Readiness, add_health
from proxy.errors import ListenFailed
from proxy.stores.contract import Store
from proxy.stores.sqlite import SqliteStore
from proxy.tasks import Tasks

if TYPE_CHECKING:
    from proxy.stores.dynamodb import DynamoStore

PURGE_INTERVAL_SECONDS = 300.0
PURGE_MARGIN_SECONDS = 86_400.0  # so that a clock set ahead for a moment deletes nothing that counts
SHUTDOWN_SECONDS = 2.0  # for requests on the control port that are under way
DRAIN_SECONDS = 20.0  # with what else stopping takes, within the half minute that Kubernetes gives a pod to end

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
    """Serves until SIGTERM or SIGINT, then drains."""
    clock = clock or SystemClock()
    tokens = Tokens(load_keys(config.auth.keys, environ), config.auth.issuer, clock.now)
    stop = _stop_signal()
    async with AsyncExitStack() as running:
        tasks = await running.enter_async_context(Tasks(clock))
        store = await running.enter_async_context(opened_store(config.store, clock, tasks))
        bedrock = await _bedrock(config, environ, clock, tasks, running)
        readiness = Readiness({"store": store.probe})
        control = await running.enter_async_context(_listening(_control(readiness), config.listen.control))
        handler = dataplane.pipeline(config, store, tokens, bedrock, clock, tasks)
        listener, port = await dataplane.listening(handler, config, clock, tasks)
        gc.freeze()  # what is here now stays; the collector need not look at it again
        await on_started(Started(Address(config.listen.data.host, port), control, tokens, store))
        await stop.wait()
        readiness.stop()
        await listener.drain(DRAIN_SECONDS)


async def _bedrock(
    config: Config, environ: Mapping[str, str], clock: Clock, tasks: Tasks, running: AsyncExitStack
) -> dataplane.Bedrock:
    if config.upstream.endpoint == dataplane.SIMULATED:
        return await running.enter_async_context(dataplane.simulated(clock))
    return await dataplane.real(config.upstream, environ, clock, tasks)


def _stop_signal() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def _control(readiness: Readiness) -> web.Application:
    app = web.Application()
    add_health(app, readiness)
    return app


@asynccontextmanager
async def _listening(app: web.Application, address: Address) -> AsyncIterator[Address]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, address.host, address.port).start()
        except OSError as failure:
            number = failure.errno or 0  # below 0 it is the resolver's, whose own words say more
            reason = os.strerror(number) if number > 0 else str(failure.strerror)
            raise ListenFailed(f"cannot listen on {address}: {reason}") from None
        yield Address(address.host, runner.addresses[0][1])
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await runner.cleanup()
