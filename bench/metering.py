"""What metering adds to a call: its intent, reading its answer, its price and its receipt, with a journal on disk.

Rounds of every kind take turns in one process, and the best counts. The floor is two system calls of that size.

Run as: python -m bench.metering
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter

from proxy.config import Config
from proxy.forwarding.eventstream import FrameWatcher, encode
from proxy.forwarding.forwarder import Target
from proxy.forwarding.model_path import Operation
from proxy.forwarding.upstream import Endpoint
from proxy.metering.pricing import cost, label_tariff
from proxy.metering.reading import reader_of
from proxy.metering.usage import Usage
from proxy.recording.entries import Account, Counter
from proxy.recording.expected import Expected
from proxy.recording.journal import Journal
from proxy.recording.meter import Meter, Price
from proxy.recording.ulid import Ulids

SCOPE = "ORG#550e8400-e29b-41d4-a716-446655440000#APP#web"
TARGET = Target(Endpoint("127.0.0.1", 1, False), "us-east-1", "a-model", "/")
HEADERS = [(b"content-type", b"application/json"), (b"x-amzn-requestid", b"7c9e6679-7425-40de-944b-e07fc1f90ae7")]
STREAM = [(b"content-type", b"application/vnd.amazon.eventstream"), HEADERS[1]]
ANSWER = json.dumps(
    {
        "metrics": {"latencyMs": 812},
        "output": {"message": {"role": "assistant", "content": [{"text": "An answer of some length. " * 20}]}},
        "stopReason": "end_turn",
        "usage": {"inputTokens": 120, "outputTokens": 130, "totalTokens": 250},
    }
).encode()
FRAMES = 200


def _frames() -> bytes:
    def event(name: str, payload: dict[str, object]) -> bytes:
        headers = {":event-type": name, ":content-type": "application/json", ":message-type": "event"}
        return encode(headers, json.dumps(payload).encode())

    delta = {"contentBlockIndex": 0, "delta": {"text": " some words"}, "p": "abcdefghijklmnopqrstuvwxyz"}
    return event("contentBlockDelta", delta) * FRAMES


class Bench:
    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder, Ulids(lambda: 1_795_003_200.0, os.urandom), lambda *_: None)
        self.account = Account.of([Counter(SCOPE, "premium", "DAY#20261118", 8)])
        tariff = label_tariff(Config.development().labels["premium"])
        plain = tariff.tiers["default"]
        self.price = Price(partial(cost, tariff), f"{tariff.source} {tariff.version}", plain.input, plain.output)
        self.expected = Expected()
        self.file = os.open(folder / "floor", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.numbers = count()
        self.stream = _frames()

    def metered(self) -> None:
        """All of it, as a Converse call has it."""
        meter = Meter(
            self.journal,
            self.expected,
            self.account,
            Operation.CONVERSE,
            "anthropic",
            lambda _: self.price,
            TARGET,
            Usage(120, 500),
            1_795_003_200.0,
        )
        meter.sent_to(TARGET)
        meter.head(200, HEADERS)
        meter.data(ANSWER)
        meter.end(True)
        meter.close()

    def floor(self) -> None:
        os.write(self.file, b"x" * 190)
        os.write(self.file, b"x" * 150)

    def watched(self) -> None:
        """What every stream has anyway: its frames are checked."""
        FrameWatcher({}).feed(self.stream)

    def read(self) -> None:
        reader_of(Operation.CONVERSE_STREAM, "anthropic", STREAM[0][1], STREAM).feed(self.stream)


def best_of(works: list[Callable[[], None]], rounds: int, times: int) -> list[float]:
    best = [float("inf")] * len(works)
    gc.disable()
    for _ in range(rounds):
        for number, work in enumerate(works):
            began = perf_counter()
            for _ in range(times):
                work()
            best[number] = min(best[number], (perf_counter() - began) / times * 1e6)
    gc.enable()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        metered, floor = best_of([bench.metered, bench.floor], rounds, 2000)
        watched, read = best_of([bench.watched, bench.read], rounds, 20)
    print(f"a request: {metered:.2f} us, of which {floor:.2f} us are its two writes")
    print(f"a frame: {read / FRAMES:.3f} us, of which {watched / FRAMES:.3f} us are to see that it is sound")


if __name__ == "__main__":
    main()
