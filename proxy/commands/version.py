"""`price-keeper version`: which version this is, and whether its hot path is compiled."""

from __future__ import annotations

import platform
from argparse import Namespace
from importlib.metadata import version as version_of
from importlib.util import find_spec

from proxy.commandline.whole import PROGRAM
from proxy.commands.shared import print_json


def version(chosen: Namespace) -> int:
    number = version_of("bedrock-price-keeper")
    if getattr(chosen, "json", False):
        print_json({"version": number, "is_compiled": is_compiled(), "python": platform.python_version()})
    else:
        print(f"{PROGRAM} {number}, {'compiled' if is_compiled() else 'pure Python'}")
    return 0


def is_compiled() -> bool:
    """All of the modules that setup.py names are, or none."""
    found = find_spec("proxy.express")
    return found is not None and not (found.origin or "").endswith(".py")
