"""`price-keeper tables`: makes, checks and describes the store's tables."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from proxy.app import open_dynamodb
from proxy.clock import SystemClock
from proxy.commands.shared import Commands, add_config_option, add_json_option, print_json
from proxy.config import Store, load
from proxy.stores import cloudformation, sqlite_file
from proxy.stores.contract import EXPIRY
from proxy.stores.schema import TABLES


def add_to(commands: Commands) -> None:
    tables = commands.add_parser("tables", help="make, check and describe the store's tables")
    verbs = tables.add_subparsers(metavar="WHAT", required=True)
    create = verbs.add_parser("create", help="make the tables that are missing; safe to run again")
    create.set_defaults(run=_create)
    check = verbs.add_parser("check", help="compare the tables with what they should be; exit code 1 if they differ")
    check.set_defaults(run=_check)
    describe = verbs.add_parser("describe", help="list the tables, their keys and what they are for")
    describe.add_argument("--cloudformation", action="store_true", help="print them as a CloudFormation template")
    describe.set_defaults(run=_describe)
    for parser in (create, check, describe):
        add_config_option(parser)
        add_json_option(parser)


def _create(chosen: Namespace) -> int:
    config = load(chosen.config, os.environ).store
    made: dict[str, str] = {}

    def tell(table: str, what: str) -> None:
        made[table] = what
        if not chosen.json:
            print(f"{table}: {what}", flush=True)

    if config.engine == "sqlite":
        _create_in_sqlite(Path(config.path), tell)
    else:
        asyncio.run(_with_client(config, lambda tables, client: _create_in_dynamodb(tables, client, config, tell)))
    if chosen.json:
        print_json(made)
    return 0


def _create_in_sqlite(path: Path, tell: Callable[[str, str], None]) -> None:
    missing = sqlite_file.missing_tables(path)
    sqlite_file.prepare(path)
    for table in TABLES:
        tell(table, "created" if table in missing else "was there")


async def _create_in_dynamodb(tables: Any, client: Any, config: Store, tell: Callable[[str, str], None]) -> None:
    await tables.create_missing(client, config.table_prefix, SystemClock().sleep, tell)


def _check(chosen: Namespace) -> int:
    config = load(chosen.config, os.environ).store
    if config.engine == "sqlite":
        missing = sqlite_file.missing_tables(Path(config.path))
        found = {table: ["it does not exist"] if table in missing else [] for table in TABLES}
    else:
        states = asyncio.run(
            _with_client(config, lambda tables, client: tables.states(client, config.table_prefix, SystemClock().sleep))
        )
        found = {state.table: list(state.differences) for state in states}
    _tell_differences(found, as_json=chosen.json)
    return 1 if any(found.values()) else 0


def _tell_differences(found: dict[str, list[str]], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for table, differences in found.items():
        print(f"{table}: {'; '.join(differences) or 'good'}")
    if any(found.values()):
        print("\nWhat is missing is made by: price-keeper tables create")


async def _with_client(config: Store, use: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    from proxy.stores import tables  # brings botocore along, which SQLite's users need not wait for

    store = await open_dynamodb(config, SystemClock())
    try:
        return await use(tables, store.client)
    finally:
        await store.close()


def _describe(chosen: Namespace) -> int:
    if chosen.cloudformation:
        print(cloudformation_yaml(), end="")
        return 0
    config = load(chosen.config, os.environ).store
    prefix = config.table_prefix if config.engine == "dynamodb" else ""
    described = [
        {
            "table": prefix + table.name,
            "key": ["PK", "SK"] if table.has_sort_key else ["PK"],
            "time_to_live": EXPIRY,
            "purpose": table.purpose,
        }
        for table in TABLES.values()
    ]
    if chosen.json:
        print_json(described)
        return 0
    width = max(len(str(entry["table"])) for entry in described)
    for entry in described:
        print(f"{entry['table']:{width}}  {' + '.join(entry['key']):7}  {entry['purpose']}")
    return 0


def cloudformation_yaml() -> str:
    return yaml.safe_dump(cloudformation.template(), sort_keys=False, width=120)
