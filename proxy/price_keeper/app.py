"""The composition root: the one place where configuration becomes running parts."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from price_keeper import dataplane
from price_keeper.alerts.composed import add_to as add_alerts
from price_keeper.alerts.composed import opened_alerts
from price_keeper.aside import Aside
from price_keeper.auth.clients import Clients
from price_keeper.auth.container import ContainerCredentials, HandsOut
from price_keeper.auth.control_service import control_service
from price_keeper.auth.failures import WrongSecrets
from price_keeper.auth.lookups import Lookups
from price_keeper.auth.relayed import RelayedCredentials
from price_keeper.auth.revocation import Revocation
from price_keeper.auth.tokens import Tokens
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import Address, Config
from price_keeper.config import StoreConfig as StoreConfig
from price_keeper.control import api
from price_keeper.control.calls import Route
from price_keeper.control.composed import parts_of
from price_keeper.control.connections import fitting
from price_keeper.control.health import Check, Readiness
from price_keeper.control.parts import Parts
from price_keeper.control.probes import probes
from price_keeper.control.serving import Control, listening, listening_within
from price_keeper.errors import ConfigError, StoreError
from price_keeper.forwarding.forwarder import Forwarder
from price_keeper.limits.leasing import SWEEP_SECONDS, Leasing
from price_keeper.limits.limiter import Limiter
from price_keeper.limits.store_time import StoreTime
from price_keeper.metering.price_updates import add_to as add_prices
from price_keeper.offer import Offer
from price_keeper.recording.adoption import Adoption
from price_keeper.recording.composed import Recording, opened_recording
from price_keeper.reloading import ReadConfig, ConfigReloader, build_budget_reload
from price_keeper.selection.notebook import Notebook
from price_keeper.selection.notes import Notes
from price_keeper.selection.standings import Standings
from price_keeper.stopping import Stop
from price_keeper.stores.contract import Store
from price_keeper.stores.sqlite import SqliteStore
from price_keeper.surface import measured
from price_keeper.surface.limits import raised_descriptors
from price_keeper.surface.listener import Listener
from price_keeper.surface.outbox import Outbox
from price_keeper.tasks import Tasks
from price_keeper.telemetry import Telemetry
from price_keeper.workers.crew import opened_crew, telemetry_of
from price_keeper.workers.place import ALONE, Place

if TYPE_CHECKING:
    from price_keeper.stores.dynamodb import DynamoStore

PURGE_INTERVAL_SECONDS = 300.0
FILE_LOOK_SECONDS = 5.0  # within these a file that was deleted or replaced is noticed though nobody writes
PURGE_MARGIN_SECONDS = 86_400.0  # so that a clock set ahead for a moment deletes nothing that counts
DRAIN_SECONDS = 20.0  # with what else stopping takes, within the half minute that Kubernetes gives a pod to end

# Objects more than were let go. What a call makes is in no cycle, so nothing waits for the collector, and to have it
# look at the calls under way again and again would cost each of them a fortieth.
COLLECTED_AFTER = (20_000, 20, 20)

# A control service has the control API and no data port; a sidecar has a data port, and can make no tokens.
Role: TypeAlias = Literal["both", "sidecar", "control"]
OnStarted: TypeAlias = "Callable[[Started], Awaitable[None]]"


async def open_sqlite(config: StoreConfig, clock: Clock) -> SqliteStore:
    return await SqliteStore(Path(config.path), clock.now).open()


async def open_dynamodb(config: StoreConfig, clock: Clock, time: StoreTime | None = None) -> DynamoStore:
    """`time` learns from its answers."""
    from price_keeper.stores.dynamodb import DynamoStore  # 50 MB and 0.2 s that SQLite's users need not pay

    store = DynamoStore(
        region=config.region,
        table_prefix=config.table_prefix,
        endpoint=config.endpoint,
        allow_insecure=config.allow_insecure,
        sleep=clock.sleep,
        **({} if time is None else {"asking": time.asking}),
    )
    return await store.open()


@asynccontextmanager
async def opened_store(
    config: StoreConfig, clock: Clock, tasks: Tasks, time: StoreTime | None = None
) -> AsyncIterator[Store]:
    store: Store
    if config.engine == "sqlite":
        embedded = await open_sqlite(config, clock)
        tasks.every("purge", PURGE_INTERVAL_SECONDS, lambda: _purge(embedded, clock), jitter=0.2)
        tasks.every("store file", FILE_LOOK_SECONDS, lambda: _look(embedded), jitter=0.2)
        store = embedded
    else:
        store = await open_dynamodb(config, clock, time)
    try:
        yield store
    finally:
        await tasks.stop()
        await store.close()


async def _look(store: SqliteStore) -> None:
    with suppress(StoreError):  # which the log has been told of
        await store.check_file()


async def _purge(store: SqliteStore, clock: Clock) -> None:
    while await store.purge(clock.now() - PURGE_MARGIN_SECONDS):
        pass


@dataclass(frozen=True, slots=True)
class Started:
    """What a process that has just started can tell: where it listens, and how to get a token from it."""

    data: Address | None  # a control service has no data port
    control: Address
    tokens: Tokens
    store: Store


@dataclass(frozen=True, slots=True)
class _Core:
    """What runs in every role."""

    config: Config
    environ: Mapping[str, str]
    clock: Clock
    tokens: Tokens
    telemetry: Telemetry
    tasks: Tasks
    store: Store
    recording: Recording
    standings: Standings
    revocation: Revocation
    clients: Clients
    wrong_secrets: WrongSecrets
    leasing: Leasing


async def run(
    config: Config,
    environ: Mapping[str, str],
    on_started: OnStarted,
    clock: Clock | None = None,
    role: Role = "both",
    place: Place = ALONE,
    read: ReadConfig | None = None,
    *,
    is_refused: bool = False,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains; while it still starts, it just ends. `read` has the configuration
    read again, for SIGHUP; `is_refused` is as `Reloading` has it."""
    clock, adoption, journal = clock or SystemClock(), adoption_in(config, place), Path(config.journal.dir)
    config, notebook = place.configured(config), Notebook(journal, clock, place.number, place.count)
    stop, reloading = Stop(place.lifeline), ConfigReloader(config, read, clock, is_refused=is_refused)
    asyncio.get_running_loop().set_default_executor(Aside())
    tokens = dataplane.build_token_service(config, environ, clock, can_mint=role != "sidecar")
    if role == "control" and not tokens.can_mint:
        raise ConfigError(["auth.keys.0: a control service signs with it, and this is its public half alone"])
    async with AsyncExitStack() as running, stop.breaks_off_the_start():
        crew = await running.enter_async_context(opened_crew(place))
        readiness, telemetry = Readiness(clock), telemetry_of(place, crew)
        served = Control(api.routes(readiness, telemetry, role), clock.now)
        control = await _control_ports(config, place, served, probes(readiness, telemetry), clock, running)
        tasks = await running.enter_async_context(Tasks(clock))
        time = StoreTime(clock)
        store = await running.enter_async_context(opened_store(config.store, clock, tasks, time))
        bedrock = None if role == "control" else await _bedrock(config, environ, clock, tasks, running)
        leasing = leases(store, clock, tasks, time)
        recording = await running.enter_async_context(opened_recording(config, store, clock, adoption))
        await notebook.open()
        core = await _core(
            config, environ, clock, tokens, telemetry, tasks, store, recording, leasing, notebook.notes, running
        )
        reloading.register_metrics(telemetry)
        data = None if bedrock is None else await _data_port(core, bedrock, role, place.count, reloading, running)
        reloading.add_step(build_budget_reload(core.standings))
        gc.freeze()  # what is here now stays; the collector need not look at it again
        gc.set_threshold(*COLLECTED_AFTER)
        core.recording.start(config, tasks)
        notebook.start(tasks)
        if place.shares_port and config.on_store_down == "serve":
            core.standings.recollect = notebook.look_again
        if role != "sidecar" and place.is_first:
            parts = _parts(core)
            core.recording.aggregator.on_total = parts.page.history.learn
            parts.add_to(core.telemetry)
            reloading.add_step(parts.prepared)
            served.started(parts)
        readiness.started({**_checks(core, data), **crew.checks()}, reloading.build_checks)
        reloading.start(tasks)
        await on_started(Started(None if data is None else data.address, control, tokens, store))
        await stop.comes()
        reloading.stop()
        readiness.stop()
        served.stop()
        if data is not None:
            await data.listener.drain(DRAIN_SECONDS, data.forwarder.close)
        try:
            await core.recording.finish()
            await notebook.write()
        finally:
            await core.leasing.stop()


def adoption_in(config: Config, place: Place) -> Adoption | None:
    """By the first worker alone, whose folder those of the others lie in."""
    return Adoption(Path(config.journal.dir), place.count) if place.is_first else None


async def _control_ports(
    config: Config, place: Place, served: Control, few: Sequence[Route], clock: Clock, running: AsyncExitStack
) -> Address:
    """Where all of it is served. `few` are what the others of several workers tell the first one."""
    address, limits = config.listen.control, fitting(raised_descriptors())
    if not place.is_first:
        own = listening_within(Control(few, clock.now), place.socket_of(place.number), clock)
        await running.enter_async_context(own)
        return address
    if config.listen.health is not None:
        await running.enter_async_context(listening(Control(few, clock.now), config.listen.health, clock, limits))
    return await running.enter_async_context(listening(served, address, clock, limits))


async def _core(
    config: Config,
    environ: Mapping[str, str],
    clock: Clock,
    tokens: Tokens,
    telemetry: Telemetry,
    tasks: Tasks,
    store: Store,
    recording: Recording,
    leasing: Leasing,
    notes: Notes,
    running: AsyncExitStack,
) -> _Core:
    alerts = await running.enter_async_context(opened_alerts(config, environ, store, clock, tasks))
    if recording.adoption is not None:
        recording.adoption.on_alerts = alerts.found
    standings = Standings(config, store, recording.recorder, clock, tasks, alerts, notes)
    revocation = dataplane.build_revocation_list(config, store, clock, tasks)
    recording.add_to(telemetry)
    standings.add_to(telemetry)
    revocation.add_to(telemetry)
    add_alerts(telemetry, alerts)
    return _Core(
        config,
        environ,
        clock,
        tokens,
        telemetry,
        tasks,
        store,
        recording,
        standings,
        revocation,
        Clients(store, clock.now, Lookups(clock), clock.monotonic, tokens.marks),
        WrongSecrets(clock.monotonic),
        leasing,
    )


def leases(store: Store, clock: Clock, tasks: Tasks, time: StoreTime) -> Leasing:
    leasing = Leasing(Limiter(store, time.now_ms, clock), clock, tasks)
    tasks.every("leases", SWEEP_SECONDS, leasing.sweep, jitter=0.2)
    return leasing


def _parts(core: _Core) -> Parts:
    return parts_of(
        core.config,
        core.environ,
        core.store,
        core.clock,
        core.standings,
        core.tokens,
        core.revocation,
        core.clients,
        leasing=core.leasing,
        wrong_secrets=core.wrong_secrets,
        limits=fitting(raised_descriptors()),
    )


@dataclass(frozen=True, slots=True)
class _DataPort:
    address: Address
    listener: Listener
    forwarder: Forwarder


async def _data_port(
    core: _Core,
    bedrock: dataplane.BedrockAccess,
    role: Role,
    workers: int,
    reloading: ConfigReloader,
    running: AsyncExitStack,
) -> _DataPort:
    credentials = await _handing_out(core, role, running)
    config, clock, tasks = core.config, core.clock, core.tasks
    tariffs = await dataplane.load_price_tables(config, core.store, clock, tasks)
    outbox = Outbox()
    forwarder = dataplane.build_forwarder(bedrock, clock, tasks, outbox)
    admitting = dataplane.build_rate_limiter(config, core.store, clock, tasks, core.leasing, core.standings.notes)
    admitting.add_to(core.telemetry)
    hard = dataplane.build_hard_budgets(config, core.store, clock, tasks, core.recording, core.standings, tariffs, forwarder)
    hard.add_to(core.telemetry)
    handler = dataplane.build_handler(
        config,
        core.store,
        core.tokens,
        core.revocation,
        bedrock,
        clock,
        forwarder,
        core.recording.recorder,
        tariffs,
        core.standings,
        tasks,
        admitting,
        hard,
        credentials,
    )
    offer = Offer(
        tariffs,
        handler,
        bedrock,
        forwarder,
        core.recording.recorder,
        core.standings,
        hard.purses,
        core.store,
        clock,
        tasks,
    )
    add_prices(core.telemetry, lambda: offer.tariffs)
    reloading.add_step(offer.prepared)
    tracing = await running.enter_async_context(dataplane.open_traces(config, core.telemetry))
    listener, port = await dataplane.open_data_port(handler, config, clock, tasks, outbox, workers, tracing)
    measured.add_to(core.telemetry, handler.traffic, handler.joining, listener, forwarder)
    return _DataPort(Address(config.listen.data.host, port), listener, forwarder)


def _checks(core: _Core, data: _DataPort | None) -> dict[str, Check]:
    checks: dict[str, Check] = {
        "store": core.store.probe,
        "journal": core.recording.recorder.check,
        "revocation": core.revocation.check,
    }
    return checks if data is None else checks | {"bedrock": data.forwarder.reach.check}


async def _handing_out(core: _Core, role: Role, running: AsyncExitStack) -> HandsOut:
    is_revoked = core.revocation.is_revoked
    if role != "sidecar":
        return ContainerCredentials(core.clients, core.tokens, core.clock.now, is_revoked, core.wrong_secrets)
    url = core.config.auth.control_url
    ask = None if url is None else await running.enter_async_context(control_service(url))
    return RelayedCredentials(ask, core.tokens, core.clock, is_revoked, core.wrong_secrets)


async def _bedrock(
    config: Config, environ: Mapping[str, str], clock: Clock, tasks: Tasks, running: AsyncExitStack
) -> dataplane.BedrockAccess:
    if config.upstream.endpoint == dataplane.SIMULATED:
        return await running.enter_async_context(dataplane.open_simulated_bedrock(clock))
    return await dataplane.build_bedrock_access(config.upstream, environ, clock, tasks)
