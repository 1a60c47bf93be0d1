"""The sidecars of a soak: real processes of `serve`, on one store, each with its own way to it and to Bedrock."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from bedrock_simulator import DEFAULT_KEYS
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService

from tests.soak.tenants import App, labels
from tests.support.commands import build_environment
from tests.support.engines import TEST_CREDENTIALS
from tests.support.ports import free_port
from tests.support.workers import children

SECRET = "what the sidecars of a soak sign their tokens with, and no log has"
ADMIN_KEY = "the admin key of a soak, which no log has either"
STARTING_SECONDS, RELOADING_SECONDS = 150.0, 150.0  # also while the store is away for a minute
ENDING_SECONDS = 60.0


@dataclass(frozen=True)
class InForce:
    """From when on a version of the configuration may have been in force, and from when on it was for certain."""

    version: int
    sent: float
    settled: float


@dataclass
class Member:
    """One sidecar's place: ports, journal and log stay when its process ends."""

    name: str
    folder: Path
    bedrock: str
    store: Mapping[str, Any]
    workers: int = 1
    totals_seconds: float = 10.0  # between two rounds of the aggregator
    data: int = field(default_factory=free_port)
    control: int = field(default_factory=free_port)
    version: int = 0
    history: list[InForce] = field(default_factory=list)
    ends: list[tuple[float, float]] = field(default_factory=list)  # of processes: from when to when one was ending
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.kept.mkdir(parents=True)

    @property
    def kept(self) -> Path:
        """Second names of all segments that were removed."""
        return self.folder / "kept"

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def logs(self) -> list[Path]:
        return [self.folder / "out", self.folder / "err"]

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.control}"

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pids(self) -> list[int]:
        """Of the processes that serve."""
        if self.process is None:
            return []
        return children(self.process.pid) if self.workers > 1 else [self.process.pid]

    def bearer(self, app: App) -> dict[str, str]:
        token = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", time.time).mint_access(
            app.org, app.name
        )
        return {"Authorization": f"Bearer {token.token}"}

    # Its configuration.

    def write_config(self, appended: str = "") -> None:
        config = {
            "listen": {"data": f"127.0.0.1:{self.data}", "control": f"127.0.0.1:{self.control}"},
            "upstream": {"endpoint": self.bedrock},
            "store": dict(self.store),
            "journal": {"dir": "journal", "flush_interval_max_secs": 5},
            "aggregator": {"interval_secs": self.totals_seconds},
            "labels": labels(self.version),
        }
        unfinished = self.folder / "config.new"
        unfinished.write_text(yaml.safe_dump(config) + appended)
        unfinished.rename(self.folder / "config.yaml")

    async def reload(self, version: int) -> None:
        self.version = version
        self.write_config()
        sent = time.time()
        await self._hang_up("labels and prices reloaded", len(self.pids))
        self.history.append(InForce(version, sent, time.time()))

    async def reload_malformed(self) -> None:
        """It continues as before."""
        self.write_config("labels: {premium: {}}\n")
        await self._hang_up("configuration rejected", 1)
        self.write_config()

    async def _hang_up(self, message: str, times: int) -> None:
        """Until the log has it so many times more."""
        before, deadline = self._count_log_lines(message), time.monotonic() + RELOADING_SECONDS
        self.signal(signal.SIGHUP)
        while self._count_log_lines(message) < before + times:
            assert time.monotonic() < deadline, f"{self.name} does not tell {times} times: {message}"
            await asyncio.sleep(0.05)

    def _count_log_lines(self, what: str) -> int:
        return self.logs[1].read_text().count(what)

    # Its process.

    def command(self) -> list[str]:
        """What runs the product's command line."""
        return [sys.executable, "-m", "tests.soak.watched", str(self.kept)]

    def environment(self) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": DEFAULT_KEYS.access_key, "AWS_SECRET_ACCESS_KEY": DEFAULT_KEYS.secret_key}
        own = {**TEST_CREDENTIALS, **keys, "PRICE_KEEPER_JWT_SECRET": SECRET, "PRICE_KEEPER_API_KEY": ADMIN_KEY}
        return build_environment(own)

    async def start(self) -> None:
        self.write_config()
        command = [*self.command(), "serve", "--workers", str(self.workers)]
        began = time.time()
        with self.logs[0].open("ab") as out, self.logs[1].open("ab") as err:
            self.process = subprocess.Popen(  # noqa: ASYNC220 - it takes a millisecond
                command, cwd=self.folder, env=self.environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        await self._until_it_answers()
        self.history.append(InForce(self.version, began, time.time()))

    async def _until_it_answers(self) -> None:
        deadline = time.monotonic() + STARTING_SECONDS
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < deadline:
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(f"{self.api}/", timeout=aiohttp.ClientTimeout(2)) as answer:
                        if answer.status == 200 and self._listens():
                            return
                assert self.is_up, f"{self.name} ended at its start: {self.logs[1].read_text()[-2000:]}"
                await asyncio.sleep(0.05)
        raise AssertionError(f"{self.name} does not answer: {self.logs[1].read_text()[-2000:]}")

    def _listens(self) -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.data), 1).close()
            return True
        return False

    def signal(self, number: signal.Signals, pids: list[int] | None = None) -> None:
        assert self.process is not None
        for pid in [self.process.pid] if pids is None else pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def kill(self) -> None:
        """`kill -9` of all its processes at once, as by a machine that runs out of memory."""
        assert self.process is not None
        began = time.time()
        self.signal(signal.SIGKILL, [*self.pids, self.process.pid])
        await asyncio.to_thread(self.process.wait)
        self.ends.append((began, time.time()))

    async def kill_worker(self, number: int) -> None:
        """It is started again by its supervisor."""
        began, pids = time.time(), self.pids
        self.signal(signal.SIGKILL, pids[number : number + 1])
        self.ends.append((began, time.time()))

    async def stop(self) -> int:
        """In order; its exit status."""
        assert self.process is not None
        began = time.time()
        self.signal(signal.SIGTERM)
        status = await asyncio.to_thread(self.process.wait, ENDING_SECONDS)
        self.ends.append((began, time.time()))
        return status

    def end(self) -> None:
        """Whatever happened."""
        if self.process is not None and self.process.poll() is None:
            pids = self.pids
            self.signal(signal.SIGCONT, [*pids, self.process.pid])
            self.signal(signal.SIGKILL, [*pids, self.process.pid])
            self.process.wait()
