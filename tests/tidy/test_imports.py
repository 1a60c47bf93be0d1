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
    {"bedrock_simulator"},  # of the product it knows nothing
    {
        "price_keeper.domain",
        "price_keeper.errors",
        "price_keeper.clock",
        "price_keeper.client_tls",
        "price_keeper.org_calendar",
        "price_keeper.exchange",
        "price_keeper.operations",
        "price_keeper.model_ids",
        "price_keeper.price_dimensions",
        "price_keeper.leaky_buckets",
        "price_keeper.bounded_dict",
        "price_keeper.responder_wrapper",
        "price_keeper.vendor_apis",
    },
    # The configuration.
    {"price_keeper.config.config_problems"},
    {"price_keeper.config.yaml_tree"},
    {"price_keeper.config.config_reader"},
    {"price_keeper.config.value_checks"},
    {"price_keeper.config.config_sections"},
    {"price_keeper.config"},
    # What every service needs.
    {"price_keeper.telemetry.incident"},
    {"price_keeper.telemetry.logs", "price_keeper.telemetry.request_stats"},
    {"price_keeper.telemetry"},
    {"price_keeper.telemetry.build_info"},
    {"price_keeper.tasks", "price_keeper.local_responses"},
    {"price_keeper.aws_session", "price_keeper.provider_chain", "price_keeper.single_flight"},
    # The store: its contract, pure files, the engines.
    {"price_keeper.stores.contract"},
    {"price_keeper.stores.schema"},
    {"price_keeper.stores.cloudformation", "price_keeper.stores.item_values"},
    {"price_keeper.stores.dynamodb_expressions", "price_keeper.stores.item_codec"},
    {"price_keeper.stores"},
    # The services. None imports one of a later line.
    {"price_keeper.auth"},
    {"price_keeper.alerts"},
    {"price_keeper.ledger.segment", "price_keeper.ledger.ulid"},
    {"price_keeper.ledger.journal_lock", "price_keeper.ledger.lease_rows", "price_keeper.ledger.ledger_entries"},
    {"price_keeper.ledger.journal", "price_keeper.ledger.lease_file"},
    {"price_keeper.ledger"},
    {"price_keeper.telemetry.tracing"},  # of what the ledger records of a call
    {"price_keeper.rates"},
    {"price_keeper.upstream"},
    {"price_keeper.usage"},
    {"price_keeper.parse_call"},
    {"price_keeper.anthropic_messages"},
    {"price_keeper.budgets.hard"},
    {"price_keeper.budgets"},
    {"price_keeper.reports"},
    # The ports.
    {"price_keeper.handler"},
    {
        "price_keeper.server.request_building",
        "price_keeper.server.server_limits",
        "price_keeper.server.write_batcher",
    },
    {"price_keeper.server"},
    {"price_keeper.server.data_port_metrics"},
    {"price_keeper.control"},
    # The process.
    {"price_keeper.workers"},
    {"price_keeper.data_port_wiring", "price_keeper.config_reload"},
    {"price_keeper.catalog"},
    {"price_keeper.app"},
    {"price_keeper.doctor"},
    {"price_keeper.cli"},
    {"price_keeper"},
]

IMPURE = {
    "aioboto3", "aiobotocore", "aiohttp", "asyncio", "boto3", "botocore", "logging", "os", "random", "select", "socket",
    "sqlite3", "subprocess", "threading", "time", "uvloop",
}  # fmt: skip


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT / "proxy").with_suffix("").parts
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


def test_layers_name_existing_modules() -> None:
    assert set().union(*LAYERS) - MODULES == set()


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_point_down(path: Path) -> None:
    own = _layer(_module(path))
    upward = [name for name in _imports(path) if name in MODULES and _layer(name) > own]
    assert upward == []


PURE = [path for path in FILES if "Pure" in (ast.get_docstring(ast.parse(path.read_text())) or "")]


def test_pure_modules_exist() -> None:
    assert {
        "price_keeper.stores.item_values",
        "price_keeper.stores.dynamodb_expressions",
    } <= {_module(p) for p in PURE}


@pytest.mark.parametrize("path", PURE, ids=_module)
def test_pure_modules_do_no_io(path: Path) -> None:
    assert {name.split(".")[0] for name in _imports(path)} & IMPURE == set()
