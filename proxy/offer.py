"""What the data port sells: what follows from labels and prices, made anew when others are taken on.

A call keeps what it was chosen with to its end: nothing that is made here changes later, but is replaced.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy import dataplane
from proxy.clock import Clock
from proxy.config import Config
from proxy.config.prices import PSEUDO_LABELS
from proxy.dataplane import Bedrock
from proxy.forwarding.counting import Counting
from proxy.forwarding.forwarder import Forwarder
from proxy.hard.purses import Purses
from proxy.metering.price_updates import REFRESH_SECONDS, Tariffs
from proxy.pipeline import Pipeline
from proxy.recording.metering import Metering
from proxy.recording.recorder import Recorder
from proxy.selection.hard_budgets import HardBudgets
from proxy.selection.standings import Standings
from proxy.stores.contract import Store
from proxy.tasks import Tasks


class Offer:
    def __init__(
        self,
        tariffs: Tariffs,
        pipeline: Pipeline,
        bedrock: Bedrock,
        forwarder: Forwarder,
        recorder: Recorder,
        standings: Standings,
        purses: Purses,
        store: Store,
        clock: Clock,
        tasks: Tasks,
    ) -> None:
        """`tariffs` and `pipeline` are those that the process started with."""
        self.tariffs = tariffs
        self._pipeline = pipeline
        self._bedrock = bedrock
        self._forwarder = forwarder
        self._recorder = recorder
        self._standings = standings
        self._purses = purses
        self._store = store
        self._clock = clock
        self._tasks = tasks
        tasks.every("prices", REFRESH_SECONDS, lambda: self.tariffs.refresh(), jitter=0.2)

    async def prepared(self, config: Config) -> Callable[[], None]:
        """What takes it on, in one go. Until then nothing is another than before."""
        tariffs = await dataplane.prices(config, self._store, self._clock, self._tasks, self.tariffs)

        def take_on() -> None:
            pipeline, recorder, standings = self._pipeline, self._recorder, self._standings
            metering = Metering(config, recorder.journal, tariffs, self._clock, pipeline.choosing.metering)
            hard = HardBudgets(config, self._purses, tariffs, Counting(self._forwarder))
            choosing = dataplane.choosing(config, self._bedrock, recorder, standings, metering, hard, pipeline.traffic)
            endpoints = dataplane.endpoints_of(config, self._bedrock)
            # All that could fail has been done.
            labels = (*config.labels, *PSEUDO_LABELS)
            pipeline.traffic.tell_apart(labels)
            recorder.journal.tell_apart(labels)
            self._forwarder.knows(endpoints)
            self.tariffs = tariffs
            pipeline.take_on(choosing)

        return take_on
