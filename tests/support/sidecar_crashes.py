"""A sidecar that is killed again and again under load, and its books compared with those of its Bedrock."""

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
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.domain import Scope
from price_keeper.ledger.journal import SegmentSeal
from price_keeper.ledger.ledger_entries import ChargedCounters, Intent, LineKind, Receipt, UsageCounts
from price_keeper.ledger.segment import SEGMENT_SUFFIX, decode_lines

from tests.support.commands import ROOT, Sidecar, sidecar
from tests.support.ports import free_port
from tests.support.simulated import CLAUDE, CLAUDE_BODY, NOVA, BotoCaller
from tests.support.threads import ThreadGroup

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
class SidecarSetup:
    """Everything that outlives the sidecar: where it listens, calls, keeps its journal and finds its store."""

    folder: Path
    bedrock: str
    store: dict[str, Any]
    port: int = field(default_factory=free_port)
    options: tuple[str, ...] = ()  # of `serve`
    wrapper_command: tuple[str, ...] = ()  # a command that starts it
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    def write_config(self, **sections: Any) -> None:
        """`sections` override those of the configuration."""
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
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config | sections))

    @contextmanager
    def run_sidecar(self) -> Iterator[Sidecar]:
        keys = {"AWS_ACCESS_KEY_ID": DEFAULT_KEYS.access_key, "AWS_SECRET_ACCESS_KEY": DEFAULT_KEYS.secret_key}
        environment = {"PRICE_KEEPER_JWT_SECRET": SECRET, **keys, **self.environment}
        with sidecar(
            "serve", *self.options, folder=self.folder, wrapper_command=self.wrapper_command, **environment
        ) as running:
            yield running

    def token(self) -> str:
        return (
            TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", time.time)
            .mint_access(ORG, APP)
            .token
        )


class CrashLoad(ThreadGroup):
    """boto3 clients that call without rest, and remember which answers they received whole."""

    def __init__(self, setup: SidecarSetup, clients: int, chance: random.Random) -> None:
        super().__init__()
        self.complete_requests: list[str] = []
        self.failed_calls = 0
        self._setup = setup
        seeds = [chance.random() for _ in range(clients)]
        self._threads = [threading.Thread(target=self._call_until_stopped, args=(seed,)) for seed in seeds]

    def _call_until_stopped(self, seed: float) -> None:
        chance, numbers = random.Random(seed), count()
        keys = Keys("any", "any", self._setup.token())
        caller = BotoCaller(self._setup.url, keys=keys, read_timeout=10, connect_timeout=1)
        try:
            while not self._stop.is_set():
                try:
                    self.complete_requests.append(_one_call(caller, chance, f"{seed} {next(numbers)}"))
                except (BotoCoreError, ClientError, ConnectionError, ValueError, KeyError, OSError):
                    self.failed_calls += 1
                    self._stop.wait(0.02)
                except Exception as failure:  # whatever a client of boto3's makes of a cut stream
                    if type(failure).__module__.split(".")[0] not in ("urllib3", "botocore"):
                        raise
                    self.failed_calls += 1
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


class SegmentCopies:
    """Second names of all segments, so that they can be read when the sidecar has removed its own."""

    def __init__(self, journal: Path, folder: Path) -> None:
        self._journal = journal
        self._folder = folder

    def __enter__(self) -> SegmentCopies:
        self._folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.support.segment_copier", str(self._journal), str(self._folder)]
        self._process = subprocess.Popen(command, cwd=ROOT)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class JournalContents:
    """What all segments together say."""

    seals: dict[str, SegmentSeal] = field(default_factory=dict)
    intents: int = 0
    unpaid_calls: int = 0
    receipts: list[Receipt] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> JournalContents:
        contents = cls()
        for path in sorted(folder.glob(f"*{SEGMENT_SUFFIX}")):
            contents._add(path)
        return contents

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
                    self.unpaid_calls += 1
                case LineKind.SEAL:
                    self.seals[path.stem] = SegmentSeal.from_values(values, {})

    @property
    def exact_counts(self) -> dict[str, UsageCounts]:
        exact_receipts = [receipt for receipt in self.receipts if "why" not in receipt.about]
        by_request = {receipt.about["request"]: receipt.counts for receipt in exact_receipts}
        assert len(by_request) == len(exact_receipts)  # none twice
        return by_request

    @property
    def estimated_receipts(self) -> list[Receipt]:
        return [receipt for receipt in self.receipts if "why" in receipt.about]

    def sum_by_label(self, scope: str) -> dict[str, UsageCounts]:
        """By label."""
        sums: dict[str, UsageCounts] = {}
        for seal in self.seals.values():
            for counter, counts in (pair for part in seal.parts for pair in part):
                if counter.scope == scope:
                    sums[counter.label] = sums.get(counter.label, UsageCounts()).plus(counts)
        return sums


def run_crash_loop(
    setup: SidecarSetup, kills: int, chance: random.Random, check_before_kill: Callable[[], object]
) -> CrashLoad:
    """Under load from its first start to its last; `may` is asked before each kill, as to how things stand."""
    setup.write_config()
    with CrashLoad(setup, 6, chance) as load, SegmentCopies(setup.journal, setup.folder / "copies"):
        for _ in range(kills):
            with setup.run_sidecar() as running:
                time.sleep(chance.uniform(0, 0.4))
                check_before_kill()
                running.process.send_signal(signal.SIGKILL)
                running.process.wait()
        with setup.run_sidecar() as running:
            time.sleep(0.5)
            load.__exit__()
            assert running.stop() == 0
    return load


def check_against_ledger(
    contents: JournalContents, complete_requests: list[str], ledger: dict[str, dict[str, Any]]
) -> None:
    """With what clients have, and with what Bedrock says."""
    exact_counts = contents.exact_counts
    assert set(complete_requests) <= set(exact_counts)  # what a client received is recorded, and not as an estimate
    for request, counts in exact_counts.items():
        assert counts == _price_by_hand(ledger[request]), request
    used_requests = {request for request, entry in ledger.items() if entry.get("usage")}
    assert len(used_requests - set(exact_counts)) <= len(
        contents.estimated_receipts
    )  # whatever else ran was in flight, and is in the estimates
    assert all(receipt.counts.pico > 0 for receipt in contents.estimated_receipts)
    recorded = sum(seal.requests for seal in contents.seals.values())
    assert recorded == len(exact_counts) + len(contents.estimated_receipts) == contents.intents - contents.unpaid_calls


def _price_by_hand(entry: dict[str, Any]) -> UsageCounts:
    """What the simulated Bedrock says, priced by hand."""
    label = next(name for name, model in MODELS.items() if model == entry["model"])
    usage, prices = entry["usage"], PRICES[label]
    tokens = tuple(usage[name] for name in UsageCounts._fields if name.endswith("_tokens"))
    pico = sum(count * round(price * 10**6) for count, price in zip(tokens, prices.values(), strict=True))
    return UsageCounts(1, 0, *tokens, 0, pico)
