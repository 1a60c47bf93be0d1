"""`price-keeper check-config` and `tables`: validate a configuration; create, check and describe its store's tables."""

from __future__ import annotations

import asyncio
import json
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from price_keeper.cli.output import Progress, print_json, print_lines
from price_keeper.cli.store_selection import describe_labels, load_config_at
from price_keeper.cli.terminal import GREEN, RED, paint
from price_keeper.clock import SystemClock
from price_keeper.config import Config, StoreConfig
from price_keeper.domain import PICO_PER_MICRO, format_dollars
from price_keeper.stores import cloudformation, sqlite_file
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE
from price_keeper.stores.schema import TABLES
from price_keeper.usage.price_table import build_label_price_table, describe_derived


def run_check_config(args: Namespace) -> int:
    config = load_config_at(args.config)
    if config.alerts.webhook is not None:
        from price_keeper.alerts.alert_setup import load_checked_secret

        load_checked_secret(config.alerts.webhook, os.environ)
    derived = _find_derived_prices(config)
    amounts = [] if args.settings is None else _describe_amounts_without_unit(args.settings)
    if args.json:
        document: dict[str, Any] = {"config": str(args.config), "is_good": True, "labels": list(config.labels)}
        document |= {"derived_prices_usd_per_1m": derived}
        print_json(document if args.settings is None else document | {"amounts_without_unit": amounts})
    else:
        print_lines([f"{args.config}: " + paint("good", GREEN) + f", with {describe_labels(config)}"])
        for label, prices in derived.items():
            listed = ", ".join(f"{name} {usd}" for name, usd in prices.items())
            print_lines([f"{label}: derived from the price of input, in USD per million tokens: {listed}"])
        if args.settings is not None:
            print_lines([*amounts, f"{args.settings}: " + paint("good", GREEN)])
    return 0


def _describe_amounts_without_unit(settings: Path) -> list[str]:
    """A line for each quota that is a bare number, with what it is in dollars."""
    from price_keeper.cli.apply_command import find_amounts_without_unit

    return [
        entry.format_mistake(
            ("quotas", label),
            f"{micros} has no unit, so it is in micro-USD: {format_dollars(micros * PICO_PER_MICRO)}",
        )
        for entry, label, micros in find_amounts_without_unit(settings)
    ]


def _find_derived_prices(config: Config) -> dict[str, dict[str, str]]:
    """The cache prices that the configuration does not name, by label, and by where they would stand."""
    found: dict[str, dict[str, str]] = {}
    for name, label in config.labels.items():
        tables = {"": build_label_price_table(label)}
        for number, endpoint in enumerate(label.endpoints):
            if endpoint.prices_usd_per_1m is not None:
                tables[f"endpoints.{number}."] = build_label_price_table(label, endpoint)
        derived = {
            f"{place}{path}": usd for place, table in tables.items() for path, usd in describe_derived(table).items()
        }
        if derived:
            found[name] = derived
    return found


def run_tables_create(args: Namespace) -> int:
    config = load_config_at(args.config).store
    outcomes: dict[str, str] = {}
    with Progress(SystemClock().monotonic) as progress:

        def on_table(table: str, outcome: str) -> None:
            outcomes[table] = outcome
            progress.clear()
            if not args.json:
                print(f"{table}: {outcome}", flush=True)
            progress.update(f"{len(outcomes)} of {len(TABLES)} tables are there")

        progress.update("looking for the tables; DynamoDB takes some seconds for a new one")
        if config.engine == "sqlite":
            _create_in_sqlite(Path(config.path), on_table)
        else:
            asyncio.run(
                _run_with_client(
                    config, lambda tables, client: _create_in_dynamodb(tables, client, config, on_table, args)
                )
            )
    if args.json:
        print_json(outcomes)
    return 0


def _create_in_sqlite(path: Path, on_table: Callable[[str, str], None]) -> None:
    missing = sqlite_file.find_missing_tables(path)
    sqlite_file.prepare_file(path)
    for table in TABLES:
        on_table(table, "created" if table in missing else "was there")


async def _create_in_dynamodb(
    tables: Any, client: Any, config: StoreConfig, on_table: Callable[[str, str], None], args: Namespace
) -> None:
    await tables.create_missing_tables(
        client, config.table_prefix, SystemClock().sleep, on_table, args.kms_key, dict(args.tag)
    )


def run_tables_check(args: Namespace) -> int:
    config = load_config_at(args.config).store
    if config.engine == "sqlite":
        missing = sqlite_file.find_missing_tables(Path(config.path))
        differences = {table: ["it does not exist"] if table in missing else [] for table in TABLES}
    else:
        states = asyncio.run(
            _run_with_client(
                config,
                lambda tables, client: tables.read_table_states(client, config.table_prefix, SystemClock().sleep),
            )
        )
        differences = {state.table: list(state.differences) for state in states}
    _print_differences(differences, as_json=args.json)
    return 1 if any(differences.values()) else 0


def _print_differences(differences_by_table: dict[str, list[str]], *, as_json: bool) -> None:
    if as_json:
        print_json(differences_by_table)
        return
    print_lines(
        f"{table}: " + (paint("; ".join(differences), RED) if differences else paint("good", GREEN))
        for table, differences in differences_by_table.items()
    )
    if any(differences_by_table.values()):
        print("\nWhat is missing is made by: price-keeper tables create")


async def _run_with_client(config: StoreConfig, use: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    from price_keeper.app import open_dynamodb  # imports the AWS libraries, which are slow and not needed for SQLite
    from price_keeper.stores import dynamodb_tables

    store = await open_dynamodb(config, SystemClock())
    try:
        return await use(dynamodb_tables, store.client)
    finally:
        await store.close()


def run_tables_describe(args: Namespace) -> int:
    if args.cloudformation:
        print(
            json.dumps(cloudformation.build_tables_template(), indent=2)
            if args.json
            else format_cloudformation_yaml().rstrip()
        )
        return 0
    config = load_config_at(args.config).store
    prefix = config.table_prefix if config.engine == "dynamodb" else ""
    descriptions = [
        {
            "table": prefix + table.name,
            "key": ["PK", "SK"] if table.has_sort_key else ["PK"],
            "time_to_live": EXPIRY_ATTRIBUTE,
            "purpose": table.purpose,
        }
        for table in TABLES.values()
    ]
    if args.json:
        print_json(descriptions)
        return 0
    width = max(len(str(entry["table"])) for entry in descriptions)
    for entry in descriptions:
        print(f"{entry['table']:{width}}  {' + '.join(entry['key']):7}  {entry['purpose']}")
    return 0


def format_cloudformation_yaml() -> str:
    return yaml.safe_dump(cloudformation.build_tables_template(), sort_keys=False, width=120)
