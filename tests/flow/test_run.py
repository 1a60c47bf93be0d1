"""`price-keeper dev` and `serve` as processes: they answer, they stop when told, and say what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from price_keeper.control.readiness_checks import RESULT_TTL_SECONDS
from price_keeper.stores.dynamodb import MAX_ATTEMPTS

from tests.support.commands import PYTHON_PATH, ROOT, SECONDS, price_keeper, sidecar
from tests.support.engines import Engines
from tests.support.fault_proxy import DropAnswer, fault_proxy
from tests.support.ports import free_port
from tests.support.workers import wait_until

SERVED = {
    "PRICE_KEEPER_JWT_SECRET": "a secret of the test's own, long enough",
    "PRICE_KEEPER__UPSTREAM__ENDPOINT": "simulated",
    "PRICE_KEEPER__LISTEN__DATA": "127.0.0.1:0",
    "PRICE_KEEPER__LISTEN__CONTROL": "127.0.0.1:0",
}
ON_DYNAMODB = SERVED | {"PRICE_KEEPER__STORE__ENGINE": "dynamodb"}


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRICE_KEEPER__STORE__TABLE_PREFIX", f"t{uuid4().hex[:8]}-")


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.load(refusal)


def until_ready(control: str) -> None:
    deadline = time.monotonic() + SECONDS
    while get(f"{control}/ready")[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


FREE_PORTS = ("--port", "0", "--control-port", "0")


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_dev_needs_nothing_and_stops_on_signal(tmp_path: Path, stop: signal.Signals) -> None:
    with sidecar("dev", *FREE_PORTS, folder=tmp_path) as running:
        assert get(f"{running.control}/health") == (200, {"status": "ok"})
        checks = {"store": "ok", "journal": "ok", "revocation": "ok", "bedrock": "ok"}
        assert get(f"{running.control}/ready") == (200, {"status": "ready", "checks": checks})
        assert (tmp_path / "data" / "price-keeper.db").exists()
        assert running.stop(stop) == 0
        assert running.errors == ""


def test_serve_runs_on_dynamodb(engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    settings = ON_DYNAMODB | {"PRICE_KEEPER__STORE__ENDPOINT": engines.endpoints["ministack"]}
    with sidecar("serve", folder=tmp_path, **settings) as running:
        status, body = get(f"{running.control}/ready")
        assert (status, body["status"]) == (503, "not ready")
        assert body["checks"]["store"] == "the store is not as it should be; the log says why"
        assert "price-keeper tables create" in running.errors
        assert price_keeper("tables", "create", folder=tmp_path, **settings).returncode == 0
        until_ready(running.control)


def test_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        refused = price_keeper("dev", "--port", "0", "--control-port", port, folder=tmp_path)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"price-keeper: cannot listen on 127.0.0.1:{port}: Address already in use; name other ports")


def test_unusable_data_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("in the way")
    refused = price_keeper("dev", *FREE_PORTS, folder=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith("price-keeper: cannot keep data/token-key")
    assert len(refused.stderr.splitlines()) == 1


def test_configuration_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("listen:\n  dta: 127.0.0.1:1\nstore: {engine: oracle}\nlabels: {}\n")
    for command in ("serve", "check-config"):
        refused = price_keeper(command, folder=tmp_path)
        assert refused.returncode == 2
        assert [line.split(": ")[:2] for line in refused.stderr.splitlines()] == [
            ["config.yaml:2", "listen.dta"],
            ["config.yaml:3", "store.engine"],
            ["config.yaml:4", "labels"],
        ]


def test_default_configuration_is_valid() -> None:
    checked = price_keeper("check-config", folder=ROOT)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "premium, standard, economy" in checked.stdout


def test_check_config_lists_derived_prices(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "labels: {one: {model: anthropic.m, format: anthropic, prices_usd_per_1m: {input: 3, output: 15}}}"
    )
    lines = price_keeper("check-config", folder=tmp_path).stdout.splitlines()
    expected = {"cache_read": "0.3", "cache_write_5m": "3.75", "cache_write_1h": "6"}
    told = ", ".join(f"{name} {usd}" for name, usd in expected.items())
    assert lines[1:] == [f"one: derived from the price of input, in USD per million tokens: {told}"]
    document = json.loads(price_keeper("check-config", "--json", folder=tmp_path).stdout)
    assert document["derived_prices_usd_per_1m"] == {"one": expected}


@pytest.mark.parametrize("arguments", [["tables", "nonsense"], ["nonsense"], ["dev", "--control-port", "x"]])
def test_command_mistake_shows_usage(tmp_path: Path, arguments: list[str]) -> None:
    refused = price_keeper(*arguments, folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("usage: price-keeper")


async def test_readiness_follows_store(engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    async with fault_proxy(engines.endpoints["ministack"]) as proxy:
        settings = ON_DYNAMODB | {"PRICE_KEEPER__STORE__ENDPOINT": proxy.url}
        await asyncio.to_thread(price_keeper, "tables", "create", folder=tmp_path, **settings)
        with sidecar("serve", folder=tmp_path, **settings) as running:
            assert (await asyncio.to_thread(get, f"{running.control}/ready"))[0] == 200
            await asyncio.sleep(RESULT_TTL_SECONDS)
            proxy.plan([DropAnswer()] * MAX_ATTEMPTS)
            status, body = await asyncio.to_thread(get, f"{running.control}/ready")
            assert (status, body["status"]) == (503, "not ready")
            assert body["checks"]["store"] == "the store is away; the log says why"
            assert "not ready: store: the store is away: no answer from DynamoDB" in running.errors
            assert (await asyncio.to_thread(get, f"{running.control}/health"))[0] == 200
            await asyncio.to_thread(until_ready, running.control)


# Starting, and signals to the process.


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_hanging_start_answers_probes_and_stops(tmp_path: Path, stop: signal.Signals) -> None:
    """A provider of credentials may take for ever; it runs in a thread, which must not hold up the exit."""
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    os.mkfifo(tmp_path / "never")
    (tmp_path / "aws").write_text(f"[default]\ncredential_process = cat {tmp_path / 'never'}\n")
    control = f"127.0.0.1:{free_port()}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | SERVED
    environment |= {
        "PYTHONPATH": PYTHON_PATH,
        "PRICE_KEEPER__UPSTREAM__ENDPOINT": "http://127.0.0.1:9",
        "PRICE_KEEPER__LISTEN__CONTROL": control,
        "AWS_CONFIG_FILE": str(tmp_path / "aws"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    command = [sys.executable, "-m", "price_keeper.cli", "serve"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=-1, stderr=-1, text=True) as process:
        try:
            assert until_heard(f"http://{control}/ready") == (
                503,
                {"status": "not ready", "checks": {"process": "starting"}},
            )
            assert get(f"http://{control}/health") == (200, {"status": "ok"})
            process.send_signal(stop)
            assert process.wait(SECONDS) == 0
            assert process.communicate() == ("", "")
        finally:
            process.kill()
            # so that a reader of it ends
            os.close(os.open(tmp_path / "never", os.O_RDWR | os.O_NONBLOCK))


def until_heard(url: str) -> tuple[int, Any]:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return get(url)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_health_may_have_its_own_port(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    health = f"127.0.0.1:{free_port()}"
    with sidecar("serve", folder=tmp_path, **SERVED, PRICE_KEEPER__LISTEN__HEALTH=health) as running:
        for address in (running.control, f"http://{health}"):
            assert get(f"{address}/health") == (200, {"status": "ok"})
            assert get(f"{address}/ready")[0] == 200
        assert running.stop() == 0


def test_sighup_does_not_end_serve(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    with sidecar("serve", folder=tmp_path, **SERVED) as running:
        running.process.send_signal(signal.SIGHUP)
        assert get(f"{running.control}/ready")[0] == 200
        message = "SIGHUP: labels and prices reloaded: nothing in them is another\n"
        wait_until(lambda: message in running.errors)
        assert running.stop() == 0
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT[\d:.]+Z WARNING price_keeper\.reloading: {message}", running.errors)


def test_sighup_does_not_end_dev(tmp_path: Path) -> None:
    with sidecar("dev", *FREE_PORTS, folder=tmp_path) as running:
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP ignored: this process has no configuration file to read again" in running.errors)
        assert get(f"{running.control}/ready")[0] == 200
        assert running.stop() == 0


def test_connection_flood_keeps_readiness_and_existing_connections(tmp_path: Path) -> None:
    """There are fewer descriptors than connections; what the sidecar needs itself is not theirs."""
    few = ("prlimit", "--nofile=400")
    with sidecar("dev", *FREE_PORTS, folder=tmp_path, wrapper_command=few) as running, ExitStack() as flood:
        place = urlsplit(running.data)
        for _ in range(600):
            flood.enter_context(socket.create_connection((place.hostname or "", place.port or 0)))
        assert get(f"{running.control}/ready")[0] == 200
        assert get(f"{running.control}/health")[0] == 200
        flood.close()
        deadline = time.monotonic() + SECONDS
        while answered(running.data) in (0, 503):  # they leave one by one
            assert time.monotonic() < deadline
        assert running.stop() == 0
        assert len(running.errors.splitlines()) == 1
        assert "connection limit reached" in running.errors


def answered(url: str) -> int:
    try:
        return get(url)[0]
    except OSError:
        return 0
