"""A flush in several transactions, some of which the store applied: what a restart makes of journal and snapshot."""

from __future__ import annotations

from pathlib import Path

from price_keeper.budgets import budget_snapshot as noted
from price_keeper.budgets.budget_snapshot import BudgetSnapshot
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment import decode_lines
from price_keeper.stores.contract import Store

from tests.support.budget_fleet import USD, new_caller, open_budget_sidecar, put_budget
from tests.support.clock import ManualClock

APPS = 50  # each charged to its own scope: more than one transaction takes


async def test_half_flushed_segment_counts_once_after_restart(tmp_path: Path, exact_store: Store) -> None:
    clock, org = ManualClock(), new_caller().org
    notes = BudgetSnapshot(clock.now)
    everybody = [new_caller(f"app{number}", org) for number in range(APPS)]
    await put_budget(exact_store, org, {"premium": 100})
    async with open_budget_sidecar(tmp_path / "one", exact_store, clock, snapshot=notes) as one:
        for who in everybody:
            await one.spend(who, 30 * USD)
        await one.wait_for_refresh()
        transactions = 0

        async def away_after_the_first(verb: str) -> None:
            nonlocal transactions
            transactions += verb == "transact"
            one.store.is_away = transactions > 1

        one.store.before_call = away_after_the_first
        assert not await one.flusher.flush()
        assert transactions == 2
        await one.clock.advance(10)
        notes.record_pending(noted.MAX_RECORDS)
        found = noted.select_newest(decode_lines(b"".join(notes.export_lines())).values)[0]
    left = recover(tmp_path / "one")
    same = BudgetSnapshot(clock.now)
    same.merge(found)
    async with open_budget_sidecar(tmp_path / "two", exact_store, clock, snapshot=same) as two:
        two.flusher._unsent.extend(left.sealed)
        two.store.is_away = True
        for who in everybody:
            caller_day = await two.caller_day(who)
            assert caller_day.budget.get_tracker("premium").spent == 30 * USD
