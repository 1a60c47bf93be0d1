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

CONTENDERS = ("direct", "nginx", "aiohttp", "litellm", "keeper")
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
    figures = Figures(about={"machine": "2 cores"}, left_out=["workers: not yet"])
    for name, rate, cost in zip(
        CONTENDERS, (80e3, 30e3, 6e3, 120.0, 15e3), (None, 16.0, 130.0, 5e3, 50.0), strict=True
    ):
        for connections, part in ((1, 0.2), (16, 0.8), (64, 1.0)):
            for noise in (0.9, 1.0, 1.2):
                row = {"per_second": rate * part * noise, "median_us": 1e6 / rate * connections, "p99_us": 2e6 / rate}
                figures.add("http1", connections, name, **row, cpu_us=cost, others=0.03)
                if name in ("nginx", "keeper"):
                    figures.add("http2", connections, name, **row, cpu_us=cost)
        figures.add("quiet", name, median_us=2e6 / rate, p99_us=4e6 / rate)
        figures.add("fast", name, per_second=rate * 5, cpu_us=cost)
        figures.add("alone", name, per_second=rate * 3, cpu_us=cost)
        figures.add("paced", name, per_second=4000.0, cpu_us=cost, median_us=1e6 / rate, p99_us=2e6 / rate)
        if name != "direct":
            figures.add("memory", name, bytes=6e7)
    figures.add("idle", "keeper", bytes=20_000)
    figures.add("start", "sqlite", seconds=0.45)
    figures.add("start", "dynamodb", seconds=1.5)
    return figures


def by_goal(figures: Figures) -> dict[str, goals.Goal]:
    return {each.goal: each for each in goals.reached(figures)}


def test_goals_are_compared_with_figures() -> None:
    reached = by_goal(sample())
    beside_nginx = reached["requests a second, 64 connections, beside nginx"]
    assert (beside_nginx.reached, beside_nginx.is_reached) == ("0.50 times (15,000 to 30,000)", True)
    assert reached["the same beside LiteLLM"].is_reached
    assert reached["start to first answer, SQLite"].is_reached
    assert reached["start to first answer, DynamoDB"].is_reached is False
    assert reached["CPU of a request with `--workers 2`, beside one"].is_reached is None
    assert all(each.is_reached is None for each in goals.reached(Figures()))


def test_page_has_every_part_and_every_plot(tmp_path: Path) -> None:
    folder = tmp_path / "performance"
    folder.mkdir()
    (folder / report.RESULTS).write_text(json.dumps(sample().as_json()))
    (folder / "scaling.json").write_text(json.dumps(FURTHER))
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
        "- workers: not yet",
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
