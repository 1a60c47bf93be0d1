"""The ledger: complete while there is room, bounded when there is not, and on disk line by line."""

from __future__ import annotations

import json

import pytest
from bedrock_simulator.ledger import Entry, Ledger
from bedrock_simulator.request_metadata import HEADER
from bedrock_simulator.usage import Usage

from tests.support.simulated import read_ledger


def entry(ledger: Ledger, body: bytes = b"{}", model: str = "m", headers=()) -> Entry:
    return Entry(
        sequence=ledger.next_sequence(),
        arrived=1.0,
        method="POST",
        target="/",
        operation="Converse",
        model=model,
        invocation_id="i",
        headers=tuple(headers),
        body=body,
        body_size=len(body),
        request_id="r",
    )


def added(ledger: Ledger, **described) -> Entry:
    noted = entry(ledger, **described)
    ledger.add(noted)
    return noted


@pytest.fixture
def ledger():
    return Ledger()


def test_entries_are_in_order_of_arrival(ledger):
    for _ in range(3):
        added(ledger)
    assert [noted.sequence for noted in ledger] == [1, 2, 3]
    assert (len(ledger), ledger.arrived, ledger.dropped) == (3, 3, 0)


def test_oldest_entries_are_evicted_and_counted(ledger, monkeypatch):
    monkeypatch.setattr("bedrock_simulator.ledger.MAX_ENTRIES", 2)
    for _ in range(5):
        added(ledger)
    assert [noted.sequence for noted in ledger] == [4, 5]
    assert (ledger.arrived, ledger.dropped) == (5, 3)


def test_kept_bodies_are_bounded_together(ledger, monkeypatch):
    monkeypatch.setattr("bedrock_simulator.ledger.MAX_TOTAL_BODY_BYTES", 10)
    for _ in range(4):
        added(ledger, body=b"12345")
    assert (len(ledger), ledger.dropped) == (2, 2)


def test_totals_per_model_outlive_entries(ledger, monkeypatch):
    monkeypatch.setattr("bedrock_simulator.ledger.MAX_ENTRIES", 1)
    for model, usage in (("a", Usage(1, 2)), ("b", Usage(5)), ("a", Usage(10, 20)), ("a", None)):
        noted = added(ledger, model=model)
        noted.usage = usage
        ledger.finish(noted)
    assert ledger.totals == {"a": Usage(11, 22), "b": Usage(5)}


def test_models_with_totals_are_bounded(ledger, monkeypatch):
    monkeypatch.setattr("bedrock_simulator.ledger.MAX_MODELS", 1)
    for model in ("a", "b", "c", "a"):
        noted = added(ledger, model=model)
        noted.usage = Usage(1)
        ledger.finish(noted)
    assert ledger.totals == {"a": Usage(2), "": Usage(2)}


def test_clear_keeps_numbering(ledger):
    done = added(ledger)
    done.usage = Usage(1)
    ledger.finish(done)
    ledger.clear()
    assert (len(ledger), ledger.arrived, ledger.totals) == (0, 0, {})
    assert added(ledger).sequence == 2


def test_report_is_json_and_may_start_later(ledger):
    added(ledger, body=b"\xff", headers=[(b"X-Name", b"\xfc")])
    last = added(ledger)
    last.usage = Usage(1, guardrail_units={"topicPolicyUnits": 2})
    ledger.finish(last)
    report = json.loads(json.dumps(ledger.report()))
    assert report["entries"][0]["body"] == "\u00ff"
    assert report["entries"][0]["headers"] == [["X-Name", "\u00fc"]]
    assert report["entries"][1]["usage"]["guardrail_units"] == {"topicPolicyUnits": 2}
    assert report["totals"]["m"]["guardrail_units"] == {"topicPolicyUnits": 2}
    assert [each["sequence"] for each in ledger.report(after=1)["entries"]] == [2]


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ([(HEADER.lower().encode(), b'{"org": "o"}')], b"{}", {"org": "o"}),
        ([], b'{"requestMetadata": {"org": "p"}}', {"org": "p"}),
        ([], b"{}", {}),
        ([], b"no json", {}),
        ([(HEADER.encode(), b"[1]")], b"", {}),
    ],
)
def test_metadata_is_read_from_header_or_body(ledger, headers, body, expected):
    assert entry(ledger, body=body, headers=headers).metadata == expected


def test_file_has_every_arrival_before_its_outcome(tmp_path):
    file = tmp_path / "ledger"
    ledger = Ledger(file)
    first, second = added(ledger), added(ledger)
    second.usage, second.is_whole, second.status = Usage(3), True, 200
    ledger.finish(second)
    noted = read_ledger(file)  # while the ledger is still open, as after a kill
    assert [(each["sequence"], each["is_done"], each["is_whole"]) for each in noted] == [
        (1, False, False),
        (2, True, True),
    ]
    assert noted[1]["usage"]["input_tokens"] == 3
    ledger.finish(first)
    ledger.close()
    again = Ledger(file)
    added(again)
    again.close()
    assert [each["sequence"] for each in read_ledger(file)] == [1, 2, 1]  # appended, not started again
