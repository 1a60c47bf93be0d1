"""What the benchmark reports of its figures, and how it parses other tools' output."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hpack import Decoder
from price_keeper.upstream.eventstream import FrameWatcher

from bench.speed import load
from bench.speed.client import ID_DIGITS, Http1, Http2, Plan, Refused
from bench.speed.contenders import Running
from bench.speed.figures import Figures, Spread, percentile, ratio
from bench.speed.flame import ELSEWHERE, shares, sized, without_places
from bench.speed.frames import FRAMES, SIZE, answer, chunk, number_of, numbered, unchunked
from bench.speed.load import Pattern, parse_wrk
from bench.speed.machine import CannotMeasure, describe_quiet, wait_until_quiet
from bench.speed.suite import turned
from bench.speed.upstream import QUESTION


def test_spread_has_median_lowest_and_highest() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.01, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_percentiles_are_computed(share: float, value: int) -> None:
    assert percentile(range(100, 0, -1), share) == value


def test_ratio_needs_both_figures() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert (ratio(None, 2.0), ratio(1.0, None), ratio(1.0, 0.0)) == (None, None, None)


def test_figures_are_kept_per_round_and_survive_json() -> None:
    figures = Figures(about={"date": "2026-11-19"})
    for rate in (1.0, 3.0, 2.0):
        figures.add("http1", 64, "nginx", per_second=rate, cpu_us=None)
    again = Figures.from_json(json.loads(json.dumps(figures.as_json())))
    assert again == figures
    assert again.spread("http1", 64, "nginx", "per_second") == Spread(2.0, 1.0, 3.0)
    assert again.middle("http1", 64, "nginx", "cpu_us") is None
    assert again.is_known("http1", 64, "nginx")
    assert not again.is_known("http1", 6)


def test_rounds_start_with_a_different_contender() -> None:
    assert [turned("abc", number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert turned("", 3) == []


def test_wrk_output_is_parsed() -> None:
    speed = parse_wrk("noise\nRESULT 17271 1004438 0 0 328.000000 17674.000000 20001.000000\n")
    assert (round(speed.per_second), speed.requests) == (17195, 17271)
    assert (speed.median_us, speed.p99_us, speed.p999_us) == (328.0, 17674.0, 20001.0)


@pytest.mark.parametrize(
    "output", ["", "RESULT 0 1000000 0 0 0 0 0", "RESULT 9 1000 1 0 3 4 5", "RESULT 9 1000 0 1 3 4 5"]
)
def test_refused_or_broken_load_gives_no_figure(output: str) -> None:
    with pytest.raises(CannotMeasure):
        parse_wrk(output)


@pytest.mark.parametrize("is_sdk", [True, False])
def test_wrk_sends_a_new_invocation_id_with_each_call(
    is_sdk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "needed", lambda program, _: program)
    running = Running(8080, headers={"authorization": "Bearer x"})
    command = load._wrk(running, "/model/premium/converse", Pattern("http1", 64, is_sdk=is_sdk), 3, tmp_path)
    before, after = ((tmp_path / name).read_bytes() for name in ("before", "after"))
    script = (tmp_path / "call.lua").read_text()
    assert command[0] == "wrk"
    assert "-c64" in command
    assert (f'before .. string.format("%0{ID_DIGITS}x", number) .. after' in script) is is_sdk
    assert ("return before\n" in script) is not is_sdk
    head, _, body = (before + b"0" * ID_DIGITS * is_sdk + after).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /model/premium/converse HTTP/1.1\r\n")
    assert body == QUESTION
    found = re.findall(rb"amz-sdk-invocation-id: ([0-9a-f-]{24}0{12})\r\n", head)
    assert len(found) == is_sdk


def test_pattern_path_names_headers_and_connections() -> None:
    assert Pattern("http1", 64).path == ("http1", "sdk", "64")
    assert Pattern("http1", 64, is_sdk=False).path == ("http1", "bare", "64")
    assert Pattern("http2", 20, is_new=True).path == ("http2", "sdk", "new")


def test_wait_for_quiet_machine_ends_when_it_is_quiet_or_patience_is_over() -> None:
    looks, clock = iter([0.9, 0.5, 0.03, 0.9]), iter(range(100))
    assert wait_until_quiet(60.0, lambda: next(looks), lambda: next(clock)) == 0.03
    looks, clock = iter([0.9, 0.8, 0.7, 0.03]), iter([0, 30, 61])
    assert wait_until_quiet(60.0, lambda: next(looks), lambda: next(clock)) == 0.8
    assert wait_until_quiet(0.0, lambda: 0.9, lambda: 0.0) == 0.9


def test_machine_is_called_quiet_only_if_it_was_before_and_after() -> None:
    assert describe_quiet(0.01, 0.05).startswith("yes: ")
    assert describe_quiet(0.01, 0.06).startswith("**no**: ")
    assert describe_quiet(0.4, 0.0) == ("**no**: other programs used 40% of the cores before the run and 0% after it")


INVOCATION = "7c9e6679-7425-40de-944b-"
SPEC = Plan("http2", 8080, "/model/premium/converse", [("accept", "application/json")], "{}", 1, 1.0, INVOCATION)


def _frames_of(sent: bytes) -> list[tuple[int, int, int, bytes]]:
    """Type, flags, stream and payload of each."""
    found, at = [], 0
    while at < len(sent):
        end = at + 9 + int.from_bytes(sent[at : at + 3], "big")
        found.append((sent[at + 3], sent[at + 4], int.from_bytes(sent[at + 5 : at + 9], "big"), sent[at + 9 : end]))
        at = end
    return found


def test_http2_client_sends_a_new_invocation_id_with_each_call() -> None:
    client, decoder, preface = Http2(SPEC), Decoder(), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    first, second = client.request(7), client.request(8)
    assert first.startswith(preface)
    for sent, number, stream, opening in ((first[len(preface) :], 7, 1, [4, 8]), (second, 8, 3, [])):
        *before, head, body = _frames_of(sent)
        assert [kind for kind, *_ in before] == opening
        assert (head[:3], body) == ((1, 4, stream), (0, 1, stream, b"{}"))
        headers = dict(decoder.decode(head[3]))
        assert headers["amz-sdk-invocation-id"] == f"{INVOCATION}00000000000{number}"
        assert (headers[":path"], headers["accept"]) == ("/model/premium/converse", "application/json")


def test_http2_client_knows_the_end_of_an_answer_and_a_refusal() -> None:
    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload

    client = Http2(SPEC)
    client.request(0)
    answer = (
        frame(4, 0, 0, b"")
        + frame(4, 1, 0, b"")
        + frame(1, 4, 1, b"\x20\x88")
        + frame(0, 1, 1, b"abc")
        + frame(3, 0, 1, bytes(4))
    )
    assert [client.feed(answer[at : at + 1]) for at in range(len(answer))].index(True) == len(answer) - 13 - 1
    assert client.request(1)[:9] == frame(4, 1, 0, b"")  # the settings are acknowledged
    for refusal in (frame(1, 4, 3, b"\x8c"), frame(1, 4, 3, b"\x3f\xe1\x1f\x8d"), frame(3, 0, 3, b"\0\0\0\7")):
        with pytest.raises(Refused):
            client.feed(refusal)


def test_http2_client_does_not_send_more_than_the_window() -> None:
    client = Http2(replace(SPEC, body="x" * 30_000))
    client.request(0)
    client.request(1)
    with pytest.raises(Refused):
        client.request(2)
    client = Http2(replace(SPEC, body="x" * 30_000))
    client.request(0)
    client.feed(b"\0\0\4\x08\0\0\0\0\0" + (60_000).to_bytes(4, "big"))
    for number in (1, 2, 3):
        client.request(number)


@pytest.mark.parametrize(
    "form", ["content-length: 5\r\n\r\nhello", "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
)
def test_http1_client_knows_the_end_of_an_answer_and_a_refusal(form: str) -> None:
    client = Http1(replace(SPEC, protocol="http1"))
    assert f"amz-sdk-invocation-id: {INVOCATION}00000000000a\r\n\r\n{{}}".encode() in client.request(10)
    answer = f"HTTP/1.1 200 OK\r\n{form}".encode()
    assert [client.feed(answer[at : at + 1]) for at in range(len(answer))] == [False] * (len(answer) - 1) + [True]
    client.request(11)
    with pytest.raises(Refused):
        client.feed(answer.replace(b"200", b"429"))


def test_benchmark_frames_match_bedrock_and_have_one_size() -> None:
    frames = answer()
    watcher = FrameWatcher({"metadata": 1000})
    (last,) = watcher.feed(b"".join(frames))
    assert {len(frame) for frame in frames} == {SIZE}
    assert (watcher.frames, watcher.close()) == (FRAMES, None)
    assert json.loads(last.payload)["usage"]["totalTokens"] > FRAMES
    assert unchunked(b"".join(map(chunk, frames)) + b"0\r\n\r\n") == b"".join(frames)


def test_benchmark_requests_have_a_number_and_one_length() -> None:
    assert [number_of(numbered(number)) for number in (0, 7, 1999)] == [0, 7, 1999]
    assert len(numbered(1999)) == len(QUESTION)
    assert json.loads(numbered(3))


def test_flame_graph_shows_no_local_paths() -> None:
    drawn = (
        '<text id="title" x="1">py-spy record -o /tmp/x/flame.svg</text>'
        "<title>run (/srv/us/proxy/price_keeper/app.py:3) (2 samples)</title>"
        "<title>get (/opt/py/lib/python3.11/hmac.py:1)</title>"
        "<title>read (/opt/env/site-packages/aiohttp/web.py:1)</title><title>x (/elsewhere/at/all.py:1)</title>"
    )
    shown = without_places(drawn, "/srv/us")
    for place in ("/srv", "/opt", "/tmp", "/elsewhere"):
        assert place not in shown
    for kept in ("(proxy/price_keeper/app.py:3)", "(hmac.py:1)", "(aiohttp/web.py:1)", "(all.py:1)"):
        assert kept in shown
    with pytest.raises(CannotMeasure):
        sized("x" * 500_000)


def _frame(name: str, level: int, begin: int, width: int) -> str:
    title = f"<title>{name} ({width:,} samples, 1.0%)</title>"
    return f'<g>{title}<rect x="0.1%" y="{level}" width="1%" height="15" fg:x="{begin}" fg:w="{width}"/></g>'


def test_flame_graph_shares_are_per_step() -> None:
    drawn = (
        _frame("all", 20, 0, 1000)
        + _frame("run (asyncio/runners.py:1)", 36, 0, 900)
        + _frame("read (proxy/price_keeper/server/http1.py:1)", 52, 0, 700)
        + _frame("call (proxy/price_keeper/express.py:1)", 68, 100, 500)
        + _frame("admit (proxy/price_keeper/rates/rate_limiter.py:1)", 84, 100, 100)
        + _frame("&lt;lambda&gt; (proxy/price_keeper/budgets/budget_state.py:1)", 84, 200, 50)
        + _frame("sync (proxy/price_keeper/ledger/segment.py:1)", 36, 900, 100)
    )
    assert shares(drawn) == {
        "handler: from step to step": 0.35,
        "server: read the request, write the response": 0.2,
        ELSEWHERE: 0.2,
        "rate limits": 0.1,
        "meter and record": 0.1,
        "budgets: select the label": 0.05,
    }
    assert shares("<svg/>") == {}
