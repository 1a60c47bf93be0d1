"""`price-keeper dev --config`: an app with names of its own, before a simulated Bedrock with the labels of a file."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.support.commands import SECONDS, Sidecar, sidecar
from tests.support.simulated import TURN

LABELS = """
labels:
  fast:
    model: us.amazon.nova-lite-v1:0
    aliases: [{alias}]
    format: nova
    prices_usd_per_1m: {{input: 1, output: 2}}
"""


def ask(running: Sidecar, name: str) -> tuple[int, str, str]:
    """Status, label and model."""
    headers = {"authorization": f"Bearer {running.exports['AWS_SESSION_TOKEN']}", "content-type": "application/json"}
    request = Request(f"{running.data}/model/{name}/converse", json.dumps(TURN).encode(), headers)
    try:
        with urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.headers["x-price-keeper-label"], answer.headers["x-price-keeper-model"]
    except HTTPError as refused:
        with refused:
            return refused.code, "", ""


def test_dev_serves_labels_of_file_by_every_name_and_reloads_them(tmp_path: Path) -> None:
    file = tmp_path / "labels.yaml"
    file.write_text(LABELS.format(alias="gpt-4o"))
    ports = ("--port", "0", "--control-port", "0")
    with sidecar("dev", "--config", "labels.yaml", *ports, folder=tmp_path) as running:
        assert 'modelId="fast"' in running.startup_output
        served = (200, "fast", "us.amazon.nova-lite-v1:0")
        for name in ("fast", "amazon.nova-lite-v1:0", "eu.amazon.nova-lite-v1:0", "gpt-4o"):
            assert ask(running, name) == served  # and the demo org has a quota for it
        assert ask(running, "premium") == ask(running, "gpt-5") == (400, "", "")
        file.write_text(LABELS.format(alias="gpt-5"))
        running.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + SECONDS
        while ask(running, "gpt-5") != served:
            assert time.monotonic() < deadline, running.errors
        assert ask(running, "gpt-4o") == (400, "", "")
