"""`price-keeper check-config`: says every mistake of a configuration, without starting anything."""

from __future__ import annotations

import os
from argparse import Namespace

from price_keeper.cli.output import print_json, print_lines
from price_keeper.cli.store_selection import describe_labels, load_config_at
from price_keeper.cli.terminal import GREEN, paint


def run_check_config(args: Namespace) -> int:
    config = load_config_at(args.config)
    if config.alerts.webhook is not None:
        from price_keeper.alerts.composed import (
            load_checked_secret,  # with an HTTP client, which takes longer than all else here
        )

        load_checked_secret(config.alerts.webhook, os.environ)
    if args.json:
        print_json({"config": str(args.config), "is_good": True, "labels": list(config.labels)})
    else:
        print_lines([f"{args.config}: " + paint("good", GREEN) + f", with {describe_labels(config)}"])
    return 0
