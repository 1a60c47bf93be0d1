"""A configuration from the supervisor to its workers: the text that was checked, and nothing that went wrong."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
from price_keeper.cli.config_handover import ConfigHandover
from price_keeper.config import load_config
from price_keeper.errors import ConfigError

LABELS = """
labels:
  one:
    model: amazon.nova-lite-v1:0
    format: nova
    prices_usd_per_1m: {{input: {price}, output: 2}}
"""


class Pair:
    """A supervisor, and a worker made by it before anything else."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "config.yaml"
        self.sockets = folder / "sockets"
        self.sockets.mkdir()
        self.write(1)
        self.supervisor = ConfigHandover(load_config(self.file, {}), self.file, {}, self.sockets)
        self.worker = self.forked()

    def forked(self) -> ConfigHandover:
        return copy.copy(self.supervisor)

    def write(self, price: float, more: str = "") -> None:
        self.file.write_text(LABELS.format(price=price) + more)


def price(passing: ConfigHandover) -> float:
    return float(passing.config.labels["one"].prices_usd_per_1m.input)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_worker_reads_published_text_whatever_file_says_now(pair: Pair) -> None:
    pair.write(5, "aggregator: {interval_secs: 59}\n")
    assert pair.supervisor.publish()
    pair.write(6)
    found = pair.worker.read_new_config()
    assert found is not None
    assert (price(pair.worker), float(found.labels["one"].prices_usd_per_1m.input)) == (5, 5)
    assert found.aggregator.interval_secs == 60  # which takes a restart
    assert pair.worker.read_new_config() is None  # once
    assert price(pair.forked()) == 5
    assert pair.forked().read_new_config() is None


def test_sighup_received_by_worker_alone_is_ignored(pair: Pair) -> None:
    pair.write(5)
    assert pair.worker.read_new_config() is None
    assert price(pair.worker) == 1


def test_mistake_is_reported_by_supervisor_and_known_to_workers(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.write(5)
    pair.supervisor.publish()
    pair.worker.read_new_config()
    caplog.clear()
    pair.write(-1, "nonsense: 1\n")
    assert pair.supervisor.publish()
    messages = [record.getMessage() for record in caplog.records]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert all(f": {pair.file}:" in message for message in messages)
    with pytest.raises(ConfigError) as refused:
        pair.worker.read_new_config()
    assert refused.value.problems == ()
    assert (price(pair.supervisor), price(pair.worker), price(pair.forked())) == (5, 5, 5)
    assert pair.worker.read_new_config() is pair.forked().read_new_config() is None
    assert pair.forked().is_reload_rejected
    pair.write(7)
    assert pair.supervisor.publish()
    pair.worker.read_new_config()
    assert price(pair.worker) == 7
    assert not pair.forked().is_reload_rejected


def test_configuration_not_yet_read_by_worker_survives_later_refusal(pair: Pair) -> None:
    pair.write(5)
    pair.supervisor.publish()
    pair.write(-1)
    pair.supervisor.publish()
    slow, later = pair.worker, pair.forked()
    assert slow.read_new_config() is not None
    assert price(slow) == 5
    with pytest.raises(ConfigError):
        slow.read_new_config()
    assert slow.read_new_config() is later.read_new_config() is None
    for wanted in (-1, 7):
        pair.write(wanted)
        pair.supervisor.publish()
    assert slow.read_new_config() is not None
    assert price(slow) == 7
    assert slow.read_new_config() is None  # the refusal before it is over


def test_configuration_that_cannot_be_handed_over_is_applied_nowhere(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.sockets.rename(pair.sockets.with_name("gone"))
    pair.write(5)
    assert not pair.supervisor.publish()
    assert "it cannot be handed to the workers: FileNotFoundError" in caplog.text
    assert (price(pair.supervisor), price(pair.forked())) == (1, 1)
    pair.sockets.with_name("gone").rename(pair.sockets)
    assert pair.supervisor.publish()
    pair.worker.read_new_config()
    assert price(pair.worker) == 5


def test_handover_file_is_replaced_atomically(pair: Pair) -> None:
    """It is there whole, or as it was."""
    pair.write(5, "#" * 100_000)
    pair.supervisor.publish()
    before = (pair.sockets / "configuration").stat().st_ino
    pair.write(6)
    pair.supervisor.publish()
    assert (pair.sockets / "configuration").stat().st_ino != before
    assert [path.name for path in pair.sockets.iterdir()] == ["configuration"]
