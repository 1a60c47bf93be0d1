"""Calls of a prompt router: which model the trace names, and that its prices and the router's fee are charged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bedrock_simulator.event_frames import encode_event
from price_keeper.budgets.hard.cost_ceiling import CallPrices, compute_ceiling
from price_keeper.config.config_sections import parse_config
from price_keeper.domain import Caller, ResolvedLabel
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, UsageCounts
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.operations import Operation
from price_keeper.stores.contract import Store
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.meter_factory import MeterFactory
from price_keeper.usage.price_table import PRICE_UNKNOWN, build_label_price_table
from price_keeper.usage.price_updates import PriceTables
from price_keeper.usage.prompt_router import add_fee, is_prompt_router, price_invoked
from price_keeper.usage.token_usage import Usage

from tests.support.clock import ManualClock

ROUTER = "arn:aws:bedrock:us-east-1:123456789012:default-prompt-router/anthropic.claude:1"
PROFILE = "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.anthropic.claude-haiku-4-5-20251001-v1:0"
CONFIG = f"""
labels:
  router:
    model: {ROUTER}
    format: anthropic
    prices_usd_per_1m: {{input: 7, output: 8}}
    prices_usd_per_unit: {{routed_request: 0.001}}
  small:
    model: anthropic.claude-haiku-4-5-20251001-v1:0
    format: anthropic
    prices_usd_per_1m: {{input: 1, output: 5}}
    endpoints:
      - {{region: us-east-1}}
      - region: us-east-1
        model: us.anthropic.claude-haiku-4-5-20251001-v1:0
        prices_usd_per_1m: {{input: 2, output: 9}}
      - region: eu-west-1
        model: global.anthropic.claude-haiku-4-5-20251001-v1:0
        prices_usd_per_1m: {{input: 4, output: 6}}
  large:
    model: anthropic.claude-sonnet-4-5-20250929-v1:0
    format: anthropic
    prices_usd_per_1m: {{input: 3, output: 15}}
"""
FEE = 10**9
TARGET = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", ROUTER, "/")
CHARGED = ChargedCounters.from_counters([Counter("ORG#a", "router", "DAY#20261120", 8)])
CALLER = Caller("a", None, "org-a")
EVENTS = b"application/vnd.amazon.eventstream"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path, UlidFactory(lambda: 1_795_003_200.0, os.urandom, ""))
    yield made
    made.close()


def record(
    journal: Journal,
    answer: bytes,
    operation: Operation = Operation.CONVERSE,
    status: int = 200,
    config: str = CONFIG,
) -> UsageCounts:
    parsed, clock = parse_config(config, "", {}), ManualClock()
    no_store: Any = Store  # the list is never read here
    meters = MeterFactory(parsed, journal, PriceTables(parsed, no_store, None, clock), clock)
    pricing = meters.pricing_for(ResolvedLabel("router", "router", ROUTER), operation, b"POST")
    assert pricing is not None
    before = journal.tally.total()
    meter = meters.open_meter(pricing, CHARGED, CALLER, [TARGET], 400)
    meter.on_sent(TARGET)
    meter.on_head(status, {b"content-type": EVENTS if operation is Operation.CONVERSE_STREAM else b"application/json"})
    meter.on_data(answer)
    meter.on_end(True)
    meter.close()
    return journal.tally.total().less(before)


def trace(model: Any) -> dict[str, Any]:
    return {"trace": {"promptRouter": {"invokedModelId": model}}}


def converse(model: Any, **more: Any) -> bytes:
    usage = {"inputTokens": 100, "outputTokens": 10, "totalTokens": 110}
    return json.dumps(
        {"output": {"message": {"content": [{"text": "a"}]}}, "usage": usage} | trace(model) | more
    ).encode()


@pytest.mark.parametrize(
    ("model", "input", "output"),
    [
        ("anthropic.claude-haiku-4-5-20251001-v1:0", 1, 5),
        ("us.anthropic.claude-haiku-4-5-20251001-v1:0", 2, 9),
        (PROFILE, 2, 9),
        ("anthropic.claude-sonnet-4-5-20250929-v1:0", 3, 15),
    ],
)
def test_routed_call_costs_the_prices_of_the_invoked_model_and_the_fee(
    journal: Journal, model: str, input: int, output: int
) -> None:
    pico = (100 * input + 10 * output) * 10**6 + FEE
    assert record(journal, converse(model)) == UsageCounts(1, 0, 100, 10, pico=pico, routed_requests=1)


@pytest.mark.parametrize(
    "model",
    [
        "amazon.nova-lite-v1:0",
        "eu.anthropic.claude-opus-4-1-20250805-v1:0",
        "global.anthropic.claude-haiku-4-5-20251001-v1:0",  # which has a price in another region alone
        "",
        None,
        5,
        "x" * 5000,
    ],
)
def test_invoked_model_without_a_label_costs_the_routers_own_prices(journal: Journal, model: Any) -> None:
    assert record(journal, converse(model)).pico == (100 * 7 + 10 * 8) * 10**6 + FEE


def test_streamed_trace_is_read(journal: Journal) -> None:
    usage = {"inputTokens": 100, "outputTokens": 10, "totalTokens": 110}
    stream = encode_event("messageStart", {"role": "assistant"}) + encode_event(
        "metadata", {"usage": usage, **trace("anthropic.claude-haiku-4-5-20251001-v1:0")}
    )
    counts = record(journal, stream, Operation.CONVERSE_STREAM)
    assert (counts.pico, counts.estimated_requests) == ((100 * 1 + 10 * 5) * 10**6 + FEE, 0)


def test_routed_call_without_usage_is_estimated_with_the_fee(journal: Journal) -> None:
    counts = record(journal, b"{}")
    assert (counts.routed_requests, counts.estimated_requests) == (1, 1)
    assert counts.pico > FEE


def test_routed_call_that_failed_costs_nothing(journal: Journal) -> None:
    assert record(journal, b'{"message": "no"}', status=400) == UsageCounts()


def test_what_the_model_said_is_no_trace(journal: Journal) -> None:
    said = json.dumps(trace("anthropic.claude-haiku-4-5-20251001-v1:0"))
    answer = json.loads(converse(None)) | {"output": {"message": {"content": [{"text": said}]}}}
    assert record(journal, json.dumps(answer).encode()).pico == (100 * 7 + 10 * 8) * 10**6 + FEE


def test_tokens_of_an_unknown_model_are_flagged() -> None:
    labels = parse_config(CONFIG, "", {}).labels
    own, small = (build_label_price_table(labels[name]).pricer for name in ("router", "small"))
    usage = add_fee(Usage(100, 10), ["routed_request"])
    assert price_invoked(own, small).price(usage) == ((100 * 1 + 10 * 5) * 10**6 + FEE, frozenset())
    assert price_invoked(own, None).price(usage) == ((100 * 7 + 10 * 8) * 10**6 + FEE, {PRICE_UNKNOWN})


def test_routed_call_of_a_label_without_a_fee_has_none(journal: Journal) -> None:
    """Older versions cannot read journal lines with one, and its price would not be known."""
    config = CONFIG.replace("    prices_usd_per_unit: {routed_request: 0.001}\n", "")
    counts = record(journal, converse("anthropic.claude-sonnet-4-5-20250929-v1:0"), config=config)
    assert counts == UsageCounts(1, 0, 100, 10, pico=(100 * 3 + 10 * 15) * 10**6)
    written = b"".join(path.read_bytes() for path in journal.folder.rglob("*") if path.is_file())
    assert b"config-" in written
    assert PRICE_UNKNOWN.encode() not in written
    assert record(journal, b"{}", config=config).routed_requests == 0


def test_ceiling_has_the_fee() -> None:
    config = parse_config(CONFIG, "", {})
    tables = PriceTables(config, Store, None, ManualClock()).all_tables()  # type: ignore[arg-type]
    body = json.dumps({"messages": [{"role": "user", "content": [{"text": "a"}]}], "inferenceConfig": {"maxTokens": 9}})
    arguments = (Operation.CONVERSE, "anthropic", body.encode(), {})
    plain = compute_ceiling(*arguments, CallPrices(tables), None).pico
    assert compute_ceiling(*arguments, CallPrices(tables, piece_prices=tables[0].unit_prices), None).pico == plain + FEE
    alone = (compute_ceiling(*arguments, CallPrices([table]), None).pico for table in tables)
    assert plain == max(alone)


@pytest.mark.parametrize(
    ("model", "is_router"),
    [
        (ROUTER, True),
        ("arn:aws-us-gov:bedrock:us-gov-west-1:123456789012:prompt-router/abc", True),
        (PROFILE, False),
        ("anthropic.claude-haiku-4-5-20251001-v1:0", False),
    ],
)
def test_prompt_router_is_known_by_its_arn(model: str, is_router: bool) -> None:
    assert is_prompt_router(model) is is_router
