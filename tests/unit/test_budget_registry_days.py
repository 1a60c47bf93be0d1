"""The day ends in every zone, on days when clocks change: the budget is new at that second, not before."""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores.sqlite import SqliteStore

from tests.support.budget_fleet import USD, BudgetSidecar, new_caller, open_budget_sidecar, put_budget
from tests.support.clock import ManualClock

# Noon of days around which clocks change, somewhere: in Europe, America, Australia, Lord Howe, Chile, Egypt, ...
NOONS = [datetime(2026, month, day, 12, tzinfo=UTC) for month, day in ((3, 28), (4, 4), (9, 5), (10, 24), (10, 31))]


def turns() -> Iterator[tuple[str, datetime]]:
    """Each zone once, on one of the days."""
    zones = sorted(zoneinfo.available_timezones() - {"localtime", "Factory"})
    for number, zone in enumerate(zones):
        yield zone, NOONS[number % len(NOONS)]


async def _turns_over(one: BudgetSidecar, zone: str) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, {"premium": 10, "standard": 5}, timezone=zone)
    day = find_span(Period.DAY, one.clock.now(), load_zone(zone))
    await one.spend(who, 10 * USD)
    one.clock.set_wall(day.end - 0.001)
    assert (await one.decide(who)).label == "standard", zone
    one.clock.set_wall(day.end)
    assert (await one.decide(who)).label == "premium", zone
    following = find_span(Period.DAY, day.end, load_zone(zone))
    assert await one.spend(who, 10 * USD) == "premium"
    one.clock.set_wall(following.end - 0.001)
    assert (await one.decide(who)).label == "standard", zone


async def test_day_ends_at_midnight_in_every_zone(tmp_path: Path) -> None:
    clock = ManualClock()
    store = await SqliteStore(tmp_path / "store.db", clock.now).open()
    async with open_budget_sidecar(tmp_path / "journal", store, clock) as one:
        for zone, noon in turns():
            clock.set_wall(noon.timestamp())
            await _turns_over(one, zone)
    await store.close()
