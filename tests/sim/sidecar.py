"""A sidecar in simulated time: composed as the real one is, of the same parts, from its journal to its pipeline."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from price_keeper import data_port_wiring
from price_keeper.alerts.alert_raiser import AlertRaiser
from price_keeper.budgets import active_label
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.budgets.budget_snapshot import SnapshotFile
from price_keeper.budgets.budget_state import NEVER, BudgetState
from price_keeper.config import Config
from price_keeper.domain import Scope
from price_keeper.errors import JournalUnusable
from price_keeper.exchange import Request
from price_keeper.ledger.ledger_entries import Intent
from price_keeper.ledger.recording import Recording, open_recording
from price_keeper.rates.rate_lease_manager import SWEEP_SECONDS
from price_keeper.rates.store_time import StoreTime
from price_keeper.stores import schema
from price_keeper.stores.contract import Key, Store
from price_keeper.tasks import Tasks
from price_keeper.usage.price_updates import PriceTables

from tests.sim.bedrock import ByHeader, CallOutcome, SimulatedForwarder
from tests.sim.disk import Disk
from tests.sim.ledger import LedgerBucketClient, LedgerLeaseManager
from tests.sim.network import PATIENCE_SECONDS, Weather, Wire
from tests.sim.scheduler import BEGINNING, Loop
from tests.sim.setup import ORG
from tests.sim.truth import Name, Noted, TruthAlerts

if TYPE_CHECKING:
    from tests.sim.world import World

DRAIN_SECONDS = 20.0
NOTED_SECONDS = 5.0  # after which what was read stands on the disk
SERVING_PAUSE_SECONDS = 4.0  # between two calls of a scope that is served without a pause
FOLLOWED_SECONDS = 5.5  # after which a changed active label is known: 5 s, and the way to the store and back
TELLING = frozenset({"adjust", "_acquire", "_top_up", "_return_after_top_up"})  # tasks, of what was taken or used


class Clock:
    """A machine's: its wall clock may be wrong."""

    def __init__(self, world: World) -> None:
        self._world, self._scheduler = world, world.scheduler
        self.wrong_by = 0.0

    def now(self) -> float:
        return self._world.wall() + self.wrong_by

    def monotonic(self) -> float:
        return self._scheduler.now

    async def sleep(self, seconds: float) -> None:
        loop: Any = asyncio.get_running_loop()
        await (loop.sleep(seconds) if seconds > 0 else asyncio.sleep(0))


class Sidecar:
    """One machine, on which a sidecar lives, dies and lives again."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.name = world, number, f"s{number}"
        self.folder: Path = world.folder / self.name
        self.clock = Clock(world)
        self.weather = Weather(world.chance, world.setup.odds)
        self.is_disk_full = False
        self.noted: dict[Noted, int] = {}  # what stands on its disk, and since which life
        self.life: Life | None = None

    def start(self) -> None:
        self.life = Life(self)

    @property
    def running(self) -> Life | None:
        return self.life if self.life is not None and self.life.is_ready else None


class Life:
    """One run of the process."""

    def __init__(self, machine: Sidecar) -> None:
        world = machine.world
        self.machine, self.world, self.name = machine, world, machine.name
        self.number = next(world.lives)
        self.loop = Loop(world.scheduler, self)
        self.disk = Disk()
        self.disk.is_full = machine.is_disk_full
        self.is_dead = self.is_ready = self.is_over = self.is_stopping = False
        self.has_told_limits = True  # when it ended
        self.under_way: dict[int, Intent] = {}
        self.calls: dict[int, CallOutcome] = {}
        self.serving: dict[Key, tuple[float, float]] = {}  # by sticky state: since when without a pause, and until when
        self.is_out_of_time = bool(abs(machine.clock.wrong_by) > 2.5)
        self.wire: Wire | None = None
        self._task = self.loop.create_task(self._lives())
        self._task.add_done_callback(self._ends)

    # Its end.

    def die(self) -> None:
        """Between two turns."""
        if not self.is_dead:
            self.is_dead = True
            self.bury()

    def bury(self) -> None:
        if self.is_over:
            return
        self.world.trace(self.name, "is dead")
        self.disk.bury()
        self.has_told_limits = not self._leaves_limits_open()
        self.world.limits.is_exact &= self.has_told_limits
        self.world.truth.dies(self)
        self.world.limits.forget(self.number)
        self.is_ready = False
        self.is_over = True

    def _leaves_limits_open(self) -> bool:
        """Something was taken or used that it has not told the store, and never will."""
        if not self.is_ready:
            return False
        holders = self.leasing._holders.values()
        top_ups = self.leasing._top_ups
        has_pending = any(not each.lease.is_empty or each.unsettled or each in top_ups for each in holders)
        is_exact = (self.world.settings.limits or {}).get("mode") == "exact"
        is_telling = any(task.get_coro().__name__ in TELLING for task in self.tasks._spawned)  # perhaps not yet begun
        return bool(self.limiter.pending or has_pending or is_telling or (is_exact and (self.calls or self.under_way)))

    def _ends(self, task: asyncio.Task[None]) -> None:
        self.world.trace(self.name, "ends", type(task.exception()).__name__)
        if task.exception() is not None and not isinstance(task.exception(), JournalUnusable):
            self.world.scheduler.failures.append(task.exception())
        if not self.is_dead:
            self.die()

    # Its life, as `proxy/price_keeper/app.py` has it.

    async def _lives(self) -> None:
        world, clock = self.world, self.machine.clock
        setup, config = world.setup, self._config()
        self.stop = asyncio.Event()
        async with AsyncExitStack() as running:
            self.tasks = tasks = await running.enter_async_context(Tasks(clock))
            time = StoreTime(clock)
            self.wire = Wire(
                self.name,
                world.store,
                world.truth,
                world.loop,
                self.machine.weather,
                world.chance,
                world.trace,
                time if setup.tells_time else None,
                world.wall,
                clock,
            )
            store = cast(Store, self.wire)
            self.limiter = LedgerBucketClient(store, time.now_ms, clock)
            self.leasing = LedgerLeaseManager(self.limiter, clock, tasks)
            self.limiter.books = self.leasing.books = world.limits
            self.limiter.life = self.leasing.life = self.number
            if setup.limits is not None:
                tasks.run_every("leases", SWEEP_SECONDS, self.leasing.sweep, jitter=0.2)
            recording = await running.enter_async_context(open_recording(config, store, clock))
            self.recording: Recording = recording
            snapshot_file = SnapshotFile(self.machine.folder, clock)
            await snapshot_file.open()
            alerts = cast(AlertRaiser, TruthAlerts(world.truth))
            self.budget_registry = BudgetRegistry(
                config, store, recording.flusher, clock, tasks, alerts, snapshot_file.snapshot
            )
            self._opens_port(config, store)
            recording.start(config, tasks)
            self.budget_registry.start()
            snapshot_file.start(tasks)
            self.is_ready = True
            world.trace(self.name, "is ready", len(recording.recovered.sealed), recording.recovered.estimated_calls)
            await self.stop.wait()
            await self._drained()
            try:
                await recording.finish()
                await snapshot_file.write()
            finally:
                await self.leasing.stop()
                self.forwarder.close()
            await asyncio.sleep(0)

    def _opens_port(self, config: Config, store: Store) -> None:
        clock, tasks, recording, world = self.machine.clock, self.tasks, self.recording, self.world
        journal = recording.flusher.journal
        self.forwarder = SimulatedForwarder(clock, world.bedrock, lambda: bool(journal._unwritten))
        tariffs = PriceTables(config, store, None, clock)
        rate_limiter = data_port_wiring.build_rate_limiter(
            config, store, clock, self.leasing, self.budget_registry.snapshot
        )
        hard = data_port_wiring.build_hard_label_selector(
            config, store, clock, tasks, recording, self.budget_registry, tariffs, self.forwarder
        )
        self.hard = hard
        bedrock = data_port_wiring.BedrockAccess("http://bedrock", cast(Any, None))
        with mock.patch.object(data_port_wiring, "_build_authenticator", return_value=ByHeader(world.setup.callers)):
            self.pipeline = data_port_wiring.build_handler(
                config,
                store,
                cast(Any, None),
                cast(Any, None),
                bedrock,
                clock,
                self.forwarder,
                recording.flusher,
                tariffs,
                self.budget_registry,
                tasks,
                rate_limiter,
                hard,
                cast(Any, object()),
            )

    def _config(self) -> Config:
        setup = self.world.setup
        journal = replace(
            self.world.config.journal,
            dir=str(self.machine.folder),
            fsync_interval_ms=3000,
            max_unflushed_usd=Decimal(setup.max_unflushed_usd),
        )
        totals = replace(self.world.config.aggregator, interval_secs=setup.aggregate_secs)
        return replace(self.world.config, journal=journal, aggregator=totals, on_store_down=setup.on_store_down)

    async def _drained(self) -> None:
        """No new calls are accepted; calls in flight have some time."""
        self.is_stopping = True
        for _ in range(int(DRAIN_SECONDS)):
            if not self.calls:
                return
            await asyncio.sleep(1)

    # For the world.

    def takes(self, number: int, request: Request) -> CallOutcome:
        outcome = self.calls[number] = CallOutcome()

        def begin() -> None:
            request.received_at = self.loop.time()
            self.tasks.spawn_eager(handled())

        def over() -> None:
            self.calls.pop(number, None)
            self.world.call_is_over(self, number, outcome)

        async def handled() -> None:
            try:
                await self.pipeline(request, outcome)
            finally:
                over()

        self.loop.call_soon(begin)
        return outcome

    def about_to_begin(self, intent: Intent) -> None:
        """None takes a soft quota for less spent than it can know, and none goes by what is too old."""
        wire, truth, now = self.wire, self.world.truth, self.world.scheduler.now
        if wire is None:
            return
        self._pays_as_noted(intent)
        self._counts_no_more()
        charged = {(counter.scope, counter.period_or_lease) for counter in intent.charged.counters}
        for state in self._budget_states():
            if (state.scope.key, state.span.key) in charged:  # the state of a day that is over decides nothing
                self._follows(state, now)
            for label, quota in state.settings.quotas.items():
                spent = state.get_tracker(label)
                if spent not in intent.charged.spend_listeners or state.settings.enforcement != "soft":
                    continue
                name = Name(state.scope.key, label, state.span.key)
                least = truth.least(wire.seen, name, spent.exact_at)
                is_known = least is None or least < quota
                truth.check("no call begins on a quota that is known to be spent", is_known, name, least, quota)
                truth.check(
                    "what is taken is less than the quota", spent.committed < quota, name, spent.committed, quota
                )
                self._is_seen_in_time(name, state, now)

    def _follows(self, standing: BudgetState, now: float) -> None:
        """Of a scope that it serves without a pause, it knows an active label and an override soon."""
        key = schema.sticky_state_key(standing.scope, standing.span.key)
        since, last = self.serving.get(key, (now, now))
        since = now if now - last > SERVING_PAUSE_SECONDS else since
        self.serving[key] = since, now
        wire, truth = self.wire, self.world.truth
        changed_at = max(since, truth.sticky_changed_at.get(key, BEGINNING))
        if now - changed_at <= FOLLOWED_SECONDS or self.is_out_of_time or wire is None:
            return
        if wire.last_fault_at > changed_at - PATIENCE_SECONDS:
            return
        item, settings = self.world.store.items.get(key), standing.settings
        active = active_label.find_active_index(item, settings) if settings.is_sticky else 0
        override = active_label.parse_override(item, self.machine.clock.now())
        if override is not None and override.label in settings.ordering:
            active = settings.ordering.index(override.label)
        told = self.name, key, standing.active_index, active, now - changed_at
        truth.check("who serves a scope follows its active label", standing.active_index == active, *told)

    def _counts_no_more(self) -> None:
        for watch in self.budget_registry._refresh_states.values():
            self.world.truth.check_most(self.name, watch.budget)

    def _pays_as_noted(self, intent: Intent) -> None:
        """Who was met by a life before this one, whether or not this one can ask the store."""
        counters, world = intent.charged.counters, self.world
        scopes = {each.scope for each in counters if not each.is_lease}
        org, app = Scope(ORG), Scope.from_key(max(scopes, key=len))
        caller_day = org if world.setup.quota_scope == "ORG" else app
        noted = {settings for settings, since in self.machine.noted.items() if since < self.number}
        if any(settings_of(each) not in {each.key for each in noted} for each in (org, caller_day)):
            return
        details = self.name, caller_day.key, counters
        world.truth.check("who was met before pays for its calls", caller_day.key in scopes, *details)
        if Noted(settings_of(org), "hard") in noted and counters[0].label in world.settings.quotas:
            is_held = any(each.is_lease for each in counters)
            world.truth.check("who was met with a hard budget spends what is held for it", is_held, *details)

    def _budget_states(self) -> list[BudgetState]:
        """That calls can be paid from. Those by defaults alone are left as soon as better is known: until then nobody
        knows whose budget it is, nor over how many shards it is spread."""
        found = {
            id(caller_day.budget): (caller_day.budget, watch)
            for caller_day, watch in self.budget_registry._caller_days.values()
        }
        calendar = self.world.calendar
        return [
            each
            for each, watch in found.values()
            if each.settings.calendar == calendar and watch.spend_stale_at > -NEVER
        ]

    def _is_seen_in_time(self, name: Name, state: Any, now: float) -> None:
        """As long as nothing keeps it from looking, what was spent is known after a flush and an interval."""
        world, spent_at = self.world, self.world.truth.spent_at.get(name)
        if spent_at is None or world.last_trouble > spent_at - 120 or not world.is_soft_bound_kept:
            return
        most = world.longest_delay(state.settings.normal_secs)
        world.truth.check(
            "a soft quota is passed for no longer than stated", now - spent_at <= most, name, now - spent_at
        )

    def check(self) -> None:
        """What it counts is no less than what it can know, and what is under way is what it says."""
        if self.wire is None or not self.is_ready:
            return
        truth, now = self.world.truth, self.world.scheduler.now
        for settings, at in self.wire.seen.settings.items():
            if now - at > NOTED_SECONDS and not (self.disk.has_failed or self.is_out_of_time):
                self.machine.noted.setdefault(settings, self.number)
        self._counts_no_more()
        for state in self._budget_states():
            for label, spent in state._trackers.items():
                name = Name(state.scope.key, label, state.span.key)
                least = truth.least(self.wire.seen, name, spent.exact_at)
                is_less = least is not None and spent.spent < least
                details = self.name, name, spent.spent, least, spent.exact_at, self.wire.seen.known.get(name)
                truth.check("nobody counts less than it can know", not is_less, *details)
                expected = sum(
                    _expected(each) for each in self.under_way.values() if spent in each.charged.spend_listeners
                )
                truth.check(
                    "what is under way is counted", spent.in_flight == expected, name, spent.in_flight, expected
                )


def settings_of(scope: Scope) -> Key:
    return schema.org_config_key(scope.org) if scope.app is None else schema.app_config_key(scope.org, scope.app)


def _expected(intent: Intent) -> int:
    return intent.pico if intent.expected_pico is None else intent.expected_pico
