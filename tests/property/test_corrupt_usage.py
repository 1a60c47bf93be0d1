"""Whatever an answer states of its usage, in any family and form: a hard budget is charged at least what the call used,
and elsewhere less than that is never recorded without being flagged as estimated.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson
import pytest
from bedrock_simulator.event_frames import encode_event
from bedrock_simulator.fault_spec import FaultSpec
from bedrock_simulator.routes import find_route
from bedrock_simulator.service import Service
from bedrock_simulator.simulated_call import EVENT_STREAM, SERVER_SENT_EVENTS, SimulatedCall, SimulatedResponse
from bedrock_simulator.usage import USAGE_FAULTS, corrupt_count, corrupt_usage
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict
from price_keeper.budgets.hard import cost_ceiling
from price_keeper.budgets.hard.cost_ceiling import compute_ceiling
from price_keeper.config.config_sections import PricesConfig
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, UsageCounts
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.operations import Operation
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.eventstream import FrameWatcher
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.meter import Meter, OperationPricing, UsageForecast
from price_keeper.usage.model_families import INVOCATION_METRICS
from price_keeper.usage.price_table import build_price_table, price_usage
from price_keeper.usage.token_usage import Usage, make_plain_usage

from tests.support.clock import ManualClock
from tests.support.effort import tries

TARIFF = build_price_table(PricesConfig(*(Decimal(usd) for usd in ("3", "15", "0.3", "3.75", "6"))))
TARGET = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", "m", "/")
ACCOUNT = ChargedCounters.from_counters([Counter("ORG#a", "premium", "DAY#20261118", 8)])
WORDS = "word " * 2000  # 2,500 tokens, and many more bytes

MESSAGES = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 60}
TURN = {"messages": [{"role": "user", "content": [{"text": WORDS}]}], "inferenceConfig": {"maxTokens": 60}}
PROMPT = {"prompt": WORDS, "max_tokens": 60}
CLAUDE = "anthropic.claude-sonnet-4-5-20250929-v1:0"

# Format and model of a label, and the body that InvokeModel takes.
FAMILIES: dict[str, tuple[str, str, Any]] = {
    "claude": ("anthropic", CLAUDE, MESSAGES | {"anthropic_version": "bedrock-2023-05-31"}),
    "nova": ("nova", "amazon.nova-lite-v1:0", TURN),
    "titan": (
        "titan",
        "amazon.titan-text-express-v1",
        {"inputText": WORDS, "textGenerationConfig": {"maxTokenCount": 60}},
    ),
    "llama": ("llama", "meta.llama3-70b-instruct-v1:0", {"prompt": WORDS, "max_gen_len": 60}),
    "mistral": ("mistral", "mistral.mistral-7b-instruct-v0:2", PROMPT),
    "pixtral": ("mistral", "us.mistral.pixtral-large-2502-v1:0", MESSAGES),
    "command r": ("cohere", "cohere.command-r-plus-v1:0", {"message": WORDS, "max_tokens": 60}),
    "jamba": ("ai21", "ai21.jamba-1-5-large-v1:0", MESSAGES),
    "deepseek": ("deepseek", "us.deepseek.r1-v1:0", PROMPT),
    "gpt-oss": ("openai", "openai.gpt-oss-120b-1:0", MESSAGES),
}
EMBEDDERS: dict[str, tuple[str, str, Any]] = {
    "titan embed": ("titan", "amazon.titan-embed-text-v2:0", {"inputText": WORDS}),
    "cohere embed": ("cohere", "cohere.embed-english-v3", {"texts": [WORDS], "input_type": "search_query"}),
}
WITHOUT_CACHES = ("titan", "llama")  # neither the models, nor the counts in their bodies
CHAT_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
FORMS = ("converse", "converse-stream", "invoke", "invoke-with-response-stream", "chat", "chat stream")


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journal]:
    made = Journal(tmp_path_factory.mktemp("journal"), UlidFactory(lambda: 1_795_003_200.0, os.urandom, ""))
    yield made
    made.close()


def request(form: str, family: str) -> tuple[Operation, str, bytes]:
    _, model, body = (FAMILIES | EMBEDDERS)[family]
    if form.startswith("chat"):
        more = CHAT_STREAM if "stream" in form else {}
        path, body = Operation.CHAT_COMPLETIONS.value, {"model": model, **MESSAGES, **more}
        return Operation.CHAT_COMPLETIONS, path, orjson.dumps(body)
    operation = next(each for each in Operation if each.value == f"/model/{{id}}/{form}")
    return operation, f"/model/{model}/{form}", orjson.dumps(TURN if form.startswith("converse") else body)


def simulated(path: str, body: bytes, wished: FaultSpec) -> SimulatedResponse:
    route = find_route("POST", path)
    assert route is not None
    call = SimulatedCall(route, CIMultiDict({"Content-Type": "application/json"}), body, wished)
    return Service(ManualClock(), "us-east-1", min_cache_tokens=1000).handle(call)


def true_usage(answer: SimulatedResponse) -> Usage:
    used = answer.usage
    assert used is not None
    cached = (used.cache_read_tokens, used.cache_write_5m_tokens, used.cache_write_1h_tokens)
    return Usage(used.input_tokens, used.output_tokens, *cached)


@dataclass(frozen=True)
class Spoilings:
    """How each place that states counts is spoilt: the headers, the model's own counts, Bedrock's in a last chunk."""

    headers: str
    own: str
    by_bedrock: str

    def document(self, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        counted = {INVOCATION_METRICS: document[INVOCATION_METRICS]} if INVOCATION_METRICS in document else {}
        rest = {name: value for name, value in document.items() if name != INVOCATION_METRICS}
        return corrupt_usage(rest, self.own) | corrupt_usage(counted, self.by_bedrock)

    def head(self, headers: dict[str, str]) -> dict[bytes, bytes]:
        found = {}
        for name, value in headers.items():
            is_output = "Output" in name
            if name.endswith("Token-Count"):
                if self.headers == "none" or (self.headers == "no-output" and is_output):
                    continue
                count = corrupt_count(int(value), self.headers, is_output=is_output)
                if count is None:
                    continue
                value = str(count)
            found[name.lower().encode()] = value.encode()
        return found

    def body(self, answer: SimulatedResponse) -> bytes:
        kind = answer.headers["Content-Type"]
        if answer.frames is None:
            return orjson.dumps(self.document(orjson.loads(answer.body)))
        wire = b"".join(answer.frames)
        if kind == SERVER_SENT_EVENTS:
            return b"\n\n".join(map(self._event, wire.split(b"\n\n")))
        assert kind == EVENT_STREAM
        names = ("chunk", "messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop")
        frames = FrameWatcher(dict.fromkeys((*names, "metadata"), 10**6)).feed(wire)
        return b"".join(encode_event(frame.name, self._payload(frame.payload)) for frame in frames)

    def _event(self, line: bytes) -> bytes:
        data = line.removeprefix(b"data: ")
        return line if not data.startswith(b"{") else b"data: " + orjson.dumps(self.document(orjson.loads(data)))

    def _payload(self, payload: bytes) -> Any:
        document = orjson.loads(payload)
        if "bytes" not in document:
            return self.document(document)
        inner = orjson.dumps(self.document(orjson.loads(b64decode(document["bytes"]))))
        return {"bytes": b64encode(inner).decode()}


def recorded(
    journal: Journal,
    operation: Operation,
    format: str,
    answer: SimulatedResponse,
    how: Spoilings,
    body: bytes,
    most: int | None,
) -> UsageCounts:
    before = journal.tally.total()
    guess = make_plain_usage(len(body) // 4 + 1, 501, 0)
    terms = OperationPricing("premium", operation, format, lambda _: TARIFF.pricer, lambda _: guess, UsageForecast())
    meter = Meter(journal, terms, ACCOUNT, TARGET, guess, 1.0, ceiling_pico=most)
    meter.on_sent(TARGET)
    meter.on_head(200, how.head(answer.headers))
    meter.on_data(how.body(answer))
    meter.on_end(True)
    meter.close()
    return journal.tally.total().less(before)


places = st.sampled_from(("", *USAGE_FAULTS))
spoilings = st.one_of(places.map(lambda how: Spoilings(how, how, how)), st.builds(Spoilings, places, places, places))
caches = st.sampled_from(({}, {"cache_read_tokens": 701}, {"cache_read_tokens": 701, "cache_write_5m_tokens": 83}))
lengths = st.sampled_from((1, 7, 60))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=tries(150), derandomize=True)
@given(family=st.sampled_from(list(FAMILIES)), how=spoilings, cached=caches, length=lengths)
def test_corrupted_usage_never_charges_hard_budget_less_than_used(
    journal: Journal, form: str, family: str, how: Spoilings, cached: dict[str, int], length: int
) -> None:
    format, model, _ = FAMILIES[family]
    operation, path, body = request(form, family)
    bound = compute_ceiling(operation, format, body, {}, cost_ceiling.CallPrices([TARIFF]), None, model)
    cached = {} if family in WITHOUT_CACHES else cached

    def answer() -> SimulatedResponse:
        return simulated(path, body, FaultSpec(output_tokens=length, **cached))

    true = price_usage(TARIFF, true_usage(answer())).pico
    assert 0 < true <= bound.pico
    hard = recorded(journal, operation, format, answer(), how, body, bound.pico)
    assert (hard.requests, hard.pico >= true) == (1, True)
    soft = recorded(journal, operation, format, answer(), how, body, None)
    assert soft.pico > 0
    assert soft.pico >= true or soft.estimated_requests == 1


@pytest.mark.parametrize("family", EMBEDDERS)
@settings(max_examples=tries(60), derandomize=True)
@given(how=spoilings)
def test_corrupted_usage_of_embeddings_is_flagged_if_too_low(journal: Journal, family: str, how: Spoilings) -> None:
    format, model, _ = EMBEDDERS[family]
    operation, path, body = request("invoke", family)
    bound = compute_ceiling(operation, format, body, {}, cost_ceiling.CallPrices([TARIFF]), None, model)
    answer = simulated(path, body, FaultSpec())
    true = price_usage(TARIFF, true_usage(answer)).pico
    assert recorded(journal, operation, format, answer, how, body, bound.pico).pico >= true
    soft = recorded(journal, operation, format, answer, how, body, None)
    assert soft.pico >= true or soft.estimated_requests == 1
    healthy = Spoilings("", "", "")
    assert recorded(journal, operation, format, answer, healthy, body, None).estimated_requests == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_usage_is_recorded_exactly_in_every_family_and_form(journal: Journal, form: str, family: str) -> None:
    format, _, _ = FAMILIES[family]
    operation, path, body = request(form, family)
    wished = FaultSpec(output_tokens=40, cache_read_tokens=701, cache_write_5m_tokens=83)
    true = true_usage(simulated(path, body, wished))
    counts = recorded(journal, operation, format, simulated(path, body, wished), Spoilings("", "", ""), body, 10**14)
    assert counts == UsageCounts(1, 0, *true[:5], 0, price_usage(TARIFF, true).pico)


def test_pieces_of_healthy_response_join_unchanged() -> None:
    _, path, body = request("chat stream", "gpt-oss")
    wire = b"".join(simulated(path, body, FaultSpec()).frames or ())
    whole = Spoilings("", "", "").body(simulated(path, body, FaultSpec()))
    assert [json.loads(line[6:]) for line in whole.split(b"\n\n") if b"{" in line] == [
        json.loads(line[6:]) for line in wire.split(b"\n\n") if b"{" in line
    ]
