"""What stands in the store at the end: counters, totals, hard budgets."""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from price_keeper.domain import PICO_PER_MICRO, Scope
from price_keeper.ledger.aggregator import (
    MAX_CLOCK_SKEW_SECONDS,
    TOTAL_ATTRIBUTES,
    ActiveCounter,
    Aggregator,
    build_total_key,
    list_active_counters,
    read_spent_pico,
    sum_shards,
)
from price_keeper.ledger.counter_writes import DAY_SECONDS
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetBucket, HardBudgetKey
from price_keeper.ledger.total_sweep import TotalSweep
from price_keeper.stores.contract import Store, iterate_rows

from tests.soak.tenants import MODELS, SPENDING, SUBMITTED
from tests.soak.verdict import Verdict
from tests.support.clock import ShiftedClock

Key = tuple[str, str, str]  # scope, label, period


@dataclass
class Sum:
    requests: int = 0
    estimated: int = 0
    pico: int = 0

    def add(self, requests: int, estimated: int, pico: int) -> None:
        self.requests += requests
        self.estimated += estimated
        self.pico += pico


async def compare_store(store: Store, db: sqlite3.Connection, submitted_usd_micros: Decimal, verdict: Verdict) -> None:
    await sweep_totals(store)
    journals = _sums_of_journals(db)
    counters = {each.counter[:3]: each.counter for each in await _active(store)}
    submitted_scope = Scope(SUBMITTED.org, SUBMITTED.name).key
    differ, money, submitted = [], 0, 0
    for key, counter in counters.items():
        shards = await sum_shards(store, counter)
        found = Sum(
            int(shards["requests"]), int(shards["estimated_requests"]), int(shards["cost_usd_micros"] * PICO_PER_MICRO)
        )
        if key[0] == submitted_scope:
            submitted += found.pico
        elif found != journals.get(key):
            differ.append(f"{key}: {found} in the store, {journals.get(key)} in the journals")
        if "#APP#" in key[0] and key[0] != submitted_scope:
            money += found.pico
    recorded = db.execute("select sum(pico) from receipts").fetchone()[0]
    verdict.figures["scopes, labels and days"] = len(counters)
    verdict.figures["USD recorded"] = round(money / 10**12, 6)
    verdict.none("counters of journals that the store lacks", [key for key in journals if key not in counters])
    verdict.none("scopes, labels and days of which store and journals differ", differ)
    verdict.none("totals that are not the sum of their shards", await find_stale_totals(store))
    verdict.none("sums that are not those of their calls", _not_of_their_calls(db, journals))
    verdict.holds("pico-dollars between the store and all calls", "0", money - recorded, is_so=money == recorded)
    wanted = int(submitted_usd_micros * PICO_PER_MICRO)
    verdict.figures["USD told by others"] = round(submitted / 10**12, 6)
    verdict.holds(
        "pico-dollars between usage told and its counters", "0", submitted - wanted, is_so=submitted == wanted
    )


async def sweep_totals(store: Store) -> None:
    """As if it were so late that nobody adds to a counter any more: the fleet was killed a moment ago."""
    clock = ShiftedClock()
    clock.ahead = DAY_SECONDS + MAX_CLOCK_SKEW_SECONDS + 1.0
    assert await TotalSweep(store, clock, Aggregator(store, clock, 60.0)).sweep()


async def find_stale_totals(store: Store) -> list[Key]:
    """Totals that are not the sum of their shards."""
    stale: list[Key] = []
    for counter in {each.counter for each in await _active(store)}:
        shards = await sum_shards(store, counter)
        total = await store.get(build_total_key(counter), consistent=True) or {}
        if any(shards[name] != total.get(name, 0) for name in TOTAL_ATTRIBUTES):
            stale.append(counter[:3])
    return stale


async def _active(store: Store) -> list[ActiveCounter]:
    today = datetime.fromtimestamp(time.time(), UTC).date()
    days = [today + timedelta(days=offset) for offset in (-2, -1, 0, 1)]
    return [each for each in await list_active_counters(store, days, consistent=True) if not each.counter.is_lease]


def _sums_of_journals(db: sqlite3.Connection) -> dict[Key, Sum]:
    sums: dict[Key, Sum] = defaultdict(Sum)
    query = "select scope, label, period, requests, estimated, pico from sums where period not like 'HOLD#%'"
    for *key, requests, estimated, paid in db.execute(query):
        sums[tuple(key)].add(requests, estimated, int(paid))
    return sums


def _not_of_their_calls(db: sqlite3.Connection, journals: Mapping[Key, Sum]) -> list[Key]:
    """Each sum of an app equals its calls, each sum of an org its apps' calls."""
    sums: dict[Key, Sum] = defaultdict(Sum)
    query = "select scope, label, period, scopes, count(*), sum(why != ''), sum(pico) from receipts group by 1, 2, 3, 4"
    for scope, label, period, scopes, *numbers in db.execute(query):
        sums[scope, label, period].add(*numbers)
        if scopes > 1:
            sums[scope.partition("#APP#")[0], label, period].add(*numbers)
    return [key for key in {*sums, *journals} if sums[key] != journals.get(key)]


async def check_hard_budget(store: Store, served: Mapping[str, int], verdict: Verdict) -> None:
    """`served` is what Bedrock's books say that the calls of it cost, by label, in pico-dollars."""
    passed, broken = [], []
    scope = Scope(SPENDING.org, SPENDING.name).key
    counters = {each.counter for each in await _active(store) if each.counter.scope == scope}
    for label, period in {(counter.label, counter.period_or_lease) for counter in counters if counter.label in MODELS}:
        name = HardBudgetKey(scope, label, period)
        item = await store.get(name.bucket_key, consistent=True)
        assert item is not None, f"there is no bucket of {name}"
        bucket, spent, billed = (
            HardBudgetBucket.from_item(item),
            await read_spent_pico(store, name),
            served.get(label, 0),
        )
        holds = [BudgetLeaseRow.from_item(row.item) async for row in iterate_rows(store, name.lease_query)]
        verdict.figures[f"of the hard budget of {label} spent, %"] = round(100 * spent / bucket.quota, 3)
        verdict.figures[f"of the hard budget of {label} served, %"] = round(100 * billed / bucket.quota, 3)
        if max(spent, billed) > bucket.quota:
            passed.append(f"{label}: {spent} recorded and {billed} served of {bucket.quota}")
        parts = bucket.unleased + sum(hold.leased for hold in holds) + bucket.spent_without_lease
        if parts != bucket.quota or bucket.unleased < 0:
            broken.append(f"{label}: {bucket}, {holds}")
    verdict.none("hard budgets passed", passed)
    verdict.none("hard budgets whose parts are not the whole", broken)
