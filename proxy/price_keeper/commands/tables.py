"""`price-keeper tables`: makes, checks and describes the store's tables."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from price_keeper.clock import SystemClock
from price_keeper.commandline.terminal import GREEN, RED, paint
from price_keeper.commands.places import load_config_at
from price_keeper.commands.progress import Progress
from price_keeper.commands.shared import print_json, print_lines
from price_keeper.config import StoreConfig
from price_keeper.stores import cloudformation, sqlite_file
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE
from price_keeper.stores.schema import TABLES


def create(args: Namespace) -> int:
    config = load_config_at(args.config).store
    made: dict[str, str] = {}
    with Progress(SystemClock().monotonic) as progress:

        def tell(table: str, what: str) -> None:
            made[table] = what
            progress.clear()
            if not args.json:
                print(f"{table}: {what}", flush=True)
            progress.update(f"{len(made)} of {len(TABLES)} tables are there")

        progress.update("looking for the tables; DynamoDB takes some seconds for a new one")
        if config.engine == "sqlite":
            _create_in_sqlite(Path(config.path), tell)
        else:
            asyncio.run(_with_client(config, lambda tables, client: _create_in_dynamodb(tables, client, config, tell)))
    if args.json:
        print_json(made)
    return 0


def _create_in_sqlite(path: Path, tell: Callable[[str, str], None]) -> None:
    missing = sqlite_file.find_missing_tables(path)
    sqlite_file.prepare_file(path)
    for table in TABLES:
        tell(table, "created" if table in missing else "was there")


async def _create_in_dynamodb(tables: Any, client: Any, config: StoreConfig, tell: Callable[[str, str], None]) -> None:
    await tables.create_missing(client, config.table_prefix, SystemClock().sleep, tell)


def check(args: Namespace) -> int:
    config = load_config_at(args.config).store
    if config.engine == "sqlite":
        missing = sqlite_file.find_missing_tables(Path(config.path))
        found = {table: ["it does not exist"] if table in missing else [] for table in TABLES}
    else:
        states = asyncio.run(
            _with_client(config, lambda tables, client: tables.states(client, config.table_prefix, SystemClock().sleep))
        )
        found = {state.table: list(state.differences) for state in states}
    _tell_differences(found, as_json=args.json)
    return 1 if any(found.values()) else 0


def _tell_differences(found: dict[str, list[str]], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    print_lines(
        f"{table}: " + (paint("; ".join(differences), RED) if differences else paint("good", GREEN))
        for table, differences in found.items()
    )
    if any(found.values()):
        print("\nWhat is missing is made by: price-keeper tables create")


async def _with_client(config: StoreConfig, use: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    from price_keeper.app import open_dynamodb  # with AWS's libraries, which SQLite's users need not wait for
    from price_keeper.stores import tables

    store = await open_dynamodb(config, SystemClock())
    try:
        return await use(tables, store.client)
    finally:
        await store.close()


def describe(args: Namespace) -> int:
    if args.cloudformation:
        print(json.dumps(cloudformation.build_tables_template(), indent=2) if args.json else cloudformation_yaml().rstrip())
        return 0
    config = load_config_at(args.config).store
    prefix = config.table_prefix if config.engine == "dynamodb" else ""
    described = [
        {
            "table": prefix + table.name,
            "key": ["PK", "SK"] if table.has_sort_key else ["PK"],
            "time_to_live": EXPIRY_ATTRIBUTE,
            "purpose": table.purpose,
        }
        for table in TABLES.values()
    ]
    if args.json:
        print_json(described)
        return 0
    width = max(len(str(entry["table"])) for entry in described)
    for entry in described:
        print(f"{entry['table']:{width}}  {' + '.join(entry['key']):7}  {entry['purpose']}")
    return 0


def cloudformation_yaml() -> str:
    return yaml.safe_dump(cloudformation.build_tables_template(), sort_keys=False, width=120)
