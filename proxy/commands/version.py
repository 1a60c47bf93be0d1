"""`price-keeper --version`: which version this is, and whether its hot path is compiled."""

from __future__ import annotations

from argparse import Action, ArgumentParser
from importlib.metadata import version
from typing import Any

from proxy import express


class Version(Action):
    """Looks it up when it is asked for: every other command starts sooner without."""

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        how = "compiled" if is_compiled() else "pure Python"
        print(f"{parser.prog} {version('bedrock-price-keeper')}, {how}")
        parser.exit()


def is_compiled() -> bool:
    """All of the modules that setup.py names are, or none."""
    return not express.__file__.endswith(".py")
