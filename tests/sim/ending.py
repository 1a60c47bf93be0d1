"""When nothing goes wrong any more, everything comes right: within a stated time, and to the last pico-dollar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from price_keeper.budgets.budget_refresh import STORE_RETRY_SECONDS
from price_keeper.budgets.budget_state import BudgetState
from price_keeper.domain import Caller, Scope
from price_keeper.ledger import lease_file, lease_rows
from price_keeper.ledger.aggregator import MAX_CLOCK_SKEW_SECONDS, TOTAL_ATTRIBUTES, Aggregator, build_total_key
from price_keeper.ledger.counter_writes import COST_ATTRIBUTE, DAY_SECONDS, to_pico
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.total_sweep import TotalSweep
from price_keeper.rates.token_bucket import CONSUMED, MILLI, TOKENS
from price_keeper.stores import schema
from price_keeper.stores.contract import Store

from tests.sim.bedrock import CallOutcome, request
from tests.sim.network import PATIENCE_SECONDS
from tests.sim.setup import LABELS, ORG
from tests.sim.sidecar import Clock, Life
from tests.sim.truth import Name

if TYPE_CHECKING:
    from tests.sim.world import World

ARRIVES_SECONDS = 3.0  # what is late
QUIET_SECONDS = 240.0  # until all is in the store: an answer may be slow, and what failed is tried ever less often
DRAIN_SECONDS = 60.0
SERVED_SECONDS = 60.0  # until a call is let in, beyond the time in which its bucket has refilled


class Ending:
    def __init__(self, world: World) -> None:
        self.world, self.truth = world, world.truth

    def comes(self) -> None:
        world = self.world
        world.trace("--", "nothing goes wrong any more")
        self._heals()
        # Of who still waits for what was lost; and then until those are asked after who were met by the defaults.
        world.run_for(PATIENCE_SECONDS + STORE_RETRY_SECONDS)
        self._until("all is in the store", QUIET_SECONDS, self._is_quiet)
        self._nothing_is_lost()
        world.scheduler.run(self._totals(), world.loop, 60.0)
        for life in world.running:
            world.scheduler.run(self._agrees(life), life.loop, 30.0)
        self._all_decide_alike()
        self._all_are_served()
        self._until("all is in the store again", QUIET_SECONDS, self._is_quiet)
        self._drains()
        self._holds_are_closed()
        self._books_of_limits()
        world.check()

    def _until(self, what: str, seconds: float, is_so: Callable[[], bool]) -> None:
        end = self.world.scheduler.now + seconds
        while not (has_come := is_so()) and self.world.scheduler.now < end:
            self.world.run_for(0.5)
            for machine in self.world.machines:
                if machine.life is None or machine.life.is_over:
                    machine.start()
        self.truth.check(f"it comes to this that {what}", has_come, self._describe_fleet())
        self.world.check()

    def _describe_fleet(self) -> str:
        parts = []
        for machine in self.world.machines:
            life = machine.life
            flusher = life.recording.flusher if life is not None and life.is_ready else None
            trouble = None if flusher is None else (flusher.store_trouble, flusher.journal.trouble)
            parts.append(f"{machine.name}: ready {flusher is not None}, trouble {trouble}")
        return "; ".join(parts)

    def _heals(self) -> None:
        world = self.world
        world.bedrock.odds, world.bedrock.is_down = {}, False
        for machine in world.machines:
            machine.weather.is_fine()
            machine.is_disk_full = False
            if machine.clock.wrong_by:
                world.set_clock(machine, 0.0)
            if machine.life is not None:
                machine.life.disk.is_full = machine.life.disk.cannot_sync = False
                machine.life.disk.dies_in = None
                machine.life.loop.go_on()
        for turn, arrive in self.truth.late:
            if not turn.cancelled() and turn.when() > world.scheduler.now:
                turn.cancel()
                world.loop.call_later(world.chance.uniform(0, ARRIVES_SECONDS), arrive, False)

    def _is_quiet(self) -> bool:
        lives = [machine.running for machine in self.world.machines]
        return all(
            life is not None
            and not life.is_stopping
            and not life.calls
            and not life.under_way
            and not life.recording.flusher.unflushed_by_counter()
            and not life.recording.has_former_leases
            for life in lives
        )

    def _nothing_is_lost(self) -> None:
        for name, pico in self.truth.pico.items():
            found = self.truth.flushed.get(name)
            counted = (0, 0) if found is None else (found.pico, found.requests)
            self.truth.check("nothing is lost", counted == (pico, self.truth.requests[name]), name, counted, pico)
        self.world.check()

    async def _totals(self) -> None:
        """A sweep finds what each process left, as soon as nobody can add to it any more."""
        store, clock = cast(Store, self.world.admin()), Clock(self.world)
        clock.wrong_by = DAY_SECONDS + MAX_CLOCK_SKEW_SECONDS + 1.0
        await TotalSweep(store, clock, Aggregator(store, clock, self.world.setup.aggregate_secs)).sweep()
        if self.world.has_clock_far_off:  # a total is taken for final an hour after its day
            return
        for name, flushed in self.truth.flushed.items():
            key = build_total_key(Counter(*name, self.world.setup.shards))
            item: Any = self.world.store.items.get(key) or {}
            is_same = (
                to_pico(item.get(COST_ATTRIBUTE, 0)) == flushed.pico
                and item.get(TOTAL_ATTRIBUTES[0], 0) == flushed.requests
            )
            self.truth.check("totals are what was spent", is_same, name, item, flushed.pico)

    async def _agrees(self, life: Life) -> None:
        """By one new look at the store, it knows who pays, and the truth."""
        for caller in self.world.setup.callers:
            state, _ = await life.budget_registry.read_status(caller, forces_read=True)
            for label in state.settings.quotas:
                spent, name = state.get_tracker(label), Name(state.scope.key, label, state.span.key)
                known = spent.spent, spent.in_flight
                self.truth.check("all know what was spent", known == (self.truth.pico[name], 0), life.name, name, known)

    def _all_decide_alike(self) -> None:
        for caller in self.world.setup.callers:
            states = [
                self.world.scheduler.run(self._state(life, caller), life.loop, 30.0) for life in self.world.running
            ]
            known = [each for each in states if each is not None]
            if len({each.span for each in known}) > 1 or any(self._something_ends(each) for each in known):
                continue
            for label in LABELS:
                served = {each.find_enforced_label(label) for each in known}
                self.truth.check("all decide alike", len(served) <= 1, caller.app, label, served)

    async def _state(self, life: Life, caller: Caller) -> BudgetState | None:
        """In the sidecar's own loop, as the look may start a read."""
        caller_day = life.budget_registry.cached(caller)
        return None if caller_day is None else caller_day.budget

    def _something_ends(self, state: BudgetState) -> bool:
        now = self.world.wall()
        item: Any = self.world.store.items.get(schema.sticky_state_key(state.scope, state.span.key)) or {}
        ends = (state.span.start, state.span.end, item.get("override_until_epoch", 0))
        return any(abs(now - float(end)) < 30 for end in ends)

    # Calls.

    def _all_are_served(self) -> None:
        """However wrong a clock or a disk was: who may still pay is let in as soon as the bucket has refilled."""
        item: Any = self.world.store.items.get(schema.rate_bucket_key(Scope(ORG), "RATE")) or {}
        limits, wait = self.world.settings.limits, SERVED_SECONDS
        for name in ("rpm", "tpm") if limits else ():
            overdraft = max(0, -int(item.get(name + TOKENS, 0))) / MILLI
            wait += overdraft * 60 / limits[name] + limits["burst_secs"]
        for life in self.world.running:
            self._is_served(life, wait)

    def _is_served(self, life: Life, seconds: float) -> None:
        end = self.world.scheduler.now + seconds
        while (outcome := self._small_call(life)).status not in (200, 400) and self.world.scheduler.now < end:
            self.world.run_for(2.0)
        self.truth.check("all are served again", outcome.status in (200, 400), life.name, outcome.status)
        self.world.check()

    def _small_call(self, life: Life) -> CallOutcome:
        outcome = life.takes(next(self.world.numbers), request(LABELS[0], 0, 10, 10, 1, None))
        for _ in range(40):
            if outcome.is_over:
                break
            self.world.run_for(0.5)
        return outcome

    def _books_of_limits(self) -> None:
        item: Any = self.world.store.items.get(schema.rate_bucket_key(Scope(ORG), "RATE"))
        if item is None or not self.world.limits.is_exact:
            return
        for name in ("rpm", "tpm"):
            consumed, used = item.get(name + CONSUMED), self.world.limits.used[name]
            self.truth.check("what was used is told once", consumed == used, name, consumed, used)

    # The end of it all.

    def _drains(self) -> None:
        lives = self.world.running
        for life in lives:
            life.is_stopping = True
            life.loop.call_soon(life.stop.set)
        end = self.world.scheduler.now + DRAIN_SECONDS
        while not all(life.is_over for life in lives) and self.world.scheduler.now < end:
            self.world.run_for(0.5)
        self.truth.check("all stop in time", all(life.is_over for life in lives))
        self.truth.check("who ends in order has told all", all(life.has_told_limits for life in lives))
        for machine in self.world.machines:
            left = [each for each in recover(machine.folder).sealed if each.seal.requests]
            self.truth.check("nothing is left on a disk", not left, machine.name, left)
            files = [path.name for path in machine.folder.glob("*holds-*") if lease_file._read_keys(path)]
            self.truth.check("no hold is left on a disk", not files, machine.name, files)
        self.world.check()

    def _holds_are_closed(self) -> None:
        """Unspent money is in the bucket again."""
        out: dict[lease_rows.HardBudgetKey, int] = {}
        for key, item in self.world.store.items.items():
            if key.table != "rate-buckets" or not key.sk.startswith("HOLD#"):
                continue
            label, _, rest = key.sk.removeprefix("HOLD#").partition("#")
            period, _, holder = rest.rpartition("#")
            name, hold = lease_rows.HardBudgetKey(key.pk, label, period), lease_rows.BudgetLeaseRow.from_item(item)
            spent = self.truth.held[name, holder] + self.truth.over_held[name, holder]
            out[name] = out.get(name, 0) + hold.leased
            is_right = hold.is_closed and hold.leased == hold.used == spent
            self.truth.check("every hold is closed with what was spent of it", is_right, name, holder, hold, spent)
        for name, sum_ in out.items():
            item = self.world.store.items.get(name.bucket_key)
            if item is None:
                continue
            bucket = lease_rows.HardBudgetBucket.from_item(item)
            whole = bucket.unleased + bucket.spent_without_lease + sum_ == bucket.quota
            self.truth.check("what nobody spent is there again", whole, name, bucket, sum_)
