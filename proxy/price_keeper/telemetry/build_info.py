"""Version of the running build, and whether it is compiled."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

from price_keeper import exchange
from price_keeper.telemetry.metrics import BUILD_INFO, MetricsRegistry


@cache  # reading it takes 3 ms
def get_version() -> str:
    return version("bedrock-price-keeper")


def is_compiled() -> bool:
    """Whether the build is compiled. A build compiles all of the modules that setup.py lists, or none."""
    return not exchange.__file__.endswith(".py")


def describe_build() -> str:
    return f"{get_version()}, {'compiled' if is_compiled() else 'pure Python'}"


def register_build_info(registry: MetricsRegistry) -> None:
    labels = {
        "version": get_version(),
        "compiled": str(is_compiled()).lower(),
        "python": platform.python_version(),
    }
    registry.add(BUILD_INFO, lambda: [(labels, 1)])
