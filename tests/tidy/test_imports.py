"""Imports point down only, and pure files touch nothing outside themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "proxy").rglob("*.py"))

# From the ground up. A module belongs to the first line that names it or a package around it.
LAYERS: list[set[str]] = [
    {"proxy.model", "proxy.errors", "proxy.clock", "proxy.calendar_days", "proxy.exchange", "proxy.authority"},
    {"proxy.traffic", "proxy.aside", "proxy.provider_chain", "proxy.verified", "proxy.memory"},
    {"proxy.telemetry"},
    {"proxy.build"},
    {"proxy.config.problems"},
    {"proxy.logs"},
    {"proxy.answers"},
    {"proxy.config.tree"},
    {"proxy.config.kinds"},
    {"proxy.config.overrides"},
    {"proxy.config.reader"},
    {"proxy.config.checks"},
    {"proxy.config.encryption"},
    {"proxy.config.alerts"},
    {"proxy.config"},
    {"proxy.stores.contract", "proxy.stores.schema"},
    {"proxy.stores.values", "proxy.stores.cloudformation", "proxy.stores.expressions", "proxy.stores.sqlite_codec"},
    {"proxy.stores.evaluate"},
    {"proxy.stores", "proxy.tasks"},
    {"proxy.limits"},
    {"proxy.audit"},
    {"proxy.alerts"},
    {"proxy.forwarding", "proxy.auth"},
    {"proxy.metering"},
    {"proxy.recording.lines", "proxy.recording.segment", "proxy.recording.ulid"},
    {"proxy.hard"},
    {"proxy.recording"},
    {"proxy.selection"},
    {"proxy.reporting"},
    {"proxy.surface", "proxy.control", "proxy.simulator"},
    {"proxy.choosing"},
    {"proxy.express"},
    {"proxy.pipeline", "proxy.tracing"},
    {"proxy.dataplane", "proxy.hangups"},
    {"proxy.offer", "proxy.reloading", "proxy.stopping", "proxy.workers"},
    {"proxy.app"},
    {"proxy.doctor"},
    {"proxy.commandline", "proxy.commands", "proxy.cli"},
    {"proxy"},
]

IMPURE = {
    "aioboto3", "aiobotocore", "aiohttp", "asyncio", "boto3", "botocore", "logging", "os", "random", "select", "socket",
    "sqlite3", "subprocess", "threading", "time", "uvloop",
}  # fmt: skip


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(file) for file in FILES}


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in named)


def _layer(module: str) -> int:
    best = max((name for layer in LAYERS for name in layer if _is_within(module, name)), key=len)
    return next(number for number, layer in enumerate(LAYERS) if best in layer)


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_point_down(path: Path) -> None:
    own = _layer(_module(path))
    upward = [name for name in _imports(path) if name in MODULES and _layer(name) > own]
    assert upward == []


PURE = [path for path in FILES if "Pure" in (ast.get_docstring(ast.parse(path.read_text())) or "")]


def test_there_are_pure_files() -> None:
    assert {"proxy.stores.values", "proxy.stores.evaluate", "proxy.stores.expressions"} <= {_module(p) for p in PURE}


@pytest.mark.parametrize("path", PURE, ids=_module)
def test_pure_files_do_no_io(path: Path) -> None:
    assert {name.split(".")[0] for name in _imports(path)} & IMPURE == set()
