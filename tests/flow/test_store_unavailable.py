"""The store is away while real clients keep calling: no call fails and nothing is lost, or calls are refused."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from price_keeper.config.config_sections import JournalConfig
from price_keeper.domain import PICO_PER_MICRO
from price_keeper.ledger.aggregator import sum_shards

from tests.support.commands import ROOT, SECONDS, Sidecar, sidecar
from tests.support.data_port import DataPort, data_port
from tests.support.recording_harness import ScriptedFaults
from tests.support.simulated import TURN

SERVED = {
    "PRICE_KEEPER_JWT_SECRET": "a secret of the test's own, long enough",
    "PRICE_KEEPER__LISTEN__DATA": "127.0.0.1:0",
    "PRICE_KEEPER__LISTEN__CONTROL": "127.0.0.1:0",
    "PRICE_KEEPER__UPSTREAM__ENDPOINT": "simulated",
}


def calls(port: DataPort, count: int) -> None:
    client = port.client()
    try:
        for _ in range(count):
            client.converse(modelId="premium", **TURN)
    finally:
        client.close()


async def load(port: DataPort, count: int = 40, clients: int = 4) -> None:
    """To its end, even where one of them fails."""
    all_calls = (asyncio.to_thread(calls, port, count) for _ in range(clients))
    for failure in await asyncio.gather(*all_calls, return_exceptions=True):
        if failure is not None:
            raise failure


async def spent(port: DataPort, store: ScriptedFaults) -> tuple[int, int]:
    """Requests and pico-dollars in the store."""
    (counter,) = port.counters()
    sums = await sum_shards(store._store, counter)
    return int(sums["requests"]), int(sums["cost_usd_micros"] * PICO_PER_MICRO)


def used(port: DataPort) -> tuple[int, int]:
    usages = [entry.usage for entry in port.bedrock.ledger if entry.usage is not None]
    pico = sum(usage.input_tokens * 3 * 10**6 + usage.output_tokens * 15 * 10**6 for usage in usages)
    return len(usages), pico


async def test_store_outage_is_unnoticed_and_loses_nothing(tmp_path: Path) -> None:
    stores: list[ScriptedFaults] = []

    def away(store: Any) -> ScriptedFaults:
        stores.append(ScriptedFaults(store))
        stores[0].is_away = True
        return stores[0]

    async with data_port(tmp_path, away) as port:
        flusher = port.recording.flusher
        for _ in range(3):
            await load(port)
            port.counters()
            assert not await flusher.flush()
            assert flusher.waiting_segments == 1
        assert flusher.unflushed_pico == used(port)[1]
        stores[0].is_away = False
        assert await flusher.flush()
        assert flusher.unflushed_pico == 0
        assert await spent(port, stores[0]) == used(port)
        assert used(port)[0] == 480


@pytest.mark.parametrize("policy", ["serve", "refuse"])
async def test_store_outage_above_unflushed_limit_refuses_calls(tmp_path: Path, policy: str) -> None:
    """`serve` bears it up to a limit, `refuse` not at all."""
    stores: list[ScriptedFaults] = []

    def wrapped(store: Any) -> ScriptedFaults:
        stores.append(ScriptedFaults(store))
        return stores[0]

    limit = JournalConfig(dir=str(tmp_path / "journal"), max_unflushed_usd=Decimal("0.01"))
    async with data_port(tmp_path, wrapped, journal=limit, on_store_down=policy) as port:
        await load(port, count=1)
        port.counters()
        stores[0].is_away = True
        assert not await port.recording.flusher.flush()
        words = {
            "serve": r"spend of 0\.01 USD waits for the store",
            "refuse": "the store that keeps count of spend is away",
        }
        with pytest.raises(ClientError, match=words[policy]) as refused:
            await load(port, count=100)
        response = refused.value.response
        assert response["Error"]["Code"] == "ServiceUnavailableException"
        assert response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "5"
        assert used(port)[0] < 200 if policy == "serve" else used(port)[0] == 4
        stores[0].is_away = False
        assert await port.recording.flusher.flush()
        await load(port, count=1)
        await port.recording.flusher.flush()
        assert await spent(port, stores[0]) == used(port)


async def test_renamed_store_file_moved_back_gets_pending_calls(tmp_path: Path) -> None:
    path, away = tmp_path / "store.db", tmp_path / "away.db"
    async with data_port(tmp_path) as port:
        flusher = port.recording.flusher
        await load(port, count=2)
        port.counters()
        assert await flusher.flush()
        await asyncio.to_thread(path.rename, away)
        await load(port, count=2)
        port.counters()
        assert not await flusher.flush()
        assert flusher.waiting_segments == 1
        await asyncio.to_thread(away.rename, path)
        assert await flusher.flush()
        assert flusher.unflushed_pico == 0
        (counter,) = port.counters()
        sums = await sum_shards(port.store, counter)
        assert (sums["requests"], sums["cost_usd_micros"] * PICO_PER_MICRO) == used(port)
        assert used(port)[0] == 16


def test_deleted_store_file_is_reported_by_readiness_and_log(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    with sidecar("serve", folder=tmp_path, **SERVED) as running:
        assert store_readiness(running) == (200, "ok")
        (tmp_path / "data" / "price-keeper.db").unlink()
        until(lambda: store_readiness(running) == (503, "the store is away; the log says why"))
        assert "price-keeper.db was deleted or renamed while in use: move it back" in running.errors
        assert running.stop() == 0
        assert not (tmp_path / "data" / "price-keeper.db").exists()


def test_deleted_store_file_is_logged_without_calls(tmp_path: Path) -> None:
    """A process without calls checks by itself."""
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    with sidecar("serve", folder=tmp_path, **SERVED) as running:
        (tmp_path / "data" / "price-keeper.db").unlink()
        until(lambda: "was deleted or renamed while in use" in running.errors)


def store_readiness(running: Sidecar) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{running.control}/ready", timeout=SECONDS) as answer:
            return answer.status, json.load(answer)["checks"]["store"]
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)["checks"]["store"]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
