"""Keeps a standing for each scope that is called for, and looks at the store for it as often as it is needed.

A call of a scope that is known waits for nobody. What is asked of the store for one scope is asked once, however many
calls wait for the answer. While the store is away, what is known stays in force and is marked stale.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace

from proxy import telemetry as metrics
from proxy.alerts.raising import Alerts
from proxy.alerts.thresholds import crossed
from proxy.calendar_days import Period, Span, span
from proxy.clock import Clock
from proxy.config import Config
from proxy.errors import ConditionFailed, StoreError
from proxy.model import Caller, Scope
from proxy.recording.entries import Counter
from proxy.recording.recorder import Recorder
from proxy.selection import sticky
from proxy.selection.looks import Looks
from proxy.selection.overrides import Override, override_of
from proxy.selection.payer import Payer
from proxy.selection.plan import Plan
from proxy.selection.spent import NEVER
from proxy.selection.standing import LEAST_SECONDS, Outcomes, Standing
from proxy.stores.contract import Item, Store
from proxy.tasks import Tasks
from proxy.telemetry import Telemetry

MOST_STANDINGS = 20_000
WAIT_SECONDS = 2.0  # for the store, of a call of a scope that is not known; then it goes by what is known
ASK_AGAIN_SECONDS = 3.0  # while the store is away
SETTINGS_SECONDS = 60.0  # so that a change of quotas, or an override, is seen soon
GRACE = 0.1  # of the interval: whoever calls that long after it is over waits, as what is known is old

_log = logging.getLogger("proxy.selection")


_Name = tuple[str, "str | None"]  # of an org and an app


@dataclass(slots=True)
class _Watch:
    """When to look again after a standing. Times are by the monotonic clock, but for `ends`."""

    standing: Standing
    due: float = -NEVER
    money_due: float = -NEVER  # when not only the settings are to be looked at
    old: float = -NEVER  # from then on a call waits for a look
    looked_at: float = -NEVER
    ends: float = NEVER  # of an override, or of what is known only by default
    override: Override | None = None
    warned_of: tuple[str, ...] = ()
    looking: asyncio.Event | None = None


class Standings:
    def __init__(
        self, config: Config, store: Store, recorder: Recorder, clock: Clock, tasks: Tasks, alerts: Alerts | None = None
    ) -> None:
        self._labels = config.labels
        self._looks = Looks(config, store, recorder, clock)
        self._aggregator_seconds = config.aggregator.interval_secs
        self._store = store
        self._recorder = recorder
        self._clock = clock
        self._tasks = tasks
        self._alerts = alerts
        self._payers: dict[_Name, tuple[Payer, _Watch]] = {}
        self._watches: dict[tuple[str, str], _Watch] = {}  # by scope and period
        self._frozen: dict[str, tuple[Plan, Span]] = {}  # by org: what it cannot change before its period is over
        self._meeting: dict[_Name, asyncio.Event] = {}
        self.looks = self.failures = self.moves = 0
        self.outcomes = Outcomes()
        recorder.sender.books = self

    def add_to(self, telemetry: Telemetry) -> None:
        telemetry.add(metrics.SCOPES, lambda: len(self._watches))
        telemetry.add(metrics.SCOPES_STALE, lambda: sum(watch.standing.is_stale for watch in self._watches.values()))
        telemetry.add(
            metrics.LOOKS,
            lambda: [({"failed": "false"}, self.looks - self.failures), ({"failed": "true"}, self.failures)],
        )
        telemetry.add(metrics.MOVES, lambda: self.moves)
        telemetry.add(metrics.SERVED_ELSEWHERE, lambda: self.outcomes.elsewhere)
        telemetry.add(metrics.QUOTA_REFUSALS, lambda: self.outcomes.refused)

    # For the calls.

    def known(self, caller: Caller) -> Payer | None:
        """Without asking anybody; None if somebody has to be asked first."""
        found = self._payers.get((caller.org, caller.app))
        if found is None:
            return None
        payer, watch = found
        now, moment = self._clock.now(), self._clock.monotonic()
        if not payer.start <= now < payer.end or now >= watch.ends or moment >= watch.old:
            return None
        if moment >= watch.due:
            self._look(watch)
        return payer

    async def learned(self, caller: Caller) -> Payer:
        """Asks the store. If that takes long, or is away, what is known holds, and the defaults where nothing is."""
        name, now = (caller.org, caller.app), self._clock.now()
        found = self._payers.get(name)
        if found is None or not found[0].start <= now < found[0].end:
            await self._met(caller)
            found = self._payers[name]
        payer, watch = found
        if self._clock.monotonic() >= watch.old or now >= watch.ends:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    await self._look(watch).wait()
        return payer

    # What the recorder tells.

    def acknowledged(self, counter: Counter, pico: int) -> None:
        watch = self._watches.get((counter.scope, counter.period))
        if watch is not None:
            watch.standing.spent(counter.label).acknowledged(pico, self._clock.now())

    def dropped(self, counter: Counter, pico: int) -> None:
        watch = self._watches.get((counter.scope, counter.period))
        if watch is not None:
            watch.standing.spent(counter.label).dropped(pico)

    # Meeting somebody for the first time in a period.

    async def _met(self, caller: Caller) -> None:
        name = (caller.org, caller.app)
        event = self._meeting.get(name)
        if event is None:
            event = self._meeting[name] = asyncio.Event()
            self._tasks.once(self._meet(caller, event))
        await event.wait()

    async def _meet(self, caller: Caller, event: asyncio.Event) -> None:
        try:
            is_known, plan = True, self._plan_so_far(caller)
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    plan = await self._looks.plan(Scope(caller.org, caller.app))
            except (StoreError, TimeoutError) as failure:
                is_known = False
                _log.warning("the settings of %s cannot be read; those known before hold: %s", caller.org, failure)
            self._introduce(caller, plan, is_known)
        finally:
            del self._meeting[caller.org, caller.app]
            event.set()

    def _introduce(self, caller: Caller, plan: Plan, is_known: bool) -> None:
        now = self._clock.now()
        plan, period = self._settled(caller.org, plan, now, is_known)
        scope = Scope(caller.org, caller.app if plan.quota_scope == "APP" else None)
        watch = self._watches.get((scope.key, period.key)) or self._new_watch(scope, period, plan)
        if watch.standing.span != period:
            watch.standing.renew(period, plan)
            watch.money_due = watch.old = -NEVER
        payer = Payer(caller, watch.standing, span(Period.DAY, now, plan.zone))
        if not is_known:
            payer.end = min(payer.end, int(now + ASK_AGAIN_SECONDS))
        self._payers[caller.org, caller.app] = payer, watch

    def _settled(self, org: str, plan: Plan, now: float, is_known: bool) -> tuple[Plan, Span]:
        """All apps of an org go by one calendar, until its period is over."""
        frozen = self._frozen.get(org)
        if frozen is not None and frozen[1].covers(now):
            own = frozen[0]
            plan = replace(plan, zone=own.zone, period=own.period, quota_scope=own.quota_scope, shards=own.shards)
            return plan, frozen[1]
        period = span(plan.period, now, plan.zone)
        if is_known:
            self._frozen[org] = plan, period
        return plan, period

    def _new_watch(self, scope: Scope, period: Span, plan: Plan) -> _Watch:
        self._make_room()
        unflushed = {
            counter.label: pico
            for counter, pico in self._recorder.unflushed().items()
            if counter.scope == scope.key and counter.period == period.key
        }
        standing = Standing(scope, period, plan, self._labels, unflushed, lambda: self._alarmed(watch), self.outcomes)
        watch = self._watches[scope.key, period.key] = _Watch(standing)
        return watch

    def _make_room(self) -> None:
        """What nobody calls for any more goes; what still has calls under way stays, or their end would be lost."""
        if len(self._watches) < MOST_STANDINGS:
            return
        now = self._clock.now()
        gone = [key for key, watch in self._watches.items() if watch.standing.is_idle]
        gone.sort(key=lambda key: self._watches[key].standing.span.end > now)  # those that are over, first
        for key in gone[: MOST_STANDINGS // 10]:
            del self._watches[key]
        kept = {id(watch) for watch in self._watches.values()}
        self._payers = {name: found for name, found in self._payers.items() if id(found[1]) in kept}
        self._frozen = {org: found for org, found in self._frozen.items() if found[1].covers(now)}

    # Looking at the store.

    def _alarmed(self, watch: _Watch) -> None:
        """More was spent here than anybody thought."""
        watch.due = watch.money_due = min(watch.money_due, watch.looked_at + LEAST_SECONDS)
        if self._clock.monotonic() >= watch.due:
            self._look(watch)

    def _look(self, watch: _Watch) -> asyncio.Event:
        if watch.looking is None:
            watch.looking = asyncio.Event()
            self._tasks.once(self._looked(watch, watch.looking))
        return watch.looking

    async def _looked(self, watch: _Watch, event: asyncio.Event) -> None:
        standing, self.looks = watch.standing, self.looks + 1
        watch.due = self._clock.monotonic() + ASK_AGAIN_SECONDS
        try:
            await self._read(watch)
            standing.is_stale = False
        except StoreError as failure:
            self.failures += 1
            if not standing.is_stale:
                _log.warning("%s cannot be looked up, and what is known holds: %s", standing.scope.key, failure)
            standing.is_stale = True
            watch.old = watch.due if watch.looked_at == -NEVER else NEVER
        finally:
            watch.looking = None
            event.set()

    async def _read(self, watch: _Watch) -> None:
        standing, moment = watch.standing, self._clock.monotonic()
        is_old, has_money = moment >= watch.old, moment >= watch.money_due
        plan, item = await self._looks.plan_and_sticky(standing)
        self._warn(watch, plan)
        active = self._active(watch, plan, item)
        is_certain = False
        if has_money or plan.quotas != standing.plan.quotas:
            standing.learn(plan, active)
            is_near = is_old or standing.is_near or moment - watch.looked_at < self._aggregator_seconds
            is_certain = await (self._looks.read_shards if is_near else self._looks.read_totals)(standing)
            wait = standing.looked(moment)
            watch.looked_at, watch.money_due = moment, moment + wait
            watch.old = watch.money_due + max(LEAST_SECONDS, wait * GRACE)
        standing.learn(plan, active)
        if is_certain:
            await self._move(watch, item)
        watch.due = min(watch.money_due, moment + SETTINGS_SECONDS)
        if standing.is_tight:
            self._recorder.hurry()
        await self._raise_alerts(standing)

    def _plan_so_far(self, caller: Caller) -> Plan:
        """Of the period before, or else the defaults."""
        before = self._payers.get((caller.org, caller.app))
        if before is not None:
            return before[0].standing.plan
        return self._looks.plan_of()

    def _warn(self, watch: _Watch, plan: Plan) -> None:
        if plan.passed_over != watch.warned_of:
            watch.warned_of = plan.passed_over
            for problem in plan.passed_over:
                _log.warning("%s: settings that cannot be used: %s", watch.standing.scope.key, problem)

    def _active(self, watch: _Watch, plan: Plan, item: Item | None) -> int:
        """Where the chain begins: an override goes before what was spent, for as long as it is in force."""
        override = override_of(item, self._clock.now())
        if override != watch.override:
            scope, period = watch.standing.scope.key, watch.standing.span.key
            label, who, why = ("none", "", "") if override is None else (override.label, override.who, override.reason)
            _log.warning("override changed: scope=%s period=%s label=%s who=%r why=%r", scope, period, label, who, why)
            watch.override = override
        watch.ends = NEVER if override is None else override.until
        if override is not None and override.label in plan.ordering:
            return plan.ordering.index(override.label)
        return sticky.index_of(item, plan) if plan.is_sticky else 0

    async def _move(self, watch: _Watch, item: Item | None) -> None:
        """Whoever finds the active label spent says so for all; who comes too late follows."""
        standing, plan = watch.standing, watch.standing.plan
        before = sticky.index_of(item, plan)
        index = standing.due_to_move(before)
        if index is None:
            return
        write = sticky.moved_to(index, before, standing.scope, standing.span, plan, self._clock.now())
        try:
            item = await self._store.update(write)
            self.moves += 1
            _log.warning(
                "active label moved on: scope=%s period=%s label=%s before=%s",
                standing.scope.key,
                standing.span.key,
                plan.ordering[index],
                plan.ordering[before],
            )
        except ConditionFailed as failure:
            item = failure.item
        standing.learn(plan, self._active(watch, plan, item))

    async def _raise_alerts(self, standing: Standing) -> None:
        if self._alerts is None:
            return
        for label, spent in standing.budgets().items():
            quota = standing.plan.quotas[label]
            for pct in crossed(spent.known, quota, standing.plan.thresholds):
                await self._alerts.reached(standing.scope, label, standing.span, pct, spent.known, quota)
