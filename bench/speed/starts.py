"""From the start of a sidecar to its first answer, with either store."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from price_keeper.stores import schema
from price_keeper.stores.contract import Put

from bench.speed.contenders import (
    FROM_SOURCES,
    KEEPER,
    ORG,
    Running,
    configured,
    environment,
    everything_on,
    prepared,
    serving,
)
from bench.speed.machine import CORES, OTHER_CORE, CannotMeasure
from tests.support.servers import ministack_server

PREFIX = "price-keeper-speed-"
_PAUSE = 0.001  # between two attempts to reach it
DYNAMODB = "  engine: dynamodb\n  endpoint: {endpoint}\n  region: us-east-1\n  table_prefix: {prefix}"


def with_sqlite(folder: Path, upstream: int, *, asks_prices: bool = False) -> Running:
    running = configured(folder, upstream, asks_prices=asks_prices)
    asyncio.run(prepared(folder / "store.db"))
    return running


def with_dynamodb(folder: Path, upstream: int, endpoint: str) -> Running:
    running = configured(folder, upstream, DYNAMODB.format(endpoint=endpoint, prefix=PREFIX))
    command = [sys.executable, "-m", "price_keeper.cli", "tables", "create", "--config", "config.yaml"]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMeasure(f"the tables cannot be made: {(done.stdout + done.stderr)[-300:]}")
    asyncio.run(_org(endpoint))
    return running


async def _org(endpoint: str) -> None:
    from price_keeper.stores.dynamodb import DynamoStore

    with patch.dict(os.environ, KEEPER):
        store = await DynamoStore(
            region="us-east-1", table_prefix=PREFIX, endpoint=endpoint, sleep=asyncio.sleep
        ).open()
        try:
            await store.put(Put(schema.org_config_key(ORG), everything_on()))
        finally:
            await store.close()


@contextmanager
def dynamodb(folder: Path) -> Iterator[str]:
    """The endpoint of a server that speaks DynamoDB's protocol, on the core that is not the sidecar's."""
    folder.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, {OTHER_CORE})  # which what is started inherits
    try:
        server = ministack_server(folder)
        endpoint = server.__enter__()
    finally:
        os.sched_setaffinity(0, CORES)
    try:
        yield endpoint
    finally:
        server.__exit__(None, None, None)


def seconds_to_answer(folder: Path, running: Running, program: Sequence[str] = FROM_SOURCES) -> float:
    began = time.perf_counter()
    with serving(folder, running, pause=_PAUSE, program=program):
        return time.perf_counter() - began
