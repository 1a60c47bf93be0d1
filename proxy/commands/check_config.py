"""`price-keeper check-config`: says every mistake of a configuration, without starting anything."""

from __future__ import annotations

import os
from argparse import Namespace

from proxy.commands.shared import Commands, add_config_option
from proxy.config import load


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("check-config", help="say every mistake of a configuration, with its line")
    add_config_option(parser)
    parser.set_defaults(run=_check)


def _check(chosen: Namespace) -> int:
    config = load(chosen.config, os.environ)
    print(f"{chosen.config}: good, with {len(config.labels)} labels: {', '.join(config.labels)}")
    return 0
