"""Compiles the data port's hot path where that is asked for: PRICE_KEEPER_COMPILED=1. Without it, all is pure Python.

What else there is to say about the package stands in pyproject.toml.
"""

from __future__ import annotations

import os
from typing import Any

from setuptools import setup

# What nearly every call walks through, and whatever inherits from a class of these.
COMPILED = [
    "proxy/auth/identify.py",
    "proxy/auth/revocation.py",
    "proxy/choosing.py",
    "proxy/exchange.py",
    "proxy/express.py",
    "proxy/forwarding/eventstream.py",
    "proxy/forwarding/forwarder.py",
    "proxy/forwarding/relay.py",
    "proxy/forwarding/sigv4.py",
    "proxy/forwarding/upstream.py",
    "proxy/limits/admission.py",
    "proxy/limits/bucket.py",
    "proxy/limits/lease.py",
    "proxy/limits/leasing.py",
    "proxy/metering/bodies.py",
    "proxy/metering/converse_stream.py",
    "proxy/metering/counts.py",
    "proxy/metering/guardrail_traces.py",
    "proxy/metering/guardrails.py",
    "proxy/metering/json_tail.py",
    "proxy/metering/kept.py",
    "proxy/metering/pricing.py",
    "proxy/metering/reading.py",
    "proxy/metering/streams.py",
    "proxy/metering/usage.py",
    "proxy/recording/aggregator.py",
    "proxy/recording/entries.py",
    "proxy/recording/expected.py",
    "proxy/recording/guarded.py",
    "proxy/recording/jobs.py",
    "proxy/recording/journal.py",
    "proxy/recording/meter.py",
    "proxy/recording/metering.py",
    "proxy/recording/segment.py",
    "proxy/selection/admitting.py",
    "proxy/selection/callers_limits.py",
    "proxy/selection/payer.py",
    "proxy/selection/policy.py",
    "proxy/selection/serving.py",
    "proxy/selection/spent.py",
    "proxy/selection/standing.py",
    "proxy/selection/standings.py",
    "proxy/surface/bodies.py",
    "proxy/surface/calls.py",
    "proxy/surface/http1.py",
    "proxy/surface/http1_answer.py",
    "proxy/surface/http1_request.py",
    "proxy/surface/listener.py",
    "proxy/surface/outbox.py",
    "proxy/traffic.py",
]


def extensions() -> list[Any]:
    if os.environ.get("PRICE_KEEPER_COMPILED") != "1":
        return []
    from mypyc.build import mypycify

    return mypycify(COMPILED, opt_level="2", multi_file=True)


if __name__ == "__main__":
    setup(ext_modules=extensions())
