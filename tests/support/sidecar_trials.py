"""Sidecars in external trouble, and their books compared with those of their Bedrock."""

from __future__ import annotations

import http.client
import json
import os
import sqlite3
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import boto3
import yaml
from price_keeper.domain import PICO_PER_MICRO
from price_keeper.ledger.aggregator import sum_items
from price_keeper.ledger.ledger_entries import UsageCounts
from price_keeper.stores import item_codec
from price_keeper.stores.cloudformation import build_attribute_definitions, build_key_schema
from price_keeper.stores.schema import TABLES, Table

from tests.support.sidecar_crashes import MODELS, PRICES, SCOPE, SidecarSetup
from tests.support.simulated import BedrockProcess, bedrock_process, read_ledger
from tests.support.workers import TURN

SECONDS = 30.0


@dataclass
class FaultTrial:
    """One Bedrock and one store, and the test that calls the one and counts in the other."""

    folder: Path
    bedrock: BedrockProcess

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    def add_sidecar(self, name: str = "a", store: dict[str, Any] | None = None, **sections: Any) -> SidecarSetup:
        """One sidecar's place. `sections` override those of its configuration."""
        folder = self.folder / name
        folder.mkdir()
        setup = SidecarSetup(folder, self.bedrock.url, store or {"path": str(self.folder / "price-keeper.db")})
        setup.write_config()
        if sections:
            write_sections(setup, **sections)
        return setup

    def read_used_requests(self) -> dict[str, dict[str, Any]]:
        """What ran at Bedrock, by request."""
        return {entry["request_id"]: entry for entry in read_ledger(self.ledger) if entry.get("usage")}


@contextmanager
def run_trial(folder: Path, *options: str) -> Iterator[FaultTrial]:
    """`options` are Bedrock's."""
    with bedrock_process("--ledger", str(folder / "ledger"), *options) as bedrock:
        yield FaultTrial(folder, bedrock)


def write_sections(setup: SidecarSetup, **sections: Any) -> None:
    file = setup.folder / "config.yaml"
    config = yaml.safe_load(file.read_text())
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section if isinstance(section, dict) else section
    file.write_text(yaml.safe_dump(config))


def price_by_hand(used_requests: dict[str, dict[str, Any]]) -> dict[str, UsageCounts]:
    """What Bedrock says that it served, priced by hand: by label."""
    labels = {model: label for label, model in MODELS.items()}
    sums: dict[str, UsageCounts] = {}
    for entry in used_requests.values():
        label = labels[entry["model"]]
        usage, prices = entry["usage"], PRICES[label]
        tokens = tuple(usage[name] for name in UsageCounts._fields if name.endswith("_tokens"))
        pico = sum(count * round(price * 10**6) for count, price in zip(tokens, prices.values(), strict=True))
        sums[label] = sums.get(label, UsageCounts()).plus(UsageCounts(1, 0, *tokens, 0, pico))
    return sums


def read_counts_by_label(file: Path) -> dict[str, UsageCounts]:
    """What SQLite's file holds, by label, of all days and shards."""
    items: dict[str, list[Any]] = {}
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        for pk, item in connection.execute('SELECT pk, item FROM "usage-agg-sharded"'):
            scope, _, rest = pk.partition("#LABEL#")
            if scope == SCOPE.key:
                items.setdefault(rest.partition("#")[0], []).append(item_codec.decode_item(item))
    return {label: _counts(sum_items(found)) for label, found in items.items()}


def _counts(sums: dict[str, Any]) -> UsageCounts:
    pico = int(sums.pop("cost_usd_micros") * PICO_PER_MICRO)
    return UsageCounts(**{name: int(number) for name, number in sums.items()}, pico=pico)


def fetch(url: str, path: str) -> tuple[int, str]:
    """By the control port; 0 where it gives no answer."""
    try:
        with urllib.request.urlopen(f"{url}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as status_error:
        return status_error.code, status_error.read().decode()
    except OSError as failure:
        return 0, str(failure)


def read_readiness(url: str) -> dict[str, str]:
    """Of readiness."""
    _, body = fetch(url, "/ready")
    return dict(json.loads(body)["checks"]) if body.startswith("{") else {"control port": body}


def wait_until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def call_once(setup: SidecarSetup, token: str, seconds: float = 10.0) -> tuple[int, str, str]:
    """One call on a connection of its own: its status, the kind of error and what is said of it. 0: no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", setup.port, timeout=seconds)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/model/premium/converse", TURN, headers)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as failure:
        return 0, type(failure).__name__, str(failure)
    finally:
        connection.close()
    if answer.status == 200:
        return 200, "", ""
    return answer.status, answer.headers.get("x-amzn-errortype", ""), str(json.loads(body)["message"])


def read_cpu_seconds(pid: int) -> float:
    """Of a process, so far."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def read_metric(url: str, name: str) -> float:
    """Of one that has one sample; `name` goes with its labels."""
    _, text = fetch(url, "/metrics")
    return next(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"price_keeper_{name} ")
    )


def create_tables(endpoint: str, prefix: str, without: str = "") -> None:
    """DynamoDB's, as the schema wants them; but for one."""
    client = dynamodb(endpoint)
    for table in TABLES.values():
        if table.name != without:
            create_table(client, prefix, table)


def create_table(client: Any, prefix: str, table: Table) -> None:
    client.create_table(
        TableName=prefix + table.name,
        KeySchema=build_key_schema(table),
        AttributeDefinitions=build_attribute_definitions(table),
        BillingMode="PAY_PER_REQUEST",
    )


def dynamodb(endpoint: str) -> Any:
    return boto3.client("dynamodb", endpoint_url=endpoint, region_name="us-east-1")


def read_dynamodb_usage(endpoint: str, prefix: str) -> dict[str, int]:
    """Of all scopes, labels, days and shards; money in pico-dollars."""
    pages = dynamodb(endpoint).get_paginator("scan").paginate(TableName=f"{prefix}usage-agg-sharded")
    items = [item for page in pages for item in page["Items"]]
    micros = sum(Decimal(item["cost_usd_micros"]["N"]) for item in items)
    used = {"requests": sum(int(item["requests"]["N"]) for item in items)}
    return used | {"pico": int(micros * PICO_PER_MICRO)}


def read_requests_by_day(file: Path) -> dict[str, int]:
    """Requests in SQLite's file, by the day on which they count."""
    requests: Counter[str] = Counter()
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        for day, item in connection.execute('SELECT sk, item FROM "usage-agg-sharded"'):
            requests[day] += int(item_codec.decode_item(item)["requests"])
    return dict(requests)
