"""What the control API works with, handed in once the process has started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from price_keeper import telemetry as metrics
from price_keeper.auth.clients import ClientVerifier
from price_keeper.auth.container import CredentialIssuer
from price_keeper.auth.failures import LoginThrottle
from price_keeper.auth.lookups import LookupThrottle, LookupRate
from price_keeper.auth.page_sessions import PageSessions
from price_keeper.auth.sessions import RefreshSessions
from price_keeper.auth.tokens import TokenService
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.config.prices import PSEUDO_LABELS
from price_keeper.control.access import Access
from price_keeper.control.page.state import PageState
from price_keeper.control.rates import Rates
from price_keeper.control.turns import Turns
from price_keeper.metering.pricing import PriceTable
from price_keeper.recording.submitted import SubmissionRecorder
from price_keeper.selection.standings import BudgetRegistry
from price_keeper.stores.contract import Store
from price_keeper.telemetry import MetricsRegistry

RETRIEVALS = 8  # at once: each reads the store, for a token that may be anybody's invention
RETRIEVALS_WAITING = 100
RETRIEVALS_OF_AN_ADDRESS, RETRIEVALS_OF_ALL = LookupRate(10, 5.0), LookupRate(100, 50.0)
RETRIEVALS_OF_A_TOKEN = LookupRate(3, 0.2)  # that was made here: it is good once


@dataclass(slots=True)
class Parts:
    config: Config  # the one in force
    store: Store
    clock: Clock
    standings: BudgetRegistry
    submissions: SubmissionRecorder
    access: Access
    rates: Rates
    clients: ClientVerifier
    wrong_secrets: LoginThrottle
    credentials: CredentialIssuer
    tokens: TokenService
    sessions: RefreshSessions
    page_sessions: PageSessions
    retrieval_pace: LookupThrottle
    marked_retrieval_pace: LookupThrottle
    retrievals: Turns = field(default_factory=lambda: Turns(RETRIEVALS, RETRIEVALS_WAITING))
    marked_retrievals: Turns = field(default_factory=lambda: Turns(RETRIEVALS, RETRIEVALS_WAITING))
    retrieval_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("made", "used", "refused"), 0))

    page: PageState = field(default_factory=PageState)
    tariffs: dict[str, PriceTable] = field(default_factory=dict)  # of labels that usage was told of

    def add_to(self, telemetry: MetricsRegistry) -> None:
        counted = self.retrieval_tokens
        telemetry.add(metrics.RETRIEVAL_TOKENS, lambda: [({"what": what}, n) for what, n in counted.items()])

    async def prepared(self, config: Config) -> Callable[[], None]:
        """What has it in force."""

        def take_on() -> None:
            self.config = config
            self.tariffs.clear()

        return take_on

    @property
    def labels(self) -> tuple[str, ...]:
        """Those that settings may name."""
        return (*self.config.labels, *PSEUDO_LABELS)
