"""Builds the parts of the data port from the configuration: access to Bedrock, forwarder, rate limiter, label selector,
meters, request handler and listener.

`app` decides which of them a process has and in which order they start. Tests build single parts with these functions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from price_keeper import operations
from price_keeper.auth.authenticate import Authenticator, FixedIdentityAuthenticator, TokenAuthenticator
from price_keeper.auth.client_secrets import ClientVerifier
from price_keeper.auth.container_credentials import CredentialIssuer, LocalCredentialIssuer
from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.signing_keys import load_needed_keys
from price_keeper.auth.tokens import TokenService
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.budgets.budget_snapshot import BudgetSnapshot
from price_keeper.budgets.hard.budget_lease import BudgetLeases
from price_keeper.budgets.hard_label_selector import HardLabelSelector
from price_keeper.budgets.label_selector import FindTargets, LabelResolver, LabelSelector
from price_keeper.clock import Clock
from price_keeper.config import Config, LabelConfig, UpstreamConfig
from price_keeper.config.config_sections import PSEUDO_LABELS
from price_keeper.domain import ResolvedLabel
from price_keeper.errors import ConfigError
from price_keeper.handler import RequestHandler
from price_keeper.ledger.aggregator import read_spent_pico
from price_keeper.ledger.flusher import Flusher
from price_keeper.ledger.lease_rows import HardBudgetKey
from price_keeper.ledger.recording import Recording
from price_keeper.operations import Operation
from price_keeper.parse_call import MODEL_PATH_OPERATIONS, ParsedCall
from price_keeper.provider_chain import RENEW_INTERVAL_SECONDS
from price_keeper.rates.rate_lease_manager import RateLeaseManager
from price_keeper.rates.rate_limiter import RateLimitCache, RateLimiter
from price_keeper.server import server_limits
from price_keeper.server.listener import Listener
from price_keeper.server.server_limits import fit_to_descriptors, fit_to_memory, raise_descriptor_limit
from price_keeper.server.tls import create_server_context
from price_keeper.server.write_batcher import WriteBatcher
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks
from price_keeper.telemetry.logs import format_traceback
from price_keeper.telemetry.metrics import SPANS, MetricsRegistry
from price_keeper.telemetry.request_stats import RequestStats
from price_keeper.upstream.aws_credentials import UNUSABLE_CHECK_SECONDS, RefreshingCredentials, StaticCredentials
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import (
    Authorizer,
    BearerAuthorizer,
    Forwarder,
    SigV4Authorizer,
    UpstreamTarget,
    parse_endpoint,
)
from price_keeper.upstream.profile_models import ProfileModels
from price_keeper.upstream.retry_joiner import MAX_TOTAL_BYTES, RetryJoiner
from price_keeper.upstream.sigv4 import AwsCredentials
from price_keeper.upstream.token_counter import TokenCounter
from price_keeper.usage.inference_profiles import AppLabel, ResolvedAppLabel
from price_keeper.usage.meter_factory import MeterFactory
from price_keeper.usage.price_list_client import AwsPriceList
from price_keeper.usage.price_updates import PriceTables

if TYPE_CHECKING:
    from price_keeper.telemetry.tracing import Tracing

PRICES_TIMEOUT_SECONDS = 0.25  # that a start waits for current prices
UPSTREAM_CHECK_SECONDS = 1.0  # between checks of timeouts of upstream connections
MAX_CACHED_TARGETS = 1024  # labels times operations are a few dozen; ids of async invocations come and go
BEARER_TOKEN_VARIABLE = "AWS_BEARER_TOKEN_BEDROCK"  # noqa: S105 - the name of an environment variable
SIMULATED = "simulated"
SIMULATED_PREFIX = b"x-simulate-"
_OTEL_MISSING = "traces need the extra otel (pip install 'bedrock-price-keeper[otel]')"

_log = logging.getLogger("price_keeper.dataplane")


@dataclass(frozen=True, slots=True)
class BedrockAccess:
    """Where calls go unless a label says otherwise, and how they are authorized."""

    url: str | None  # None: the regional endpoint of Bedrock
    authorizer: Authorizer
    simulated_prefix: bytes | None = None
    credentials: RefreshingCredentials | None = None


@asynccontextmanager
async def open_simulated_bedrock(clock: Clock) -> AsyncIterator[BedrockAccess]:
    from bedrock_simulator import DEFAULT_KEYS, simulated_bedrock  # imports botocore, which is large

    async with simulated_bedrock(clock=clock) as simulator:
        keys = StaticCredentials(AwsCredentials(DEFAULT_KEYS.access_key, DEFAULT_KEYS.secret_key))
        yield BedrockAccess(simulator.url, SigV4Authorizer(keys, clock.now), SIMULATED_PREFIX)


async def build_bedrock_access(
    config: UpstreamConfig, environ: Mapping[str, str], clock: Clock, tasks: Tasks
) -> BedrockAccess:
    """Access with a bearer token, or with AWS credentials that a background task renews. Raises ConfigError."""
    if config.auth == "bearer":
        if not environ.get(BEARER_TOKEN_VARIABLE):
            raise ConfigError(
                [f"upstream.auth is bearer, and the environment variable {BEARER_TOKEN_VARIABLE} is not set"]
            )
        return BedrockAccess(config.endpoint, BearerAuthorizer(environ[BEARER_TOKEN_VARIABLE]))
    credentials = RefreshingCredentials()
    await credentials.renew()
    tasks.run_every("AWS credentials", RENEW_INTERVAL_SECONDS, credentials.renew, jitter=0.2)
    tasks.run_every(
        "AWS credentials that are of no use", UNUSABLE_CHECK_SECONDS, credentials.renew_unusable, jitter=0.2
    )
    return BedrockAccess(config.endpoint, SigV4Authorizer(credentials, clock.now), credentials=credentials)


def build_forwarder(bedrock: BedrockAccess, clock: Clock, tasks: Tasks, write_batcher: WriteBatcher) -> Forwarder:
    """The caller must close the forwarder after the last call."""
    forwarder = Forwarder(bedrock.authorizer, clock, schedule_write=write_batcher.write)
    if bedrock.credentials is not None:
        bedrock.credentials.subscribe(forwarder.health.on_credentials_renewed)
    tasks.run_every("time of upstream calls", UPSTREAM_CHECK_SECONDS, forwarder.check_timeouts)
    return forwarder


def build_token_service(
    config: Config, environ: Mapping[str, str], clock: Clock, *, can_mint: bool = True
) -> TokenService:
    """Without `can_mint` the service only verifies tokens, even if the configuration has private keys."""
    auth = config.auth
    keys = load_needed_keys(auth, environ)
    if not can_mint:
        keys = tuple(replace(key, signs_with=None) for key in keys)
    return TokenService(keys, auth.issuer, clock.now, auth.access_seconds, auth.refresh_seconds)


def build_revocation_list(config: Config, store: Store, clock: Clock, tasks: Tasks) -> RevocationList:
    return RevocationList(store, clock, tasks, config.on_store_down, config.auth.revocation_grace_seconds)


async def load_price_tables(
    config: Config, store: Store, clock: Clock, tasks: Tasks, previous: PriceTables | None = None
) -> PriceTables:
    """Price tables for this configuration, with current prices if these arrive within PRICES_TIMEOUT_SECONDS.

    `previous` hands over what it has read. The caller must refresh the tables periodically.
    """

    def create() -> PriceTables:
        is_simulated = config.upstream.endpoint == SIMULATED
        follows = any(label.price_source == "aws" for label in config.labels.values())
        is_read = follows and not is_simulated
        price_list = AwsPriceList(allow_insecure=config.upstream.allow_insecure) if is_read else None
        return PriceTables(config, store, price_list, clock)

    price_tables = await asyncio.to_thread(create)  # importing the AWS client would block calls for too long
    if previous is not None:
        price_tables.inherit(previous)
    await _start_price_refresh(price_tables, tasks)
    return price_tables


async def _start_price_refresh(price_tables: PriceTables, tasks: Tasks) -> None:
    """Starts the first refresh and waits for it briefly. Prices that are in the store arrive at once. Reading AWS's
    price list takes seconds, once a day for a fleet, and longer where it is unreachable; until then the prices of the
    configuration apply."""
    is_done = asyncio.Event()

    async def refresh() -> None:
        try:
            await price_tables.refresh()
        except Exception as failure:  # of any kind: the periodic refresh tries again
            _log.error(
                "first refresh of prices failed (%s); the prices known so far apply until the next refresh",
                type(failure).__name__,
                extra={"where": format_traceback(failure)},
            )
        finally:
            is_done.set()

    tasks.start("first refresh of prices", refresh)
    with suppress(TimeoutError):
        async with asyncio.timeout(PRICES_TIMEOUT_SECONDS):
            await is_done.wait()


def build_rate_limiter(
    config: Config,
    store: Store,
    clock: Clock,
    lease_manager: RateLeaseManager,
    snapshot: BudgetSnapshot | None = None,
) -> RateLimiter:
    limit_cache = RateLimitCache(store, clock, snapshot or BudgetSnapshot(clock.now))
    return RateLimiter(limit_cache, lease_manager, serves_offline=config.on_store_down == "serve")


def build_hard_label_selector(
    config: Config,
    store: Store,
    clock: Clock,
    tasks: Tasks,
    recording: Recording,
    budgets: BudgetRegistry,
    price_tables: PriceTables,
    forwarder: Forwarder,
) -> HardLabelSelector:
    """Hard budgets of this process. `Recording.finish` returns what their leases still hold."""
    leases = BudgetLeases(store, clock, tasks, recording.lease_file, partial(read_spent_pico, store))
    leases.start()
    budgets.subscribe(lambda counter: leases.note_spend_elsewhere(HardBudgetKey(*counter[:3])))
    return HardLabelSelector(config, leases, price_tables, TokenCounter(forwarder))


def build_handler(
    config: Config,
    store: Store,
    tokens: TokenService,
    revocation: RevocationList,
    bedrock: BedrockAccess,
    clock: Clock,
    forwarder: Forwarder,
    flusher: Flusher,
    price_tables: PriceTables,
    budgets: BudgetRegistry,
    tasks: Tasks,
    rate_limiter: RateLimiter,
    hard_label_selector: HardLabelSelector,
    credential_issuer: CredentialIssuer | None = None,
) -> RequestHandler:
    request_stats = RequestStats((*config.labels, *PSEUDO_LABELS))
    retry_joiner = RetryJoiner(clock.monotonic)
    tasks.run_every("answers kept for retries", UPSTREAM_CHECK_SECONDS, retry_joiner.drop_expired)
    forwarder.set_endpoints(list_endpoints(config, bedrock))
    meters = MeterFactory(config, flusher.journal, price_tables, clock)
    return RequestHandler(
        authenticator=_build_authenticator(config, tokens, revocation),
        rate_limiter=rate_limiter,
        label_selector=build_label_selector(
            config, bedrock, flusher, budgets, meters, hard_label_selector, request_stats, clock
        ),
        forwarder=forwarder,
        retry_joiner=retry_joiner,
        credential_issuer=credential_issuer
        or LocalCredentialIssuer(
            ClientVerifier(store, clock.now, monotonic=clock.monotonic), tokens, clock.now, revocation.is_revoked
        ),
        simulated_prefix=bedrock.simulated_prefix,
        adds_request_metadata=config.upstream.request_metadata,
        request_stats=request_stats,
    )


def build_label_selector(
    config: Config,
    bedrock: BedrockAccess,
    flusher: Flusher,
    budgets: BudgetRegistry,
    meters: MeterFactory,
    hard_label_selector: HardLabelSelector,
    request_stats: RequestStats,
    clock: Clock,
) -> LabelSelector:
    labels = LabelResolver(config.labels, allows_unlabelled=config.unlabelled == "meter")
    return LabelSelector(
        labels,
        budgets,
        meters,
        _build_find_targets(config, bedrock),
        flusher.check_recordable,
        hard_label_selector,
        request_stats,
        ProfileModels(
            _list_regions(config),
            lambda region: bedrock.url or build_control_plane_url(region),
            bedrock.authorizer,
            clock,
        ),
    )


def _build_authenticator(config: Config, tokens: TokenService, revocation: RevocationList) -> Authenticator:
    identity = config.auth.identity
    return (
        TokenAuthenticator(tokens, revocation)
        if identity is None
        else FixedIdentityAuthenticator(identity.org, identity.app)
    )


def build_regional_url(region: str) -> str:
    return f"https://bedrock-runtime.{region}.amazonaws.com"


def build_control_plane_url(region: str) -> str:
    return f"https://bedrock.{region}.amazonaws.com"


def _list_regions(config: Config) -> set[str]:
    return {
        config.upstream.region,
        *(endpoint.region for label in config.labels.values() for endpoint in label.endpoints),
    }


def list_endpoints(config: Config, bedrock: BedrockAccess) -> set[UpstreamEndpoint]:
    """The endpoints of all configured labels, and the default one if any call may use it. App labels, which are
    inference profiles, are not among them."""
    labels = config.labels.values()
    endpoints = {
        _locate_endpoint(each.region, each.endpoint or bedrock.url)[0] for label in labels for each in label.endpoints
    }
    if config.unlabelled == "meter" or not all(label.endpoints for label in labels):
        endpoints.add(_locate_endpoint(config.upstream.region, bedrock.url)[0])
    return endpoints


def _locate_endpoint(region: str, url: str | None) -> tuple[UpstreamEndpoint, str]:
    return parse_endpoint(url or build_regional_url(region)), region


def _build_find_targets(config: Config, bedrock: BedrockAccess) -> FindTargets:
    """A function that lists the targets of a call, in order of preference. Targets, which include the encoded path, are
    cached per label, model and operation."""

    def list_endpoints(label: LabelConfig) -> list[tuple[UpstreamEndpoint, str, str]]:
        return [
            (*_locate_endpoint(each.region, each.endpoint or bedrock.url), each.model or label.model)
            for each in label.endpoints
        ]

    default = _locate_endpoint(config.upstream.region, bedrock.url)
    endpoints = {name: list_endpoints(label) for name, label in config.labels.items()}

    def find_targets(resolved: ResolvedLabel, call: ParsedCall) -> list[UpstreamTarget]:
        label = resolved.profile if type(resolved) is ResolvedAppLabel else resolved.label
        if call.operation not in MODEL_PATH_OPERATIONS:
            return build_targets(label, resolved.model, call.target.path, None)
        return build_targets(label, resolved.model, "", call.operation)

    @lru_cache(MAX_CACHED_TARGETS)
    def build_targets(
        label: str | AppLabel, model: str, path: str, operation: Operation | None
    ) -> list[UpstreamTarget]:
        configured = endpoints.get(label) if isinstance(label, str) else list_endpoints(label.label_config)
        return [
            UpstreamTarget(
                endpoint, region, served, path or operations.OperationPath(cast(Operation, operation), served).path
            )
            for endpoint, region, served in configured or [(*default, model)]
        ]

    return find_targets


@asynccontextmanager
async def open_traces(config: Config, telemetry: MetricsRegistry) -> AsyncIterator[Tracing | None]:
    """Yield the tracing of this process; None if no receiver is configured. Raises ConfigError."""
    if config.telemetry.otlp_endpoint is None:
        telemetry.add(SPANS, lambda: ())
        yield None
        return
    try:
        from price_keeper.telemetry.tracing import open_tracing  # its packages are an extra
    except ImportError as missing:
        raise ConfigError([f"telemetry.otlp_endpoint: {_OTEL_MISSING}: {missing.name} is not installed"]) from None
    async with open_tracing(config.telemetry) as tracing:
        telemetry.add(SPANS, tracing.samples)
        yield tracing


async def open_data_port(
    handler: RequestHandler,
    config: Config,
    clock: Clock,
    tasks: Tasks,
    write_batcher: WriteBatcher,
    workers: int = 1,
    tracing: Tracing | None = None,
) -> tuple[Listener, int]:
    """Start to listen on the data port; return the listener and the port. `workers` processes share the port and the
    machine's memory. Raises ConfigError or ListenFailed."""
    tls = config.listen.tls
    tls_context = create_server_context(Path(tls.certificate_file), Path(tls.key_file)) if tls is not None else None
    requests_bytes = None if config.listen.request_memory_mib is None else config.listen.request_memory_mib * 2**20
    limits = fit_to_memory(
        fit_to_descriptors(raise_descriptor_limit()),
        server_limits.read_memory_limits(),
        workers,
        requests_bytes,
        is_tls=tls is not None,
    )
    handler.retry_joiner.max_bytes = min(MAX_TOTAL_BYTES, limits.requests_bytes // 8)
    listener = Listener(
        handler if tracing is None else tracing.wrap_handler(handler),
        clock,
        tasks,
        limits,
        check_head=handler.check_head,
        new_request_id=handler.new_request_id,
        write_batcher=write_batcher,
        on_refusal=handler.request_stats.count_refusal,
    )
    data = config.listen.data
    port = await listener.listen(data.host, data.port, tls_context, is_shared=workers > 1)
    return listener, port
