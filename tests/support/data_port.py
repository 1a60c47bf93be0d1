"""The data port in the test's own process: real sockets, a real store, a simulated Bedrock that stands by."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import boto3
from bedrock_simulator import DEFAULT_KEYS, SimulatedBedrock, simulated_bedrock
from botocore.config import Config as ClientConfig
from price_keeper import data_port_wiring
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.budgets.hard_label_selector import HardLabelSelector
from price_keeper.catalog import Catalog
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import Address, Config
from price_keeper.config.config_sections import JournalConfig, ListenConfig, UpstreamConfig
from price_keeper.config_reload import build_budget_reload
from price_keeper.handler import RequestHandler
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.ledger.recording import Recording, open_recording
from price_keeper.rates.bucket_client import BucketClient
from price_keeper.rates.rate_lease_manager import SWEEP_SECONDS, RateLeaseManager
from price_keeper.rates.store_time import StoreTime
from price_keeper.server.listener import Listener
from price_keeper.server.write_batcher import WriteBatcher
from price_keeper.stores.contract import Store
from price_keeper.stores.sqlite import SqliteStore
from price_keeper.tasks import Tasks
from price_keeper.upstream.aws_credentials import StaticCredentials
from price_keeper.upstream.forwarder import Forwarder, SigV4Authorizer
from price_keeper.upstream.sigv4 import AwsCredentials

ORG = "550e8400-e29b-41d4-a716-446655440000"
APP = "web"
TOKEN_SECONDS = 48 * 3600  # for tests that pass midnight
SECRET = b"a secret that is long enough for HS256"


@dataclass
class DataPortResponse:
    status: int
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def message(self) -> str:
        return str(self.body["message"])


@dataclass
class DataPort:
    url: str
    token: str
    bedrock: SimulatedBedrock
    recording: Recording
    store: Store
    budget_registry: BudgetRegistry
    hard: HardLabelSelector
    config: Config
    handler: RequestHandler
    forwarder: Forwarder
    catalog: Catalog
    proxy: Any  # what `way` made
    listener: Listener
    _seen: set[Counter] = field(default_factory=set)

    async def apply_config(self, **changes: Any) -> None:
        """As SIGHUP does it."""
        self.config = replace(self.config, **changes)
        ready = [
            await prepared(self.config)
            for prepared in (self.catalog.prepare, build_budget_reload(self.budget_registry))
        ]
        for apply in ready:
            apply()

    def counters(self) -> set[Counter]:
        """All that this journal's tallies were ever seen to touch."""
        self._seen |= set(self.recording.flusher.journal.tally.sums())
        return self._seen

    async def ask(self, path: str, body: Any) -> DataPortResponse:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, headers=headers, data=json.dumps(body)) as answer,
        ):
            headers_by_name = {name.lower(): value for name, value in answer.headers.items()}
            return DataPortResponse(answer.status, headers_by_name, await answer.json(content_type=None))

    def client(self, read_timeout: float = 60, **headers: str) -> Any:
        """boto3's, which sends these headers too."""
        client = boto3.session.Session().client(
            "bedrock-runtime",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
            aws_session_token=self.token,
            config=ClientConfig(read_timeout=read_timeout, retries={"total_max_attempts": 3}),
        )

        def add(request: Any, **_: Any) -> None:
            for name, value in headers.items():
                request.headers[name.replace("_", "-")] = value

        client.meta.events.register("before-sign.bedrock-runtime", add)
        return client


@asynccontextmanager
async def data_port(
    folder: Path,
    wrap_store: Callable[[Any], Any] = lambda store: store,
    clock: Clock | None = None,
    open_proxy: Callable[[str], AbstractAsyncContextManager[Any]] = lambda url: nullcontext(None),
    **config: Any,
) -> AsyncIterator[DataPort]:
    """As in development, but for what `config` says, for what stands between it and its store, and for what stands on
    its way to Bedrock, which has an address of its own."""
    clock = clock or SystemClock()
    port_of_its_own = ListenConfig(data=Address("127.0.0.1", 0))
    plain = Config(
        labels=Config.development().labels,
        listen=port_of_its_own,
        upstream=UpstreamConfig(endpoint=data_port_wiring.SIMULATED),
        journal=JournalConfig(dir=str(folder / "journal")),
        unknown_org="meter",
    )
    full_config = replace(plain, **config)
    tokens = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", clock.now)
    opened = await SqliteStore(folder / "store.db", clock.now).open()
    store = wrap_store(opened)
    async with AsyncExitStack() as stack, Tasks(clock) as tasks, simulated_bedrock(clock=clock) as stand_in:
        keys = StaticCredentials(AwsCredentials(DEFAULT_KEYS.access_key, DEFAULT_KEYS.secret_key))
        proxy = await stack.enter_async_context(open_proxy(stand_in.url))
        url = stand_in.url if proxy is None else proxy.url
        bedrock = data_port_wiring.BedrockAccess(
            url, SigV4Authorizer(keys, clock.now), data_port_wiring.SIMULATED_PREFIX
        )
        async with open_recording(full_config, store, clock) as recording:
            price_tables = await data_port_wiring.load_price_tables(full_config, store, clock, tasks)
            budget_registry = BudgetRegistry(full_config, store, recording.flusher, clock, tasks)
            write_batcher = WriteBatcher()
            forwarder = data_port_wiring.build_forwarder(bedrock, clock, tasks, write_batcher)
            revocation = data_port_wiring.build_revocation_list(full_config, store, clock, tasks)
            lease_manager = RateLeaseManager(BucketClient(store, StoreTime(clock).now_ms, clock), clock, tasks)
            tasks.run_every("leases", SWEEP_SECONDS, lease_manager.sweep)
            hard = data_port_wiring.build_hard_label_selector(
                full_config, store, clock, tasks, recording, budget_registry, price_tables, forwarder
            )
            handler = data_port_wiring.build_handler(
                full_config,
                store,
                tokens,
                revocation,
                bedrock,
                clock,
                forwarder,
                recording.flusher,
                price_tables,
                budget_registry,
                tasks,
                data_port_wiring.build_rate_limiter(full_config, store, clock, lease_manager),
                hard,
            )
            listener, port = await data_port_wiring.open_data_port(handler, full_config, clock, tasks, write_batcher)
            token = tokens.mint_access(ORG, APP, TOKEN_SECONDS).token
            catalog = Catalog(
                price_tables,
                handler,
                bedrock,
                forwarder,
                recording.flusher,
                budget_registry,
                hard.leases,
                store,
                clock,
                tasks,
            )
            try:
                yield DataPort(
                    f"http://127.0.0.1:{port}",
                    token,
                    stand_in,
                    recording,
                    store,
                    budget_registry,
                    hard,
                    full_config,
                    handler,
                    forwarder,
                    catalog,
                    proxy,
                    listener,
                )
            finally:  # a failed test leaves no open port to another
                await listener.drain(0.5, forwarder.close)
            await recording.finish()
            await lease_manager.stop()
    await opened.close()
