"""Which thresholds are reached, to the pico-dollar, and which addresses are public."""

from __future__ import annotations

from fractions import Fraction
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.alerts.alert import crossed_thresholds, next_threshold_pico
from price_keeper.alerts.webhook import is_public_address

amounts = st.integers(0, 10**30) | st.integers(0, 300)
quotas = st.integers(1, 10**30) | st.integers(1, 300)
percentages = st.lists(st.integers(1, 999), max_size=8)


@given(amounts, quotas, percentages)
def test_crossed_thresholds_match_exact_fractions(known: int, quota: int, thresholds: list[int]) -> None:
    share = Fraction(known, quota) * 100
    assert crossed_thresholds(known, quota, thresholds) == tuple(sorted({pct for pct in thresholds if share >= pct}))


@given(amounts, quotas, percentages)
def test_next_threshold_is_crossed_at_exactly_its_amount(known: int, quota: int, thresholds: list[int]) -> None:
    reached = crossed_thresholds(known, quota, thresholds)
    at = next_threshold_pico(known, quota, thresholds)
    if at is None:
        assert set(reached) == set(thresholds)
    else:
        assert at > known
        assert crossed_thresholds(at - 1, quota, thresholds) == reached
        assert len(crossed_thresholds(at, quota, thresholds)) > len(reached)
        assert (next_threshold_pico(at, quota, thresholds) or at + 1) > at


@given(amounts, st.integers(-5, 0), percentages)
def test_zero_quota_crosses_every_threshold(known: int, quota: int, thresholds: list[int]) -> None:
    assert crossed_thresholds(known, quota, thresholds) == tuple(sorted({pct for pct in thresholds if pct <= 100}))
    assert next_threshold_pico(known, quota, thresholds) is None


def test_crossing_is_exact_to_one_pico_dollar() -> None:
    assert crossed_thresholds(4, 9, (50, 80)) == ()
    assert next_threshold_pico(4, 9, (50, 80)) == 5
    assert crossed_thresholds(5, 9, (80, 50)) == (50,)
    assert crossed_thresholds(10**12, 10**12, (50, 80, 95, 100)) == (50, 80, 95, 100)
    assert crossed_thresholds(10**12 - 1, 10**12, (50, 80, 95, 100)) == (50, 80, 95)


PRIVATE_4 = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "169.254.170.2",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "192.88.99.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
]
PUBLIC_4 = [
    "1.1.1.1",
    "8.8.8.8",
    "52.94.236.248",
    "100.63.255.255",
    "100.128.0.1",
    "172.15.0.1",
    "172.32.0.1",
    "223.255.255.255",
]
PRIVATE_6 = [
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "ff0e::1",
    "100::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1",
    "3fff::1",
    "64:ff9b:1::1",
    "5f00::1",
    "::ffff:0:127.0.0.1",
    "4000::1",
]
PUBLIC_6 = ["2600:1f18::1", "2a00:1450:4001::200e", "2606:4700:4700::1111"]


def wrapped(address: str) -> list[str]:
    number = int(IPv4Address(address))
    return [
        f"::ffff:{address}",
        f"64:ff9b::{address}",
        str(IPv6Address((0x2002 << 112) | (number << 80) | 1)),
    ]


@pytest.mark.parametrize("address", PRIVATE_4)
def test_private_address_is_recognised_in_every_embedding(address: str) -> None:
    assert [each for each in [address, *wrapped(address)] if is_public_address(each)] == []


@pytest.mark.parametrize("address", PUBLIC_4)
def test_public_address_is_allowed_in_every_embedding(address: str) -> None:
    assert all(map(is_public_address, [address, *wrapped(address)]))


def test_ipv6_special_ranges_are_not_public() -> None:
    assert [each for each in PRIVATE_6 if is_public_address(each)] == []
    assert all(map(is_public_address, PUBLIC_6))


@pytest.mark.parametrize(
    "text", ["", "localhost", "127.1", "0x7f000001", "2130706433", "1.1.1.1 ", "[::1]", "1.1.1.1/8"]
)
def test_malformed_address_is_not_public(text: str) -> None:
    assert not is_public_address(text)


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6, network="2000::/3"))
def test_public_address_is_global_for_python_too(address: IPv4Address | IPv6Address) -> None:
    if is_public_address(str(address)):
        found = ip_address(str(address))
        assert found.is_global
        assert not any([found.is_multicast, found.is_reserved, found.is_private])
