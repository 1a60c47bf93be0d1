"""What is known of counters that this process submits usage to: never more than is in the store, and all that it
acknowledged, whatever is read in between and however submissions end."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from price_keeper.budgets.budget_state import SpendTracker
from price_keeper.ledger.counter_writes import to_micros
from price_keeper.ledger.known_totals import MAX_COUNTERS, KnownTotals
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.stores.contract import Item, Key

from tests.support.effort import tries

COUNTER = Counter("ORG#6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b", "premium", "DAY#20261118", 8)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["others", "begin", "apply", "confirm", "cancel", "aggregate", "look", "look", "mark", "exact"]
        ),
        st.integers(1, 3),
    ),
    min_size=6,
    max_size=25,
)


class Totals:
    """The store as far as `KnownTotals` asks it: the total, as the last aggregation made it."""

    def __init__(self) -> None:
        self.stored = self.total = 0

    async def get_many(self, keys: list[Key], *, consistent: bool = False) -> list[Item | None]:
        total: Item = {"cost_usd_micros": to_micros(self.total), "requests": self.total, "as_of_epoch": 1}
        return [total for _ in keys]


class Writer:
    """One process that submits, and everybody else."""

    def __init__(self) -> None:
        journal: Any = SimpleNamespace(possibly_stored_counts=dict, unflushed_counts=dict)
        self.known, self.tracker, self.totals = KnownTotals(journal), SpendTracker(), Totals()
        self.pending: list[tuple[Any, int, bool]] = []
        self.acknowledged = 0
        self.mark: tuple[int | None, int] = None, 0

    def do(self, step: str, number: int) -> None:
        if step == "others":
            self.totals.stored += number
        elif step == "begin":
            counts = UsageCounts(requests=number, pico=number)
            self.tracker.begin_submission(number)
            self.pending.append((self.known.begin_submission({COUNTER: counts}), number, False))
        elif step in ("apply", "confirm", "cancel") and self.pending:
            self._end(step, *self.pending.pop(number % len(self.pending)))
        elif step == "aggregate":
            self.totals.total = self.totals.stored
        elif step == "look":  # at a total that is up to date
            self.totals.total = self.totals.stored
            self.do("read", number)
        elif step == "read":
            self.read_total()
            self.tracker.apply_lower_bound(self.totals.total)
        elif step == "mark":  # a read of the shards begins
            self.mark = self.tracker.flush_mark, self.totals.stored
        elif step == "exact" and self.mark[0] is not None and self.mark[0] == self.tracker.flush_mark:
            self.tracker.apply_exact_sum(self.mark[1], 0.0)

    def read_total(self) -> None:
        with suppress(StopIteration):  # nothing in it waits
            self.known.read(self.totals, [COUNTER], keeps=True).send(None)  # type: ignore[arg-type]

    def _end(self, step: str, pending: Any, number: int, is_applied: bool) -> None:
        if step == "apply" or (step == "confirm" and not is_applied):
            self.totals.stored += 0 if is_applied else number
        if step == "apply":
            self.pending.append((pending, number, True))
        elif step == "confirm":
            pending.confirm()
            self.tracker.confirm_submission(number)
            self.acknowledged += number
        else:
            pending.cancel()
            self.tracker.cancel_submission(number)


@settings(max_examples=tries(1000))
@given(STEPS)
@example([("begin", 3), ("apply", 0), ("mark", 0), ("exact", 0), ("confirm", 0)])
def test_known_spend_is_between_what_was_acknowledged_and_what_is_stored(steps: list[tuple[str, int]]) -> None:
    writer = Writer()
    for step, number in steps:
        writer.do(step, number)
        counts = writer.known.get_all([COUNTER])[COUNTER].counts
        assert counts.requests == counts.pico
        assert writer.acknowledged <= counts.pico <= writer.totals.stored
        assert writer.acknowledged <= writer.tracker.spent <= writer.totals.stored


def test_known_total_read_before_a_submission_has_all_of_both() -> None:
    writer = Writer()
    for step in (("others", 5), ("aggregate", 0), ("read", 0), ("begin", 3), ("read", 0), ("confirm", 0)):
        writer.do(*step)
    assert writer.known.get_all([COUNTER])[COUNTER].counts.pico == writer.tracker.spent == 8


@pytest.mark.parametrize("is_sent", [False, True])
def test_known_total_counts_the_journal_once_beside_it(is_sent: bool) -> None:
    in_journal = {COUNTER: UsageCounts(1, pico=4)}
    journal: Any = SimpleNamespace(
        possibly_stored_counts=lambda: in_journal if is_sent else {}, unflushed_counts=lambda: in_journal
    )
    writer = Writer()
    writer.known, writer.totals.total = (known := KnownTotals(journal)), 10
    writer.read_total()
    assert known.get_all([COUNTER])[COUNTER].counts.pico == (10 if is_sent else 14)
    journal.unflushed_counts = journal.possibly_stored_counts = dict
    known.on_flushed(in_journal.items())
    assert known.get_all([COUNTER])[COUNTER].counts.pico == (10 if is_sent else 14)


def test_known_totals_of_leases_are_not_kept_and_the_oldest_is_evicted() -> None:
    journal: Any = SimpleNamespace(possibly_stored_counts=dict, unflushed_counts=dict)
    known, counts = KnownTotals(journal), UsageCounts(pico=1)
    known.on_flushed([(Counter.for_lease("s", "l", "h", "p", 8), counts)])
    known.on_flushed([(COUNTER._replace(label=f"l{number}"), counts) for number in range(MAX_COUNTERS + 1)])
    assert len(known._own) == MAX_COUNTERS
    first, last = (COUNTER._replace(label=f"l{number}") for number in (0, MAX_COUNTERS))
    assert [known.get_all([each])[each].counts.pico for each in (first, last)] == [0, 1]


async def test_reader_of_many_counters_gets_each_and_evicts_no_own_usage() -> None:
    journal: Any = SimpleNamespace(possibly_stored_counts=dict, unflushed_counts=dict)
    known, totals = KnownTotals(journal), Totals()
    known.on_flushed([(COUNTER, UsageCounts(pico=5))])
    totals.total = 3
    others = [COUNTER._replace(label=f"l{number}") for number in range(MAX_COUNTERS + 1)]
    read = await known.read(totals, others)  # type: ignore[arg-type]
    assert {each.counts.pico for each in read.values()} == {3}
    assert len(read) == len(others)
    assert known.get_all([COUNTER])[COUNTER].counts.pico == 5
    assert len(known._own) == 1


async def test_reader_remembers_what_others_spent_of_a_counter_with_usage_in_the_journal() -> None:
    in_journal = {COUNTER: UsageCounts(pico=4)}
    journal: Any = SimpleNamespace(possibly_stored_counts=dict, unflushed_counts=lambda: in_journal)
    known, totals = KnownTotals(journal), Totals()
    totals.total = 10
    read = [(await known.read(totals, [COUNTER]))[COUNTER].counts.pico]  # type: ignore[arg-type]
    known.on_flushed([*in_journal.items()])
    in_journal.clear()
    for totals.total in (10, 14):  # the total before the flush, and with it
        read.append((await known.read(totals, [COUNTER]))[COUNTER].counts.pico)  # type: ignore[arg-type]
    assert read == [14, 14, 14]
