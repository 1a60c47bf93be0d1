"""Which label serves, against an oracle of a few lines."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.budgets import label_policy
from price_keeper.budgets.budget_state import BudgetState
from price_keeper.budgets.effective_settings import resolve_settings
from price_keeper.budgets.label_policy import Mode
from price_keeper.config import Config
from price_keeper.domain import Scope
from price_keeper.errors import InvalidRequest, QuotaExceeded, TooManyRequests
from price_keeper.org_calendar import Period, find_span, load_zone

LABELS = ("a", "b", "c", "d", "e")
ORDERINGS = st.lists(st.sampled_from(LABELS[:4]), unique=True)
FORMATS = {"a": "anthropic", "b": "nova", "c": "anthropic", "d": "llama", "e": "nova"}
PREMIUM = Config.development().labels["premium"]
CONFIGURED = MappingProxyType({name: replace(PREMIUM, format=kind) for name, kind in FORMATS.items()})  # type: ignore[arg-type]
PLAN = resolve_settings(None, None, Config.development().defaults, (), 0)
SCOPE = Scope("e0000000-0000-4000-8000-000000000001")
DAY = find_span(Period.DAY, 1_795_003_200, load_zone("UTC"))
AMOUNTS = st.dictionaries(st.sampled_from(LABELS), st.integers(0, 3))


def oracle(
    asked: str, ordering: list[str], quotas: dict[str, int], active: int, spent: dict[str, int], fits: set[str]
) -> str | None:
    may = [asked]
    if asked in ordering:
        active = min(active, len(ordering) - 1)
        may = [label for at, label in enumerate(ordering) if at >= active and at >= ordering.index(asked)]
    elif ordering and asked not in quotas:
        may = []
    for label in may:
        if label in fits and (label not in quotas or spent.get(label, 0) < quotas[label]):
            return label
    return None


@given(st.sampled_from(LABELS), ORDERINGS, AMOUNTS, st.integers(0, 3), AMOUNTS, AMOUNTS, st.booleans())
def test_first_affordable_label_serves(
    asked: str,
    ordering: list[str],
    quotas: dict[str, int],
    active: int,
    spent: dict[str, int],
    under_way: dict[str, int],
    is_specific: bool,
) -> None:
    plan = replace(PLAN, ordering=tuple(ordering), quotas=quotas)
    state = BudgetState(SCOPE, DAY, plan, CONFIGURED, lambda: {label: (pico, 0) for label, pico in spent.items()})
    state.apply_settings(plan, active)
    for label, pico in under_way.items():
        for budget in state.find_trackers(label):
            budget.on_call_started(pico)
    taken = {label: spent.get(label, 0) + under_way.get(label, 0) for label in LABELS}
    fits = {label for label in LABELS if not is_specific or FORMATS[label] == FORMATS[asked]}
    expected = oracle(asked, ordering, quotas, active, taken, fits)
    if expected is None:
        with pytest.raises((QuotaExceeded, TooManyRequests, InvalidRequest)):
            state.decide(asked, is_specific)
    else:
        assert state.decide(asked, is_specific).label == expected


@given(ORDERINGS, st.lists(AMOUNTS, max_size=6), AMOUNTS)
def test_active_label_only_moves_down_and_stops_where_quota_is_left(
    ordering: list[str], spends: list[dict[str, int]], quotas: dict[str, int]
) -> None:
    spent, active = dict.fromkeys(ordering, 0), 0
    for more in spends:
        spent = {label: spent[label] + more.get(label, 0) for label in ordering}
        before, active = active, label_policy.advance_active_index(active, ordering, spent.__getitem__, quotas)
        assert active >= before
        left = [at for at in range(before, len(ordering)) if spent[ordering[at]] < quotas.get(ordering[at], 10**9)]
        assert active == (left[0] if left else max(before, len(ordering) - 1))


@given(st.integers(0, 10**16), st.integers(0, 10**16), st.integers(1, 100))
def test_percent_is_hundred_exactly_when_quota_is_spent(spent: int, quota: int, tight: int) -> None:
    percent, mode = label_policy.compute_quota_percent(spent, quota), label_policy.compute_mode(spent, quota, tight)
    assert (percent >= 100) == (spent >= quota) == (mode is Mode.EXCEEDED)
    if mode is not Mode.EXCEEDED:
        assert (mode is Mode.TIGHT) == (percent >= tight)


@pytest.mark.parametrize("enforcement", ["soft", "hard"])
def test_decision_unlimited_label_serves_when_those_before_it_are_spent(enforcement: str) -> None:
    plan = replace(PLAN, ordering=("a", "b"), quotas={"a": 2}, enforcement=enforcement)  # type: ignore[arg-type]
    budget = BudgetState(SCOPE, DAY, plan, CONFIGURED, lambda: {"a": (2, 0)})
    assert budget.decide("a", False) == budget.decide_hard("a", False, ()) == ("b", Mode.NORMAL, None, None)
    assert budget.decide_hard("a", False, {"a"}).label == "b"
    assert (budget.find_next_active(0), budget.find_next_active(1)) == (1, None)
    # Its body is written for another format, so that label alone may serve.
    with pytest.raises(InvalidRequest, match=r"format anthropic has quota left; .* served by b \(nova\)"):
        budget.decide("a", True)
    with pytest.raises(QuotaExceeded, match=r"has used today's a budget of .*; it resets"):
        budget.decide_hard("a", True, {"a"})
