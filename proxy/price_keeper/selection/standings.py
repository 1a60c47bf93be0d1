"""Keeps a standing for each scope that is called for.

A call of a scope that is known waits for nobody. What is asked of the store for one scope is asked once, however many
calls wait for the answer, and no call waits for long: then it goes by what is known, or by the defaults.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Final

from price_keeper import telemetry as metrics
from price_keeper.alerts.raising import AlertRaiser
from price_keeper.calendar_days import Period, PeriodSpan, find_span
from price_keeper.clock import Clock
from price_keeper.config import Config, LabelConfig
from price_keeper.errors import Busy, UnknownOrg
from price_keeper.metering.profiles import Own
from price_keeper.model import Caller, Scope
from price_keeper.recording.entries import Counter
from price_keeper.recording.recorder import Recorder
from price_keeper.selection.notes import BudgetSnapshot
from price_keeper.selection.overrides import Override
from price_keeper.selection.own_labels import AppLabelCache
from price_keeper.selection.payer import CallerDay, find_budget_scope
from price_keeper.selection.plan import EffectiveSettings
from price_keeper.selection.quotas import Quotas
from price_keeper.selection.spent import NEVER, SpendTracker
from price_keeper.selection.standing import DecisionCounters, BudgetState
from price_keeper.selection.unknown_orgs import UnknownOrgs
from price_keeper.selection.watch import RefreshState
from price_keeper.selection.watching import STORE_RETRY_SECONDS, BudgetRefresher
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks
from price_keeper.telemetry import MetricsRegistry

MOST_STANDINGS: Final = 20_000
WAIT_SECONDS = 2.0  # for the store, of a call of a scope that is not known
KEPT_SECONDS: Final = 3600  # of a standing whose period is over: its last calls end, and are flushed

_log = logging.getLogger("price_keeper.selection")

_Name = tuple[str, "str | None"]  # of an org and an app


class Standings:
    def __init__(
        self,
        config: Config,
        store: Store,
        recorder: Recorder,
        clock: Clock,
        tasks: Tasks,
        alerts: AlertRaiser | None = None,
        notes: BudgetSnapshot | None = None,
    ) -> None:
        """`notes` may be those of a process before this one."""
        self.labels = config.labels
        self.notes = notes or BudgetSnapshot(clock.now)
        self._refuses_unknown = config.on_store_down == "refuse"
        self.unknown_orgs = UnknownOrgs(config.unknown_org, clock, self.notes)
        self._recorder = recorder
        self._clock = clock
        self._tasks = tasks
        self.own_labels = AppLabelCache(config.labels, store, clock, tasks, self._learn_own)
        self.watching = BudgetRefresher(
            config,
            store,
            recorder,
            clock,
            tasks,
            alerts,
            self._meet_again,
            self._serves_unregistered,
            self.own_labels,
            self.notes,
        )
        self._payers: dict[_Name, tuple[CallerDay, RefreshState]] = {}
        self._watches: dict[tuple[str, str], RefreshState] = {}  # by scope and period
        self._frozen: dict[str, tuple[EffectiveSettings, PeriodSpan]] = {}  # by org: what it cannot change before its period is over
        self._meeting: dict[_Name, asyncio.Event] = {}
        self._swept = -NEVER
        self.outcomes = DecisionCounters()
        self.on_spent_elsewhere: Callable[[Counter], None] = lambda _: None
        self.recollect: Callable[[], Awaitable[None]] | None = None  # what other workers have noted since
        recorder.sender.books = self

    def add_to(self, telemetry: MetricsRegistry) -> None:
        telemetry.add(metrics.SCOPES, lambda: len(self._watches))
        telemetry.add(metrics.SCOPES_STALE, self._stale)
        telemetry.add(metrics.SERVED_BY_ANOTHER_LABEL, lambda: self.outcomes.served_elsewhere)
        telemetry.add(metrics.QUOTA_REFUSALS, lambda: self.outcomes.refusals)
        telemetry.add(metrics.ACTIVE_LABEL_FLIPS, lambda: self.outcomes.active_label_changes)
        Quotas(self._now_in_force).add_to(telemetry)
        self.watching.register_metrics(telemetry)
        self.unknown_orgs.add_to(telemetry)

    def _stale(self) -> int:
        return sum(standing.is_stale for standing in self._now_in_force())

    def _now_in_force(self) -> Iterator[BudgetState]:
        now, standings = self._clock.now(), (watch.budget for watch in self._watches.values())
        return (standing for standing in standings if standing.span.covers(now))

    def take_on(self, labels: Mapping[str, LabelConfig]) -> None:
        """Those of another configuration, in the place of those there were."""
        self.labels = labels
        for watch in self._watches.values():
            watch.budget.apply_config(labels)
        self.own_labels.apply_config(labels)

    def naming(self, labels: Collection[str]) -> dict[str, list[BudgetState]]:
        """Those in force whose chain has one of them, by label."""
        found: dict[str, list[BudgetState]] = {}
        for standing in self._now_in_force():
            for label in standing.settings.ordering:  # which is short, however many labels there are
                if label in labels:
                    found.setdefault(label, []).append(standing)
        return found

    # For the calls.

    def known(self, caller: Caller) -> CallerDay | None:
        """Without asking anybody; None if somebody has to be asked first."""
        found = self._payers.get((caller.org, caller.app))
        if found is None:
            return None
        payer, watch = found
        now, moment = self._clock.now(), self._clock.monotonic()
        if not payer.start <= now < payer.end:
            return None
        if moment >= watch.stale_at and not watch.is_refresh_slow:
            return None
        if now >= watch.override_ends_at:
            self.watching.end_override(watch)
        if moment >= payer.valid_until:
            self._meet_soon(caller)
        if moment >= watch.due_at:
            self.watching.refresh(watch)
        return payer

    async def learned(self, caller: Caller) -> CallerDay:
        """Asks the store, and waits for a while. What is known holds until it answers, and where nothing is, the
        defaults, or Busy is raised where that is wanted. Raises UnknownOrg where nobody has registered the org."""
        name = (caller.org, caller.app)
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                for _ in range(2):  # the first look may find that somebody else pays
                    self.unknown_orgs.check(caller.org)
                    if not self._is_met_well(name):
                        await self._meet_soon(caller).wait()
                    await self._looked(name)
        if not self._is_met(name):
            await self._recollect(caller)
        payer, watch = self._met(caller)
        watch.is_refresh_slow = watch.refresh_done is not None
        return payer

    async def _looked(self, name: _Name) -> None:
        found = self._payers.get(name)
        if found is None:  # whoever waited with us may have been made to meet it again, or room was made
            return
        watch = found[1]
        if self._clock.monotonic() >= watch.stale_at and not (watch.refresh_done is not None and watch.is_refresh_slow):
            await self.watching.refresh(watch).wait()

    def _met(self, caller: Caller) -> tuple[CallerDay, RefreshState]:
        """If it is not there, or is there no more, one for the time being that goes by what was known before."""
        name = (caller.org, caller.app)
        if not self._is_met(name):
            self._introduce_so_far(caller)
        if name not in self._payers:
            if self.unknown_orgs.is_refused(caller.org):
                raise self.unknown_orgs.refusal(caller.org)
            raise Busy("what its budget is cannot be told while the store is away", retry_after=STORE_RETRY_SECONDS)
        return self._payers[name]

    def _is_met(self, name: _Name) -> bool:
        found = self._payers.get(name)
        return found is not None and found[0].start <= self._clock.now() < found[0].end

    def _is_met_well(self, name: _Name) -> bool:
        """And not by the defaults alone, which hold until the store can be asked again."""
        return self._is_met(name) and self._clock.monotonic() < self._payers[name][0].valid_until

    # For people.

    async def told(self, caller: Caller, *, is_forced: bool) -> tuple[BudgetState, Override | None]:
        """How the caller's scope stands, and the override that is in force. `is_forced` looks at the store now; if it
        does not answer soon, the standing is stale, and says so. Of an org that is refused, no label serves."""
        payer = None if is_forced else self.known(caller)
        if is_forced:
            self.unknown_orgs.forget(caller.org)
        try:
            payer = payer or await self.learned(caller)
        except UnknownOrg:
            plan = self.watching.reader.resolve_settings()
            period = find_span(plan.period, self._clock.now(), plan.zone)
            return BudgetState(find_budget_scope(caller, plan), period, plan, {}, dict), None
        _, watch = self._met(caller)
        if is_forced:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    if watch.refresh_done is not None:  # one that began before now may have read what is old
                        await watch.refresh_done.wait()
                    watch.expire()
                    await self.watching.refresh(watch).wait()
        return watch.budget, watch.override

    def spent_elsewhere(self, counter: Counter) -> None:
        """Somebody wrote to it without this process's recorder, so what is known of it is too low."""
        watch = self._watches.get((counter.scope, counter.period))
        if watch is not None:
            self.watching.refresh_soon(watch)
        self.on_spent_elsewhere(counter)

    # What the recorder tells.

    def sending(self, counter: Counter, pico: int) -> None:
        for spent in self._spent_of(counter):
            spent.add_sent(pico)

    def not_taken(self, counter: Counter, pico: int) -> None:
        for spent in self._spent_of(counter):
            spent.remove_sent(pico)

    def acknowledged(self, counter: Counter, pico: int) -> None:
        for spent in self._spent_of(counter):
            spent.add_acknowledged(pico)
        watch = self._watches.get((counter.scope, counter.period))
        if watch is not None and watch.has_spend:
            self.notes.mark_changed(watch)

    def _spent_of(self, counter: Counter) -> tuple[SpendTracker, ...]:
        watch = self._watches.get((counter.scope, counter.period))
        return () if watch is None else watch.budget.find_trackers(counter.label)

    # Meeting somebody for the first time in a period.

    def _meet_soon(self, caller: Caller) -> asyncio.Event:
        name = (caller.org, caller.app)
        over = self._meeting.get(name)
        if over is None:
            over = self._meeting[name] = asyncio.Event()
            self._tasks.spawn(self._meet(caller, over))
        return over

    async def _meet(self, caller: Caller, over: asyncio.Event) -> None:
        name = (caller.org, caller.app)
        try:
            plan, is_settled = await self.watching.reader.read_settings(Scope(caller.org, caller.app))
            if is_settled:
                self.unknown_orgs.forget(caller.org)
            if is_settled or self._serves_unregistered(caller.org):
                self._introduce(caller, plan, is_known=True, is_settled=is_settled)
        except Exception as failure:  # of whatever kind: the call must find somebody who pays
            _log.warning(
                "the settings of %s cannot be read; those known before hold: %s", caller.org, type(failure).__name__
            )
            await self._recollect(caller)
            self._introduce_so_far(caller)
        finally:
            del self._meeting[name]
            over.set()

    async def _recollect(self, caller: Caller) -> None:
        """It may be new to this process alone."""
        is_new = (caller.org, caller.app) not in self._payers
        if self.recollect is not None and is_new and not self.notes.has_settings(Scope(caller.org, caller.app)):
            await self.recollect()

    def _introduce_so_far(self, caller: Caller) -> None:
        """By what held in the period before, or by what is noted, or else by the defaults; unless nobody is to be
        served by anything but what this process has read."""
        before = self._payers.get((caller.org, caller.app))
        if before is not None:
            self._introduce(caller, before[0].budget.settings, is_known=False, is_settled=False)
        elif not self._refuses_unknown and not self.unknown_orgs.is_refused(caller.org):
            noted = self.watching.reader.resolve_snapshot_settings(Scope(caller.org, caller.app))
            plan = noted or self.watching.reader.resolve_settings()
            self._introduce(caller, plan, is_known=False, is_settled=False)
            if noted is None:
                self.unknown_orgs.served_unread(caller.org)
            else:
                standing = self._payers[caller.org, caller.app][0].budget
                standing.is_stale = True
                _log.warning("%s goes by what was noted when the store was last read", standing.scope.key)

    def _introduce(self, caller: Caller, plan: EffectiveSettings, *, is_known: bool, is_settled: bool) -> None:
        now = self._clock.now()
        plan, period = self._frozen_calendar(caller.org, plan, now, is_settled)
        scope = find_budget_scope(caller, plan)
        watch = self._watches.get((scope.key, period.key))
        if watch is None:
            watch = self._new_watch(scope, period, plan, is_settled)
        elif watch.budget.span != period or watch.budget.settings.calendar != plan.calendar:
            watch.budget.change_calendar(period, plan)
            watch.expire()
        watch.budget.apply_app_labels(self.own_labels.last_read(scope))
        payer = CallerDay(caller, watch.budget, find_span(Period.DAY, now, plan.zone))
        if not is_known:
            payer.valid_until = self._clock.monotonic() + STORE_RETRY_SECONDS
        if len(self._payers) >= MOST_STANDINGS and (caller.org, caller.app) not in self._payers:
            del self._payers[next(iter(self._payers))]
        self._payers[caller.org, caller.app] = payer, watch

    def _frozen_calendar(self, org: str, plan: EffectiveSettings, now: float, is_settled: bool) -> tuple[EffectiveSettings, PeriodSpan]:
        """All apps of an org that somebody put go by one calendar, until its period is over."""
        frozen = self._frozen.get(org)
        if frozen is not None and frozen[1].covers(now):
            return plan.with_calendar_of(frozen[0]), frozen[1]
        period = find_span(plan.period, now, plan.zone)
        if is_settled:
            self._frozen[org] = plan, period
        return plan, period

    def _meet_again(self, org: str) -> None:
        """It was taken to have the defaults, and has a calendar of its own."""
        self._frozen.pop(org, None)
        for name in [name for name in self._payers if name[0] == org]:
            del self._payers[name]

    def _serves_unregistered(self, org: str) -> bool:
        """Whether an org that is not in the store is served. If not, nobody pays for it any more."""
        is_served = self.unknown_orgs.found(org)
        if not is_served:
            self._meet_again(org)
        return is_served

    def _learn_own(self, scope: Scope, own: Own) -> None:
        """A call named one of them, so they were read before the next look."""
        found = self._payers.get((scope.org, scope.app))
        if found is not None and found[1].budget.scope == scope:
            found[1].budget.apply_app_labels(own)

    def _new_watch(self, scope: Scope, period: PeriodSpan, plan: EffectiveSettings, is_settled: bool) -> RefreshState:
        self._make_room()

        def by_label(found: Mapping[Counter, int]) -> dict[str, int]:
            sums: dict[str, int] = {}
            for counter, pico in found.items():
                if counter.scope == scope.key and counter.period == period.key:
                    sums[counter.label] = sums.get(counter.label, 0) + pico
            return sums

        def unflushed() -> dict[str, tuple[int, int]]:
            in_doubt = by_label(self._recorder.in_doubt())
            found = by_label(self._recorder.unflushed())
            return {label: (pico, in_doubt.get(label, 0)) for label, pico in found.items()}

        standing = BudgetState(
            scope, period, plan, self.labels, unflushed, lambda: self.watching.refresh_soon(watch), self.outcomes
        )
        watch = self._watches[scope.key, period.key] = RefreshState(standing, is_settled)
        self.watching.restore(watch)
        return watch

    def _make_room(self) -> None:
        """What is over goes, and what nobody calls for where there is too much. What still has calls under way stays,
        or their end would be lost."""
        moment, now = self._clock.monotonic(), self._clock.now()
        is_full = len(self._watches) >= MOST_STANDINGS
        if moment < self._swept + KEPT_SECONDS and not is_full:
            return
        self._swept = moment
        idle = [key for key, watch in self._watches.items() if watch.budget.is_idle]
        over = [key for key in idle if self._watches[key].budget.span.end + KEPT_SECONDS < now]
        for key in over or (idle[: MOST_STANDINGS // 10] if is_full else []):
            del self._watches[key]
        kept = {id(watch) for watch in self._watches.values()}
        self._payers = {name: found for name, found in self._payers.items() if id(found[1]) in kept}
        self._frozen = {org: found for org, found in self._frozen.items() if found[1].covers(now)}
