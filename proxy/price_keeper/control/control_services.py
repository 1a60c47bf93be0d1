"""The dependencies of the handlers of the control API, and how they are built.

The dispatcher receives them once the process has started; until then only probes are served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from price_keeper.auth.client_secrets import ClientVerifier
from price_keeper.auth.container_credentials import CredentialIssuer, LocalCredentialIssuer
from price_keeper.auth.org_keys import OrgKeyVerifier
from price_keeper.auth.page_sessions import PageSessions
from price_keeper.auth.refresh_sessions import RefreshSessions
from price_keeper.auth.registration import RefusalReason
from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.throttles import LoginThrottle, LookupRate, LookupThrottle
from price_keeper.auth.tokens import TokenService
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.config.config_sections import PSEUDO_LABELS, ControlApiConfig
from price_keeper.control.api_rate_limits import (
    ApiRateLimiter,
    BoundedConcurrency,
    LocalApiRateLimiter,
    SharedApiRateLimiter,
)
from price_keeper.control.control_access import ControlAuthenticator, VerifyToken, fingerprint_admin_key, load_admin_key
from price_keeper.control.control_connections import DEFAULT_PORT_LIMITS, ControlPortLimits
from price_keeper.control.page.page_state import PageState
from price_keeper.domain import Caller
from price_keeper.ledger.usage_submissions import SubmissionRecorder
from price_keeper.rates.rate_lease_manager import RateLeaseManager
from price_keeper.stores.contract import Store
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry
from price_keeper.usage.price_table import PriceTable

MAX_CONCURRENT_RETRIEVALS = 8  # each reads the store, for a token that may be made up
MAX_WAITING_RETRIEVALS = 100
RETRIEVAL_RATE_PER_ADDRESS, RETRIEVAL_RATE_TOTAL = LookupRate(10, 5.0), LookupRate(100, 50.0)
RETRIEVAL_RATE_PER_TOKEN = LookupRate(3, 0.2)  # for genuine tokens, each of which can be used once


@dataclass(slots=True)
class ControlServices:
    """Passed to every handler of the control API."""

    config: Config  # the configuration in force
    store: Store
    clock: Clock
    budgets: BudgetRegistry
    submissions: SubmissionRecorder
    authenticator: ControlAuthenticator
    rate_limiter: ApiRateLimiter
    clients: ClientVerifier
    org_keys: OrgKeyVerifier
    login_throttle: LoginThrottle
    credential_issuer: CredentialIssuer
    tokens: TokenService
    sessions: RefreshSessions
    revocation: RevocationList
    page_sessions: PageSessions
    retrieval_throttle: LookupThrottle
    marked_retrieval_throttle: LookupThrottle
    retrieval_slots: BoundedConcurrency = field(
        default_factory=lambda: BoundedConcurrency(MAX_CONCURRENT_RETRIEVALS, MAX_WAITING_RETRIEVALS)
    )
    marked_retrieval_slots: BoundedConcurrency = field(
        default_factory=lambda: BoundedConcurrency(MAX_CONCURRENT_RETRIEVALS, MAX_WAITING_RETRIEVALS)
    )
    retrieval_token_counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("made", "used", "refused"), 0)
    )
    retrieval_refusals: dict[RefusalReason, int] = field(
        default_factory=lambda: {"expired": 0, "reused": 0, "unknown": 0}
    )

    page: PageState = field(kw_only=True)
    price_tables: dict[str, PriceTable] = field(default_factory=dict)  # of labels for which usage was submitted

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        counts = self.retrieval_token_counts
        refusals = self.retrieval_refusals
        telemetry.add(metrics.RETRIEVAL_TOKENS, lambda: [({"what": what}, n) for what, n in counts.items()])
        telemetry.add(metrics.RETRIEVAL_REFUSALS, lambda: [({"reason": reason}, n) for reason, n in refusals.items()])

    async def prepare_config(self, config: Config) -> Callable[[], None]:
        """The function that applies a reloaded configuration."""

        def apply_config() -> None:
            self.config = config
            self.price_tables.clear()

        return apply_config

    @property
    def labels_and_pseudo_labels(self) -> tuple[str, ...]:
        """What the settings of orgs and apps may name."""
        return (*self.config.labels, *PSEUDO_LABELS)


def build_control_services(
    config: Config,
    environ: Mapping[str, str],
    store: Store,
    clock: Clock,
    budgets: BudgetRegistry,
    tokens: TokenService,
    revocation: RevocationList,
    clients: ClientVerifier,
    rate_limiter: ApiRateLimiter | None = None,
    leasing: RateLeaseManager | None = None,
    login_throttle: LoginThrottle | None = None,
    limits: ControlPortLimits = DEFAULT_PORT_LIMITS,
) -> ControlServices:
    """Build the services. `login_throttle` is shared with the data port. Raises ConfigError if the admin key cannot be
    loaded."""
    login_throttle = login_throttle or LoginThrottle(clock.monotonic)
    admin_key = load_admin_key(config.auth, environ)
    org_keys = OrgKeyVerifier(store, clock.now, LookupThrottle(clock), clock.monotonic, tokens.secret_tagger)
    page_sessions = PageSessions(tokens, revocation, fingerprint_admin_key(admin_key))
    return ControlServices(
        config=config,
        store=store,
        clock=clock,
        budgets=budgets,
        submissions=SubmissionRecorder(store, clock, (budgets, budgets.known_totals)),
        authenticator=ControlAuthenticator(
            admin_key, _build_token_verifier(tokens, revocation), login_throttle, page_sessions, clock, org_keys
        ),
        rate_limiter=rate_limiter or build_rate_limiter(config.control_api, clock, leasing),
        clients=clients,
        org_keys=org_keys,
        login_throttle=login_throttle,
        credential_issuer=LocalCredentialIssuer(clients, tokens, clock.now, revocation.is_revoked),
        tokens=tokens,
        sessions=RefreshSessions(store, tokens, revocation, clock, config.auth.max_sessions),
        revocation=revocation,
        page_sessions=page_sessions,
        retrieval_throttle=LookupThrottle(clock, RETRIEVAL_RATE_PER_ADDRESS, RETRIEVAL_RATE_TOTAL),
        marked_retrieval_throttle=LookupThrottle(clock, RETRIEVAL_RATE_PER_TOKEN, RETRIEVAL_RATE_TOTAL),
        page=PageState(clock.monotonic, limits),
    )


def build_rate_limiter(config: ControlApiConfig, clock: Clock, leasing: RateLeaseManager | None) -> ApiRateLimiter:
    burst, per_second = config.burst_requests, config.requests_per_second
    local = LocalApiRateLimiter(clock.monotonic, burst, per_second)
    return local if leasing is None else SharedApiRateLimiter(leasing, local, burst, per_second)


def _build_token_verifier(tokens: TokenService, revocation: RevocationList) -> VerifyToken:
    async def verify(token: str) -> Caller:
        claims = tokens.verify_access(token)
        if not revocation.is_known_valid(claims):
            await revocation.check_store(claims)
        return claims.caller

    return verify
