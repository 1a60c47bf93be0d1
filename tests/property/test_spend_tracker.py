"""What a sidecar knows of a quota is never more than was spent, and never less than it could see for certain, whoever
reads and flushes when. Where nothing of its own is under way or of unknown outcome, the shards tell it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from price_keeper.budgets.budget_state import SpendTracker

from tests.support.effort import tries


@dataclass
class One:
    """A sidecar: what it recorded and has not sent, what it is sending, and what it has in the store."""

    spent: SpendTracker = field(default_factory=SpendTracker)
    waiting: int = 0
    sending: int = 0
    applied: int = 0  # of what it is sending, though it has not heard so
    is_unresolved: bool = False  # it was sent before, without an answer
    stored: int = 0
    floor: int = 0  # what it can know for certain

    @property
    def unstored(self) -> int:
        return self.sending - self.applied + self.waiting


which = st.integers(0, 2)


class Fleet(RuleBasedStateMachine):
    """Three sidecars. A total may be read long after it was made, and after a newer one."""

    def __init__(self) -> None:
        super().__init__()
        self.all = [One() for _ in range(3)]
        self.totals = [0]

    @property
    def stored(self) -> int:
        return sum(one.stored for one in self.all)

    @rule(who=which, pico=st.integers(0, 100))
    def spend(self, who: int, pico: int) -> None:
        one = self.all[who]
        one.spent.on_call_started(7)
        one.spent.on_call_ended(7, pico)
        one.waiting += pico
        one.floor += pico

    @rule(who=which)
    def send(self, who: int) -> None:
        one = self.all[who]
        if not one.sending:
            one.sending, one.waiting = one.waiting, 0
            one.spent.add_sent(one.sending)

    @rule(who=which)
    def apply(self, who: int) -> None:
        one = self.all[who]
        one.stored, one.applied = one.stored + one.sending - one.applied, one.sending

    @rule(who=which)
    def hear(self, who: int) -> None:
        """The answer, which may have been on its way for long."""
        one = self.all[who]
        if one.applied == one.sending:
            one.spent.add_acknowledged(one.sending)
            one.sending, one.applied, one.is_unresolved = 0, 0, False

    @rule(who=which)
    def lose_the_answer(self, who: int) -> None:
        self.all[who].is_unresolved = True

    @rule(who=which)
    def fail_for_certain(self, who: int) -> None:
        one = self.all[who]
        if not (one.applied or one.is_unresolved):
            one.spent.remove_sent(one.sending)
            one.waiting, one.sending = one.waiting + one.sending, 0

    @rule()
    def make_total(self) -> None:
        self.totals.append(self.stored)

    @rule(who=which, age=st.integers(0, 4))
    def read_total(self, who: int, age: int) -> None:
        self._read(who, self.totals[max(0, len(self.totals) - 1 - age)])

    @rule(who=which)
    def read_shards(self, who: int) -> None:
        one = self.all[who]
        if one.spent.is_flush_certain:
            one.spent.apply_exact_sum(self.stored, 0.0)
            one.floor = self.stored + one.unstored
            assert one.spent.spent == one.floor
        else:
            self._read(who, self.stored)

    def _read(self, who: int, pico: int) -> None:
        one = self.all[who]
        one.spent.apply_lower_bound(pico)
        one.floor = max(one.floor, pico)

    @rule(who=which, was_noted=st.booleans())
    def die(self, who: int, was_noted: bool) -> None:
        """The next one finds all that was not acknowledged, and may go by what was noted."""
        one, parts = self.all[who], self.all[who].spent.stored_and_pending
        one.sending, one.waiting, one.is_unresolved = one.sending + one.waiting, 0, True
        one.spent = SpendTracker(one.sending, one.sending)
        if was_noted:
            one.spent.restore(*parts, is_own=True)
        else:
            one.floor = one.sending

    @rule(who=which, other=which)
    def recall_what_another_one_noted(self, who: int, other: int) -> None:
        self.all[who].spent.restore(*self.all[other].spent.stored_and_pending, is_own=False)

    @invariant()
    def nothing_is_known_too_high_or_too_low(self) -> None:
        truth = self.stored + sum(one.unstored for one in self.all)
        for one in self.all:
            assert one.floor <= one.spent.spent <= truth
            assert one.spent.in_flight == 0

    def teardown(self) -> None:
        """When all is flushed and the shards are read, all know the truth."""
        for who in range(3):
            for _ in range(2):  # what was under way, and what waited behind it
                self.apply(who)
                self.hear(who)
                self.send(who)
        for who, one in enumerate(self.all):
            self.read_shards(who)
            assert one.spent.spent == self.stored


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=tries(200), stateful_step_count=40, deadline=None)


@given(others=st.integers(0, 100), seen=st.integers(0, 100), unseen=st.integers(0, 100), waiting=st.integers(0, 100))
def test_spend_seen_by_other_worker_is_a_lower_bound(others: int, seen: int, unseen: int, waiting: int) -> None:
    """Of what the journal has, the other one has seen some in the store."""
    spent = SpendTracker(seen + unseen, seen + unseen)
    spent.restore(others + seen, waiting, is_own=False)
    assert max(others + seen + waiting, seen + unseen) == spent.spent <= others + seen + unseen + waiting
