"""All parts of the contract, and how they are written down."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from price_keeper.alerts.alert import Alert
from price_keeper.domain import Scope

from tests.public_contract import inside
from tests.public_contract.commands import commands
from tests.public_contract.play import played
from tests.support.observed_sidecar import ORG

FILE = Path(__file__).parents[2] / "docs" / "public-contract.yaml"
_HEAD = """\
# What users and other programs rely on, generated from the running product by `make contract`; do not edit it.
# A name in it changes only with the old one accepted as well, and with a line in CHANGELOG.md.
#
# Fields are told with their types; {uuid}, {label} and the like stand for what differs; "any" is any value of a label.
# A line of the journal is told by its places, and so is a row by the pattern of its key.
"""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _: Any) -> bool:
        return True


def whole() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = played(Path(folder))
        described = commands(Path(folder))
    for name, kind in inside.metrics().items():
        found["metrics"].setdefault(name, {"kind": kind, "labels": "not measured here"})
    order = {
        "commands": described["commands"],
        "exit codes": described["exit codes"],
        "configuration": inside.configuration(),
        "names": inside.names(),
        "loggers": inside.loggers(),
        "errors": inside.errors(),
    }
    webhook = Alert("", Scope(ORG), "", "", 0, 0, 0, 0, 0)
    return order | found | {"webhook": sorted(yaml.safe_load(webhook.body()))}


def text() -> str:
    return _HEAD + yaml.dump(whole(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
