"""A control service with orgs and apps that are busy, on one of the engines, and what can be asked of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.request import urlopen
from uuid import NAMESPACE_URL, uuid4, uuid5

from price_keeper.auth import registration
from price_keeper.auth.client_secrets import SECRET_CREATED_AT
from price_keeper.auth.signing_keys import load_keys
from price_keeper.auth.tokens import TokenService
from price_keeper.clock import SystemClock
from price_keeper.config import parse_config
from price_keeper.domain import Scope
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store
from price_keeper.stores.sqlite import SqliteStore

from bench.speed.contenders import KEEPER, ROOT, SQLITE, everything_on
from bench.speed.control_asking import Asked, request
from bench.speed.machine import OTHER_CORE, PROXY_CORE, CannotMeasure, process, wait_until
from bench.speed.upstream import answers, free_port

SQLITE_ENGINE, DYNAMODB_ENGINE = "sqlite", "dynamodb"
APPS_OF_AN_ORG = 25
RECORDS = 100  # in a batch, the most that one takes
PREFIX = "benchmark-"
_REGION = "us-east-1"

CONFIG = """\
listen:
  control: 127.0.0.1:{port}
store:
{store}
journal:
  dir: {folder}/journal
labels:
  premium: {{model: a.b, format: nova, prices_usd_per_1m: {{input: 3, output: 15}}}}
  standard: {{model: c.d, format: nova, prices_usd_per_1m: {{input: 1, output: 5}}}}
"""
DYNAMODB = "  engine: dynamodb\n  region: {region}\n  table_prefix: {prefix}\n  endpoint: {endpoint}"
# A stand-in for DynamoDB counts with Python's decimals, of 28 digits unless it is told otherwise; DynamoDB has 38.
_STAND_IN = (
    "import decimal, runpy, sys; decimal.DefaultContext.prec = 38; decimal.setcontext(decimal.DefaultContext);"
    " sys.argv = ['ministack']; runpy.run_module('ministack', run_name='__main__')"
)


@dataclass(frozen=True)
class Service:
    """Where it answers, and the apps that it knows."""

    port: int
    pid: int
    config: str
    apps: Sequence[Scope]
    retrievals: Sequence[tuple[Scope, str]]

    @cached_property
    def _tokens(self) -> TokenService:
        config = parse_config(self.config, "the benchmark's", {})
        return TokenService(load_keys(config.auth.keys, KEEPER), config.auth.issuer, SystemClock().now)

    def bearer(self, scope: Scope) -> dict[str, str]:
        """As a log-in answers it, of a session of its own."""
        minted = self._tokens.mint_access(scope.org, scope.app, sid=str(uuid4()), generation=0)
        return {"Authorization": f"Bearer {minted.token}"}

    def read(self, scope: Scope, below: str, bearer: dict[str, str], status: int = 200) -> Asked:
        app = "" if scope.app is None else f"/apps/{scope.app}"
        path = f"/api/v1/orgs/{scope.org}{app}/{below}"
        return Asked(request("GET", path, self.port, bearer), frozenset({status}))

    def submission(self, scope: Scope, bearer: dict[str, str]) -> Asked:
        path = f"/api/v1/orgs/{scope.org}/apps/{scope.app}/usage"
        return Asked(request("POST", path, self.port, bearer, json.dumps(usage()).encode()), frozenset({201}))

    def batch(self, scope: Scope, bearer: dict[str, str], days_ago: Sequence[str] = ()) -> Asked:
        items = [usage(each) for each in days_ago] or [usage() for _ in range(RECORDS)]
        path = f"/api/v1/orgs/{scope.org}/apps/{scope.app}/usage/batch"
        body = json.dumps({"items": items}).encode()
        return Asked(request("POST", path, self.port, bearer, body), frozenset({207}))


def usage(occurred_at: str | None = None) -> dict[str, object]:
    told: dict[str, object] = {
        "request_id": str(uuid4()),
        "label": "premium",
        "input_tokens": 1242,
        "output_tokens": 830,
        "cache_read_tokens": 2048,
    }
    return told if occurred_at is None else {**told, "occurred_at": occurred_at}


def scopes(count: int) -> list[Scope]:
    return [Scope(org_of(number // APPS_OF_AN_ORG), f"app-{number % APPS_OF_AN_ORG}") for number in range(count)]


def org_of(number: int) -> str:
    return str(uuid5(NAMESPACE_URL, f"org {number}"))


@contextmanager
def service(folder: Path, engine: str, apps: int, retrievals: int) -> Iterator[Service]:
    """Alone on its core; what stands for DynamoDB runs on the other one."""
    folder.mkdir(parents=True, exist_ok=True)
    if engine == SQLITE_ENGINE:
        with _served(folder, SQLITE.format(folder=folder), None, apps, retrievals) as running:
            yield running
        return
    with stand_in(folder / "dynamodb") as endpoint:
        store = DYNAMODB.format(region=_REGION, prefix=PREFIX, endpoint=endpoint)
        with _served(folder, store, endpoint, apps, retrievals) as running:
            yield running


@contextmanager
def stand_in(folder: Path) -> Iterator[str]:
    """What answers in DynamoDB's place: its address."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    settings = {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "SERVICES": "dynamodb",
        "LOG_LEVEL": "WARNING",
        "TMPDIR": str(folder),
    }
    command = [sys.executable, "-c", _STAND_IN]
    with process(command, OTHER_CORE, environment=os.environ | settings, output=folder / "out") as started:
        wait_until(lambda: started.poll() is not None or answers(port), "the stand-in for DynamoDB answers")
        if started.poll() is not None:
            raise CannotMeasure("what stands for DynamoDB is not installed: make setup")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _served(folder: Path, store: str, endpoint: str | None, apps: int, retrievals: int) -> Iterator[Service]:
    port = free_port()
    text = CONFIG.format(port=port, store=store, folder=folder)
    (folder / "config.yaml").write_text(text)
    known = scopes(apps)
    tokens = asyncio.run(_prepared(folder, endpoint, known, retrievals))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT), **KEEPER}
    command = [sys.executable, "-m", "price_keeper.cli", "serve", "--config", "config.yaml", "--role", "control"]
    with process(command, PROXY_CORE, folder=folder, environment=environment, output=folder / "out") as started:
        wait_until(lambda: started.poll() is not None or is_ready(port), "the control service is ready")
        if started.poll() is not None:
            raise CannotMeasure(f"the control service ended: {(folder / 'out').read_text()[-500:]}")
        yield Service(port, started.pid, text, known, tokens)


async def _prepared(folder: Path, endpoint: str | None, apps: Sequence[Scope], count: int) -> list[tuple[Scope, str]]:
    """Orgs and apps, and secrets that wait to be fetched. They are put there, as hashing each takes far longer."""
    async with _opened(folder, endpoint) as store:
        for org in dict.fromkeys(scope.org for scope in apps):
            await store.put(Put(schema.org_config_key(org), everything_on() | {"quota_scope": "APP"}))
        now = SystemClock().now()
        found = []
        for number, scope in enumerate([*apps, *(Scope(org_of(0), f"new-{number}") for number in range(count))]):
            key, is_new = schema.app_config_key(scope.org, scope.app or ""), number >= len(apps)
            if not is_new:
                await store.put(Put(key, {"app_name": scope.app or ""}))
                continue
            sealed = registration.seal_secret(scope, "a-secret-of-the-benchmark", now)
            await store.put(
                Put(
                    key,
                    {"app_name": scope.app or "", registration.RETRIEVAL_ROW: sealed.row, SECRET_CREATED_AT: int(now)},
                )
            )
            await store.put(sealed.put)
            found.append((scope, sealed.token))
        return found


def is_ready(port: int) -> bool:
    try:
        return bool(urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).status == 200)
    except OSError:
        return False


@asynccontextmanager
async def _opened(folder: Path, endpoint: str | None) -> AsyncIterator[Store]:
    if endpoint is None:
        embedded = await SqliteStore(folder / "store.db", SystemClock().now).open()
        try:
            yield embedded
        finally:
            await embedded.close()
        return
    from price_keeper.stores.dynamodb import DynamoStore
    from price_keeper.stores.dynamodb_tables import create_missing_tables

    os.environ.update({name: value for name, value in KEEPER.items() if name.startswith("AWS_")})
    store = await DynamoStore(region=_REGION, table_prefix=PREFIX, endpoint=endpoint, sleep=asyncio.sleep).open()
    try:
        await create_missing_tables(store.client, PREFIX, asyncio.sleep, lambda *_: None)
        yield store
    finally:
        await store.close()
