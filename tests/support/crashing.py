"""A sidecar that is killed again and again under load, and its books beside those of the Bedrock it called."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from bedrock_simulator import DEFAULT_KEYS, Keys
from botocore.exceptions import BotoCoreError, ClientError
from price_keeper.auth.keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.model import Scope
from price_keeper.recording.entries import ChargedCounters, UsageCounts, Intent, LineKind, Receipt
from price_keeper.recording.lines import decode_lines
from price_keeper.recording.seal import SegmentSeal
from price_keeper.recording.segment import SEGMENT_SUFFIX

from tests.support.commands import ROOT, Sidecar, sidecar
from tests.support.ports import free_port
from tests.support.simulated import CLAUDE, CLAUDE_BODY, NOVA, BotoCaller
from tests.support.threads import Threads

ORG = "c0000000-0000-4000-8000-00000000000d"
APP = "crashing"
SECRET = "what the sidecar of this test signs its tokens with"
SCOPE = Scope(ORG, APP)
MODELS = {"premium": CLAUDE, "economy": NOVA}
PRICES = {
    "premium": {"input": 3, "output": 15, "cache_read": 0.3, "cache_write_5m": 3.75, "cache_write_1h": 6},
    "economy": {"input": 0.06, "output": 0.24, "cache_read": 0.015, "cache_write_5m": 0.06, "cache_write_1h": 0.06},
}


@dataclass
class Lineup:
    """Everything that outlives the sidecar: where it listens, calls, keeps its journal and finds its store."""

    folder: Path
    bedrock: str
    store: dict[str, Any]
    port: int = field(default_factory=free_port)
    options: tuple[str, ...] = ()  # of `serve`
    around: tuple[str, ...] = ()  # a command that starts it
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    def write_config(self) -> None:
        labels = {
            name: {
                "model": model,
                "format": "anthropic" if name == "premium" else "nova",
                "prices_usd_per_1m": PRICES[name],
                "price_source": "config",
            }
            for name, model in MODELS.items()
        }
        config = {
            "listen": {"data": f"127.0.0.1:{self.port}", "control": "127.0.0.1:0"},
            "upstream": {"endpoint": self.bedrock},
            "store": self.store,
            "journal": {"dir": "journal", "flush_interval_secs": 0.1, "flush_interval_max_secs": 0.3},
            "unknown_org": "meter",
            "labels": labels,
        }
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))

    @contextmanager
    def serving(self) -> Iterator[Sidecar]:
        keys = {"AWS_ACCESS_KEY_ID": DEFAULT_KEYS.access_key, "AWS_SECRET_ACCESS_KEY": DEFAULT_KEYS.secret_key}
        environment = {"PRICE_KEEPER_JWT_SECRET": SECRET, **keys, **self.environment}
        with sidecar("serve", *self.options, folder=self.folder, around=self.around, **environment) as running:
            yield running

    def token(self) -> str:
        return TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", time.time).mint_access(ORG, APP).token


class Load(Threads):
    """boto3 clients that call without rest, and remember which answers they received whole."""

    def __init__(self, lineup: Lineup, clients: int, chance: random.Random) -> None:
        super().__init__()
        self.whole: list[str] = []
        self.broken = 0
        self._lineup = lineup
        seeds = [chance.random() for _ in range(clients)]
        self._threads = [threading.Thread(target=self._call_on, args=(seed,)) for seed in seeds]

    def _call_on(self, seed: float) -> None:
        chance, numbers = random.Random(seed), count()
        keys = Keys("any", "any", self._lineup.token())
        caller = BotoCaller(self._lineup.url, keys=keys, read_timeout=10, connect_timeout=1)
        try:
            while not self._stop.is_set():
                try:
                    self.whole.append(_one_call(caller, chance, f"{seed} {next(numbers)}"))
                except (BotoCoreError, ClientError, ConnectionError, ValueError, KeyError, OSError):
                    self.broken += 1
                    self._stop.wait(0.02)
                except Exception as failure:  # whatever a client of boto3's makes of a cut stream
                    if type(failure).__module__.split(".")[0] not in ("urllib3", "botocore"):
                        raise
                    self.broken += 1
        finally:
            caller.client.close()


def _one_call(caller: BotoCaller, chance: random.Random, text: str) -> str:
    text += " word" * chance.randrange(20)
    label = chance.choice(list(MODELS))
    turn = {"modelId": label, "messages": [{"role": "user", "content": [{"text": text}]}]}
    match chance.randrange(4):
        case 0:
            answer = caller.call_blocking("converse", turn)
        case 1:
            answer = caller.call_blocking("converse_stream", turn)
            assert "metadata" in answer["stream"][-1]
        case 2:
            answer = caller.call_blocking("invoke_model", {"modelId": "premium", "body": _body(text)})
        case _:
            body = _body(text)
            answer = caller.call_blocking("invoke_model_with_response_stream", {"modelId": "premium", "body": body})
            assert b"invocationMetrics" in answer["body"][-1]["chunk"]["bytes"]
    return str(answer["ResponseMetadata"]["RequestId"])


def _body(text: str) -> bytes:
    return json.dumps(CLAUDE_BODY | {"messages": [{"role": "user", "content": text}]}).encode()


class Copies:
    """Second names of all segments, so that they can be read when the sidecar has removed its own."""

    def __init__(self, journal: Path, folder: Path) -> None:
        self._journal = journal
        self._folder = folder

    def __enter__(self) -> Copies:
        self._folder.mkdir()
        command = [sys.executable, "-m", "tests.support.copying", str(self._journal), str(self._folder)]
        self._process = subprocess.Popen(command, cwd=ROOT)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Books:
    """What all segments together say."""

    seals: dict[str, SegmentSeal] = field(default_factory=dict)
    intents: int = 0
    nothing: int = 0
    receipts: list[Receipt] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Books:
        books = cls()
        for path in sorted(folder.glob(f"*{SEGMENT_SUFFIX}")):
            books._add(path)
        return books

    def _add(self, path: Path) -> None:
        accounts: dict[int, ChargedCounters] = {}
        for values in decode_lines(path.read_bytes()).values:
            match values[0]:
                case LineKind.INTENT | LineKind.CARRIED:
                    self.intents += values[0] == LineKind.INTENT
                    accounts[values[1]] = Intent.from_values(values).charged
                case LineKind.RECORD:
                    assert values[1] in accounts
                    self.receipts.append(Receipt.from_values(values))
                case LineKind.NOTHING:
                    self.nothing += 1
                case LineKind.SEAL:
                    self.seals[path.stem] = SegmentSeal.from_values(values, {})

    @property
    def exact(self) -> dict[str, UsageCounts]:
        known = [receipt for receipt in self.receipts if "why" not in receipt.about]
        by_request = {receipt.about["request"]: receipt.counts for receipt in known}
        assert len(by_request) == len(known)  # none twice
        return by_request

    @property
    def estimated(self) -> list[Receipt]:
        return [receipt for receipt in self.receipts if "why" in receipt.about]

    def sums(self, scope: str) -> dict[str, UsageCounts]:
        """By label."""
        sums: dict[str, UsageCounts] = {}
        for seal in self.seals.values():
            for counter, counts in (each for part in seal.parts for each in part):
                if counter.scope == scope:
                    sums[counter.label] = sums.get(counter.label, UsageCounts()).plus(counts)
        return sums


def killed_again_and_again(lineup: Lineup, kills: int, chance: random.Random, may: Callable[[], object]) -> Load:
    """Under load from its first start to its last; `may` is asked before each kill, as to how things stand."""
    lineup.write_config()
    with Load(lineup, 6, chance) as load, Copies(lineup.journal, lineup.folder / "copies"):
        for _ in range(kills):
            with lineup.serving() as running:
                time.sleep(chance.uniform(0, 0.4))
                may()
                running.process.send_signal(signal.SIGKILL)
                running.process.wait()
        with lineup.serving() as running:
            time.sleep(0.5)
            load.__exit__()
            assert running.stop() == 0
    return load


def compare(books: Books, whole: list[str], ledger: dict[str, dict[str, Any]]) -> None:
    """With what clients have, and with what Bedrock says."""
    exact = books.exact
    assert set(whole) <= set(exact)  # what a client received is recorded, and not as an estimate
    for request, counts in exact.items():
        assert counts == _of(ledger[request]), request
    ran = {request for request, entry in ledger.items() if entry.get("usage")}
    assert len(ran - set(exact)) <= len(books.estimated)  # whatever else ran was in flight, and is in the estimates
    assert all(receipt.counts.pico > 0 for receipt in books.estimated)
    recorded = sum(seal.requests for seal in books.seals.values())
    assert recorded == len(exact) + len(books.estimated) == books.intents - books.nothing


def _of(entry: dict[str, Any]) -> UsageCounts:
    """What the simulated Bedrock says, priced by hand."""
    label = next(name for name, model in MODELS.items() if model == entry["model"])
    usage, prices = entry["usage"], PRICES[label]
    tokens = tuple(usage[name] for name in UsageCounts._fields if name.endswith("_tokens"))
    pico = sum(count * round(price * 10**6) for count, price in zip(tokens, prices.values(), strict=True))
    return UsageCounts(1, 0, *tokens, 0, pico)
