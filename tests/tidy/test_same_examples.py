"""`make test` tries the same examples on every machine, in whatever order the tests run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import effort

ROOT = Path(__file__).parents[2]
DRAW = """
from tests.support import effort
effort.load_profile()
from hypothesis import given
from hypothesis import strategies as st

@given(st.integers() | st.text())
def draw(value):
    print(ascii(value))

draw()
"""


def drawn() -> list[object]:
    found: list[object] = []

    @settings(max_examples=500)
    @given(st.integers() | st.text() | st.binary())
    def draw(value: object) -> None:
        found.append(value)

    draw()
    return found


@pytest.mark.skipif(effort.IS_EXPLORING, reason="draws at random")
def test_examples_do_not_depend_on_loaded_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    source = tmp_path / "with_constants.py"
    source.write_text(
        "\n".join(f"A{n} = {1000 + n * 7919}; B{n} = 'constant {n}'; C{n} = b'{n:05}'" for n in range(300))
    )
    spec = importlib.util.spec_from_file_location("with_constants", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "with_constants", module)
    spec.loader.exec_module(module)
    assert drawn() == before


@pytest.mark.parametrize("surroundings", [{}, {"CI": "true"}, {"PYTHONHASHSEED": "7"}], ids=str)
def test_examples_are_the_same_in_every_process(surroundings: dict[str, str], tmp_path: Path) -> None:
    assert _drawn_apart(surroundings, tmp_path) == _drawn_apart({"PYTHONHASHSEED": "1"}, tmp_path)


def test_examples_differ_when_exploring(tmp_path: Path) -> None:
    assert _drawn_apart({"PRICE_KEEPER_EFFORT": "1"}, tmp_path) != _drawn_apart({"PRICE_KEEPER_EFFORT": "1"}, tmp_path)


def test_low_effort_draws_fewer_examples_and_the_same_in_every_process(tmp_path: Path) -> None:
    few = _drawn_apart({"PRICE_KEEPER_EFFORT": "0.1"}, tmp_path)
    assert few == _drawn_apart({"PRICE_KEEPER_EFFORT": "0.1", "PYTHONHASHSEED": "7"}, tmp_path)
    assert 1 <= len(few.splitlines()) <= 10 < len(_drawn_apart({}, tmp_path).splitlines())


def _drawn_apart(surroundings: dict[str, str], folder: Path) -> str:
    program = folder / "draw.py"
    program.write_text(DRAW)
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "PRICE_KEEPER_EFFORT")}
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**environ, "PYTHONPATH": str(ROOT), **surroundings},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout
    return done.stdout
