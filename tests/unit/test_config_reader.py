"""The reader, on a schema of its own: what it accepts, and the exact line it gives for each kind of mistake."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from price_keeper.config.config_reader import read_file
from price_keeper.config.yaml_tree import MAX_CHARS
from price_keeper.errors import ConfigError

from tests.support.config_schema import Everything, Hue, Outer, Point, parse, problems


@pytest.mark.parametrize("text", ["", "# nothing", "~", "---\n", "{}"])
def test_empty_text_gives_defaults(text: str) -> None:
    assert parse(text) == Everything()


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("name: abc", "name", "abc"),
        ("name: 'yes'", "name", "yes"),
        ("name: !!str 5", "name", "5"),
        ("note: null", "note", None),
        ("note:", "note", None),
        ("low: -7", "low", -7),
        ("low: -1_0", "low", -10),
        ("ratio: 15", "ratio", 15.0),
        ("ratio: 1e-3", "ratio", 0.001),
        ("ratio: .5", "ratio", 0.5),
        ("is_on: true", "is_on", True),
        ("is_on: No", "is_on", False),
        ("size: 16", "size", 16),
        ("color: blue", "color", "blue"),
        ("hue: 90deg", "hue", Hue(90)),
        ("numbers: [1, 2]", "numbers", (1, 2)),
        ("points: [{x: 1}, {x: 2, y: 3}]", "points", (Point(1), Point(2, 3))),
        ("point: {x: 4}", "point", Point(4)),
        ("shades: {dark: 3}", "shades", {"dark": 3}),
        ("named: {a: {x: 1}}", "named", {"a": Point(1)}),
        ("named: {a: &p {x: 1}, b: *p}", "named", {"a": Point(1), "b": Point(1)}),
    ],
)
def test_value_is_read_by_its_type(text: str, name: str, value: Any) -> None:
    found = getattr(parse(text), name)
    assert found == value
    assert type(found) is type(value) or isinstance(value, dict)


def test_money_keeps_all_decimals() -> None:
    assert str(parse("amount: 0.1000000000000000000001").amount) == "0.1000000000000000000001"


def test_parsed_mapping_is_immutable() -> None:
    with pytest.raises(TypeError):
        parse("shades: {dark: 3}").shades["dark"] = 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("low: three", 'c.yaml:1: low: expected a whole number, found "three"'),
        ("low: '3'", 'c.yaml:1: low: expected a whole number, found "3"'),
        ("low: true", "c.yaml:1: low: expected a whole number, found true"),
        ("low: 1.0", "c.yaml:1: low: expected a whole number, found 1.0"),
        ("low: 010", "c.yaml:1: low: expected a whole number, found 010"),
        ("low: null", "c.yaml:1: low: expected a whole number, found null"),
        ("low:", "c.yaml:1: low: expected a whole number, found null"),
        ("low: [1]", "c.yaml:1: low: expected a single value, found a list"),
        ("low: {a: 1}", "c.yaml:1: low: expected a single value, found a mapping"),
        ("ratio: .inf", "c.yaml:1: ratio: expected a number, found .inf"),
        ("ratio: .nan", "c.yaml:1: ratio: expected a number, found .nan"),
        ("ratio: 1e999", 'c.yaml:1: ratio: expected a number, found "1e999"'),
        ("ratio: yes", "c.yaml:1: ratio: expected a number, found yes"),
        ("amount: nan", 'c.yaml:1: amount: expected a number, found "nan"'),
        ("amount: -.inf", "c.yaml:1: amount: expected a number, found -.inf"),
        ("amount: " + "9" * 70, "c.yaml:1: amount: expected a number, found " + "9" * 64 + "..."),
        ("is_on: 1", "c.yaml:1: is_on: expected true or false, found 1"),
        ("is_on: 'true'", 'c.yaml:1: is_on: expected true or false, found "true"'),
        ("name: 5", "c.yaml:1: name: expected text (put it in quotes), found 5"),
        ("name: no", "c.yaml:1: name: expected text (put it in quotes), found no"),
        ("name: 2026-11-18", "c.yaml:1: name: expected text (put it in quotes), found 2026-11-18"),
        ("name: null", "c.yaml:1: name: expected text, found null"),
        ("size: 9", "c.yaml:1: size: expected one of 8, 16, found 9"),
        ("color: gren", 'c.yaml:1: color: expected one of red, green, blue (did you mean "green"?), found "gren"'),
        ("color: xyz", 'c.yaml:1: color: expected one of red, green, blue, found "xyz"'),
        ("hue: 90", "c.yaml:1: hue: expected text (put it in quotes), found 90"),
        ("hue: 90rad", 'c.yaml:1: hue: expected degrees, such as 90deg, found "90rad"'),
        ("high: 100", "c.yaml:1: high: expected less than 100, found 100"),
        ("low: 12", "c.yaml:1: high: below low, which is 12"),
        ("high: 0\nname: x", "c.yaml:1: high: below low, which is 1"),
        ("numbers: 5", "c.yaml:1: numbers: expected a list, found a number"),
        ("numbers: {a: 5}", "c.yaml:1: numbers: expected a list, found a mapping"),
        ("numbers:\n- 1\n- two", 'c.yaml:3: numbers.1: expected a whole number, found "two"'),
        ("points:\n- {x: 1}\n- {y: 1}", "c.yaml:3: points.1.x: required, but missing"),
        ("point:\n\n  y: 1", "c.yaml:1: point.x: required, but missing"),
        ("point: here", "c.yaml:1: point: expected a mapping, found text"),
        ("point: [1]", "c.yaml:1: point: expected a mapping, found a list"),
        (
            "shades:\n  dim: 1\n",
            "c.yaml:2: shades.dim: expected one of light, dark",
        ),
        ("named:\n  AB: {x: 1}", "c.yaml:2: named.AB: expected lower case"),
        ("named:\n  ab:", "c.yaml:2: named.ab: expected a mapping, found null"),
        ("lw: 1", 'c.yaml:1: lw: unknown key; did you mean "low"?'),
        ("\nPoint: {x: 1}", 'c.yaml:2: Point: unknown key; did you mean "point"?'),
        ("point: {x: 1, zzz: 1}", "c.yaml:1: point.zzz: unknown key; allowed are x, y"),
        ("low: 1\nname: a\nlow: 2", "c.yaml:3: low: duplicate key, first on line 1"),
        ("point:\n  x: 1\n  x: 1", "c.yaml:3: point.x: duplicate key, first on line 2"),
        ("named:\n  a: {x: 1}\n  a: {x: 1}", "c.yaml:3: named.a: duplicate key, first on line 2"),
        ("5: 1", "c.yaml:1: 5: a key must be text; put it in quotes"),
        ("named:\n  no: {x: 1}", "c.yaml:2: named.no: a key must be text; put it in quotes"),
        ("? [a]\n: 1", "c.yaml:1: a key must be text; put it in quotes"),
        (
            "point: {<<: {x: 1}, x: 2}",
            "c.yaml:1: point: merge keys are not supported; repeat the keys, or name a whole section by an alias",
        ),
        ("- 1", "c.yaml:1: expected a mapping, found a list"),
        ("just text", "c.yaml:1: expected a mapping, found text"),
    ],
)
def test_each_mistake_is_reported_with_line(text: str, problem: str) -> None:
    assert problems(text) == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "a: [1\nb: 2",
            "c.yaml:2: not valid YAML at column 2: while parsing a flow sequence that begins on line 1, "
            "expected ',' or ']', but got ':'",
        ),
        (
            "a: 'x\nb: 3\n",
            "c.yaml:3: not valid YAML at column 1: while scanning a quoted scalar that begins on line 1, "
            "found unexpected end of stream",
        ),
        (
            "a: @x",
            "c.yaml:1: not valid YAML at column 4: while scanning for the next token, "
            "found character '@' that cannot start any token",
        ),
        ("a: *hunter2", "c.yaml:1: not valid YAML at column 4: found undefined alias '...'"),
        ("a: 1\nb: !thing 2", "c.yaml:2: not valid YAML at column 4: a tag of this kind is not supported"),
        ("a\n\x07: 1", "c.yaml:2: not valid YAML: a character that may not stand in YAML text"),
        ('a: "\\U99999999"', "c.yaml:1: not valid YAML: a number or an escape out of range"),
        (f"%YAML {'1' * 5000}.1\n---\n", "c.yaml:1: not valid YAML: a number or an escape out of range"),
        ("a: &a [*a]", "c.yaml:1: not valid YAML at column 4: nested more than 24 levels deep"),
        ("[" * 100_000, "c.yaml:1: not valid YAML at column 26: nested more than 24 levels deep"),
        ("- " * 100_000, "c.yaml:1: not valid YAML at column 51: nested more than 24 levels deep"),
        ("a:\n" + "- x\n" * 50_000, "c.yaml:29999: not valid YAML at column 3: more than 30000 nodes"),
        ("#" * (MAX_CHARS + 1), f"c.yaml:1: longer than {MAX_CHARS} characters"),
    ],
)
def test_malformed_yaml_is_reported_with_line(text: str, problem: str) -> None:
    found = problems(text)
    assert found == [problem]


def test_yaml_alias_bomb_is_refused_quickly() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    began = time.process_time()
    assert "more than 30000 nodes" in problems("\n".join(lines))[0]
    assert time.process_time() - began < 5


def test_all_mistakes_are_reported_in_line_order() -> None:
    text = "high: 0\nis_on: 3\npoint: {}\nnam: x\nnumbers: [a, 1, b]\nlow: 4\ncolor: pink\n"
    assert problems(text, {"APP__SIZE": "9", "APP__SICE": "8"}) == [
        "c.yaml:1: high: below low, which is 4",
        "c.yaml:2: is_on: expected true or false, found 3",
        "c.yaml:3: point.x: required, but missing",
        'c.yaml:4: nam: unknown key; did you mean "name"?',
        'c.yaml:5: numbers.0: expected a whole number, found "a"',
        'c.yaml:5: numbers.2: expected a whole number, found "b"',
        'c.yaml:7: color: expected one of red, green, blue, found "pink"',
        'APP__SICE: sice: unknown key; did you mean "size"?',
        'APP__SIZE: size: expected one of 8, 16, found "9"',
    ]


def test_problem_is_one_line_of_printable_characters() -> None:
    assert problems('color: "a\\nb\\u2028c\\ud800\\e[31m"') == [
        'c.yaml:1: color: expected one of red, green, blue, found "a\\nb\\u2028c\\ud800\\x1b[31m"'
    ]


def test_rule_is_checked_although_other_section_is_invalid() -> None:
    assert problems("inner: {low: 9, high: 1}\nwhere: {x: u}", schema=Outer) == [
        "c.yaml:1: inner.high: below low, which is 9",
        'c.yaml:2: where.x: expected a whole number, found "u"',
    ]


@pytest.mark.parametrize(
    "text",
    [
        "secret: hunter2",
        "password: [hunter2]",
        "my_token: {a: hunter2, a: hunter2, 1: hunter2}",
        "named: {my_token: {hunter2, hunter2, x: 1}}",
        "free: {my_token: hunter2}",
        "named: {my_token: {x: hunter2}}",
        "api-key: 'hunter2",
        "hidden: hunter2",
        "hidden: [hunter2]",
        "api_key_file: hunter2",
        "api_key_file: [hunter2]",
        "point: hunter2",
        "numbers: hunter2",
        "points: [hunter2]",
        "unheard_of: hunter2",
        "{low: 1, secret:hunter2}",
        "point: {x: 1, secret:hunter2}",
        "a: *hunter2",
        "a: &hunter2 1\nb: &hunter2 2",
        "a: !hunter2 1",
        "a: !hunter2!x 1",
        "%TAG !hunter2! x\n%TAG !hunter2! x\n---\n1",
    ],
)
def test_possible_secret_in_file_is_redacted(text: str) -> None:
    assert not any("hunter2" in problem for problem in problems(text))


@pytest.mark.parametrize("variable", ["APP__SECRET", "APP__HIDDEN", "APP__API_KEY_FILE", "APP__POINT", "APP__XYZ"])
def test_variable_value_is_redacted(variable: str) -> None:
    assert not any("hunter2" in problem for problem in problems("", {variable: "hunter2"}))


def test_misplaced_secret_is_reported_without_value() -> None:
    assert problems("api_key: x\npoint: {x: 1, password: y}") == [
        "c.yaml:1: api_key: a secret never stands in the configuration itself; name its source with api_key_file",
        "c.yaml:2: point.password: a secret never stands in the configuration itself; "
        "name its source with a key that ends with _env or _file",
    ]


def test_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: \xc3\xa9\r\nlow: 3\r\n")
    assert read_file(Everything, path, {}, "APP__") == Everything(name="é", low=3)


def test_problem_in_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("\nlow: x")
    assert unreadable(path) == f'{path}:2: low: expected a whole number, found "x"'


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    missing, latin, endless = tmp_path / "missing.yaml", tmp_path / "latin.yaml", tmp_path / "endless.yaml"
    latin.write_bytes(b"a: 1\nb: \xe9\n")
    endless.write_bytes(b"#" * (5 * MAX_CHARS))
    assert unreadable(missing) == f"{missing}: cannot be read: No such file or directory"
    assert unreadable(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    assert unreadable(latin) == f"{latin}:2: not UTF-8 text"
    assert unreadable(endless) == f"{endless}:1: longer than {MAX_CHARS} characters"
    assert unreadable(Path("a\0b")) == "a\\x00b: cannot be read: not a path"


def unreadable(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_file(Everything, path, {}, "APP__")
    (problem,) = caught.value.problems
    return problem
