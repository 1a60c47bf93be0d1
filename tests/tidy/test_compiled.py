"""What the modules of the hot path have to keep to, so that they can be compiled and are the same then."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
COMPILED: list[str] = SETUP["COMPILED"]
MODULES = {path.removesuffix(".py").replace("/", ".") for path in COMPILED}
INTERPRETED = [path for path in sorted((ROOT / "proxy").rglob("*.py")) if str(path.relative_to(ROOT)) not in COMPILED]


def test_compiled_list_is_sorted_and_names_files() -> None:
    assert sorted(set(COMPILED)) == COMPILED
    assert [path for path in COMPILED if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(
    ("command", "environ", "expected"),
    [
        ("bdist_wheel", {}, True),
        ("bdist_wheel", {"PRICE_KEEPER_COMPILED": "0"}, False),
        ("editable_wheel", {}, False),
        ("build_ext", {}, False),
        ("build_ext", {"PRICE_KEEPER_COMPILED": "1"}, True),
    ],
)
def test_wheels_are_compiled_unless_asked_otherwise(command: str, environ: dict[str, str], expected: bool) -> None:
    assert SETUP["is_to_be_compiled"](["setup.py", command], environ) is expected


def _calls(path: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", COMPILED)
def test_slices_are_literal(path: str) -> None:
    """`data[slice(*span)]` of bytes raises TypeError when it is compiled."""
    assert "slice" not in {ast.unparse(call.func) for call in _calls(path)}


@pytest.mark.parametrize("path", COMPILED)
def test_super_init_arguments_are_literal(path: str) -> None:
    """Of `super().__init__(*several)` the tuple itself arrives when it is compiled."""
    above = [call for call in _calls(path) if ast.unparse(call.func).startswith("super().")]
    assert [ast.unparse(call) for call in above if any(isinstance(each, ast.Starred) for each in call.args)] == []


@pytest.mark.parametrize("path", COMPILED)
def test_no_class_has_keyword_arguments(path: str) -> None:
    """Of `class Shape(Struct, rename="camel")` the arguments are lost when it is compiled."""
    classes = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.ClassDef)]
    assert [each.name for each in classes if each.keywords] == []


def _bases(path: Path) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name, [ast.unparse(base) for base in node.bases]


# Of protocols nothing is compiled.
NATIVE = {name for path in COMPILED for name, bases in _bases(ROOT / path) if "Protocol" not in bases}


def _from_compiled(path: Path) -> set[str]:
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    return {alias.name for node in found if node.module in MODULES for alias in node.names} & NATIVE


@pytest.mark.parametrize("path", INTERPRETED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_interpreted_class_inherits_from_compiled_one(path: Path) -> None:
    """No object of such a class can be made: compile the class that inherits as well."""
    assert _from_compiled(path) & {base for _, bases in _bases(path) for base in bases} == set()
