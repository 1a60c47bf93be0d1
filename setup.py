"""Compiles the data port's hot path, in wheels; an editable installation, as of `make setup`, is pure Python.

PRICE_KEEPER_COMPILED=1 always compiles, and 0 never does. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from setuptools import setup

# What nearly every call walks through, and whatever inherits from a class of these.
COMPILED = [
    "proxy/price_keeper/auth/authenticate.py",
    "proxy/price_keeper/auth/revocation.py",
    "proxy/price_keeper/budgets/budget_registry.py",
    "proxy/price_keeper/budgets/budget_state.py",
    "proxy/price_keeper/budgets/label_policy.py",
    "proxy/price_keeper/budgets/label_selector.py",
    "proxy/price_keeper/exchange.py",
    "proxy/price_keeper/handler.py",
    "proxy/price_keeper/ledger/aggregator.py",
    "proxy/price_keeper/ledger/journal.py",
    "proxy/price_keeper/ledger/ledger_entries.py",
    "proxy/price_keeper/ledger/segment.py",
    "proxy/price_keeper/parse_call.py",
    "proxy/price_keeper/price_dimensions.py",
    "proxy/price_keeper/rates/rate_lease.py",
    "proxy/price_keeper/rates/rate_lease_manager.py",
    "proxy/price_keeper/rates/rate_limiter.py",
    "proxy/price_keeper/rates/token_bucket.py",
    "proxy/price_keeper/server/http1.py",
    "proxy/price_keeper/server/http1_parser.py",
    "proxy/price_keeper/server/http2.py",
    "proxy/price_keeper/server/http2_frames.py",
    "proxy/price_keeper/server/http2_headers.py",
    "proxy/price_keeper/server/http2_stream.py",
    "proxy/price_keeper/server/listener.py",
    "proxy/price_keeper/server/request_building.py",
    "proxy/price_keeper/server/write_batcher.py",
    "proxy/price_keeper/telemetry/request_stats.py",
    "proxy/price_keeper/upstream/connection_pool.py",
    "proxy/price_keeper/upstream/eventstream.py",
    "proxy/price_keeper/upstream/forwarder.py",
    "proxy/price_keeper/upstream/relay.py",
    "proxy/price_keeper/upstream/retry_joiner.py",
    "proxy/price_keeper/upstream/sigv4.py",
    "proxy/price_keeper/usage/guardrail_usage.py",
    "proxy/price_keeper/usage/meter.py",
    "proxy/price_keeper/usage/meter_factory.py",
    "proxy/price_keeper/usage/model_families.py",
    "proxy/price_keeper/usage/price_table.py",
    "proxy/price_keeper/usage/stream_usage.py",
    "proxy/price_keeper/usage/token_usage.py",
    "proxy/price_keeper/usage/usage_reader.py",
]


def is_to_be_compiled(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Without PRICE_KEEPER_COMPILED, wheels are compiled where mypy is installed, which does it."""
    wanted = environ.get("PRICE_KEEPER_COMPILED")
    return "bdist_wheel" in arguments and find_spec("mypyc") is not None if wanted is None else wanted == "1"


def extensions() -> list[Any]:
    if not is_to_be_compiled(sys.argv, os.environ):
        return []
    from mypyc.build import mypycify

    return mypycify(COMPILED, opt_level="2", multi_file=True)


if __name__ == "__main__":
    setup(ext_modules=extensions(), package_dir={"": "proxy"})
