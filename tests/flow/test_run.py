"""`price-keeper dev` and `serve` as processes: they answer, they stop when told, and say what is wrong."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from proxy.stores.dynamodb import ATTEMPTS
from tests.support.commands import ROOT, SECONDS, price_keeper, sidecar
from tests.support.engines import Engines
from tests.support.fault_proxy import DropAnswer, fault_proxy

SERVED = {
    "PRICE_KEEPER_JWT_SECRET": "a secret of the test's own, long enough",
    "PRICE_KEEPER__UPSTREAM__ENDPOINT": "simulated",
    "PRICE_KEEPER__LISTEN__DATA": "127.0.0.1:0",
    "PRICE_KEEPER__STORE__ENGINE": "dynamodb",
    "PRICE_KEEPER__LISTEN__CONTROL": "127.0.0.1:0",
}


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRICE_KEEPER__STORE__TABLE_PREFIX", f"t{uuid4().hex[:8]}-")


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.load(refusal)


FREE_PORTS = ("--port", "0", "--control-port", "0")


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_dev_needs_nothing_and_stops_when_told(tmp_path: Path, stop: signal.Signals) -> None:
    with sidecar("dev", *FREE_PORTS, folder=tmp_path) as running:
        assert get(f"{running.control}/health") == (200, {"status": "ok"})
        assert get(f"{running.control}/ready") == (200, {"status": "ready", "checks": {"store": "ok"}})
        assert (tmp_path / "data" / "price-keeper.db").exists()
        assert running.stop(stop) == 0
        assert running.errors == ""


def test_serve_on_dynamodb(engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    settings = SERVED | {"PRICE_KEEPER__STORE__ENDPOINT": engines.endpoints["ministack"]}
    with sidecar("serve", folder=tmp_path, **settings) as running:
        status, body = get(f"{running.control}/ready")
        assert (status, body["status"]) == (503, "not ready")
        assert "price-keeper tables create" in body["checks"]["store"]
        assert price_keeper("tables", "create", folder=tmp_path, **settings).returncode == 0
        assert get(f"{running.control}/ready")[0] == 200


def test_a_port_that_is_taken_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        refused = price_keeper("dev", "--port", "0", "--control-port", port, folder=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr == f"price-keeper: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_data_folder_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("in the way")
    refused = price_keeper("dev", *FREE_PORTS, folder=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith("price-keeper: cannot keep data/token-key")
    assert len(refused.stderr.splitlines()) == 1


def test_mistakes_in_the_configuration_are_told_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("listen:\n  dta: 127.0.0.1:1\nstore: {engine: oracle}\nlabels: {}\n")
    for command in ("serve", "check-config"):
        refused = price_keeper(command, folder=tmp_path)
        assert refused.returncode == 2
        assert [line.split(": ")[:2] for line in refused.stderr.splitlines()] == [
            ["config.yaml:2", "listen.dta"],
            ["config.yaml:3", "store.engine"],
            ["config.yaml:4", "labels"],
        ]


def test_the_default_configuration_is_good() -> None:
    checked = price_keeper("check-config", folder=ROOT)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "premium, standard, economy" in checked.stdout


@pytest.mark.parametrize("arguments", [[], ["tables"], ["nonsense"], ["dev", "--control-port", "x"]])
def test_a_mistake_in_the_command_shows_how_it_is_used(tmp_path: Path, arguments: list[str]) -> None:
    refused = price_keeper(*arguments, folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("usage: price-keeper")


async def test_ready_turns_with_the_store(engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    async with fault_proxy(engines.endpoints["ministack"]) as proxy:
        settings = SERVED | {"PRICE_KEEPER__STORE__ENDPOINT": proxy.url}
        await asyncio.to_thread(price_keeper, "tables", "create", folder=tmp_path, **settings)
        with sidecar("serve", folder=tmp_path, **settings) as running:
            assert (await asyncio.to_thread(get, f"{running.control}/ready"))[0] == 200
            proxy.plan([DropAnswer()] * ATTEMPTS)
            status, body = await asyncio.to_thread(get, f"{running.control}/ready")
            assert (status, body["status"]) == (503, "not ready")
            assert body["checks"]["store"].startswith("no answer from DynamoDB")
            assert (await asyncio.to_thread(get, f"{running.control}/health"))[0] == 200
            assert (await asyncio.to_thread(get, f"{running.control}/ready"))[0] == 200
