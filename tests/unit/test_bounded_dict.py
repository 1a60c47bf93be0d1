"""A dict that never exceeds its bound, against a plain model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from price_keeper.bounded_dict import BoundedDict

KEYS = st.integers(0, 8)


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from(["set", "set", "pop"]), KEYS), max_size=60))
def test_bounded_dict_keeps_the_newest_keys(max_entries: int, steps: list[tuple[str, int]]) -> None:
    found = BoundedDict[int, int](max_entries)
    model: list[tuple[int, int]] = []
    for number, (action, key) in enumerate(steps):
        names = [name for name, _ in model]
        if action == "pop":
            found.pop(key, None)
            model = [entry for entry in model if entry[0] != key]
        elif key in names:  # keeps its place
            found[key] = number
            model[names.index(key)] = key, number
        else:
            found[key] = number
            model = [*model, (key, number)][-max_entries:]
        assert list(found.items()) == model
        assert [found.get(name) for name in range(9)] == [dict(model).get(name) for name in range(9)]
