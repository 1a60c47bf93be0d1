"""A real Prometheus on loopback that scrapes what a test serves, where Debian's package `prometheus` is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_port

SCRAPE_SECONDS = 1
STARTING_SECONDS = 60


def find_program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} on this machine (Debian's package prometheus)")
    return found


@dataclass
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Fails where Prometheus does."""
        parameters = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{parameters}", timeout=10) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        results: list[dict[str, Any]] = document["data"]["result"]
        return results

    def has_scraped(self, times: int) -> bool:
        found = self.query("min(count_over_time(up[5m]))")
        return bool(found) and float(found[0]["value"][1]) >= times


@contextmanager
def prometheus(folder: Path, target: str, rules: Path) -> Iterator[Prometheus]:
    port, binary = free_port(), find_program("prometheus")
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "price-keeper", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    options = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        command = [binary, *options, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}", folder / "prometheus.log")
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=2)
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"it is not ready in {STARTING_SECONDS} s: {log.read_text()[-2000:]}")
