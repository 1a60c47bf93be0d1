"""What the control API works with, handed in once the process has started."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.auth.clients import Clients
from proxy.auth.sessions import Sessions
from proxy.auth.tokens import Tokens
from proxy.clock import Clock
from proxy.config import Config
from proxy.config.prices import PSEUDO_LABELS
from proxy.control.access import Access
from proxy.control.rates import Rates
from proxy.recording.submitted import Submissions
from proxy.selection.standings import Standings
from proxy.stores.contract import Store


@dataclass(frozen=True, slots=True)
class Parts:
    config: Config
    store: Store
    clock: Clock
    standings: Standings
    submissions: Submissions
    access: Access
    rates: Rates
    clients: Clients
    tokens: Tokens
    sessions: Sessions

    @property
    def labels(self) -> tuple[str, ...]:
        """Those that settings may name."""
        return (*self.config.labels, *PSEUDO_LABELS)
