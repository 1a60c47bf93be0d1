"""Writes the policies and the template of the roles anew, from the code: `.venv/bin/python deploy/iam/write.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml
from price_keeper.doctor.permissions import ROLES, build_creation_policy, build_policy, build_roles_template

DEPLOY = Path(__file__).parents[1]


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, _: object) -> bool:
        return True  # CloudFormation knows none


def files() -> Iterator[tuple[Path, str]]:
    documents = {role: build_policy(role) for role in ROLES} | {"tables": build_creation_policy()}
    for name, document in documents.items():
        yield DEPLOY / "iam" / f"{name}.json", json.dumps(document, indent=2) + "\n"
    text = yaml.dump(build_roles_template(), Dumper=_Plain, sort_keys=False, width=120)
    yield DEPLOY / "cloudformation" / "roles.yaml", text


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)
