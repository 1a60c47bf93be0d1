"""The product with a mistake in it, on purpose: each of these the simulator has to find, or it proves nothing.

The last ones were in the product until the simulator found them; their seeds are those that show them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from price_keeper.budgets import active_label, budget_snapshot, label_policy
from price_keeper.budgets.active_label_follower import ActiveLabelFollower
from price_keeper.budgets.budget_refresh import BudgetReader, _build_counters
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.budgets.budget_snapshot import SnapshotFile
from price_keeper.budgets.budget_state import BudgetState, SpendTracker
from price_keeper.budgets.hard.budget_lease import IDLE_SECONDS, BudgetLease
from price_keeper.errors import StoreUnavailable
from price_keeper.ledger import aggregator, counter_writes, lease_rows, recovery
from price_keeper.ledger.aggregator import build_shard_keys, sum_items
from price_keeper.ledger.counter_writes import COST_ATTRIBUTE, SegmentMarker, to_pico
from price_keeper.ledger.flusher import Flusher
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.lease_file import BudgetLeaseFile
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.rates.bucket_client import BucketTransaction, TransactionSender
from price_keeper.rates.rate_lease import RateLease
from price_keeper.rates.store_time import StoreTime
from price_keeper.stores.contract import ItemExists, ItemMissing, Put, Update, any_of

from tests.sim.play import Outcome, played


class Mistake(NamedTuple):
    """Where the mutation goes, what it replaces, in which worlds it shows, and from which seed it was soon found."""

    place: Any
    name: str
    instead: Callable[..., Any]
    focus: str
    seed: int = 10_000


@contextmanager
def made(mistake: Mistake) -> Iterator[None]:
    with mock.patch.object(mistake.place, mistake.name, mistake.instead):
        yield


def seeds_until_found(mistake: Mistake, folder: Path, most: int) -> tuple[int, Outcome | None]:
    """How many seeds it took, and what was found; None: nothing."""
    with made(mistake):
        for number in range(most):
            outcome = played(mistake.seed + number, folder, mistake.focus)
            if outcome.failure:
                return number + 1, outcome
    return most, None


_writes, _following, _send_part, _once = (
    counter_writes.build_writes,
    Journal._begin_segment,
    SegmentSender._send_part,
    TransactionSender._attempt,
)
_given_back, _tick = lease_rows.build_release, BudgetLease.tick


def _without_marker(*arguments: Any) -> list[Any]:
    marker, *rest = _writes(*arguments)
    assert isinstance(marker, Put)
    return [replace(marker, condition=None), *rest]


def _without_estimates(found: Any) -> Any:
    found.open.clear()
    return _brought_to_its_end(found)


_brought_to_its_end = recovery._estimate_and_seal


def _without_carried(journal: Any, before: str) -> Any:
    under_way, journal._open = journal._open, {}
    try:
        return _following(journal, before)
    finally:
        journal._open = under_way


async def _lost_is_good(sender: Any, *arguments: Any) -> None:
    with suppress(StoreUnavailable):
        await _send_part(sender, *arguments)


async def _nothing_counted_before(*_: Any) -> frozenset[int]:
    return frozenset()


async def _without_token(sending: Any, transaction: BucketTransaction) -> None:
    transaction.idempotency_token, token = None, transaction.idempotency_token  # type: ignore[assignment]
    try:
        await _once(sending, transaction)
    finally:
        transaction.idempotency_token = token


def _without_number(*arguments: Any) -> list[Any]:
    hold, bucket = _given_back(*arguments)
    assert isinstance(hold, Update)
    return [replace(hold, condition=None), bucket]


async def _by_time_out(lease: Any) -> None:
    """Idle leases are returned, including what calls in flight may still cost."""
    if lease.in_flight and lease._clock.monotonic() - lease._used_at >= IDLE_SECONDS:
        async with lease._writing:
            await lease._release(lease.free + lease.in_flight)
    await _tick(lease)


def _on_what_is_under_way(state: Any, index: int) -> int | None:
    plan = state.settings
    if not plan.ordering or not plan.is_sticky or plan.enforcement == "shadow":
        return None
    found = label_policy.advance_active_index(
        index, plan.ordering, lambda label: state.get_tracker(label).committed, plan.quotas
    )
    return found if found > index else None


def _by_former_quotas(state: Any, plan: Any, active: int) -> None:
    """Settings that were read first hold for good."""
    _learn(state, replace(plan, quotas=state.settings.quotas or plan.quotas), active)


_learn = BudgetState.apply_settings


def _past_one_more(active: int, ordering: Any, spent: Any, quotas: Any) -> int:
    """If the active label is spent, the next one is left unseen."""
    found = _moved_on(active, ordering, spent, quotas)
    return found if found == active else min(found + 1, len(ordering) - 1)


_moved_on = label_policy.advance_active_index


def _not_at_once(spent: Any, expected: int, pico: int) -> None:
    spent.in_flight -= expected


def _certain_that_it_is_not_in(spent: Any, pico: int) -> None:
    """What was sent counts beside whatever is read, though it may be in there."""
    spent._raise_others_to(pico - spent._acknowledged_own)


def _by_its_own_clock(time: Any) -> float:
    return float(time._clock.now())


async def _exact_at_any_time(reader: BudgetReader, budget: BudgetState) -> None:
    """Neither the gate nor the marks of flushes are asked."""
    for counter in _build_counters(budget):
        began = reader._clock.monotonic()
        items = await reader._store.get_many(build_shard_keys(counter), consistent=True)
        sums = sum_items(item for item in items if item is not None)
        budget.get_tracker(counter.label).apply_exact_sum(to_pico(sums[COST_ATTRIBUTE]), began)


async def _follows_nobody(_: Any) -> None:
    """What others move on is read when a budget is refreshed."""


async def _forgets(_: Any) -> None:
    """What was noted before."""


# Those that the simulator found when they were in the product.


def _cannot_end(journal: Any) -> None:
    journal._segment.sync()
    journal._segment.close()


def _met_by_defaults(registry: Any, name: Any) -> bool:
    return bool(registry._is_loaded(name))


def _never_sound_again(holds: Any, name: Any) -> None:
    if holds._has_unsynced_bytes:
        raise OSError("its holds could not be synced")
    _write_name(holds, name)


_write_name = BudgetLeaseFile._write
_ANY = any_of(ItemMissing(), ItemExists())

MISTAKES = {
    "a flush without the condition of its marker": Mistake(
        counter_writes, "build_writes", _without_marker, "journal", 10_006
    ),
    "a lost answer taken for a good one": Mistake(SegmentSender, "_send_part", _lost_is_good, "journal"),
    "a marker that stands for a segment whatever its lines are": Mistake(
        SegmentMarker, "is_confirmed_by", lambda *_: True, "journal", 10_105
    ),
    "estimates of a replayed copy forgotten by the segments behind": Mistake(
        SegmentSender, "_read_counted_calls", _nothing_counted_before, "journal", 10_485
    ),
    "estimates in both of two segments": Mistake(
        recovery.RecoveredSegment, "hand_calls_to", lambda *_: None, "journal", 10_012
    ),
    "no estimates at all": Mistake(recovery, "_estimate_and_seal", _without_estimates, "journal", 10_007),
    "calls under way that no segment carries on": Mistake(
        Journal, "_begin_segment", _without_carried, "journal", 10_007
    ),
    "a total without its condition": Mistake(aggregator, "_build_never_lower", lambda _: _ANY, "soft", 20_067),
    "sticky fallback without its condition": Mistake(
        active_label, "_build_forward_condition", lambda *_: _ANY, "sticky", 10_027
    ),
    "sticky fallback on what is only under way": Mistake(
        BudgetState, "find_next_active", _on_what_is_under_way, "sticky", 10_004
    ),
    "sticky fallback by quotas that hold no more": Mistake(
        BudgetState, "apply_settings", _by_former_quotas, "sticky", 10_000
    ),
    "sticky fallback past a label that is not spent": Mistake(
        label_policy, "advance_active_index", _past_one_more, "sticky", 10_000
    ),
    "active labels that nobody follows": Mistake(ActiveLabelFollower, "run", _follows_nobody, "calm", 10_138),
    "spend that is counted when it is flushed": Mistake(SpendTracker, "on_call_ended", _not_at_once, "soft"),
    "own spend counted although it may be in the total": Mistake(
        SpendTracker, "apply_lower_bound", _certain_that_it_is_not_in, "soft"
    ),
    "shards read exactly beside a flush of unknown outcome": Mistake(
        SpendTracker, "is_flush_certain", property(lambda _: True), "soft", 10_010
    ),
    "shards read exactly while a flush is under way": Mistake(
        BudgetReader, "read_shards", _exact_at_any_time, "soft", 20_055
    ),
    "money given back without a number": Mistake(lease_rows, "build_release", _without_number, "hard", 10_006),
    "money of calls under way given back by time-out": Mistake(BudgetLease, "tick", _by_time_out, "hard"),
    "holds given back before all is flushed": Mistake(
        Flusher, "has_recovered_segments", property(lambda _: False), "hard", 10_030
    ),
    "limits written again without a token": Mistake(TransactionSender, "_attempt", _without_token, "limits", 10_076),
    "refill by a machine's own clock": Mistake(StoreTime, "_seconds", _by_its_own_clock, "limits", 10_029),
    "budgets that are forgotten with a process": Mistake(SnapshotFile, "open", _forgets, "mixed", 10_008),
    "notes written over those before them": Mistake(
        budget_snapshot, "_build_temporary_path", lambda path: path, "mixed", 30_190
    ),
    "a disk that cannot sync keeps a sidecar from ending": Mistake(Journal, "close", _cannot_end, "journal"),
    "who is met by the defaults stays so": Mistake(
        BudgetRegistry, "_is_loaded_from_store", _met_by_defaults, "soft", 10_155
    ),
    "a disk that could not sync once takes no hold": Mistake(
        BudgetLeaseFile, "_write", _never_sound_again, "hard", 10_017
    ),
    "a debt that no bucket can pay at once": Mistake(
        RateLease, "find_unpayable_debt", lambda *_: None, "limits", 21_430
    ),
    "a refusal that is taken for the end of it": Mistake(
        TransactionSender, "may_arrive", lambda *_: False, "limits", 20_960
    ),
}
