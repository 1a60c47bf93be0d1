"""What the control API works with, handed in once the process has started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from price_keeper.auth.client_secrets import ClientVerifier
from price_keeper.auth.container_credentials import CredentialIssuer
from price_keeper.auth.page_sessions import PageSessions
from price_keeper.auth.refresh_sessions import RefreshSessions
from price_keeper.auth.throttles import LoginThrottle, LookupRate, LookupThrottle
from price_keeper.auth.tokens import TokenService
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.config.config_sections import PSEUDO_LABELS
from price_keeper.control.api_rate_limits import ApiRateLimiter, BoundedConcurrency
from price_keeper.control.control_access import ControlAuthenticator
from price_keeper.control.page.state import PageState
from price_keeper.ledger.usage_submissions import SubmissionRecorder
from price_keeper.stores.contract import Store
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry
from price_keeper.usage.price_table import PriceTable

MAX_CONCURRENT_RETRIEVALS = 8  # at once: each reads the store, for a token that may be anybody's invention
MAX_WAITING_RETRIEVALS = 100
RETRIEVAL_RATE_PER_ADDRESS, RETRIEVAL_RATE_TOTAL = LookupRate(10, 5.0), LookupRate(100, 50.0)
RETRIEVAL_RATE_PER_TOKEN = LookupRate(3, 0.2)  # that was made here: it is good once


@dataclass(slots=True)
class ControlServices:
    config: Config  # the one in force
    store: Store
    clock: Clock
    budgets: BudgetRegistry
    submissions: SubmissionRecorder
    authenticator: ControlAuthenticator
    rate_limiter: ApiRateLimiter
    clients: ClientVerifier
    login_throttle: LoginThrottle
    credential_issuer: CredentialIssuer
    tokens: TokenService
    sessions: RefreshSessions
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

    page: PageState = field(default_factory=PageState)
    price_tables: dict[str, PriceTable] = field(default_factory=dict)  # of labels that usage was told of

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        counts = self.retrieval_token_counts
        telemetry.add(metrics.RETRIEVAL_TOKENS, lambda: [({"what": what}, n) for what, n in counts.items()])

    async def prepare_config(self, config: Config) -> Callable[[], None]:
        """What has it in force."""

        def apply_config() -> None:
            self.config = config
            self.price_tables.clear()

        return apply_config

    @property
    def labels(self) -> tuple[str, ...]:
        """Those that settings may name."""
        return (*self.config.labels, *PSEUDO_LABELS)
