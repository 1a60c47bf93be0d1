"""What a sidecar knows of a quota is never below what it could see, whoever reads and flushes when."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.selection.spent import MARGIN_SECONDS, Spent
from tests.support.effort import tries

HOUR = 3600.0  # more than a run lasts


@dataclass
class One:
    """A sidecar: what it recorded and has not flushed, and what it has in the store."""

    skew: float
    spent: Spent = field(default_factory=Spent)
    pending: int = 0
    flushed: int = 0
    read_of_others: int = 0  # the most it was ever told that they have in the store


class Fleet(RuleBasedStateMachine):
    """Three sidecars whose clocks differ by less than the margin, but for those that are an hour off for a while;
    totals are stamped by one of them."""

    @initialize(skews=st.lists(st.floats(-MARGIN_SECONDS / 2.1, MARGIN_SECONDS / 2.1), min_size=3, max_size=3))
    def begin(self, skews: list[float]) -> None:
        self.now = 1000.0
        self.all = [One(skew) for skew in skews]
        self.total: tuple[float, list[int]] = (0.0, [0, 0, 0])

    @rule(seconds=st.floats(0, 30))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(who=st.integers(0, 2), pico=st.integers(0, 100))
    def spend(self, who: int, pico: int) -> None:
        one = self.all[who]
        one.spent.began(7)
        one.spent.ended(7, pico)
        one.pending += pico

    @rule(who=st.integers(0, 2))
    def flush(self, who: int) -> None:
        one = self.all[who]
        one.spent.acknowledged(one.pending, self.now)
        one.flushed, one.pending = one.flushed + one.pending, 0

    @rule(who=st.integers(0, 2), skew=st.sampled_from([-HOUR, 0.0, HOUR]))
    def set_clock(self, who: int, skew: float) -> None:
        self.all[who].skew = skew

    @rule(who=st.integers(0, 2))
    def make_total(self, who: int) -> None:
        self.total = (self.now + self.all[who].skew, [one.flushed for one in self.all])

    @precondition(lambda self: self.total[0])
    @rule(who=st.integers(0, 2))
    def read_total(self, who: int) -> None:
        one, (stamped, parts) = self.all[who], self.total
        stamp = stamped - one.skew
        is_news = stamp > one.spent._as_of
        is_of_use = one.spent.read_total(sum(parts), stamp, self.now)
        assert is_of_use or stamp > self.now + MARGIN_SECONDS
        if is_of_use and is_news:
            assert sum(parts) - parts[who] >= one.read_of_others
            one.read_of_others = sum(parts) - parts[who]

    @rule(who=st.integers(0, 2))
    def read_exactly(self, who: int) -> None:
        one = self.all[who]
        whole = sum(each.flushed for each in self.all)
        one.spent.read_exactly(whole, self.now)
        assert one.spent.known == whole + one.pending
        one.read_of_others = whole - one.flushed

    @invariant()
    def nothing_is_known_too_low(self) -> None:
        for one in getattr(self, "all", ()):
            assert one.spent.known >= one.flushed + one.pending + one.read_of_others
            assert one.spent.in_flight == 0

    def teardown(self) -> None:
        """When all is flushed and a fresh total is read after a while, all know the truth."""
        for who in range(3 if hasattr(self, "all") else 0):
            self.set_clock(who, 0.0)
            self.flush(who)
        self.now += 3 * MARGIN_SECONDS
        if hasattr(self, "all"):
            self.make_total(0)
            self.now += MARGIN_SECONDS
            for who, one in enumerate(self.all):
                self.read_total(who)
                assert one.spent.known == sum(each.flushed for each in self.all)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=tries(100), stateful_step_count=40, deadline=None)
