"""`price-keeper --version`; and that a run of the tests that is to have compiled modules has them."""

from __future__ import annotations

import runpy
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.commands import ROOT, call_in_process, price_keeper
from tests.support.compiled import IS_COMPILED

COMPILED: list[str] = runpy.run_path(str(ROOT / "setup.py"))["COMPILED"]


def test_version_states_whether_compiled(tmp_path: Path) -> None:
    expected = f"price-keeper {version('bedrock-price-keeper')}, {'compiled' if IS_COMPILED else 'pure Python'}\n"
    for said in (price_keeper("--version", folder=tmp_path), call_in_process("--version", folder=tmp_path)):
        assert (said.returncode, said.stdout, said.stderr) == (0, expected, "")


@pytest.mark.parametrize("path", COMPILED)
def test_hot_path_is_compiled_entirely_or_not(path: str) -> None:
    module = import_module(path.removesuffix(".py").replace("/", "."))
    assert module.__file__ is not None
    assert module.__file__.endswith(".py") is not IS_COMPILED
