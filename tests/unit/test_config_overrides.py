"""The environment laid over the file, on a schema of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.config_schema import Everything, Hue, Outer, Point, parse, problems


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        ({"APP__NAME": "null"}, "name", "null"),
        ({"APP__NAME": ""}, "name", ""),
        ({"app__Name": "5"}, "name", "5"),
        ({"APP__NOTE": ""}, "note", None),
        ({"APP__NOTE": "[a"}, "note", "[a"),
        ({"APP__LOW": "3"}, "low", 3),
        ({"APP__HUE": "90deg"}, "hue", Hue(90)),
        ({"APP__HUE": ""}, "hue", None),
        ({"APP__IS_ON": "true"}, "is_on", True),
        ({"APP__SIZE": "16"}, "size", 16),
        ({"APP__NUMBERS": "[1, 2]"}, "numbers", (1, 2)),
        ({"APP__POINT": "{x: 7}"}, "point", Point(7)),
        ({"APP__POINT__X": "7"}, "point", Point(7)),
        ({"APP__POINT": "{x: 7}", "APP__POINT__Y": "8"}, "point", Point(7, 8)),
        ({"app__point": "{x: 7}", "APP__POINT__Y": "8"}, "point", Point(7, 8)),
        ({"APP__SHADES": "{dark: 1}"}, "shades", {"dark": 1}),
    ],
)
def test_variable_overrides_missing_key(environ: dict[str, str], name: str, value: Any) -> None:
    assert getattr(parse("", environ), name) == value


FILE = """\
named:
  small: {x: 1}
  a-b.c: {x: 1}
  a_b-d: {x: 1}
  a-b_d: {x: 1}
  UP: {x: 1}
points: [{x: 1}, {x: 2}]
point: null
free: {a: 1, A: 2}
"""


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        ("APP__NAMED__SMALL__X", lambda read: read.named["small"]),
        ("APP__NAMED__A_B_C__X", lambda read: read.named["a-b.c"]),
        ("APP__NAMED__a-b_d__X", lambda read: read.named["a-b_d"]),
        ("APP__NAMED__A_B-D__X", lambda read: read.named["a_b-d"]),
        ("APP__POINTS__1__X", lambda read: read.points[1]),
        ("APP__POINT__X", lambda read: read.point),
        ("APP__FREE__a", lambda read: Point(read.free["a"])),
        ("APP__FREE__A", lambda read: Point(read.free["A"])),
    ],
)
def test_variable_overrides_key_of_file(variable: str, found: Any) -> None:
    assert found(parse(FILE.replace("UP", "up"), {variable: "77"})) == Point(77)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"APP__LW": "1"}, 'APP__LW: lw: unknown key; did you mean "low"?'),
        ({"APP__POINT__Z__Q": "1"}, "APP__POINT__Z__Q: point.z: unknown key; allowed are x, y"),
        ({"APP__NAMED__SMAL__X": "1"}, 'APP__NAMED__SMAL__X: named.smal: unknown key; did you mean "small"?'),
        ({"APP__NAMED__A_B_D__X": "1"}, "APP__NAMED__A_B_D__X: named: ambiguous, may mean a-b_d, a_b-d"),
        ({"APP__POINTS__7__X": "1"}, "APP__POINTS__7__X: points.7: unknown key; allowed are 0, 1"),
        ({"APP__NUMBERS__0": "1"}, "APP__NUMBERS__0: numbers.0: unknown key; there is none here"),
        ({"APP__LOW__X": "1"}, "APP__LOW__X: low.x: unknown key; there is none here"),
        ({"APP__": "1"}, "APP__: ...: unknown key; allowed are "),
        ({"APP__LOW": "x"}, 'APP__LOW: low: expected a whole number, found "x"'),
        ({"APP__LOW": ""}, "APP__LOW: low: expected a whole number, found null"),
        ({"APP__POINTS": "[{x: 1}, {y: 1}]"}, "APP__POINTS: points.1.x: required, but missing"),
        ({"APP__POINT__Y": "1"}, "APP__POINT__Y: point.x: required, but missing"),
        (
            {"APP__POINT": "{x: 1"},
            "APP__POINT: point: not valid YAML at column 6: while parsing a flow mapping, expected ',' or '}', "
            "but got '<stream end>'",
        ),
        ({"APP__LOW": "2", "app__low": "2"}, "app__low: low: already set by APP__LOW"),
    ],
)
def test_mistake_in_variable_names_variable(environ: dict[str, str], problem: str) -> None:
    (found,) = problems(FILE.replace("UP", "up"), environ)
    assert found == problem or (problem.endswith("allowed are ") and found.startswith(problem))


def test_list_of_allowed_keys_is_bounded() -> None:
    text = f"free: {{{', '.join(f'z{n:03}: {n}' for n in range(99))}, secret:hunter2}}"
    shown = ", ".join(f"z{n:03}" for n in range(20))
    problem, *_ = problems(text, {"APP__FREE__ABC": "1"})[1:]
    assert problem == f"APP__FREE__ABC: free.abc: unknown key; allowed are {shown}, ..."


def test_allowed_names_are_shown_without_values() -> None:
    found = problems(
        "free: {secret:hunter2: 1, secret:hunter.3: 1}", {"APP__FREE__S": "1", "APP__FREE__SECRET:HUNTER": "1"}
    )
    assert not any("hunter" in problem.split(": ", 1)[1] for problem in found)


def test_variable_replaces_invalid_value_of_file() -> None:
    assert parse("low: three", {"APP__LOW": "3"}).low == 3


def test_scalar_has_no_keys_to_override() -> None:
    assert problems("low: {x: 1}", {"APP__LOW__X": "1"}) == [
        "c.yaml:1: low: expected a single value, found a mapping",
        "APP__LOW__X: low.x: unknown key; there is none here",
    ]
    assert problems("hue: 90deg", {"APP__HUE__DEGREES": "1"}) == [
        "APP__HUE__DEGREES: hue.degrees: unknown key; there is none here",
    ]


@pytest.mark.parametrize(("text", "found"), [("just text", "text"), ("[1]", "a list"), ("5", "a number")])
def test_variables_do_not_repair_file_without_mapping(text: str, found: str) -> None:
    assert problems(text, {"APP__LOW": "1"}) == [f"c.yaml:1: expected a mapping, found {found}"]


def test_text_in_place_of_section_hides_no_mistake_in_variable() -> None:
    assert problems("point: here", {"APP__POINT__Z": "1"}) == [
        "c.yaml:1: point: expected a mapping, found text",
        "APP__POINT__Z: point.z: unknown key; allowed are x, y",
    ]


def test_unrelated_variables_are_ignored() -> None:
    assert parse("", {"APP_LOW": "x", "LOW": "x", "XAPP__LOW": "x"}) == Everything()


def test_sections_nest() -> None:
    assert problems("inner:\n  low: x\n", {"APP__INNER__POINT__X": "y"}, Outer) == [
        'c.yaml:2: inner.low: expected a whole number, found "x"',
        'APP__INNER__POINT__X: inner.point.x: expected a whole number, found "y"',
    ]
