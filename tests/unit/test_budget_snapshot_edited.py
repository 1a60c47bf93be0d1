"""Settings that were written by hand hold what no note can, and a file of notes what no note is: neither does harm."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.budgets import budget_snapshot as noted
from price_keeper.budgets.budget_snapshot import BudgetSnapshot
from price_keeper.budgets.effective_settings import resolve_settings
from price_keeper.config import Config
from price_keeper.domain import Scope
from price_keeper.errors import QuotaExceeded
from price_keeper.stores import schema
from price_keeper.stores.sqlite import SqliteStore

from tests.support.budget_fleet import USD, new_caller, open_budget_sidecar, put_budget
from tests.support.clock import ManualClock

DAY = "DAY#20261118"


@pytest.mark.parametrize("written", ["null", "95.5", '{"M": {"premium": null}}'])
async def test_hand_written_value_that_cannot_be_stored_in_snapshot_blocks_no_refresh(
    tmp_path: Path, written: str
) -> None:
    """In the file itself, which any tool of SQLite can do."""
    clock, who, path = ManualClock(), new_caller(), tmp_path / "store.db"
    store = await SqliteStore(path, clock.now).open()
    try:
        await put_budget(store, who.org, {"premium": 10})
        with sqlite3.connect(path) as connection:
            put = "UPDATE config SET item = json_set(item, '$.tight_mode_threshold_pct', json(?)) WHERE pk = ?"
            assert connection.execute(put, (written, schema.org_config_key(who.org).pk)).rowcount == 1
        async with (
            open_budget_sidecar(tmp_path / "one", store, clock) as one,
            open_budget_sidecar(tmp_path / "two", store, clock) as two,
        ):
            await one.spend(who, 10 * USD)
            await one.flusher.flush()
            with pytest.raises(QuotaExceeded):
                await two.decide(who)
            assert not (await two.caller_day(who)).budget.is_stale
            assert two.budget_registry.snapshot.find_settings(Scope(who.org)) is None
    finally:
        connection.close()
        await store.close()


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["N", "B", "M", "period", "state", "spent", "quotas", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
_ORG = "00000001-0000-4000-8000-000000000000"


@given(
    made=st.floats(0, 1e12) | _JSON,
    about=st.sampled_from(["settings", "standing"]) | _JSON,
    scope=st.sampled_from([f"ORG#{_ORG}", f"ORG#{_ORG}#APP#web"]) | _JSON,
    rest=st.lists(_JSON, max_size=2) | st.builds(lambda found: [{"period": DAY, "state": {}, "spent": found}], _JSON),
)
def test_malformed_snapshot_line_is_ignored(made: Any, about: Any, scope: Any, rest: list[Any]) -> None:
    notes = BudgetSnapshot(lambda: 5.0)
    found, corrupt_lines = noted.select_newest([[made, about, scope, *rest]])
    notes.merge(found)
    assert corrupt_lines + len(notes.export_lines()) == 1
    for each in (Scope(_ORG), Scope(_ORG, "web")):
        found = notes.find_settings(each)
        if found is not None:
            resolve_settings(found, found, Config.development().defaults, (), 5.0)
        stood = notes.find_budget(each, DAY)
        assert stood is None or all(type(pico) is int for pair in stood.spent.values() for pico in pair)
