"""What the development mode keeps between its starts."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from price_keeper.cli.dev_command import _DevEnvironment, _read_or_create, build_dev_config
from price_keeper.errors import PriceKeeperError
from price_keeper.ledger.flusher import FlushInterval


def test_generated_secret_is_kept_and_private(tmp_path: Path) -> None:
    made = iter(["first", "second"])
    file = tmp_path / "new" / "secret"
    for _ in range(2):
        assert _read_or_create(file, lambda: next(made)) == "first"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["secret"]


def test_generated_file_appears_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    seen = []
    real = os.link

    def link(draft: Path, path: Path) -> None:
        seen.append((path.exists(), draft.read_text()))
        real(draft, path)

    monkeypatch.setattr(os, "link", link)
    _read_or_create(file, lambda: "whole")
    assert seen == [(False, "whole")]


def test_concurrent_starts_share_first_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"

    def slower() -> str:
        assert _read_or_create(file, lambda: "the other's") == "the other's"
        return "mine"

    assert _read_or_create(file, slower) == "the other's"
    assert os.listdir(tmp_path) == ["secret"]


def test_pasted_exports_work_for_any_folder_name(tmp_path: Path) -> None:
    """A shell takes what stands there as names, whatever is in them."""
    folder = tmp_path / "my $(touch made) data"
    started: Any = SimpleNamespace(data_address="127.0.0.1:1", control_address="127.0.0.1:2")
    guide = _DevEnvironment(started, "secret", folder / "ca.pem", folder, "token", "premium").format_guide()
    exports = [line for line in guide.splitlines() if line.startswith("export ")]
    script = "; ".join([*exports, 'printf "%s\\n" "$AWS_CA_BUNDLE" "$CURL_CA_BUNDLE"'])
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.splitlines() == [f"{folder}/ca.pem"] * 2
    assert list(tmp_path.iterdir()) == []


def test_secret_is_created_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "link", link)
    assert _read_or_create(tmp_path / "secret", lambda: "made") == "made"
    assert os.listdir(tmp_path) == ["secret"]


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PriceKeeperError, match="cannot keep"):
        _read_or_create(tmp_path / "file" / "secret", lambda: "made")


def test_dev_mode_flushes_within_a_second(tmp_path: Path) -> None:
    journal = build_dev_config(tmp_path, 0, 0, None).journal
    pace = FlushInterval(journal.flush_interval_secs, journal.flush_interval_max_secs)
    for _ in range(10):
        pace.on_flushed(1)
    assert pace.seconds == 1


LABELS_FILE = """
listen: {data: 0.0.0.0:1}
upstream: {endpoint: https://bedrock.example}
store: {engine: dynamodb}
unlabelled: meter
default_price: {input: 1, output: 1, cache_read: 1, cache_write_5m: 1, cache_write_1h: 1}
labels:
  fast:
    model: us.amazon.nova-lite-v1:0
    aliases: [gpt-4o]
    format: nova
    endpoints: [{region: eu-west-1, endpoint: https://bedrock.example}]
    prices_usd_per_1m: {input: 1, output: 2}
"""


def test_dev_config_has_labels_of_file_and_calls_simulator_alone(tmp_path: Path) -> None:
    file = tmp_path / "labels.yaml"
    file.write_text(LABELS_FILE)
    config, plain = build_dev_config(tmp_path, 0, 0, None, file), build_dev_config(tmp_path, 0, 0, None)
    assert list(config.labels) == ["fast"]
    assert config.labels["fast"].aliases == ("gpt-4o",)
    assert [(each.region, each.endpoint) for each in config.labels["fast"].endpoints] == [("eu-west-1", None)]
    assert config.unlabelled == "meter"
    for name in ("listen", "upstream", "store", "journal", "auth"):
        assert getattr(config, name) == getattr(plain, name)


def test_dev_config_without_its_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PriceKeeperError, match=r"missing.yaml: cannot be read"):
        build_dev_config(tmp_path, 0, 0, None, tmp_path / "missing.yaml")
