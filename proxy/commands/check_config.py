"""`price-keeper check-config`: says every mistake of a configuration, without starting anything."""

from __future__ import annotations

from argparse import Namespace

from proxy.commandline.terminal import GREEN, painted
from proxy.commands.places import labels_told, loaded
from proxy.commands.shared import print_json, say


def check(chosen: Namespace) -> int:
    config = loaded(chosen.config)
    if chosen.json:
        print_json({"config": str(chosen.config), "is_good": True, "labels": list(config.labels)})
    else:
        say([f"{chosen.config}: " + painted("good", GREEN) + f", with {labels_told(config)}"])
    return 0
