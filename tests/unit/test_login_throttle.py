"""Wrong secrets, counted by client and by address."""

from __future__ import annotations

import pytest
from price_keeper.auth.throttles import (
    ADMIN,
    FAILURE_BURST,
    FAILURE_INTERVAL_SECONDS,
    LoginThrottle,
    network_of,
)
from price_keeper.errors import TooManyRequests

ORG = "550e8400-e29b-41d4-a716-446655440000"


@pytest.mark.parametrize(
    ("address", "same", "other"),
    [
        ("192.0.2.1", "192.0.2.1", "192.0.2.2"),
        ("192.0.2.1", "::ffff:192.0.2.1", "::ffff:192.0.2.2"),
        ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", "2001:db8:0:1::1"),
        ("fe80::1%eth0", "fe80::2", "fe81::1"),
        ("", "a socket's path", "127.0.0.1"),
    ],
)
def test_addresses_of_one_network_are_counted_together(address: str, same: str, other: str) -> None:
    assert network_of(address) == network_of(same) != network_of(other)


def failed(wrong: LoginThrottle, client: str, address: str, times: int = 1) -> list[float]:
    """The waits of those that were refused."""
    waits = []
    for _ in range(times):
        try:
            wrong.count_failure(client, address)
        except TooManyRequests as refused:
            waits.append(refused.retry_after or 0.0)
    return waits


def test_each_client_and_each_address_has_its_own_bucket() -> None:
    wrong = LoginThrottle(lambda: 0.0)
    assert failed(wrong, f"org-{ORG}", "192.0.2.1", FAILURE_BURST + 2) == [FAILURE_INTERVAL_SECONDS] * 2
    assert len(failed(wrong, f"org-{ORG}", "192.0.2.2")) == 1  # the client's are used up
    assert len(failed(wrong, f"org-{ORG}-app-web", "192.0.2.1")) == 1  # the address's are
    assert failed(wrong, f"org-{ORG}-app-web", "192.0.2.3") == []


def test_impossible_client_ids_share_one_bucket() -> None:
    wrong = LoginThrottle(lambda: 0.0)
    waits = [each for number in range(FAILURE_BURST + 1) for each in failed(wrong, "x" * number, f"192.0.2.{number}")]
    assert waits == [FAILURE_INTERVAL_SECONDS]


def test_non_client_logins_are_counted_by_address() -> None:
    wrong = LoginThrottle(lambda: 0.0)
    for number in range(FAILURE_BURST + 5):
        wrong.count_failure(None, f"192.0.2.{number}")
    assert len(failed(wrong, "x", "198.51.100.1", FAILURE_BURST)) == 0
    assert failed(wrong, ADMIN, "198.51.100.2", FAILURE_BURST) == []
    assert failed(wrong, ADMIN, "198.51.100.3") == [FAILURE_INTERVAL_SECONDS]
