"""What is fuzzed, a file for each: `one(data)` raises where an oracle does not hold. `WORDS` are for the mutator."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in HERE.glob("*.py") if path.stem != "__init__"))


def target(name: str) -> Callable[[bytes], None]:
    one: Callable[[bytes], None] = import_module(f"{__name__}.{name}").one
    return one


def words(name: str) -> tuple[bytes, ...]:
    """Pieces of input that no fuzzer guesses byte by byte."""
    return tuple(getattr(import_module(f"{__name__}.{name}"), "WORDS", ()))
