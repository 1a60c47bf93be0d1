"""What settings say of limits: every mistake, and the bucket that comes of what is good."""

from __future__ import annotations

from typing import Any

import pytest
from price_keeper.domain import Scope
from price_keeper.rates.rate_limit_settings import parse_rate_limits, validate_rate_limits
from price_keeper.rates.token_bucket import RateLimit
from price_keeper.stores import schema

SCOPE = Scope("550e8400-e29b-41d4-a716-446655440000", "web")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, "expected a mapping of rpm, tpm, burst_secs, mode, found 7"),
        ({}, "expected rpm or tpm; leave limits out where there is none"),
        ({"mode": "lease"}, "expected rpm or tpm; leave limits out where there is none"),
        ({"rpm": 0}, "rpm: expected a whole number from 1 to 1000000000, found 0"),
        ({"rpm": True}, "rpm: expected a whole number from 1 to 1000000000, found True"),
        ({"tpm": 1.5}, "tpm: expected a whole number from 1 to 1000000000, found 1.5"),
        ({"rpm": 10**9 + 1}, "rpm: expected a whole number from 1 to 1000000000, found 1000000001"),
        ({"rpm": 1, "burst_secs": 3601}, "burst_secs: expected a whole number from 1 to 3600, found 3601"),
        ({"rpm": 1, "mode": "often"}, "mode: expected one of lease, exact, found often"),
        (
            {"rpm": 0, "tmp": 5},
            "rpm: expected a whole number from 1 to 1000000000, found 0; "
            "unknown: tmp; allowed are rpm, tpm, burst_secs, mode",
        ),
    ],
)
def test_invalid_rate_limits_are_reported(value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=r"expected|unknown") as caught:
        validate_rate_limits(value)
    assert str(caught.value) == expected


def test_many_mistakes_are_truncated() -> None:
    with pytest.raises(ValueError, match="unknown") as caught:
        validate_rate_limits({f"x{number}" * 1000: 1 for number in range(1000)})
    assert len(str(caught.value)) < 1000


def test_empty_values_are_dropped() -> None:
    assert validate_rate_limits({"rpm": 5, "tpm": None, "mode": None}) == {"rpm": 5}


def test_bucket_holds_one_minute_by_default() -> None:
    limits = parse_rate_limits(SCOPE, {"limits": {"rpm": 600, "tpm": 9000}, "version": 3})
    assert limits is not None
    assert limits.bucket.key == schema.rate_bucket_key(SCOPE, "RATE")
    assert limits.bucket.version == 3
    assert limits.bucket.limits == (
        RateLimit("rpm", 600_000, 600_000, 60_000),
        RateLimit("tpm", 9_000_000, 9_000_000, 60_000),
    )
    assert (limits.rates, limits.is_exact) == ({"rpm": 600, "tpm": 9000}, False)


def test_short_burst_allows_one_call() -> None:
    limits = parse_rate_limits(SCOPE, {"limits": {"rpm": 6, "burst_secs": 1, "mode": "exact"}})
    assert limits is not None
    assert limits.bucket.limits == (RateLimit("rpm", 1000, 6000, 60_000),)
    assert limits.is_exact


def test_missing_limits_are_none() -> None:
    assert parse_rate_limits(SCOPE, None) is None
    assert parse_rate_limits(SCOPE, {"version": 1}) is None
