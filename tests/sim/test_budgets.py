"""Whatever happens between sidecars and their store: none takes a quota for less spent than it can know, the active
label never goes back, and once all is quiet all of them know the truth and decide alike."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from price_keeper.budgets import active_label, label_policy
from price_keeper.budgets.active_label import clear_override, parse_override, set_override
from price_keeper.domain import Caller, Scope
from price_keeper.errors import ConditionFailed, Refusal
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores import schema
from price_keeper.stores.contract import Update, Value

from tests.support.clock import ManualClock
from tests.support.effort import tries
from tests.support.fleet_simulation import (
    USD,
    CheckedStoreLink,
    CounterName,
    FleetWorld,
    SimulatedProcess,
    SkewedClock,
    run_with_time,
    simulated,
)

T = TypeVar("T")

ORG = "550e8400-e29b-41d4-a716-446655440000"
LABELS = ("premium", "standard", "economy")
APPS = (Caller(ORG, "web", "client"), Caller(ORG, "batch", "client"))
QUOTAS = (0, 1, 5, 10, 40)  # USD
LONGER_THAN_ANY_LOOK = 400  # seconds: so long after the last one, a call waits for the next

which = st.integers(0, 5)
money = st.sampled_from((0, 1, USD // 3, USD, 2 * USD + 7, 4 * USD))
moment = st.sampled_from((0.3, 1, 4, 6, 31, 64, 64, 301, 3700, 20_000))
wrong_by = st.sampled_from((-2.0, -0.7, 0.0, 1.3, 2.0))


class Fleet(RuleBasedStateMachine):
    @initialize(
        skews=st.lists(wrong_by, min_size=2, max_size=6),
        scope=st.sampled_from(("APP", "ORG")),
        period=st.sampled_from(("day", "day", "week")),
        zone=st.sampled_from(("UTC", "America/New_York")),
        shards=st.sampled_from((8, 16)),
        normal=st.sampled_from((62, 300)),
    )
    def begin(self, skews: list[float], scope: str, period: str, zone: str, shards: int, normal: int) -> None:
        self.clock = ManualClock()
        self.stack = ExitStack()
        self.loop, folder = self.stack.enter_context(simulated(self.clock))
        self.world = FleetWorld(self.clock, folder)
        self.zone, self.period, self.quota_scope = zone, Period(period), scope
        self.shards, self.normal_seconds = shards, normal
        self.version, self.ordering = 1, list(LABELS)
        self.quotas: dict[str, int] = {"premium": 10, "standard": 5, "economy": 40}
        self.is_sticky = True
        self.fleet = [
            SimulatedProcess(self.world, f"s{number}", SkewedClock(self.clock, skew))
            for number, skew in enumerate(skews)
        ]
        self.run(self._begin())

    async def _begin(self) -> None:
        await self._configure()
        for process in self.fleet:
            await self._start(process)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(run_with_time(self.clock, work))

    def one(self, number: int) -> SimulatedProcess:
        return self.fleet[number % len(self.fleet)]

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        with self.stack:
            try:
                self.all_agree_when_all_is_quiet()
            finally:
                self.run(self._stop())

    async def _stop(self) -> None:
        for process in self.fleet:
            process.stop()

    # Calls.

    @rule(sidecar=which, app=st.sampled_from(APPS), label=st.sampled_from(LABELS), expected=money)
    def a_call_begins(self, sidecar: int, app: Caller, label: str, expected: int) -> None:
        with suppress(Refusal):
            self.run(self.one(sidecar).begin(app, label, expected))

    @precondition(lambda self: any(process.open for process in self.fleet))
    @rule(number=st.integers(0, 100), pico=money)
    def a_call_ends(self, number: int, pico: int) -> None:
        under_way = [(process, call) for process in self.fleet for call in process.open]
        process, call = under_way[number % len(under_way)]
        self.run(self._end(process, call, pico))

    async def _end(self, process: SimulatedProcess, call: Any, pico: int) -> None:
        process.end(call, pico)

    @rule(sidecar=which, app=st.sampled_from(APPS), label=st.sampled_from(LABELS), pico=money, times=st.integers(1, 4))
    def calls_come_and_go(self, sidecar: int, app: Caller, label: str, pico: int, times: int) -> None:
        for _ in range(times):
            self.run(self._call(self.one(sidecar), app, label, pico))

    async def _call(self, process: SimulatedProcess, app: Caller, label: str, pico: int) -> None:
        with suppress(Refusal):
            process.end(await process.begin(app, label, pico // 2), pico)

    # The way to the store.

    @rule(sidecar=which, how=st.sampled_from(("well", "well", "away", "lost")))
    def flush(self, sidecar: int, how: str) -> None:
        process = self.one(sidecar)
        line = process.links["flush"]
        if line.blocked is not None:
            return
        line.next_fault = how
        self.run(self._in_the_background(process, "flush"))  # it waits for a look that takes long

    @rule(sidecar=which, is_lost=st.booleans())
    def totals_are_made(self, sidecar: int, is_lost: bool) -> None:
        process = self.one(sidecar)
        if process.links["total"].blocked is None:
            process.links["total"].loses_answers = is_lost
            self.run(process.add_up_totals())
            process.links["total"].loses_answers = False

    @rule(
        sidecar=which,
        role=st.sampled_from(("flush", "look", "look", "total")),
        is_before=st.booleans(),
        passing=st.integers(0, 6),
    )
    def something_takes_long(self, sidecar: int, role: str, is_before: bool, passing: int) -> None:
        """One of the next things that it asks of the store."""
        process = self.one(sidecar)
        line = process.links[role]
        if line.blocked is None:
            line.block(is_before, {"flush": 0, "look": passing % 3, "total": passing}[role])
            self.run(self._in_the_background(process, role))

    async def _in_the_background(self, process: SimulatedProcess, role: str) -> None:
        work = {"flush": process.flusher.flush, "total": process.add_up_totals}.get(role)
        if work is not None:
            process.work.append(self.loop.create_task(work()))

    @rule(sidecar=which, app=st.sampled_from(APPS), is_before=st.booleans(), how=st.sampled_from(("well", "lost")))
    def a_flush_comes_while_shards_are_read(self, sidecar: int, app: Caller, is_before: bool, how: str) -> None:
        """And after it they are read once more, from whatever it left."""
        process = self.one(sidecar)
        line = process.links["look"]
        if line.blocked is None:
            for _ in range(2):
                self.run(self._call(process, app, "premium", 4 * USD))
            line.block(is_before, 1)  # after the settings come the shards
            self.time_passes(LONGER_THAN_ANY_LOOK)
            self.run(self._look(process, app))
            self.flush(sidecar, how)
            self.run(self._let_go(line))
            self.time_passes(LONGER_THAN_ANY_LOOK)
            self.run(self._look(process, app))

    @rule(sidecar=which, role=st.sampled_from(("flush", "look", "total")))
    def and_goes_on(self, sidecar: int, role: str) -> None:
        self.run(self._let_go(self.one(sidecar).links[role]))

    async def _let_go(self, line: CheckedStoreLink) -> None:
        line.unblock()

    @rule(sidecar=which, is_away=st.booleans(), is_behind=st.booleans())
    def what_is_read(self, sidecar: int, is_away: bool, is_behind: bool) -> None:
        line = self.one(sidecar).links["look"]
        line.is_away, line.is_behind = is_away, is_behind

    @rule(seconds=moment)
    def time_passes(self, seconds: float) -> None:
        self.loop.run_until_complete(self.clock.advance(seconds))

    @rule(sidecar=which, skew=wrong_by)
    def a_clock_is_set(self, sidecar: int, skew: float) -> None:
        self.one(sidecar).clock.skew = skew

    @rule(sidecar=which)
    def a_sidecar_is_killed(self, sidecar: int) -> None:
        self.run(self._die(self.one(sidecar)))
        self.run(self._start(self.one(sidecar)))

    async def _die(self, process: SimulatedProcess) -> None:
        process.die()

    async def _start(self, process: SimulatedProcess) -> None:
        process.start()

    # People.

    @rule(label=st.sampled_from(LABELS), quota=st.sampled_from(QUOTAS))
    def a_quota_is_changed(self, label: str, quota: int) -> None:
        self.quotas[label] = quota
        self.run(self._configure())

    @rule(ordering=st.permutations(LABELS), length=st.integers(1, 3))
    def the_ordering_is_changed(self, ordering: list[str], length: int) -> None:
        self.ordering, self.version = ordering[:length], self.version + 1
        self.run(self._configure())

    @rule()
    def sticky_fallback_is_switched(self) -> None:
        self.is_sticky = not self.is_sticky
        self.run(self._configure())

    async def _configure(self) -> None:
        quotas: dict[str, Value] = {label: usd * 10**6 for label, usd in self.quotas.items()}
        changed: dict[str, Value] = {
            "timezone": self.zone,
            "period": self.period.value,
            "quota_scope": self.quota_scope,
            "model_ordering": list(self.ordering),
            "quotas": quotas,
            "sticky_fallback_enabled": self.is_sticky,
            "version": self.version,
            "agg_shard_count": self.shards,
            "refresh_interval_normal_secs": self.normal_seconds,
        }
        await self.world.store.update(Update(schema.org_config_key(ORG), set=changed))

    def _scope(self, app: Caller) -> Scope:
        return Scope(ORG, app.app if self.quota_scope == "APP" else None)

    @rule(app=st.sampled_from(APPS), label=st.sampled_from(LABELS), hours=st.none() | st.integers(0, 3))
    def an_override_is_set(self, app: Caller, label: str, hours: int | None) -> None:
        if label in self.ordering:
            self.run(self._override(app, label, hours))

    async def _override(self, app: Caller, label: str, hours: int | None) -> None:
        now = self.clock.now()
        today = find_span(self.period, now, load_zone(self.zone))
        until = None if hours is None else now + 100 + hours * 3600
        arguments = self.world.store, self.clock, self._scope(app), today, label, "why", "who", until
        await set_override(*arguments, ordering=self.ordering)

    @rule(app=st.sampled_from(APPS))
    def an_override_is_cleared(self, app: Caller) -> None:
        today = find_span(self.period, self.clock.now(), load_zone(self.zone))
        with suppress(ConditionFailed):
            self.run(clear_override(self.world.store, self._scope(app), today))

    # What holds.

    @invariant()
    def none_takes_a_quota_for_less_spent_than_it_can_know(self) -> None:
        for process in getattr(self, "fleet", ()):
            process.check()

    @rule()
    def all_agree_when_all_is_quiet(self) -> None:
        self.run(self._become_quiet())
        self.run(self._flush_all())
        for _ in range(2):  # with the first look, some learn that the store is back
            self.loop.run_until_complete(self.clock.advance(LONGER_THAN_ANY_LOOK))
            for process in self.fleet:
                for app in APPS:
                    self.run(self._look(process, app))
        self.run(self._agree())
        for name in {name for _, name in self.world.recorded}:
            assert self.world.flushed(name) == self.world.truth(name)

    async def _become_quiet(self) -> None:
        for process in self.fleet:
            for line in process.links.values():
                line.unblock()
                line.is_away = line.is_behind = line.loses_answers = False
                line.next_fault = ""

    async def _flush_all(self) -> None:
        for process in self.fleet:
            for call in tuple(process.open):
                process.end(call, call.expected)
            assert await process.flusher.flush()
            assert process.flusher.unflushed_by_counter() == {}

    async def _look(self, process: SimulatedProcess, app: Caller) -> None:
        await process.caller_day(app)

    async def _agree(self) -> None:
        """But for those who look just when a day or an override ends."""
        for app in APPS:
            payers = [await process.caller_day(app) for process in self.fleet]
            states = [caller_day.budget for caller_day in payers]
            if len({state.span for state in states}) > 1 or self._something_ends(app):
                continue
            for state in states:
                for label in state.settings.quotas:
                    spent = state.get_tracker(label)
                    name = CounterName(state.scope.key, label, state.span.key)
                    assert (spent.spent, spent.in_flight) == (self.world.truth(name), 0)
            for label in LABELS:
                assert {served(state, label) for state in states} == {self._due_to_serve(app, label)}

    def _due_to_serve(self, app: Caller, label: str) -> str:
        scope, now = self._scope(app), self.clock.now()
        today = find_span(self.period, now, load_zone(self.zone))
        item = self.world.store.items.get(schema.sticky_state_key(scope, today.key)) or {}
        override = parse_override(item, now)
        # An override for a label that has left the chain says nothing, so what is sticky holds.
        is_override = override is not None and override.label in self.ordering
        active = override.label if is_override else item.get(active_label.LABEL_ATTRIBUTE) if self.is_sticky else None
        index = self.ordering.index(active) if active in self.ordering else 0
        quotas = {name: usd * USD for name, usd in self.quotas.items()}
        may = label_policy.find_candidates(label, self.ordering, quotas, index)
        spent = {name: self.world.truth(CounterName(scope.key, name, today.key)) for name in LABELS}
        found = next((each for each in may if spent[each] < quotas[each]), None)
        return found or ("QuotaExceeded" if may else "InvalidRequest")

    def _something_ends(self, app: Caller) -> bool:
        now = self.clock.now()
        today = find_span(self.period, now, load_zone(self.zone))
        item = self.world.store.items.get(schema.sticky_state_key(self._scope(app), today.key)) or {}
        return any(abs(now - end) < 10 for end in (today.start, today.end, item.get("override_until_epoch", 0)))


def served(state: Any, label: str) -> str:
    try:
        return str(state.decide(label, False).label)
    except Refusal as refused:
        return type(refused).__name__


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=tries(100), stateful_step_count=50)
