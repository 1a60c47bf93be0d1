"""`price-keeper version`: the version, and whether the hot path is compiled."""

from __future__ import annotations

import platform
from argparse import Namespace

from price_keeper.cli.output import print_json
from price_keeper.cli.root_parser import PROGRAM
from price_keeper.telemetry.build_info import describe_build, get_version, is_compiled


def run_version(args: Namespace) -> int:
    if getattr(args, "json", False):
        print_json({"version": get_version(), "is_compiled": is_compiled(), "python": platform.python_version()})
    else:
        print(f"{PROGRAM} {describe_build()}")
    return 0
