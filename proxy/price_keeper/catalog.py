"""The parts of the data port that depend on labels and prices, replaced as a whole on a configuration reload.

`Catalog.prepare` does everything that may fail, then returns a function that switches to the new configuration in one
iteration of the event loop. Calls that have their label already keep the objects they started with.
"""

from __future__ import annotations

from collections.abc import Callable

from price_keeper import data_port_wiring
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.budgets.hard.budget_lease import BudgetLeases
from price_keeper.budgets.hard_label_selector import HardLabelSelector
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.config.config_sections import PSEUDO_LABELS
from price_keeper.data_port_wiring import BedrockAccess
from price_keeper.handler import RequestHandler
from price_keeper.ledger.flusher import Flusher
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks
from price_keeper.upstream.forwarder import Forwarder
from price_keeper.upstream.token_counter import TokenCounter
from price_keeper.usage.meter_factory import MeterFactory
from price_keeper.usage.price_updates import REFRESH_SECONDS, PriceTables


class Catalog:
    """Replaces labels, prices and endpoints of a running data port. `price_tables` are those in force."""

    def __init__(
        self,
        price_tables: PriceTables,
        handler: RequestHandler,
        bedrock: BedrockAccess,
        forwarder: Forwarder,
        flusher: Flusher,
        budgets: BudgetRegistry,
        leases: BudgetLeases,
        store: Store,
        clock: Clock,
        tasks: Tasks,
    ) -> None:
        """`price_tables` and `handler` are those that the process started with."""
        self.price_tables = price_tables
        self._handler = handler
        self._bedrock = bedrock
        self._forwarder = forwarder
        self._flusher = flusher
        self._budgets = budgets
        self._leases = leases
        self._store = store
        self._clock = clock
        self._tasks = tasks
        tasks.run_every("prices", REFRESH_SECONDS, lambda: self.price_tables.refresh(), jitter=0.2)

    async def prepare(self, config: Config) -> Callable[[], None]:
        """Load what the new configuration needs, and return the function that applies it. Until that is called, nothing
        changes. Raises if the configuration cannot be applied."""
        price_tables = await data_port_wiring.load_price_tables(
            config, self._store, self._clock, self._tasks, self.price_tables
        )

        def apply() -> None:
            handler, flusher, budgets = self._handler, self._flusher, self._budgets
            meters = MeterFactory(config, flusher.journal, price_tables, self._clock, handler.label_selector.meters)
            hard_label_selector = HardLabelSelector(config, self._leases, price_tables, TokenCounter(self._forwarder))
            selector = data_port_wiring.build_label_selector(
                config,
                self._bedrock,
                flusher,
                budgets,
                meters,
                hard_label_selector,
                handler.request_stats,
                self._clock,
            )
            endpoints = data_port_wiring.list_endpoints(config, self._bedrock)
            # Nothing below this line can fail, so the switch is atomic.
            labels = (*config.labels, *PSEUDO_LABELS)
            handler.request_stats.track_labels(labels)
            flusher.journal.track_labels(labels)
            self._forwarder.set_endpoints(endpoints)
            self.price_tables = price_tables
            handler.apply_config(selector)

        return apply
