"""Which build this is."""

from __future__ import annotations

import platform
from importlib.metadata import version

from price_keeper import exchange
from price_keeper.telemetry import BUILD, Telemetry


def own_version() -> str:
    return version("bedrock-price-keeper")


def is_compiled() -> bool:
    """All of the modules that setup.py names are, or none."""
    return not exchange.__file__.endswith(".py")


def add_to(telemetry: Telemetry) -> None:
    told = {
        "version": own_version(),
        "compiled": str(is_compiled()).lower(),
        "python": platform.python_version(),
    }
    telemetry.add(BUILD, lambda: [(told, 1)])
