"""Selects the configuration and store of a command: `--config FILE`, or `--data-dir DIR` of `price-keeper dev`.

A SQLite file is never created here: a mistyped path is an error, not an empty store.
"""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from errno import ENOENT
from pathlib import Path

from price_keeper.cli.output import CommandError
from price_keeper.clock import Clock
from price_keeper.config import Config, load_config
from price_keeper.config.config_sections import StoreConfig as StoreConfig
from price_keeper.errors import ConfigError, StoreMisconfigured
from price_keeper.stores.contract import Store
from price_keeper.stores.schema import TABLES
from price_keeper.stores.sqlite import SqliteStore
from price_keeper.stores.sqlite_file import find_missing_tables


def load_config_at(path: Path) -> Config:
    if not path.exists():
        raise ConfigError([f"{path}: cannot be read: {os.strerror(ENOENT)}; name one with --config FILE"])
    return load_config(path, os.environ)


def describe_labels(config: Config) -> str:
    return f"{len(config.labels)} label{'s'[: len(config.labels) != 1]}: {', '.join(config.labels)}"


def select_config(args: Namespace) -> Config:
    if args.data_dir is None:
        return load_config_at(args.config or find_default_config())
    config = Config.development()
    path = str(args.data_dir / "price-keeper.db")
    return dataclasses.replace(config, store=dataclasses.replace(config.store, path=path))


def find_default_config() -> Path:
    path = Path("config.yaml")
    if not path.exists():
        raise CommandError(
            "there is no config.yaml here; name one with --config FILE, or dev's folder with --data-dir DIR"
        )
    return path


@asynccontextmanager
async def open_selected_store(config: StoreConfig, clock: Clock) -> AsyncIterator[Store]:
    store = await _open_engine(config, clock)
    try:
        yield store
    finally:
        await store.close()


async def _open_engine(config: StoreConfig, clock: Clock) -> Store:
    if config.engine == "dynamodb":
        from price_keeper.app import open_dynamodb  # imports the whole product, which takes longer than most reports

        return await open_dynamodb(config, clock)
    # Opening creates a missing file, and a mistyped path would look like an empty store.
    if len(find_missing_tables(Path(config.path))) == len(TABLES):
        raise StoreMisconfigured(
            f"there is no store in {config.path}: price-keeper serve or dev makes it, as does tables create; "
            "name another with --config FILE or --data-dir DIR"
        )
    return await SqliteStore(Path(config.path), clock.now).open()
