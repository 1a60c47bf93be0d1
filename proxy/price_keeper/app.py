"""The composition root: the only module that turns a configuration into a running process.

`run` opens the parts in this order and closes them in reverse:

    worker group, control port          ports answer 503 until `Readiness.start`
    tasks, store                        SQLite or DynamoDB
    Bedrock access                      roles "both" and "sidecar"
    rate leases, recording              journal, flush, recovery of earlier runs
    budgets, alerts, revocation list    `_CoreServices`: what every role has
    data port                           `data_port_wiring`: rate limiter -> label selector -> meters -> forwarder
    control services                    roles "both" and "control"

Then it serves until SIGTERM or SIGINT, drains the data port, flushes the recording and returns its leases.
Parts do not import each other's constructors: dependencies are injected here.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from price_keeper import data_port_wiring
from price_keeper.alerts.alert_setup import add_alert_metrics as add_alerts
from price_keeper.alerts.alert_setup import open_alerts
from price_keeper.auth.client_secrets import ClientVerifier
from price_keeper.auth.container_credentials import CredentialIssuer, LocalCredentialIssuer
from price_keeper.auth.control_service_client import open_control_service
from price_keeper.auth.credential_relay import CredentialRelay
from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.throttles import LoginThrottle, LookupThrottle
from price_keeper.auth.tokens import TokenService
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.budgets.budget_snapshot import SnapshotFile
from price_keeper.catalog import Catalog
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import Address, Config
from price_keeper.config import StoreConfig as StoreConfig
from price_keeper.config_reload import ConfigReloader, ReadConfig, build_budget_reload
from price_keeper.control import api
from price_keeper.control.api_types import ApiRoute
from price_keeper.control.control_connections import fit_port_limits
from price_keeper.control.control_server import ControlDispatcher, open_control_port, open_control_socket
from price_keeper.control.control_services import ControlServices, build_control_services
from price_keeper.control.probe_endpoints import build_probe_routes
from price_keeper.control.readiness_checks import Readiness, ReadinessCheck
from price_keeper.errors import ConfigError, StoreError
from price_keeper.ledger.orphaned_journals import OrphanedJournals
from price_keeper.ledger.recording import Recording, open_recording
from price_keeper.rates.bucket_client import BucketClient
from price_keeper.rates.rate_lease_manager import SWEEP_SECONDS, RateLeaseManager
from price_keeper.rates.store_time import StoreTime
from price_keeper.server import data_port_metrics
from price_keeper.server.listener import Listener
from price_keeper.server.server_limits import raise_descriptor_limit
from price_keeper.server.write_batcher import WriteBatcher
from price_keeper.stores.contract import Store
from price_keeper.stores.sqlite import SqliteStore
from price_keeper.tasks import DaemonThreadPool, Tasks
from price_keeper.telemetry.metrics import MetricsRegistry
from price_keeper.upstream.forwarder import Forwarder
from price_keeper.usage.price_updates import add_price_metrics as add_prices
from price_keeper.workers.stop_signal import StopSignal
from price_keeper.workers.worker_group import build_telemetry, open_worker_group
from price_keeper.workers.worker_slot import SINGLE_WORKER, WorkerSlot

if TYPE_CHECKING:
    from price_keeper.stores.dynamodb import DynamoStore

PURGE_INTERVAL_SECONDS = 300.0
FILE_CHECK_SECONDS = 5.0  # a deleted or replaced store file is noticed within this time even if nothing is written
PURGE_MARGIN_SECONDS = 86_400.0  # so that a clock set ahead for a moment deletes nothing that still counts
DRAIN_SECONDS = 20.0  # drain and final flush together must fit the 30 s that Kubernetes gives a pod to end

# Net allocations before a collection. The objects of a call form no cycles, so reference counting frees them; the
# default thresholds would scan active calls again and again, which costs each of them 2.5 percent.
GC_THRESHOLDS = (20_000, 20, 20)

# A control service has the control API and no data port; a sidecar has a data port and cannot sign tokens.
Role: TypeAlias = Literal["both", "sidecar", "control"]
OnStarted: TypeAlias = "Callable[[StartedServer], Awaitable[None]]"


async def open_sqlite(config: StoreConfig, clock: Clock) -> SqliteStore:
    return await SqliteStore(Path(config.path), clock.now).open()


async def open_dynamodb(config: StoreConfig, clock: Clock, store_time: StoreTime | None = None) -> DynamoStore:
    """`store_time` estimates the store's clock from its responses."""
    from price_keeper.stores.dynamodb import DynamoStore  # takes 50 MB and 0.2 s, which SQLite's users are spared

    store = DynamoStore(
        region=config.region,
        table_prefix=config.table_prefix,
        endpoint=config.endpoint,
        allow_insecure=config.allow_insecure,
        sleep=clock.sleep,
        **({} if store_time is None else {"on_request": store_time.start_request}),
    )
    return await store.open()


@asynccontextmanager
async def open_store(
    config: StoreConfig, clock: Clock, tasks: Tasks, store_time: StoreTime | None = None
) -> AsyncIterator[Store]:
    """Open the configured store. On exit, stop all background tasks before it is closed, because they use it."""
    store: Store
    if config.engine == "sqlite":
        sqlite_store = await open_sqlite(config, clock)
        tasks.run_every("purge", PURGE_INTERVAL_SECONDS, lambda: _purge_expired(sqlite_store, clock), jitter=0.2)
        tasks.run_every("store file", FILE_CHECK_SECONDS, lambda: _check_store_file(sqlite_store), jitter=0.2)
        store = sqlite_store
    else:
        store = await open_dynamodb(config, clock, store_time)
    try:
        yield store
    finally:
        await tasks.stop()
        await store.close()


async def _check_store_file(store: SqliteStore) -> None:
    with suppress(StoreError):  # the store has logged it
        await store.check_file()


async def _purge_expired(store: SqliteStore, clock: Clock) -> None:
    while await store.purge(clock.now() - PURGE_MARGIN_SECONDS):
        pass


@dataclass(frozen=True, slots=True)
class StartedServer:
    """Passed to `on_started`: where the process listens, and the services with which `dev` registers a client."""

    data_address: Address | None  # a control service has no data port
    control_address: Address
    token_service: TokenService
    store: Store


@dataclass(frozen=True, slots=True)
class _CoreServices:
    """The services that every role has."""

    config: Config
    environ: Mapping[str, str]
    clock: Clock
    token_service: TokenService
    telemetry: MetricsRegistry
    tasks: Tasks
    store: Store
    recording: Recording
    budgets: BudgetRegistry
    revocation_list: RevocationList
    client_verifier: ClientVerifier
    login_throttle: LoginThrottle
    lease_manager: RateLeaseManager


async def run(
    config: Config,
    environ: Mapping[str, str],
    on_started: OnStarted,
    clock: Clock | None = None,
    role: Role = "both",
    slot: WorkerSlot = SINGLE_WORKER,
    read_config: ReadConfig | None = None,
    *,
    is_reload_rejected: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. A signal during startup ends it without a drain.

    `read_config` reads the configuration again on SIGHUP. `is_reload_rejected`: the last reload, before this process
    was started, was rejected, so `config` is older than the file; readiness and metrics report it.
    """
    clock, orphans, journal = clock or SystemClock(), find_orphaned_journals(config, slot), Path(config.journal.dir)
    config, snapshot_file = slot.localize_config(config), SnapshotFile(journal, clock, slot.number, slot.count)
    stop_signal, reloader = (
        StopSignal(slot.lifeline),
        ConfigReloader(config, read_config, clock, is_reload_rejected=is_reload_rejected),
    )
    asyncio.get_running_loop().set_default_executor(DaemonThreadPool())
    token_service = data_port_wiring.build_token_service(config, environ, clock, can_mint=role != "sidecar")
    if role == "control" and not token_service.can_mint:
        raise ConfigError(
            ["auth.keys.0: a control service signs tokens with this key, and its private half is not configured"]
        )
    async with AsyncExitStack() as exit_stack, stop_signal.interrupt_startup():
        worker_group = await exit_stack.enter_async_context(open_worker_group(slot))
        readiness, telemetry = Readiness(clock), build_telemetry(slot, worker_group)
        dispatcher = ControlDispatcher(api.build_routes(readiness, telemetry, role), clock.now)
        control_address = await _open_control_ports(
            config, slot, dispatcher, build_probe_routes(readiness, telemetry), clock, exit_stack
        )
        tasks = await exit_stack.enter_async_context(Tasks(clock))
        store_time = StoreTime(clock)
        store = await exit_stack.enter_async_context(open_store(config.store, clock, tasks, store_time))
        bedrock = None if role == "control" else await _open_bedrock_access(config, environ, clock, tasks, exit_stack)
        lease_manager = build_lease_manager(store, clock, tasks, store_time)
        recording = await exit_stack.enter_async_context(open_recording(config, store, clock, orphans))
        await snapshot_file.open()
        core = await _build_core_services(
            config,
            environ,
            clock,
            token_service,
            telemetry,
            tasks,
            store,
            recording,
            lease_manager,
            snapshot_file,
            exit_stack,
            rereads_snapshot=slot.shares_port and config.on_store_down == "serve",
        )
        reloader.register_metrics(telemetry)
        data_port = (
            None if bedrock is None else await _open_data_port(core, bedrock, role, slot.count, reloader, exit_stack)
        )
        reloader.add_step(build_budget_reload(core.budgets))
        gc.freeze()  # the objects made so far live as long as the process, so collections need not scan them
        gc.set_threshold(*GC_THRESHOLDS)
        core.recording.start(config, tasks)
        core.budgets.start()
        snapshot_file.start(tasks)
        if role != "sidecar" and slot.is_first:
            services = _build_control_services(core)
            core.recording.aggregator.subscribe(services.page.spend_history.record)
            services.submissions.subscribe(core.recording.aggregator.note_written)
            services.register_metrics(core.telemetry)
            reloader.add_step(services.prepare_config)
            dispatcher.start(services)
        readiness.start(
            {**_build_readiness_checks(core, data_port), **worker_group.build_checks()}, reloader.build_checks
        )
        reloader.start(tasks)
        await on_started(
            StartedServer(None if data_port is None else data_port.address, control_address, token_service, store)
        )
        await stop_signal.wait()
        reloader.stop()
        readiness.stop()
        dispatcher.stop()
        if data_port is not None:
            await data_port.listener.drain(DRAIN_SECONDS, data_port.forwarder.close)
        try:
            await core.recording.finish()
            await snapshot_file.write()
        finally:
            await core.lease_manager.stop()


def find_orphaned_journals(config: Config, slot: WorkerSlot) -> OrphanedJournals | None:
    """Journals of workers that no longer exist. Only the first worker looks for them: their folders lie in its own."""
    return OrphanedJournals(Path(config.journal.dir), slot.count) if slot.is_first else None


async def _open_control_ports(
    config: Config,
    slot: WorkerSlot,
    dispatcher: ControlDispatcher,
    probe_routes: Sequence[ApiRoute],
    clock: Clock,
    exit_stack: AsyncExitStack,
) -> Address:
    """Open the control port and the health port, and return the control port's address. Workers other than the first
    serve only `probe_routes`, on a Unix socket from which the first worker collects them."""
    address, limits = config.listen.control, fit_port_limits(raise_descriptor_limit())
    if not slot.is_first:
        worker_port = open_control_socket(
            ControlDispatcher(probe_routes, clock.now), slot.socket_path(slot.number), clock
        )
        await exit_stack.enter_async_context(worker_port)
        return address
    if config.listen.health is not None:
        await exit_stack.enter_async_context(
            open_control_port(ControlDispatcher(probe_routes, clock.now), config.listen.health, clock, limits)
        )
    return await exit_stack.enter_async_context(open_control_port(dispatcher, address, clock, limits))


async def _build_core_services(
    config: Config,
    environ: Mapping[str, str],
    clock: Clock,
    token_service: TokenService,
    telemetry: MetricsRegistry,
    tasks: Tasks,
    store: Store,
    recording: Recording,
    lease_manager: RateLeaseManager,
    snapshot_file: SnapshotFile,
    exit_stack: AsyncExitStack,
    *,
    rereads_snapshot: bool,
) -> _CoreServices:
    """`rereads_snapshot`: while the store is away, the snapshots of other workers are read for callers not met yet."""
    alerts = await exit_stack.enter_async_context(open_alerts(config, environ, store, clock, tasks))
    if recording.orphans is not None:
        recording.orphans.subscribe(alerts.add_orphans)
    reread = snapshot_file.reread if rereads_snapshot else None
    budgets = BudgetRegistry(config, store, recording.flusher, clock, tasks, alerts, snapshot_file.snapshot, reread)
    revocation_list = data_port_wiring.build_revocation_list(config, store, clock, tasks)
    recording.register_metrics(telemetry)
    budgets.register_metrics(telemetry)
    revocation_list.register_metrics(telemetry)
    add_alerts(telemetry, alerts)
    return _CoreServices(
        config,
        environ,
        clock,
        token_service,
        telemetry,
        tasks,
        store,
        recording,
        budgets,
        revocation_list,
        ClientVerifier(store, clock.now, LookupThrottle(clock), clock.monotonic, token_service.secret_tagger),
        LoginThrottle(clock.monotonic),
        lease_manager,
    )


def build_lease_manager(store: Store, clock: Clock, tasks: Tasks, store_time: StoreTime) -> RateLeaseManager:
    lease_manager = RateLeaseManager(BucketClient(store, store_time.now_ms, clock), clock, tasks)
    tasks.run_every("leases", SWEEP_SECONDS, lease_manager.sweep, jitter=0.2)
    return lease_manager


def _build_control_services(core: _CoreServices) -> ControlServices:
    return build_control_services(
        core.config,
        core.environ,
        core.store,
        core.clock,
        core.budgets,
        core.token_service,
        core.revocation_list,
        core.client_verifier,
        leasing=core.lease_manager,
        login_throttle=core.login_throttle,
        limits=fit_port_limits(raise_descriptor_limit()),
    )


@dataclass(frozen=True, slots=True)
class _DataPort:
    address: Address
    listener: Listener
    forwarder: Forwarder


async def _open_data_port(
    core: _CoreServices,
    bedrock: data_port_wiring.BedrockAccess,
    role: Role,
    workers: int,
    reloader: ConfigReloader,
    exit_stack: AsyncExitStack,
) -> _DataPort:
    credential_issuer = await _build_credential_issuer(core, role, exit_stack)
    config, clock, tasks = core.config, core.clock, core.tasks
    price_tables = await data_port_wiring.load_price_tables(config, core.store, clock, tasks)
    write_batcher = WriteBatcher()
    forwarder = data_port_wiring.build_forwarder(bedrock, clock, tasks, write_batcher)
    rate_limiter = data_port_wiring.build_rate_limiter(
        config, core.store, clock, core.lease_manager, core.budgets.snapshot
    )
    rate_limiter.register_metrics(core.telemetry)
    hard_label_selector = data_port_wiring.build_hard_label_selector(
        config, core.store, clock, tasks, core.recording, core.budgets, price_tables, forwarder
    )
    hard_label_selector.register_metrics(core.telemetry)
    handler = data_port_wiring.build_handler(
        config,
        core.store,
        core.token_service,
        core.revocation_list,
        bedrock,
        clock,
        forwarder,
        core.recording.flusher,
        price_tables,
        core.budgets,
        tasks,
        rate_limiter,
        hard_label_selector,
        credential_issuer,
    )
    catalog = Catalog(
        price_tables,
        handler,
        bedrock,
        forwarder,
        core.recording.flusher,
        core.budgets,
        hard_label_selector.leases,
        core.store,
        clock,
        tasks,
    )
    add_prices(core.telemetry, lambda: catalog.price_tables)
    reloader.add_step(catalog.prepare)
    tracing = await exit_stack.enter_async_context(data_port_wiring.open_traces(config, core.telemetry))
    listener, port = await data_port_wiring.open_data_port(
        handler, config, clock, tasks, write_batcher, workers, tracing
    )
    data_port_metrics.register_data_port_metrics(
        core.telemetry, handler.request_stats, handler.retry_joiner, listener, forwarder
    )
    return _DataPort(Address(config.listen.data.host, port), listener, forwarder)


def _build_readiness_checks(core: _CoreServices, data_port: _DataPort | None) -> dict[str, ReadinessCheck]:
    checks: dict[str, ReadinessCheck] = {
        "store": core.store.probe,
        "journal": core.recording.flusher.check,
        "revocation": core.revocation_list.check,
    }
    return checks if data_port is None else checks | {"bedrock": data_port.forwarder.health.check}


async def _build_credential_issuer(core: _CoreServices, role: Role, exit_stack: AsyncExitStack) -> CredentialIssuer:
    is_revoked = core.revocation_list.is_revoked
    if role != "sidecar":
        return LocalCredentialIssuer(
            core.client_verifier, core.token_service, core.clock.now, is_revoked, core.login_throttle
        )
    url = core.config.auth.control_url
    ask_control_service = None if url is None else await exit_stack.enter_async_context(open_control_service(url))
    return CredentialRelay(ask_control_service, core.token_service, core.clock, is_revoked, core.login_throttle)


async def _open_bedrock_access(
    config: Config, environ: Mapping[str, str], clock: Clock, tasks: Tasks, exit_stack: AsyncExitStack
) -> data_port_wiring.BedrockAccess:
    if config.upstream.endpoint == data_port_wiring.SIMULATED:
        return await exit_stack.enter_async_context(data_port_wiring.open_simulated_bedrock(clock))
    return await data_port_wiring.build_bedrock_access(config.upstream, environ, clock, tasks)
