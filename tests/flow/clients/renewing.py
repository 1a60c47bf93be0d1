"""Clients that outlive their tokens, and what they fetch in between."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import yaml
from price_keeper.auth.client_secrets import client_item_key, hash_secret, make_secret
from price_keeper.auth.tokens import ACCESS_SECONDS
from price_keeper.domain import Scope, build_client_id
from price_keeper.stores.contract import ItemMissing, Put
from price_keeper.stores.sqlite import SqliteStore

from tests.support.client_stage import ORG
from tests.support.clients import NEWEST, PROGRAMS, Client, ClientOutcome, ask
from tests.support.commands import Sidecar, sidecar
from tests.support.simulated import CLAUDE, TURN

SECONDS = 20
DATABASE = "price-keeper.db"
_PASSED_ON = ("LANG", "PATH", "TMPDIR")
_QUIET = {
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REGION": "us-east-1",
    "HOME": "/nonexistent",
    "NO_PROXY": "127.0.0.1",
}


@dataclass(frozen=True)
class Known:
    """An app of its own for each client, so that what one fetches says nothing of another."""

    scope: Scope
    secret: str = field(repr=False)

    @property
    def pair(self) -> str:
        return f"{build_client_id(self.scope.org, self.scope.app)}:{self.secret}"


@dataclass(frozen=True)
class Fleet:
    """Sidecars on one store. No test but the one concerned calls the other; tokens of the usual one last an hour."""

    here: Sidecar
    other: Sidecar
    usual: Sidecar
    store: Path
    known: dict[str, Known]


@contextmanager
def fleet(folder: Path, access_seconds: int, apps: list[str]) -> Iterator[Fleet]:
    known = {app: Known(Scope(ORG, app), make_secret()) for app in apps}
    asyncio.run(_make(folder / DATABASE, list(known.values())))
    with ExitStack() as running:
        yield Fleet(
            running.enter_context(_serving(folder, "here", access_seconds)),
            running.enter_context(_serving(folder, "other", access_seconds)),
            running.enter_context(_serving(folder, "usual", ACCESS_SECONDS)),
            folder / DATABASE,
            known,
        )


async def _make(file: Path, known: list[Known]) -> None:
    async with opened(file) as store:
        for each in known:
            item = {"app_name": str(each.scope.app), "client_secret_hash": hash_secret(each.secret).decode()}
            await store.put(Put(client_item_key(each.scope), item, ItemMissing()))


@asynccontextmanager
async def opened(file: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore(file, time.time).open()
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def _serving(folder: Path, name: str, access_seconds: int) -> Iterator[Sidecar]:
    place = folder / name
    place.mkdir()
    (place / "config.yaml").write_text(yaml.safe_dump(_config(folder, access_seconds)))
    with sidecar("serve", folder=place, PRICE_KEEPER_JWT_SECRET="what both sidecars sign their tokens with") as running:
        yield running


def _config(folder: Path, access_seconds: int) -> dict[str, Any]:
    prices = {"input": 3, "output": 15, "cache_read": 0.3, "cache_write_5m": 3.75, "cache_write_1h": 6}
    return {
        "listen": {"data": "127.0.0.1:0", "control": "127.0.0.1:0"},
        "upstream": {"endpoint": "simulated"},
        "store": {"path": str(folder / DATABASE)},
        "journal": {"dir": "journal"},
        "auth": {"access_seconds": access_seconds},
        "unknown_org": "meter",
        "labels": {
            "premium": {"model": CLAUDE, "format": "anthropic", "prices_usd_per_1m": prices},
        },
    }


@dataclass(frozen=True)
class Fetch:
    began: float
    ended: float
    status: int
    token: str | None = field(repr=False)
    expires: float | None


class Window:
    """Where a client fetches its credentials: each fetch is forwarded to a sidecar, and its answer recorded."""

    def __init__(self, sidecar: str) -> None:
        self.sidecar = sidecar
        self.fetches: list[Fetch] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def tokens(self) -> list[str]:
        """Each once, in the order in which they were handed out: so many were minted."""
        return list(dict.fromkeys(each.token for each in self.fetches if each.token is not None))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/credentials"

    @contextmanager
    def open(self) -> Iterator[Window]:
        thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(10)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        window = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = window.pass_on(self.headers["authorization"])
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def pass_on(self, pair: str) -> tuple[int, bytes]:
        began = time.time()
        status, body = fetched(self.sidecar, pair)
        said = json.loads(body)
        expires = datetime.fromisoformat(said["Expiration"]).timestamp() if status == 200 else None
        self.fetches.append(Fetch(began, time.time(), status, said.get("Token"), expires))
        return status, body


def fetched(sidecar: str, pair: str) -> tuple[int, bytes]:
    return _exchanged(sidecar, "GET", "/credentials", {"authorization": pair})


def called(sidecar: str, token: str) -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    return _exchanged(sidecar, "POST", "/model/premium/converse", headers, json.dumps(TURN))


def _exchanged(
    sidecar: str, method: str, path: str, headers: dict[str, str], body: str | None = None
) -> tuple[int, bytes]:
    place = urlsplit(sidecar)
    with closing(http.client.HTTPConnection(place.hostname or "", place.port, timeout=SECONDS)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


class LongLived:
    """One process of a client: it is asked to call, and says how that went."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self) -> ClientOutcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(ask("premium")) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the client's process has ended"
        return ClientOutcome(**json.loads(line))


@contextmanager
def long_lived(client: Client, running: Fleet, window: Window, pair: str) -> Iterator[LongLived]:
    environ = {
        client.redirect: running.here.data,
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": window.url,
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": pair,
    }
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    with subprocess.Popen(
        _line(client), env=passed | _QUIET | environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield LongLived(process)
        finally:
            process.kill()


def _line(client: Client) -> list[str]:
    if client.lives_in == "node":
        return ["node", str(PROGRAMS / "long_lived.mjs")]
    python = NEWEST if client.lives_in == "newest" else sys.executable
    return [str(python), str(PROGRAMS / "long_lived.py"), client.program.removesuffix(".py")]
