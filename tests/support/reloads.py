"""Sidecars that reload their configuration on SIGHUP, and what their callers and books show of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from bedrock_simulator import Keys
from price_keeper.ledger.ledger_entries import Intent, LineKind, Receipt, UsageCounts
from price_keeper.ledger.segment import SEGMENT_SUFFIX, decode_lines

from tests.support.commands import Sidecar
from tests.support.sidecar_crashes import SidecarSetup
from tests.support.simulated import CLAUDE, NOVA, BotoCaller
from tests.support.threads import ThreadGroup
from tests.support.workers import children, wait_until

HAIKU = "anthropic.claude-haiku-4-5-20251001-v1:0"
TURN = [{"role": "user", "content": [{"text": "how much is this"}]}]
RELOADED_MESSAGE = "SIGHUP: labels and prices reloaded"


def label(model: str, input: float, output: float, **more: Any) -> dict[str, Any]:
    cache = {"cache_read": input, "cache_write_5m": input, "cache_write_1h": input}
    format = "nova" if model == NOVA else "anthropic"
    prices = {"input": input, "output": output, **cache}
    return {"model": model, "format": format, "price_source": "config", "prices_usd_per_1m": prices, **more}


# Two configurations: the same label is another model at another price.
BEFORE = {"moving": label(CLAUDE, 3, 15), "steady": label(NOVA, 1, 2)}
AFTER = {"moving": label(HAIKU, 100, 700), "steady": label(NOVA, 1, 2)}


def write_labels(setup: SidecarSetup, labels: dict[str, Any], **sections: Any) -> None:
    file = setup.folder / "config.yaml"
    current = yaml.safe_load(file.read_text()) if file.exists() else {}
    file.write_text(yaml.safe_dump({**current, "labels": labels, **sections}))


def send_sighup(running: Sidecar) -> None:
    running.process.send_signal(signal.SIGHUP)


@dataclass
class Reloader:
    """Makes a running sidecar apply one configuration after the other, and waits for each."""

    running: Sidecar
    setup: SidecarSetup
    count: int = 0  # of log lines
    workers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers = children(self.running.process.pid)

    def reload(self, labels: dict[str, Any], **sections: Any) -> None:
        write_labels(self.setup, labels, **sections)
        send_sighup(self.running)
        self.count += max(1, len(self.workers))
        wait_until(lambda: self.running.errors.count(RELOADED_MESSAGE) >= self.count)


class AnsweredCall(NamedTuple):
    request: str
    requested_label: str
    label: str
    model: str


class ReloadLoad(ThreadGroup):
    """boto3 clients that call without rest; nothing may go wrong."""

    def __init__(self, setup: SidecarSetup, labels: list[str], clients: int) -> None:
        super().__init__()
        self.answered: list[AnsweredCall] = []
        self.failed: list[str] = []
        self._setup, self._labels = setup, labels
        self._threads = [threading.Thread(target=self._call_until_stopped, args=(number,)) for number in range(clients)]

    def _call_until_stopped(self, client: int) -> None:
        caller = BotoCaller(self._setup.url, keys=Keys("any", "any", self._setup.token()))
        try:
            for number in count(client):
                if self._stop.is_set():
                    return
                operation = ("converse", "converse_stream")[number // len(self._labels) % 2]
                try:
                    self.answered.append(call_once(caller, self._labels[number % len(self._labels)], operation))
                except Exception as failure:  # whatever it is, it is reported
                    self.failed.append(repr(failure))
        finally:
            caller.client.close()


def call_once(caller: BotoCaller, requested_label: str, operation: str = "converse") -> AnsweredCall:
    answer = caller.call_blocking(operation, {"modelId": requested_label, "messages": TURN})
    if operation == "converse_stream":
        assert "metadata" in answer["stream"][-1]
    metadata = answer["ResponseMetadata"]
    headers = metadata["HTTPHeaders"]
    return AnsweredCall(
        metadata["RequestId"], requested_label, headers["x-price-keeper-label"], headers["x-price-keeper-model"]
    )


class RecordedCall(NamedTuple):
    label: str
    counts: UsageCounts
    about: dict[str, str]


def read_recorded_calls(folder: Path) -> dict[str, list[RecordedCall]]:
    """By Bedrock's request, from copies of all segments."""
    calls: dict[str, list[RecordedCall]] = {}
    for path in sorted(folder.glob(f"*{SEGMENT_SUFFIX}")):
        labels: dict[int, str] = {}
        for values in decode_lines(path.read_bytes()).values:
            match values[0]:
                case LineKind.INTENT | LineKind.CARRIED:
                    labels[values[1]] = Intent.from_values(values).charged.counters[0].label
                case LineKind.RECORD:
                    receipt = Receipt.from_values(values)
                    call = RecordedCall(labels[values[1]], receipt.counts, dict(receipt.about))
                    calls.setdefault(call.about["request"], []).append(call)
    return calls


def cost_function(labels: dict[str, Any], name: str) -> Callable[[UsageCounts], int]:
    prices = labels[name]["prices_usd_per_1m"]

    def cost(counts: UsageCounts) -> int:
        """In pico-dollars, which a token costs as many of as a million tokens cost micro-dollars."""
        used = counts.input_tokens * prices["input"] + counts.output_tokens * prices["output"]
        return round(used * 10**6)

    return cost
