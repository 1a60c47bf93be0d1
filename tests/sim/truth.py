"""What really happened, beside what the processes and the store say: every invariant is checked against it.

The journal tells what each call came to when that is written, Bedrock what it billed, the store what changes in it.
"""

from __future__ import annotations

import math
from collections import Counter as Sums
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast
from zoneinfo import ZoneInfo

from price_keeper.budgets import active_label
from price_keeper.domain import PICO_PER_MICRO
from price_keeper.ledger import lease_rows
from price_keeper.ledger.aggregator import TOTAL_ATTRIBUTES
from price_keeper.ledger.counter_writes import COST_ATTRIBUTE, to_pico
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import Intent, Receipt
from price_keeper.ledger.segment import Segment
from price_keeper.org_calendar import PeriodSpan, parse_span_key
from price_keeper.rates.token_bucket import CAPACITY, TOKENS
from price_keeper.stores.contract import Item, Key, Put, Update, Write

from tests.sim.scheduler import Killed

SHARDS, TOTALS, STICKY, BUCKETS = "usage-agg-sharded", "daily-total", "sticky-state", "rate-buckets"
LATE_MS = 15_000  # after the end of its period: a call that had to wait may be written down


class Violation(AssertionError):
    """Something that must never happen."""


class Name(NamedTuple):
    """Of a counter, however many shards it has."""

    scope: str
    label: str
    period: str


class Noted(NamedTuple):
    """Settings of an org or an app, as a process has read them."""

    key: Key
    enforcement: str


class Chain(NamedTuple):
    """What one read of the store said of a scope's budget: its labels, dearest first, and their quotas in micro-USD."""

    ordering: Sequence[str]
    quotas: Mapping[str, int]

    @classmethod
    def of(cls, items: Sequence[Item | None]) -> Chain:
        """The org's settings and, if the scope is an app, the app's own, which take precedence."""
        known = {name: value for item in items if item is not None for name, value in item.items()}
        return cls(cast("list[str]", known.get("model_ordering", [])), cast("dict[str, int]", known.get("quotas", {})))


def name_of(key: Key) -> Name:
    scope, _, rest = key.pk.partition("#LABEL#")
    return Name(scope, rest.partition("#SH#")[0], key.sk)


@dataclass
class Flushed:
    """What the store received for one counter, and after each flush: the sum, and each process's part."""

    pico: int = 0
    requests: int = 0
    by_owner: Sums[str] = field(default_factory=Sums)
    history: list[tuple[int, dict[str, int]]] = field(default_factory=lambda: [(0, {})])


class Reader:
    """What one process can know: by counter, when a reading of its shards began, at which place of the history."""

    def __init__(self, truth: Truth, owner: str) -> None:
        self._truth = truth
        self.owner = owner
        self.known: dict[Name, dict[float, int]] = {}
        self.chains: dict[Key, Chain] = {}  # by sticky state: what was read together with it last
        self.settings: dict[Noted, float] = {}  # and since when it knows of them

    def read(self, keys: Sequence[Key], began: float, positions: Mapping[Name, int]) -> None:
        """`began` is by the process's monotonic clock."""
        for key in keys:
            if key.table == SHARDS:
                name = name_of(key)
                self.known.setdefault(name, {})[began] = positions.get(name, 0)

    def heard(self, keys: Sequence[Key], found: Sequence[Item | None]) -> None:
        """The answer, of what was read consistently."""
        if keys[0].table == STICKY and len(keys) > 1:
            self.chains[keys[0]] = Chain.of(found[1:])
        for key, item in zip(keys, found, strict=True):
            if key.table == "config" and item is not None:
                self.settings.setdefault(Noted(key, str(item.get("enforcement"))), self._truth.now())


class Truth:
    def __init__(self, now: Callable[[], float], zones: Sequence[ZoneInfo]) -> None:
        self.now, self.zones = now, zones
        self.violations: list[str] = []
        self.checks: Sums[str] = Sums()
        self.counted: Sums[tuple[str, Name]] = Sums()  # pico-dollars that a budget was notified of, by process
        self.pico: Sums[Name] = Sums()
        self.requests: Sums[Name] = Sums()
        self.known_pico = 0  # what Bedrock told and was written down
        self.flushed: dict[Name, Flushed] = {}
        self.held: Sums[tuple[lease_rows.HardBudgetKey, str]] = (
            Sums()
        )  # by budget and holder: what its calls cost or may cost
        self.over_held: Sums[tuple[lease_rows.HardBudgetKey, str]] = Sums()  # what estimates that stay say beyond that
        self.unheld: Sums[Name] = Sums()  # of what has a hard budget: what was spent without a hold
        self.quotas: dict[str, int] = {}  # micro-USD, the highest there ever was, by label
        self.is_quota_lowered = False
        self._hard_rows: dict[Key, Item] = {}
        self.is_out_of_time = False
        self.spent_at: dict[Name, float] = {}
        self.sticky_changed_at: dict[Key, float] = {}
        self.late: list[tuple[Any, Callable[[bool], None]]] = []  # what was sent, and has not arrived for long
        self._spans: dict[str, list[PeriodSpan]] = {}
        self.has_replayed_snapshot = (
            False  # so that a process may count twice what the store has of it, until he flushes
        )
        self.lives: dict[str, Any] = {}  # by segment
        self._ended: dict[tuple[int, int], tuple[Intent, int, bool]] = {}  # what calls came to, by life and number
        self._estimated: set[tuple[int, int]] = set()  # calls that a replayed copy has counted: they stay as they were

    def check(self, what: str, holds: bool, *details: object) -> None:
        self.checks[what] += 1
        if not holds:
            self.violations.append(f"{what}: {' '.join(map(str, details))}")

    def of_reader(self, owner: str) -> Reader:
        return Reader(self, owner)

    def positions(self) -> dict[Name, int]:
        return {name: len(flushed.history) - 1 for name, flushed in self.flushed.items()}

    # What journals tell.

    def begins(self, life: Any, number: int, intent: Intent) -> None:
        life.under_way[number] = intent
        for counter in intent.charged.counters:
            if counter.is_lease:
                self.held[_held_by(counter)] += intent.pico
            if not life.is_out_of_time:
                self.check("a call belongs to the day on which it began", self._covers(counter, intent), counter)

    def _covers(self, counter: Any, intent: Intent) -> bool:
        spans = self._spans.get(counter.budget_period)
        if spans is None:  # by the org's own zone, or the default one while the org's is unknown
            spans = self._spans[counter.budget_period] = [
                parse_span_key(counter.budget_period, zone) for zone in self.zones
            ]
        at = intent.started_ms
        return any(span.start * 1000 <= at < span.end * 1000 + LATE_MS for span in spans)

    def ends(self, life: Any, number: int, receipt: Receipt | None) -> None:
        intent = life.under_way.pop(number)
        counts = None if receipt is None else receipt.counts
        if counts is not None and not counts.estimated_requests:
            self.known_pico += counts.pico
        self._ends(life, number, intent, 0 if counts is None else counts.pico, counts is not None)

    def dies(self, life: Any) -> None:
        """A call without a known end counts as it was estimated."""
        for number in tuple(life.under_way):
            intent = life.under_way.pop(number)
            self._ends(life, number, intent, intent.pico, True)

    def _ends(self, life: Any, number: int, intent: Intent, pico: int, counts: bool) -> None:
        is_held = any(counter.is_lease for counter in intent.charged.counters)
        is_estimated = (life.number, number) in self._estimated
        self._ended[life.number, number] = intent, pico, counts
        for counter in intent.charged.counters:
            if counter.is_lease:
                self.held[_held_by(counter)] += pico - intent.pico
                self.over_held[_held_by(counter)] += intent.pico - pico if is_estimated else 0
                continue
            name = Name(*counter[:3])
            if not is_held:
                self.unheld[name] += pico
            if counts and intent.charged.spend_listeners:
                self.counted[life.name, name] += min(pico, intent.pico) if is_estimated else pico
        if counts and not is_estimated:
            self._records(intent, pico, 1)

    def _stays_estimated(self, ulid: str, number: int) -> None:
        """A copy of this segment was counted, whatever its call comes to or came to."""
        life = self.lives.get(ulid)
        if life is None or (life.number, number) in self._estimated:
            return
        self._estimated.add((life.number, number))
        if number in life.under_way:
            self._records(life.under_way[number], life.under_way[number].pico, 1)
            return
        intent, pico, counts = self._ended[life.number, number]
        self._records(intent, intent.pico - pico if counts else intent.pico, 1 - counts)
        for counter in intent.charged.counters:
            if counter.is_lease:
                self.over_held[_held_by(counter)] += intent.pico - pico
            elif counts and intent.charged.spend_listeners:
                self.counted[life.name, Name(*counter[:3])] -= max(0, pico - intent.pico)

    def _records(self, intent: Intent, pico: int, requests: int) -> None:
        for counter in intent.charged.counters:
            name = Name(*counter[:3])
            if not counter.is_lease:
                self.pico[name] += pico
                self.requests[name] += requests
                quota = self.quotas.get(name.label)
                if quota is not None and self.pico[name] >= quota * PICO_PER_MICRO:
                    self.spent_at.setdefault(name, self.now())

    # What the store tells.

    def applied(self, owner: str, writes: Sequence[Write]) -> None:
        for write in writes:
            if isinstance(write, Put) and write.key.pk.startswith("SEG#"):
                for number in cast("list[int]", write.item.get("estimated", [])):
                    self._stays_estimated(write.key.pk.removeprefix("SEG#"), number)
            if isinstance(write, Update) and write.key.table == SHARDS:
                name = name_of(write.key)
                flushed = self.flushed.setdefault(name, Flushed())
                pico, requests = to_pico(write.add.get(COST_ATTRIBUTE, 0)), int(write.add.get("requests", 0))
                flushed.pico += pico
                flushed.requests += requests
                flushed.by_owner[owner] += pico
                flushed.history.append((flushed.pico, dict(flushed.by_owner)))
                is_true = flushed.pico <= self.pico[name] and flushed.requests <= self.requests[name]
                self.check("nothing counts twice", is_true, name, flushed.pico, self.pico[name])

    def changed(self, key: Key, was: Item | None, item: Item | None) -> None:
        if key.table == TOTALS and item is not None:
            name = name_of(key)
            lower = [each for each in TOTAL_ATTRIBUTES if item.get(each, 0) < (was or {}).get(each, 0)]  # type: ignore[operator]
            self.check("totals only grow", not lower, key, lower)
            self.check(
                "a total is no more than was spent", to_pico(cast(int, item[COST_ATTRIBUTE])) <= self.pico[name], key
            )
        if key.table == STICKY:
            self.sticky_changed_at[key] = self.now()
        if key.table == STICKY and item is not None and was is not None and active_label.LABEL_ATTRIBUTE in was:
            places = [
                (cast(int, each[active_label.VERSION_ATTRIBUTE]), cast(int, each[active_label.INDEX_ATTRIBUTE]))
                for each in (was, item)
            ]
            self.check("the active label never goes back", places[0] <= places[1], key, *places)
        elif key.table == BUCKETS and item is not None and key.sk != "BUCKET#RATE":
            self._hard_rows[key] = item
        elif key.table == BUCKETS and item is not None:
            for each in item:
                if each.endswith(TOKENS):
                    capacity = cast(int, item[each.removesuffix(TOKENS) + CAPACITY])
                    self.check("no bucket holds more than it can", cast(int, item[each]) <= capacity, key, each)

    def moves(self, reader: Reader, update: Update) -> None:
        """An update of sticky state, checked when it is sent: each label that it leaves is spent by the quotas that its
        own look read. What the process reads for another purpose, such as rate limits, changes nothing."""
        left = update.set.get("previous_model_label")
        if update.key.table != STICKY or left is None:
            return
        ordering, quotas = reader.chains.get(update.key, Chain((), {}))
        index = cast(int, update.set[active_label.INDEX_ATTRIBUTE])
        for label in ordering[ordering.index(left) : index] if left in ordering else (str(left),):
            name = Name(update.key.pk, label, update.key.sk)
            quota = quotas.get(label, math.inf) * PICO_PER_MICRO
            is_spent = self.pico[name] >= quota or self.has_replayed_snapshot
            self.check("a label is left for good when it is spent", is_spent, name, self.pico[name], quota)

    # What a process can know.

    def least(self, reader: Reader, name: Name, exact_at: float) -> int | None:
        """All that it last read exactly, and all its own that was not in there; None: it has not. What began before
        anybody knew of a quota, it learns from the store."""
        place = reader.known.get(name, {}).get(exact_at)
        if place is None:
            return None
        history = self.flushed[name].history if name in self.flushed else [(0, {})]
        total, by_owner = history[place]
        return total + max(0, self.counted[reader.owner, name] - by_owner.get(reader.owner, 0))

    def check_most(self, owner: str, state: Any) -> None:
        """No process counts more than was spent, or it would flip, alert and refuse too early."""
        for label, spent in state._trackers.items():
            name = Name(state.scope.key, label, state.span.key)
            is_no_more = spent.spent <= self.pico[name] or self.has_replayed_snapshot
            self.check("nobody counts more than was spent", is_no_more, owner, name, spent.spent)

    def check_refusal(self, state: Any, room: Mapping[str, int]) -> None:
        """By label, what a call needs to have left. One that is refused for good finds less."""
        for label, needed in room.items():
            name = Name(state.scope.key, label, state.span.key)
            left = state.settings.quotas[label] - self.pico[name]
            is_too_little = left < needed or self.has_replayed_snapshot
            self.check("a call is refused when too little is left", is_too_little, name, left, needed)

    # Hard budgets.

    def check_hard(self) -> None:
        out: Sums[lease_rows.HardBudgetKey] = Sums()
        buckets: dict[lease_rows.HardBudgetKey, lease_rows.HardBudgetBucket] = {}
        for key, item in self._hard_rows.items():
            kind, _, rest = key.sk.removeprefix("BUCKET#").partition("#")
            label, _, rest = rest.partition("#")
            if kind == "HARD":
                buckets[lease_rows.HardBudgetKey(key.pk, label, rest)] = lease_rows.HardBudgetBucket.from_item(item)
                continue
            period, _, holder = rest.rpartition("#")
            name, hold = lease_rows.HardBudgetKey(key.pk, label, period), lease_rows.BudgetLeaseRow.from_item(item)
            out[name] += hold.leased
            spent = self.held[name, holder]
            self.check("nobody spends what it does not hold", spent <= hold.leased, name, holder, spent, hold)
            most = max(hold.leased, spent + self.over_held[name, holder])
            self.check("no hold says more than was spent", hold.used <= most, name, holder, spent, hold)
        for name, bucket in buckets.items():
            sum_ = bucket.unleased + out[name] + bucket.spent_without_lease
            self.check("money is in one place", sum_ == bucket.quota, name, bucket, out[name])
            if not (self.unheld[Name(*name)] or self.is_quota_lowered or self.has_replayed_snapshot):
                self.check("no bucket owes", bucket.unleased >= 0, name, bucket)
        held: Sums[lease_rows.HardBudgetKey] = Sums()
        for (name, _), pico in self.held.items():
            held[name] += pico
        for name, pico in held.items():
            quota = self.quotas.get(name.label, 0) * PICO_PER_MICRO
            self.check("a hard budget is never passed", pico <= quota, name, pico, quota)


def _held_by(counter: Any) -> tuple[lease_rows.HardBudgetKey, str]:
    holder, period = counter.holder_and_period
    return lease_rows.HardBudgetKey(counter.scope, counter.label, period), holder


class TruthAlerts:
    """Checks that each threshold is really reached."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth

    async def raise_alert(self, scope: Any, label: str, span: PeriodSpan, pct: int, _: int, quota: int) -> None:
        name = Name(scope.key, label, span.key)
        is_reached = self._truth.pico[name] * 100 >= pct * quota or self._truth.has_replayed_snapshot
        self._truth.check("an alert fires when its threshold is reached", is_reached, name, pct, quota)


class TruthJournal(Journal):
    """Tells the truth of each call when what became of it is written."""

    def __init__(self, life: Any, *arguments: Any) -> None:
        self._life, self._truth = life, life.world.truth
        super().__init__(*arguments)

    def _begin_segment(self, before: str) -> Segment:
        segment = super()._begin_segment(before)
        self._truth.lives[segment.ulid] = self._life
        return segment

    def write_intent(self, intent: Intent) -> int:
        self._life.about_to_begin(intent)
        try:
            number = super().write_intent(intent)
        except Killed as killed:
            if killed.is_whole:
                self._truth.begins(self._life, self._last_number, intent)
            raise
        self._truth.begins(self._life, number, intent)
        return number

    def _settle(self, number: int, intent: Intent, receipt: Receipt | None) -> None:
        try:
            super()._settle(number, intent, receipt)
        except Killed as killed:
            if killed.is_whole:
                self._truth.ends(self._life, number, receipt)
            raise
        self._truth.ends(self._life, number, receipt)
