"""What the benchmark reports of its figures, and how it parses other tools' output."""

from __future__ import annotations

import json

import pytest
from price_keeper.upstream.eventstream import FrameWatcher

from bench.speed.figures import Figures, Spread, percentile, ratio
from bench.speed.flame import sized, without_places
from bench.speed.frames import FRAMES, SIZE, answer, chunk, number_of, numbered, unchunked
from bench.speed.load import h2load_told, wrk_told
from bench.speed.machine import CannotMeasure
from bench.speed.rooms import ELSEWHERE, shares
from bench.speed.suite import turned
from bench.speed.upstream import QUESTION

H2LOAD = """\
finished in 3.00s, 2486.33 req/s, 9.86MB/s
requests: 7459 total, 7459 started, 7459 done, 7459 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 7459 2xx, {third} 3xx, 0 4xx, 0 5xx
time for request:      178us     51.20ms      6.43ms      3.99ms    68.10%
"""


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
    speed = wrk_told("noise\nRESULT 17271 1004438 0 0 328.000000 17674.000000\n")
    assert (round(speed.per_second), speed.median_us, speed.p99_us, speed.requests) == (17195, 328.0, 17674.0, 17271)


@pytest.mark.parametrize("output", ["", "RESULT 0 1000000 0 0 0 0", "RESULT 9 1000 1 0 3 4", "RESULT 9 1000 0 1 3 4"])
def test_refused_or_broken_load_gives_no_figure(output: str) -> None:
    with pytest.raises(CannotMeasure):
        wrk_told(output)


def test_h2load_output_is_parsed() -> None:
    log = "".join(f"1700000000000000\t200\t{micros}\n" for micros in range(1, 101))
    speed = h2load_told(H2LOAD.format(third=0), log)
    assert (speed.per_second, speed.median_us, speed.p99_us, speed.requests) == (2486.33, 50, 99, 7459)
    for output, lines in ((H2LOAD.format(third=2), log), (H2LOAD.format(third=0), ""), ("", log)):
        with pytest.raises(CannotMeasure):
            h2load_told(output, lines)


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


def test_flame_graph_shares_are_per_room() -> None:
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
        "from room to room": 0.35,
        "reading the request, telling the caller": 0.2,
        ELSEWHERE: 0.2,
        "admit": 0.1,
        "meter and record": 0.1,
        "select": 0.05,
    }
    assert shares("<svg/>") == {}
