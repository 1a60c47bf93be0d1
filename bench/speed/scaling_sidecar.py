"""A sidecar whose callers are many apps, each with a budget, limits and tokens of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from price_keeper.auth.signing_keys import load_keys
from price_keeper.auth.tokens import TokenService
from price_keeper.clock import SystemClock
from price_keeper.config import parse_config
from price_keeper.domain import Scope
from price_keeper.stores import schema
from price_keeper.stores.contract import Put
from price_keeper.stores.sqlite import SqliteStore

from bench.speed.contenders import KEEPER, ROOT, UNARY, Running, everything_on, keeper_config, question
from bench.speed.control_asking import Asked
from bench.speed.control_service import is_ready, scopes
from bench.speed.machine import PROXY_CORE, CannotMeasure, process, wait_until
from bench.speed.scaling_counted import Counted
from bench.speed.upstream import free_port

LIMITS_OF_AN_APP = {"rpm": 10_000_000, "tpm": 100_000_000}


@dataclass(frozen=True)
class Sidecar:
    port: int
    pid: int
    folder: Path
    counted: Counted
    bearers: Sequence[str]  # of each app

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def running(self) -> Running:
        """As the first app sees it."""
        return self.seen_by(0)

    def seen_by(self, number: int) -> Running:
        return Running(self.port, self.pid, "", {"authorization": f"Bearer {self.bearers[number]}"})

    def questions(self, path: str = UNARY) -> list[Asked]:
        """One of each app."""
        return [Asked(question(self.seen_by(number), path), frozenset({200})) for number in range(len(self.bearers))]


@contextmanager
def sidecar(folder: Path, upstream: int, apps: int) -> Iterator[Sidecar]:
    folder.mkdir(parents=True, exist_ok=True)
    port, control = free_port(), free_port()
    text = keeper_config(folder, upstream, port, control)
    (folder / "config.yaml").write_text(text)
    known = scopes(apps)
    asyncio.run(_prepared(folder / "store.db", known))
    counted = Counted.made(folder / "counted")
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT), **KEEPER}
    program = [sys.executable, "-m", "bench.speed.scaling_counted", str(folder / "counted")]
    command = [*program, "serve", "--config", "config.yaml"]
    with process(command, PROXY_CORE, folder=folder, environment=environment, output=folder / "out") as started:
        wait_until(lambda: started.poll() is not None or is_ready(control), "the sidecar is ready")
        if started.poll() is not None:
            raise CannotMeasure(f"the sidecar ended: {(folder / 'out').read_text()[-500:]}")
        yield Sidecar(port, started.pid, folder, counted, _bearers(text, known))


async def _prepared(path: Path, apps: Sequence[Scope]) -> None:
    store = await SqliteStore(path, SystemClock().now).open()
    try:
        for org in dict.fromkeys(scope.org for scope in apps):
            await store.put(Put(schema.org_config_key(org), everything_on() | {"quota_scope": "APP"}))
        own = [
            Put(schema.app_config_key(scope.org, scope.app or ""), {"limits": dict(LIMITS_OF_AN_APP)}) for scope in apps
        ]
        await asyncio.gather(*(store.put(put) for put in own))
    finally:
        await store.close()


def _bearers(text: str, apps: Sequence[Scope]) -> list[str]:
    config = parse_config(text, "the benchmark's", {})
    tokens = TokenService(load_keys(config.auth.keys, KEEPER), config.auth.issuer, SystemClock().now)
    return [tokens.mint_access(scope.org, scope.app, 24 * 3600).token for scope in apps]
