"""The page of the benchmark and its plots, from figures made up here."""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.speed import goals, report
from bench.speed.figures import Figures, Spread
from bench.speed.plots import Bar, Group, Line, bars, linear_ticks, lines, log_ticks, number

CONTENDERS = ("direct", "nginx", "envoy", "aiohttp", "litellm", "keeper", "compiled")
FURTHER = {
    "goals": [{"goal": "a hundred orgs", "wanted": "as quick", "reached": "slower", "is_reached": False}],
    "tables": [{"title": "By orgs", "note": "One sidecar.", "columns": ["orgs", "µs"], "rows": [[10_000, 81.5]]}],
    "plots": [
        {
            "title": "CPU by orgs",
            "x": "orgs",
            "y": "µs",
            "log": True,
            "series": [{"name": "a", "points": [[1, 80], [1e4, 82]]}],
        }
    ],
}


def sample() -> Figures:
    figures = Figures(
        about={"machine": "2 cores", "quiet machine": "yes: nothing else ran"}, left_out=["Portkey: none"]
    )
    for name, rate, cost in zip(
        CONTENDERS, (80e3, 50e3, 25e3, 6e3, 120.0, 14e3, 24e3), (None, 20.0, 38.0, 130.0, 5e3, 60.0, 40.0), strict=True
    ):
        for how, part in ((("sdk", "1"), 0.2), (("sdk", "64"), 1.0), (("bare", "64"), 1.2), (("sdk", "new"), 0.5)):
            for noise in (0.9, 1.0, 1.2):
                row = {"per_second": rate * part * noise, "median_us": 1e6 / rate, "p99_us": 2e6 / rate}
                figures.add("http1", *how, name, **row, p999_us=3e6 / rate, cpu_us=cost, others=0.03)
                if name in ("nginx", "keeper", "compiled"):
                    figures.add("http2", *how, name, **row, p999_us=3e6 / rate, cpu_us=cost)
        for protocol in ("http1", "http2"):
            figures.add(
                "pace", protocol, name, pace=1000.0, median_us=2e6 / rate, p99_us=4e6 / rate, p999_us=5e6 / rate
            )
        figures.add("streams", name, per_second=rate * 30, cpu_us=cost)
        figures.add("frames", name, cpu_us=cost, median_us=1e6 / rate, p99_us=2e6 / rate, p999_us=3e6 / rate)
        if name != "direct":
            figures.add("memory", "bare", name, bytes=6e7)
            figures.add("memory", "sdk", name, bytes=9e7)
    figures.add("idle", "keeper", bytes=20_000)
    figures.add("http2", "sdk", "new", "older", per_second=2e3)
    figures.add("start", "keeper", seconds=0.36)
    figures.add("start", "compiled", seconds=0.32)
    figures.add("start", "dynamodb", seconds=1.5)
    return figures


def by_goal(figures: Figures) -> dict[str, goals.Goal]:
    return {each.goal: each for each in goals.reached(figures)}


@pytest.mark.parametrize(
    ("goal", "wanted", "measured", "is_reached"),
    [
        ("HTTP/1.1 requests/s beside nginx, compiled", "at least 0.45 x", "0.48 x (24,000 to 50,000)", True),
        ("HTTP/1.1 requests/s beside nginx, pure Python", "at least 0.27 x", "0.28 x (14,000 to 50,000)", True),
        (
            "HTTP/1.1 requests/s beside Envoy with SigV4 (level: within 5 %), compiled",
            "at least 0.95 x",
            "0.96 x (24,000 to 25,000)",
            True,
        ),
        (
            "HTTP/2 requests/s beside nginx's HTTP/2, kept connections, pure Python",
            "at least 0.25 x",
            "0.28 x (14,000 to 50,000)",
            True,
        ),
        (
            "HTTP/2, a new connection per call, beside `h2`, pure Python",
            "at least 2.50 x",
            "3.50 x (7,000 to 2,000)",
            True,
        ),
        ("HTTP/2, a new connection per call, beside `h2`, compiled", "at least 2.50 x", "not measured", None),
        ("frames/s beside nginx, compiled", "at least 0.30 x", "0.48 x (720,000 to 1,500,000)", True),
        (
            "added median at one connection beside nginx, compiled",
            "at most 1.40 x",
            "3.89 x (29.2 µs to 7.50 µs)",
            False,
        ),
        ("memory after load, SQLite, both protocols, bare headers, compiled", "at most 68 MB", "60.0 MB", True),
        ("memory after load, SQLite, both protocols, SDK headers, compiled", "at most 85 MB", "90.0 MB", False),
        ("start to first answer, default configuration, compiled", "at most 0.33 s", "0.32 s", True),
        ("start to first answer, default configuration, pure Python", "at most 0.33 s", "0.36 s", False),
    ],
)
def test_goals_are_compared_with_figures(goal: str, wanted: str, measured: str, is_reached: bool | None) -> None:
    assert by_goal(sample())[goal] == goals.Goal(goal, wanted, measured, is_reached)


def test_goals_without_figures_are_not_measured() -> None:
    assert all(each.is_reached is None for each in goals.reached(Figures()))


def test_goal_beside_an_idle_contender_says_so() -> None:
    figures = Figures()
    figures.add("http2", "sdk", "64", "nginx", per_second=30e3, cpu_us=20.0)
    figures.add("http2", "sdk", "64", "keeper", per_second=10e3, cpu_us=99.0)
    found = by_goal(figures)["HTTP/2 requests/s beside nginx's HTTP/2, kept connections, pure Python"]
    assert found.reached == "0.33 x (10,000 to 30,000; nginx used 60% of its core)"


def test_page_has_every_part_and_every_plot(tmp_path: Path) -> None:
    folder = tmp_path / "performance"
    folder.mkdir()
    (folder / report.RESULTS).write_text(json.dumps(sample().as_json()))
    (folder / "scaling.json").write_text(json.dumps(FURTHER))
    (folder / "of-an-older-page.svg").write_text("<svg/>")
    page = report.write(folder)
    text = page.read_text()
    assert page == tmp_path / "performance.md"
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert {name.partition("/")[2] for name in shown} == {path.name for path in folder.glob("*.svg")}
    for path in folder.glob("*.svg"):
        ElementTree.fromstring(path.read_text())
    for part in (
        "| a hundred orgs | as quick | slower | **no** |",
        "| 10,000 | 81.5 |",
        "- Portkey: none",
        "**Was the machine quiet?** yes: nothing else ran.",
        "2 cores",
        "3% at most",
    ):
        assert part in text
    assert "scaling-cpu-by-orgs.svg" in text
    assert str(tmp_path) not in text


def test_page_without_measurements_is_complete() -> None:
    page, plots = report.made(Figures(), {}, "performance")
    assert "not measured" in page
    assert plots == {}


def test_table_accepts_any_cell() -> None:
    assert report.table(["a", "b"], [[1_000_000, None], ["x|y", True]]).splitlines()[2:] == [
        "| 1,000,000 |  |",
        "| x\\|y | True |",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0.00"),
        (0.012, "0.012"),
        (0.5, "0.50"),
        (9.996, "10.0"),
        (99.96, "100"),
        (12345.6, "12,346"),
        (-3.0, "-3.00"),
    ],
)
def test_numbers_have_readable_digits(value: float, expected: str) -> None:
    assert number(value) == expected


def test_ticks_are_round_and_cover_figures() -> None:
    assert linear_ticks(0, 64) == [0, 20, 40, 60]
    assert linear_ticks(0, 0.9) == [0, 0.2, 0.4, 0.6, 0.8]
    assert linear_ticks(5, 5)[0] <= 5
    assert log_ticks(1, 10_000) == [1, 10, 100, 1000, 10_000]
    assert log_ticks(16, 64) == [16, 32, 64]
    assert log_ticks(3, 3) == [2, 4]


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_bars_have_name_and_figure_and_stay_inside() -> None:
    colour = count()
    drawn = [
        Bar(name, Spread(value, value * 0.8, value * 1.1), next(colour)) for name, value in (("a<b", 3.0), ("c", 5e3))
    ]
    svg = bars("Title", "µs", [Group("both", drawn)])
    assert {"Title", "µs", "both", "a<b", "3.00", "c", "5,000"} <= set(texts(svg))
    rights = [float(each["x"]) + float(each["width"]) for each in _rectangles(svg)]
    assert max(rights) <= 760


def test_lines_are_drawn_on_linear_and_logarithmic_axis() -> None:
    series = [Line("ours", [(1, 10.0), (100, 20.0)]), Line("theirs", [(1, 5.0), (100, 0.0)])]
    for is_log in (False, True):
        svg = lines("Title", "orgs", "µs", series, log_x=is_log, log_y=is_log)
        assert {"Title", "orgs", "µs", "ours", "theirs"} <= set(texts(svg))
        for point in re.findall(r'points="([^"]+)"', svg):
            assert all(0 <= float(each) <= 760 for each in re.split("[ ,]", point))


def _rectangles(svg: str) -> list[dict[str, Any]]:
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    return [dict(each.attrib) for each in found if "x" in each.attrib]
