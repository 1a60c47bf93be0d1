"""The engines against a plain model: the same random operations, one after another and several at once.

The model knows nothing of the engines' code: a condition is a pair, the store's condition and a Python predicate that
says the same. Operations sent at once must have the answers and the end that some order of them would have, one by one.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import uuid4

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from price_keeper.errors import ConditionFailed, ReasonCode, TransactionFailed
from price_keeper.stores.contract import (
    AttributeExists,
    AttributeMissing,
    Condition,
    ConditionCheck,
    Delete,
    ItemExists,
    ItemMissing,
    Key,
    Put,
    Query,
    Store,
    Update,
    above,
    all_of,
    any_of,
    at_least,
    at_most,
    below,
    equals,
)

from tests.support.effort import tries
from tests.support.engines import ALL, EXACT, Engines

State = dict[str, dict[str, Any]]  # sort key -> item, of the one partition an example works in
Predicate = Callable[[dict[str, Any] | None], bool]

ODD = "c"  # the attribute that may hold any kind of value, and is never added to
NAMES = st.sampled_from(["a", "b", ODD])
PLACES = st.sampled_from(["x", "y", "z"])
# Sums of a few of these stay within the 38 digits that every engine keeps; what lies beyond is tested apart.
NUMBERS = st.one_of(
    st.integers(-1, 1),
    st.integers(-1, 1),
    st.integers(-(10**30), 10**30),
    st.decimals("-9.999999", "9.999999", places=6),
)
COMPARED = st.sampled_from([-1, 0, 1, Decimal("0.5")])  # few, so that values often meet their bound
OTHERS = st.one_of(st.sampled_from(["", "m", "é"]), st.booleans(), st.binary(max_size=2))


@dataclass(frozen=True)
class ConditionPair:
    """A condition in the store's words, and in Python's."""

    condition: Condition | None
    holds: Predicate = field(compare=False)


def _compare(
    make: Callable[[str, Any], Condition], how: Callable[[Any, Any], bool]
) -> st.SearchStrategy[ConditionPair]:
    def build(name: str, number: Any) -> ConditionPair:
        def predicate(item: dict[str, Any] | None) -> bool:
            stored = (item or {}).get(name)
            is_number = isinstance(stored, (int, Decimal, Fraction)) and not isinstance(stored, bool)
            return is_number and how(stored, number)

        return ConditionPair(make(name, number), predicate)

    return st.builds(build, NAMES, COMPARED)


SIMPLE = st.one_of(
    st.just(ConditionPair(ItemExists(), lambda item: item is not None)),
    st.just(ConditionPair(ItemMissing(), lambda item: item is None)),
    NAMES.map(lambda name: ConditionPair(AttributeExists(name), lambda item: name in (item or {}))),
    NAMES.map(lambda name: ConditionPair(AttributeMissing(name), lambda item: name not in (item or {}))),
    _compare(equals, lambda left, right: left == right),
    _compare(below, lambda left, right: left < right),
    _compare(at_most, lambda left, right: left <= right),
    _compare(above, lambda left, right: left > right),
    _compare(at_least, lambda left, right: left >= right),
)


def _joined(make: Callable[..., Condition], how: Callable[[Any], bool]) -> st.SearchStrategy[ConditionPair]:
    def build(parts: list[ConditionPair]) -> ConditionPair:
        return ConditionPair(
            make(*(part.condition for part in parts)), lambda item: how(part.holds(item) for part in parts)
        )

    return st.lists(SIMPLE, min_size=1, max_size=3).map(build)


CONDITIONS = st.one_of(
    st.just(ConditionPair(None, lambda item: True)),
    SIMPLE,
    _joined(all_of, all),
    _joined(any_of, any),
)


@dataclass(frozen=True)
class Step:
    """One write, or all writes of a transaction."""

    kind: str
    place: str = ""
    condition_pair: ConditionPair = ConditionPair(None, lambda item: True)
    values: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    parts: tuple[Step, ...] = ()


# What an update does to each attribute it names.
DEEDS = st.sampled_from(["set", "set_if_missing", "add", "remove"])
UNCOUNTED = st.sampled_from(["set", "set_if_missing", "remove"])


@st.composite
def _updates(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> Step:
    names = draw(st.lists(NAMES, min_size=1, unique=True))
    deeds = {name: draw(DEEDS if name != ODD else UNCOUNTED) for name in names}
    return Step("update", draw(PLACES), draw(CONDITIONS), {name: draw(_value(name, values)) for name in names}, deeds)


def _value(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return values if name == ODD else NUMBERS


def _steps(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    """`values` belong to the odd attribute; the others are numbers."""
    items = st.fixed_dictionaries({}, optional={name: _value(name, values) for name in ("a", "b", ODD)})
    single = st.one_of(
        st.builds(Step, st.just("put"), PLACES, CONDITIONS, items),
        _updates(values),
        _updates(values),
        st.builds(Step, st.just("delete"), PLACES, CONDITIONS),
    )
    checks = st.builds(Step, st.just("check"), PLACES, SIMPLE)
    parts = st.lists(st.one_of(single, checks), min_size=1, max_size=3, unique_by=lambda step: step.place)
    return st.one_of(single, parts.map(lambda chosen: Step("transact", parts=tuple(chosen))))


# The model: what each step answers, and the state after it.


def _played(state: State, step: Step) -> tuple[Any, State]:
    if step.kind == "transact":
        return _transacted(state, step.parts)
    before = state.get(step.place)
    if not step.condition_pair.holds(before):
        return ("failed", before), state
    after = _after(step, before)
    answer = {"put": None, "update": after, "delete": before}[step.kind]
    return ("done", answer), _with(state, step.place, after)


def _transacted(state: State, parts: Sequence[Step]) -> tuple[Any, State]:
    verdicts = [part.condition_pair.holds(state.get(part.place)) for part in parts]
    if not all(verdicts):
        pairs = zip(verdicts, parts, strict=True)
        return ("refused", [None if holds else (state.get(part.place),) for holds, part in pairs]), state
    after = state
    for part in parts:
        after = _with(after, part.place, _after(part, state.get(part.place)))
    return ("done", None), after


def _with(state: State, place: str, item: dict[str, Any] | None) -> State:
    rest = {name: value for name, value in state.items() if name != place}
    return rest if item is None else rest | {place: item}


def _after(step: Step, before: dict[str, Any] | None) -> dict[str, Any] | None:
    match step.kind:
        case "put":
            return dict(step.values)
        case "delete":
            return None
        case "check":
            return before
    item = dict(before or {})
    for name, deed in step.names.items():
        value = step.values[name]
        match deed:
            case "set":
                item[name] = value
            case "set_if_missing":
                item.setdefault(name, value)
            case "add":
                item[name] = Fraction(item.get(name, 0)) + Fraction(value)
            case "remove":
                item.pop(name, None)
    return item


# The engine: the same step carried out for real, its answer in the model's words.


def _write(pk: str, step: Step) -> Put | Update | Delete | ConditionCheck:
    key = Key("config", pk, step.place)
    match step.kind:
        case "put":
            return Put(key, step.values, step.condition_pair.condition)
        case "delete":
            return Delete(key, step.condition_pair.condition)
        case "check":
            assert step.condition_pair.condition is not None
            return ConditionCheck(key, step.condition_pair.condition)
    changes = {
        deed: {name: value for name, value in step.values.items() if step.names[name] == deed}
        for deed in ("set", "set_if_missing", "add")
    }
    removed = tuple(name for name, deed in step.names.items() if deed == "remove")
    return Update(key, **changes, remove=removed, condition=step.condition_pair.condition)


async def _carried_out(store: Store, pk: str, step: Step) -> Any:
    try:
        match step.kind:
            case "transact":
                await store.transact([_write(pk, part) for part in step.parts], token=str(uuid4()))
                return "done", None
            case "put":
                return "done", await store.put(_write(pk, step))
            case "update":
                return "done", await store.update(_write(pk, step))
            case _:
                return "done", await store.delete(_write(pk, step))
    except ConditionFailed as failure:
        return "failed", failure.item
    except TransactionFailed as failure:
        failed = ReasonCode.CONDITION_FAILED
        return "refused", [(reason.item,) if reason.code is failed else None for reason in failure.reasons]


async def _state(store: Store, pk: str) -> State:
    page = await store.query(Query("config", pk, consistent=True))
    assert [row.key.sk for row in page.rows] == sorted(row.key.sk for row in page.rows)
    return {row.key.sk: dict(row.item) for row in page.rows}


async def _play(store: Store, groups: Sequence[Sequence[Step]]) -> None:
    pk, state = f"MODEL#{uuid4()}", State()
    for group in groups:
        answers = await asyncio.gather(*(_carried_out(store, pk, step) for step in group))
        state = _explained(state, group, answers, await _state(store, pk))


def _explained(state: State, group: Sequence[Step], answers: Sequence[Any], end: State) -> State:
    """The state after some order of the group that explains every answer and the end."""
    outcomes = []
    for order in itertools.permutations(range(len(group))):
        now, expected = state, [None] * len(group)
        for index in order:
            expected[index], now = _played(now, group[index])
        if expected == list(answers) and now == end:
            return now
        outcomes.append((expected, now))
    raise AssertionError(f"from {state}\n{group}\nanswered {answers}\nand left {end};\nexplained by none of {outcomes}")


def _drive(engines: Engines, names: Sequence[str], steps: st.SearchStrategy[Any], examples: int) -> None:
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:

        async def opened(stack: AsyncExitStack) -> list[Store]:
            return [await stack.enter_async_context(engines.open(name, Path(folder))) for name in names]

        stack = AsyncExitStack()
        stores = runner.run(opened(stack))

        @settings(max_examples=tries(examples), suppress_health_check=list(HealthCheck))
        @given(steps)
        def same_as_the_model(groups: list[list[Step]]) -> None:
            for name, store in zip(names, stores, strict=True):
                try:
                    runner.run(_play(store, groups))
                except AssertionError as failure:
                    raise AssertionError(f"{name}: {failure}") from None

        try:
            same_as_the_model()
        finally:
            runner.run(stack.aclose())


def test_sequential_operations_match_model(engines: Engines) -> None:
    steps = st.lists(st.lists(_steps(NUMBERS), min_size=1, max_size=1), min_size=1, max_size=12)
    _drive(engines, ALL, steps, examples=75)


def test_concurrent_operations_match_model(engines: Engines) -> None:
    groups = st.lists(st.lists(_steps(st.one_of(NUMBERS, OTHERS)), min_size=1, max_size=4), min_size=1, max_size=6)
    _drive(engines, EXACT, groups, examples=125)
