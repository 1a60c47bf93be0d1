"""What requests and answers say of searches, images and seconds of video, and what a call is recorded as then."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pytest
from price_keeper.config.config_sections import PricesConfig, parse_config
from price_keeper.errors import InvalidRequest
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Receipt, UsageCounts
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.operations import Operation
from price_keeper.price_dimensions import UNITS, UNITS_BY_NAME
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.eventstream import EventFrame
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.meter import Meter, OperationPricing, UsageForecast, build_counts
from price_keeper.usage.model_families import read_invocation
from price_keeper.usage.price_table import (
    PRICE_UNKNOWN,
    ListedPrices,
    build_label_price_table,
    build_price_table,
    find_highest_piece_prices,
    find_implausible_prices,
    overlay_prices,
    price_units,
    price_usage,
)
from price_keeper.usage.price_updates import build_cache_row, parse_cache_row
from price_keeper.usage.stream_usage import InvocationStream
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.unit_usage import NO_UNITS, UNIT_FORMS, RequestedUnits, read_request

ALL = tuple(each.name for each in UNITS)
INVOKE, JOB = Operation.INVOKE, Operation.ASYNC_INVOKES


def ask(document: Any, operation: Operation = INVOKE, sold: tuple[str, ...] = ALL) -> tuple[dict[str, int], bool, bool]:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    requested = read_request(operation, body, sold)
    return dict(requested.quantities), requested.is_certain, requested.is_bounded


# ---------------------------------------------------------------- requests

IMAGES = {"taskType": "TEXT_IMAGE", "textToImageParams": {"text": "a fox"}}
REQUESTS: dict[str, tuple[Any, Operation, tuple[dict[str, int], bool, bool]]] = {
    "one search": ({"query": "a", "documents": ["b"] * 100}, INVOKE, ({"search_unit": 1}, True, True)),
    "documents for two": ({"query": "a", "documents": ["b"] * 101}, INVOKE, ({"search_unit": 2}, True, True)),
    "a document that may be cut": ({"query": "a", "documents": ["b" * 9000]}, INVOKE, ({"search_unit": 1}, True, True)),
    "many that may be cut": ({"query": "a", "documents": ["b" * 500] * 99}, INVOKE, ({"search_unit": 2}, False, True)),
    "a long query": ({"query": "a" * 300, "documents": ["b" * 500]}, INVOKE, ({"search_unit": 1}, False, False)),
    "objects": ({"query": "a", "documents": [{"text": "b"}] * 3}, INVOKE, ({"search_unit": 1}, True, True)),
    "an image": (IMAGES, INVOKE, ({"image_1024_standard": 1}, True, True)),
    "small images": (
        IMAGES | {"imageGenerationConfig": {"numberOfImages": 3, "width": 512, "height": 384}},
        INVOKE,
        ({"image_512_standard": 3}, True, True),
    ),
    "a large premium image": (
        IMAGES | {"imageGenerationConfig": {"quality": "premium", "width": 1280, "height": 720}},
        INVOKE,
        ({"image_2048_premium": 1}, True, True),
    ),
    "an edited image": ({"taskType": "INPAINTING"}, INVOKE, ({"image": 1}, False, True)),
    "numbers as floats": (
        IMAGES | {"imageGenerationConfig": {"numberOfImages": 5.0, "width": 2048.0, "height": 2048.0}},
        INVOKE,
        ({"image_2048_standard": 5}, True, True),
    ),
    "numbers as text": (
        IMAGES | {"imageGenerationConfig": {"numberOfImages": "5", "width": "2048", "height": "2048"}},
        INVOKE,
        ({"image_2048_standard": 5}, True, True),
    ),
    "stability": ({"prompt": "a fox", "aspect_ratio": "1:1"}, INVOKE, ({"image": 1}, True, True)),
    "stable diffusion": ({"text_prompts": [{"text": "x"}], "samples": 2}, INVOKE, ({"image": 2}, True, True)),
    "stability, style transfer": ({"init_image": "aGk=", "style_image": "aGk="}, INVOKE, ({"image": 1}, True, True)),
    "an embedded image": ({"inputImage": "aGk=", "inputText": "a"}, INVOKE, ({"image": 1}, True, True)),
    "an embedded text": ({"inputText": "a"}, INVOKE, ({}, True, True)),
    "nova reel": (
        {"modelInput": {"videoGenerationConfig": {"durationSeconds": 6}}},
        JOB,
        ({"video_second": 6}, True, True),
    ),
    "nova reel in shots": (
        {"modelInput": {"multiShotManualParams": {"shots": [{"text": "a"}, {"text": "b"}]}}},
        JOB,
        ({"video_second": 12}, True, True),
    ),
    "nova reel, shots that an automated task ignores": (
        {"modelInput": {"videoGenerationConfig": {"durationSeconds": 120}, "multiShotManualParams": {"shots": [{}]}}},
        JOB,
        ({"video_second": 120}, True, True),
    ),
    "nova reel, a length that a task of shots ignores": (
        {"modelInput": {"videoGenerationConfig": {"durationSeconds": 6}, "multiShotManualParams": {"shots": [{}] * 3}}},
        JOB,
        ({"video_second": 18}, True, True),
    ),
    "nova reel, length as float": (
        {"modelInput": {"videoGenerationConfig": {"durationSeconds": 120.0}}},
        JOB,
        ({"video_second": 120}, True, True),
    ),
    "nova reel, length as text": (
        {"modelInput": {"videoGenerationConfig": {"durationSeconds": "120"}}},
        JOB,
        ({"video_second": 120}, True, True),
    ),
    "two lengths": (
        {"modelInput": {"videoGenerationConfig": {"durationSeconds": 1}, "duration": "9s"}},
        JOB,
        ({"video_second": 9}, True, True),
    ),
    "ray": (
        {"modelInput": {"duration": "9s", "resolution": "720p"}},
        JOB,
        ({"video_second_720p": 9}, True, True),
    ),
    "no length": ({"modelInput": {"prompt": "a"}}, JOB, ({}, True, True)),
    "a job is no image": ({"prompt": "a"}, JOB, ({}, True, True)),
}


@pytest.mark.parametrize(("document", "operation", "expected"), REQUESTS.values(), ids=REQUESTS.keys())
def test_request_states_what_it_asks_for(document: Any, operation: Operation, expected: Any) -> None:
    assert ask(document, operation) == expected


def images(**config: Any) -> tuple[Any, Operation]:
    return IMAGES | {"imageGenerationConfig": config}, INVOKE


def video(**given: Any) -> tuple[Any, Operation]:
    return {"modelInput": given}, JOB


NOT_UNDERSTOOD: dict[str, tuple[Any, Operation, str]] = {
    "no JSON": (b"{", INVOKE, "no JSON"),
    "no object": (b"[]", INVOKE, "no JSON object"),
    "a lone surrogate": (rb'{"prompt": "\ud800"}', INVOKE, "no JSON"),
    "a byte order mark": (b"\xef\xbb\xbf" + json.dumps(IMAGES).encode(), INVOKE, "no JSON"),
    "UTF-16": (json.dumps(IMAGES).encode("utf-16"), INVOKE, "no JSON"),
    "no configuration": (IMAGES | {"imageGenerationConfig": [5]}, INVOKE, "imageGenerationConfig"),
    **{
        f"images: {value!r}": (*images(numberOfImages=value), "numberOfImages is a whole number of 1 to")
        for value in (-3, 0, 1.5, "1.5", "two", True, None, [2], 10**10, "9" * 5000)
    },
    "no width": (*images(width="wide"), "width"),
    "no height": (*images(height=None), "height"),
    "no quality": (*images(quality="Premium"), "standard, premium"),
    "no samples": ({"prompt": "a", "samples": "many"}, INVOKE, "samples"),
    **{
        f"seconds: {value!r}": (*video(videoGenerationConfig={"durationSeconds": value}), "durationSeconds")
        for value in (0, "120.0", " 120", 5.5, None, [])
    },
    "no duration": (*video(duration="long"), "duration"),
    "no resolution": (*video(duration="5s", resolution="4k"), "540p, 720p"),
    "resolution as a number": (*video(duration="5s", resolution=720), "540p, 720p"),
    "no shots": (*video(multiShotManualParams={"shots": 3}), "shots"),
    "no input": ({"modelInput": '{"duration": "9s"}'}, JOB, "modelInput"),
}


@pytest.mark.parametrize(("document", "operation", "named"), NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD.keys())
def test_request_that_is_not_understood_is_refused(document: Any, operation: Operation, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        ask(document, operation)


@pytest.mark.parametrize("operation", [Operation.CONVERSE, INVOKE])
def test_request_without_a_form_of_what_is_sold_is_not_read(operation: Operation) -> None:
    sold = ALL if operation is Operation.CONVERSE else ("web_search", "routed_request")
    assert read_request(operation, b"{", sold, are_tokens_free=True) is NO_UNITS


@pytest.mark.parametrize("sold", ["image_2048_premium", "search_unit"])
def test_request_in_unknown_form_asks_for_one_piece_only_where_tokens_are_free(sold: str) -> None:
    body = json.dumps({"something": "new"}).encode()
    assert read_request(INVOKE, body, (sold,)) is NO_UNITS
    general = UNITS_BY_NAME[sold].general or sold
    expected = RequestedUnits({general: 1}, is_certain=False, is_bounded=False)
    assert read_request(INVOKE, body, (sold,), are_tokens_free=True) == expected


def test_embedded_text_asks_for_nothing_where_tokens_are_free() -> None:
    assert read_request(INVOKE, b'{"inputText": "a"}', ALL, are_tokens_free=True) is NO_UNITS


def test_request_of_label_that_sells_something_else_asks_for_nothing() -> None:
    assert read_request(INVOKE, json.dumps(IMAGES).encode(), ("search_unit",)) is NO_UNITS


def test_every_form_counts_what_a_dimension_counts() -> None:
    assert {form.counter for form in UNIT_FORMS} <= {each.counter for each in UNITS}
    assert {each.general for each in UNITS} - {""} <= UNITS_BY_NAME.keys()


# ---------------------------------------------------------------- prices

LABEL = """
labels:
  one:
    model: amazon.nova-canvas-v1:0
    format: nova
    prices_usd_per_1m: {input: 0, output: 0}
    prices_usd_per_unit: {%s}
"""
PRICES = "image: 0.08, image_1024_standard: 0.04, search_unit: 0.002, video_second: 0.000000000001"


def table(prices: str = PRICES):
    return build_label_price_table(parse_config(LABEL % prices, "", {}).labels["one"])


def test_unit_costs_its_own_price_then_the_general_one_then_the_dearest() -> None:
    prices = table().unit_prices
    assert price_units(prices, {"image_1024_standard": 2}) == (80_000_000_000, frozenset())
    assert price_units(prices, {"image_2048_premium": 1}) == (80_000_000_000, frozenset())
    assert price_units(prices, {"video_second": 7}) == (7, frozenset())
    assert price_units(prices, {"web_search": 1}) == (80_000_000_000, {PRICE_UNKNOWN})


def test_piece_of_unknown_size_costs_the_dearest_of_its_kind() -> None:
    prices = table("image: 0.04, image_2048_premium: 0.08, video_second: 1, video_second_720p: 2").unit_prices
    assert price_units(prices, {"image": 1}) == (8 * 10**10, frozenset())
    assert price_units(prices, {"video_second": 1}) == (2 * 10**12, frozenset())
    assert price_units(prices, {"image_512_standard": 1}) == (4 * 10**10, frozenset())


def test_highest_piece_price_holds_at_every_endpoint() -> None:
    """Where one endpoint lists a size, another may charge the general price."""
    configured = table("image: 0.08")
    listed = [
        overlay_prices(configured, ListedPrices({}, {}, pieces), "2026-11-20")
        for pieces in ({"image_1024_standard": 4 * 10**10}, {"image_2048_premium": 9 * 10**10}, {})
    ]
    highest = find_highest_piece_prices(listed)
    assert highest == {"image": 8 * 10**10, "image_1024_standard": 8 * 10**10, "image_2048_premium": 9 * 10**10}
    for name in ("image", "image_512_standard", "image_1024_standard", "image_2048_premium"):
        charged = [price_units(each.unit_prices, {name: 1}).pico for each in listed]
        assert max(charged) <= price_units(highest, {name: 1}).pico


def test_unit_prices_have_a_version_of_their_own() -> None:
    assert table().version == table().version != table("image: 0.08").version


def test_listed_price_of_a_piece_goes_before_the_configured_one() -> None:
    listed = ListedPrices({}, {}, {"image_1024_standard": 5 * 10**10, "image_512_premium": 10**10})
    found = overlay_prices(table("image: 0.08, image_1024_standard: 0.04"), listed, "2026-11-20")
    assert found.unit_prices == {"image": 8 * 10**10, "image_1024_standard": 5 * 10**10, "image_512_premium": 10**10}
    assert found.version.startswith("2026-11-20+config-")


def test_listed_piece_that_a_label_does_not_sell_is_left_out() -> None:
    listed = ListedPrices({}, {}, {"search_unit": 10**9})
    assert overlay_prices(table("image: 0.08"), listed, "2026-11-20").unit_prices == {"image": 8 * 10**10}


@pytest.mark.parametrize(("usd", "is_plausible"), [("0.008", True), ("0.0079", False), ("0.8", True), ("0.81", False)])
def test_listed_price_of_a_piece_far_from_the_configured_one_is_implausible(usd: str, is_plausible: bool) -> None:
    listed = ListedPrices({}, {}, {"image_512_premium": int(Decimal(usd) * 10**12)})
    assert (find_implausible_prices(table("image: 0.08"), listed) == "") is is_plausible


def test_cached_prices_of_pieces_are_read_back() -> None:
    tables = {"default": {"input": 1, "output": 2}}
    listed = ListedPrices(tables, {}, {"image": 5 * 10**10})
    row = build_cache_row(listed, 1.0, {})
    assert parse_cache_row("2026-11-20", row).listed == listed
    assert parse_cache_row("2026-11-20", row | {"pieces": {"imag": 5}}).listed is None
    assert "pieces" not in build_cache_row(ListedPrices(tables, {}), 1.0, {})


@pytest.mark.parametrize("prices", ["imag: 1", "image: -1", "image: 0.0000000000001", "image: 2000000"])
def test_unit_price_that_cannot_be_is_refused(prices: str) -> None:
    with pytest.raises(Exception, match="imag"):
        table(prices)


# ---------------------------------------------------------------- records

TARGET = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", "m", "/")
CHARGED = ChargedCounters.from_counters([Counter("ORG#a", "one", "DAY#20261118", 8)])


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path, UlidFactory(lambda: 1_795_003_200.0, os.urandom, ""))
    yield made
    made.close()


Record = Callable[..., UsageCounts]


@pytest.fixture
def record(journal: Journal) -> Record:
    def recorded(
        request: Any, answer: Any, *, status: int = 200, is_whole: bool = True, ceiling: int | None = None
    ) -> UsageCounts:
        before = journal.tally.total()
        requested = read_request(INVOKE, json.dumps(request).encode(), ALL)
        guess = Usage(1, 501, quantities=requested.quantities)
        pricing = OperationPricing(
            "one", INVOKE, "nova", lambda _: table().pricer, lambda _: guess, UsageForecast(), ALL, requested
        )
        meter = Meter(journal, pricing, CHARGED, TARGET, guess, 1.0, ceiling_pico=ceiling)
        meter.on_sent(TARGET)
        meter.on_head(status, {b"content-type": b"application/json"})
        meter.on_data(answer if isinstance(answer, bytes) else json.dumps(answer).encode())
        meter.on_end(is_whole)
        meter.close()
        return journal.tally.total().less(before)

    return recorded


TWO = IMAGES | {"imageGenerationConfig": {"numberOfImages": 2}}
RANKING = {"results": [{"index": 0, "relevance_score": 0.5}]}
UNSURE = {"query": "a", "documents": ["b" * 500] * 99}


def test_images_that_were_made_are_charged(record: Record) -> None:
    assert record(TWO, {"images": ["aGk=", "aGk="]}) == UsageCounts(1, pico=80_000_000_000, images=2)
    assert record(TWO, {"images": ["aGk="], "error": "one was blocked"}) == UsageCounts(
        1, pico=40_000_000_000, images=1
    )


@pytest.mark.parametrize("answer", [{"images": []}, {"images": None}, {}, b"", b"no JSON"])
def test_answer_without_images_is_estimated_as_requested(record: Record, answer: Any) -> None:
    counts = record(TWO, answer)
    assert (counts.pico, counts.images, counts.estimated_requests) == (80_000_000_000, 2, 1)


def test_search_costs_its_units(record: Record) -> None:
    assert record({"query": "a", "documents": ["b"] * 101}, RANKING) == UsageCounts(
        1, pico=4_000_000_000, search_units=2
    )


def test_search_whose_documents_may_be_cut_is_estimated(record: Record) -> None:
    counts = record(UNSURE, RANKING)
    assert (counts.pico, counts.search_units, counts.estimated_requests) == (4_000_000_000, 2, 1)


def test_stated_search_units_are_exact(record: Record) -> None:
    answer = RANKING | {"meta": {"billed_units": {"search_units": 3}}}
    assert record(UNSURE, answer) == UsageCounts(1, pico=6_000_000_000, search_units=3)


def test_unit_call_that_failed_costs_nothing(record: Record) -> None:
    assert record(TWO, {"message": "no"}, status=400) == UsageCounts()


def test_unit_call_of_unknown_outcome_costs_ceiling_under_hard_budget(record: Record) -> None:
    counts = record(TWO, b"", is_whole=False, ceiling=123)
    assert (counts.pico, counts.estimated_requests) == (123, 1)


# ---------------------------------------------------------------- tools that the model's side runs

SEARCHED = {"input_tokens": 5, "output_tokens": 6, "server_tool_use": {"web_search_requests": 2}}


def test_web_searches_cost_their_price_beside_the_tokens() -> None:
    usage = read_invocation({"content": [{"type": "text", "text": "a"}], "usage": SEARCHED}, {})
    assert usage == Usage(5, 6, quantities={"web_search": 2})
    prices = build_label_price_table(parse_config(LABEL % "web_search: 0.01", "", {}).labels["one"])
    assert price_usage(prices, usage) == (20_000_000_000, frozenset())
    counts = build_counts(usage, 7)
    assert (counts.tool_calls, counts.input_tokens, counts.pico) == (2, 5, 7)


def test_web_searches_without_a_price_are_flagged() -> None:
    usage = Usage(5, 6, quantities={"web_search": 2})
    plain = build_price_table(PricesConfig(Decimal(3), Decimal(15)))
    assert price_usage(plain, usage) == (5 * 3_000_000 + 6 * 15_000_000, {PRICE_UNKNOWN})


@pytest.mark.parametrize(("prices", "searches"), [("web_search: 0.01", 2), ("", 0)])
def test_web_searches_are_counted_only_where_they_have_a_price(journal: Journal, prices: str, searches: int) -> None:
    """Older versions cannot read journal lines with them."""
    label = parse_config(LABEL % prices, "", {}).labels["one"]
    pricer, sold = build_label_price_table(label).pricer, tuple(label.prices_usd_per_unit)
    pricing = OperationPricing("one", INVOKE, "nova", lambda _: pricer, lambda _: Usage(1, 501), UsageForecast(), sold)
    meter = Meter(journal, pricing, CHARGED, TARGET, Usage(1, 501), 1.0)
    meter.on_sent(TARGET)
    meter.on_head(200, {b"content-type": b"application/json"})
    meter.on_data(json.dumps({"content": [{"type": "text", "text": "a"}], "usage": SEARCHED}).encode())
    meter.on_end(True)
    counts = journal.tally.total()
    assert (counts.tool_calls, counts.estimated_requests) == (searches, 0)
    assert len(counts.to_values()) == len(UsageCounts()) - (0 if searches else 5)


def test_web_searches_of_a_stream_count_once() -> None:
    stream = InvocationStream()
    for document in (
        {"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": SEARCHED},
        {"type": "message_stop", "amazon-bedrock-invocationMetrics": {"inputTokenCount": 5, "outputTokenCount": 6}},
    ):
        payload = json.dumps({"bytes": b64encode(json.dumps(document).encode()).decode()}).encode()
        stream.add_frame(EventFrame("event", "chunk", payload, len(payload)))
    assert stream.usage() == Usage(5, 6, quantities={"web_search": 2})


# ---------------------------------------------------------------- the journal


def test_line_without_units_is_as_older_versions_write_it() -> None:
    counts = UsageCounts(1, 0, 2, 3, 4, 5, 6, 7, 8)
    assert orjson.loads(Receipt(counts).encode(1))[2] == [1, 0, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("name", ["search_units", "images", "video_seconds", "tool_calls", "routed_requests"])
def test_line_with_units_is_read_back(name: str) -> None:
    counts = UsageCounts(1, pico=8)._replace(**{name: 3})
    assert Receipt.from_values(orjson.loads(Receipt(counts).encode(1))).counts == counts
