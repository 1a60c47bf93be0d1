"""A journal found on a dead node, brought to the store by the command line; and what else a user meets of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import yaml
from price_keeper.ledger.aggregator import sum_shards
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.stores.sqlite import SqliteStore
from price_keeper.telemetry.metrics import ALL_METRICS

from tests.support.commands import PYTHON_PATH, ROOT, Sidecar, call_in_process, sidecar
from tests.support.simulated import Keys, boto_client
from tools.terminal import on_a_terminal

ORG = "d0000000-0000-4000-8000-000000000001"


def converse(running: Sidecar, times: int) -> None:
    exports = running.exports
    client = boto_client(running.data, keys=Keys("any", "any", exports["AWS_SESSION_TOKEN"]))
    for _ in range(times):
        client.converse(modelId="premium", messages=[{"role": "user", "content": [{"text": "hello"}]}])
    client.close()


def counted(file: Path) -> int:
    async def read() -> int:
        store = await SqliteStore(file, time.time).open()
        try:
            day = time.strftime("DAY#%Y%m%d", time.gmtime())
            counter = Counter(f"ORG#{ORG}#APP#demo", "premium", day, 8)
            return int((await sum_shards(store, counter))["requests"])
        finally:
            await store.close()

    return asyncio.run(read())


def config_of(folder: Path) -> None:
    labels = yaml.safe_load((ROOT / "config.yaml").read_text())["labels"]
    config = {
        "store": {"path": "data/price-keeper.db"},
        "journal": {"dir": "data/journal", "flush_interval_secs": 15},
        "labels": labels,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def test_found_journal_is_counted_once(tmp_path: Path) -> None:
    config_of(tmp_path)
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=tmp_path) as running:
        with closing(sqlite3.connect(tmp_path / "data" / "price-keeper.db")) as other:
            other.execute("BEGIN IMMEDIATE")  # so that no flush gets through before the end
            converse(running, 7)
            running.stop(signal.SIGKILL)
        assert counted(tmp_path / "data" / "price-keeper.db") == 0
    shutil.move(tmp_path / "data" / "journal", tmp_path / "found")
    shutil.copytree(tmp_path / "found", tmp_path / "again")
    for words in ("7 calls of 0.0", "0 calls of 0.0"):
        done = call_in_process("replay", "found", folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert words in done.stdout
        assert counted(tmp_path / "data" / "price-keeper.db") == 7
    code, shown = on_a_terminal(
        [sys.executable, "-m", "price_keeper.cli", "replay", "again", "--owner-is-dead", "--json"],
        tmp_path,
        os.environ | {"PYTHONPATH": PYTHON_PATH, "TERM": "xterm"},
    )
    assert code == 0
    assert "\rreading the journal in again\x1b[K" in shown  # how far it is, and gone again
    document = json.loads(shown.rpartition("\x1b[K")[2])
    assert (document["requests"], document["left"]) == (7, [])  # they are in the store, and not by this
    assert document["repeated_parts"] > 0
    assert counted(tmp_path / "data" / "price-keeper.db") == 7
    missing = call_in_process("replay", "nowhere", folder=tmp_path)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "cannot use the journal in nowhere: No such file or directory" in missing.stderr


def test_journal_in_use_is_refused(tmp_path: Path) -> None:
    config_of(tmp_path)
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=tmp_path):
        for arguments in (("replay", "data/journal"), ("dev", "--port", "0", "--control-port", "0")):
            done = call_in_process(*arguments, folder=tmp_path)
            assert done.returncode == 1
            assert "another process writes to the journal in data/journal" in done.stderr
            assert "Traceback" not in done.stderr


def test_shutdown_flushes_and_metrics_are_complete(tmp_path: Path) -> None:
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=tmp_path) as running:
        converse(running, 3)
        with urllib.request.urlopen(f"{running.control}/metrics") as answer:
            text = answer.read().decode()
        assert 'price_keeper_recorded_requests_total{label="premium",estimated="false"} 3\n' in text
        assert {metric.name for metric in ALL_METRICS} == set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
        assert running.stop() == 0
    assert counted(tmp_path / "data" / "price-keeper.db") == 3
    shown = call_in_process("spend", "--data-dir", "data", "--json", folder=tmp_path)
    assert json.loads(shown.stdout)["total"]["requests"] == 3
