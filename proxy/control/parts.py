"""What the control API works with, handed in once the process has started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from proxy import telemetry as metrics
from proxy.auth.clients import Clients
from proxy.auth.container import HandsOut
from proxy.auth.failures import WrongSecrets
from proxy.auth.lookups import Lookups, Pace
from proxy.auth.page_sessions import PageSessions
from proxy.auth.sessions import Sessions
from proxy.auth.tokens import Tokens
from proxy.clock import Clock
from proxy.config import Config
from proxy.config.prices import PSEUDO_LABELS
from proxy.control.access import Access
from proxy.control.page.state import PageState
from proxy.control.rates import Rates
from proxy.control.turns import Turns
from proxy.metering.pricing import Tariff
from proxy.recording.submitted import Submissions
from proxy.selection.standings import Standings
from proxy.stores.contract import Store
from proxy.telemetry import Telemetry

RETRIEVALS = 8  # at once: each reads the store, for a token that may be anybody's invention
RETRIEVALS_WAITING = 100
RETRIEVALS_OF_AN_ADDRESS, RETRIEVALS_OF_ALL = Pace(10, 5.0), Pace(100, 50.0)
RETRIEVALS_OF_A_TOKEN = Pace(3, 0.2)  # that was made here: it is good once


@dataclass(slots=True)
class Parts:
    config: Config  # the one in force
    store: Store
    clock: Clock
    standings: Standings
    submissions: Submissions
    access: Access
    rates: Rates
    clients: Clients
    wrong_secrets: WrongSecrets
    credentials: HandsOut
    tokens: Tokens
    sessions: Sessions
    page_sessions: PageSessions
    retrieval_pace: Lookups
    marked_retrieval_pace: Lookups
    retrievals: Turns = field(default_factory=lambda: Turns(RETRIEVALS, RETRIEVALS_WAITING))
    marked_retrievals: Turns = field(default_factory=lambda: Turns(RETRIEVALS, RETRIEVALS_WAITING))
    retrieval_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("made", "used", "refused"), 0))

    page: PageState = field(default_factory=PageState)
    tariffs: dict[str, Tariff] = field(default_factory=dict)  # of labels that usage was told of

    def add_to(self, telemetry: Telemetry) -> None:
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
