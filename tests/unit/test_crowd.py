"""Who may stay connected to the control port: by address, by what they do, and by how much room there is."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.control.connections import DEFAULT, Crowd, Limits, fitting
from tests.support.clock import ManualClock


def test_who_has_asked_for_nothing_goes_first_and_of_those_who_came_first() -> None:
    crowd = Crowd(ManualClock(), Limits(connections=4, of_one=4, for_loopback=0))
    stay, kept, busy, late = (_Connection(idleness) for idleness in (2, 1, 0, 2))
    newcomers = [_Connection() for _ in range(4)]
    for each in (stay, kept, busy, late):
        assert crowd.joined(each, "192.0.2.1")
    for each, gone in zip(newcomers[:3], (stay, late, kept), strict=True):
        assert crowd.joined(each, "127.0.0.1")
        assert gone.is_cut
        crowd.left(gone)  # as its transport tells in its time
    assert not crowd.joined(newcomers[3], "127.0.0.1")
    assert not any(each.is_cut for each in (busy, *newcomers))


def test_who_has_his_share_takes_the_place_of_nobody_else() -> None:
    crowd = Crowd(ManualClock(), Limits(connections=10, of_one=2, for_loopback=0))
    others = [_Connection(2) for _ in range(2)]
    own = [_Connection(), _Connection(1)]
    for address, connections in (("192.0.2.1", others), ("192.0.2.2", own)):
        assert all(crowd.joined(each, address) for each in connections)
    assert crowd.joined(_Connection(), "192.0.2.2")
    assert [each.is_cut for each in (*others, *own)] == [False, False, False, True]
    assert not crowd.joined(_Connection(), "192.0.2.2")


def test_nobody_from_elsewhere_takes_the_place_of_who_is_here() -> None:
    crowd = Crowd(ManualClock(), Limits(connections=6, of_one=6, for_loopback=2))
    here, elsewhere = [_Connection(2), _Connection(1)], [_Connection() for _ in range(4)]
    for address, connections in (("127.0.0.1", here), ("192.0.2.1", elsewhere)):
        for each in connections:
            crowd.joined(each, address)
    assert not crowd.joined(_Connection(), "192.0.2.2")
    assert not any(each.is_cut for each in here)
    assert crowd.joined(_Connection(), "127.0.0.1")


def test_who_only_stays_here_takes_no_more_than_is_kept_for_this_machine() -> None:
    """All of 127.0.0.0/8 is here, so a share for each address is no bound."""
    crowd = Crowd(ManualClock(), Limits(connections=8, of_one=2, for_loopback=2))
    stay = [_Connection(2) for _ in range(8)]
    assert all(crowd.joined(each, f"127.0.0.{number}") for number, each in enumerate(stay, 1))
    assert [crowd.joined(_Connection(), f"192.0.2.{number}") for number in range(8)] == [True] * 6 + [False] * 2
    assert [each.is_cut for each in stay] == [True] * 6 + [False] * 2


@pytest.mark.parametrize("descriptors", [0, 64, 96, 256, 1024, 65_536])
def test_few_descriptors_are_not_all_taken(descriptors: int) -> None:
    fitted = fitting(descriptors)
    assert fitted.connections <= max(8, descriptors / 8)
    assert 2 * fitted.of_one <= fitted.connections
    assert 0 < fitted.for_loopback < fitted.of_one
    assert (fitted == DEFAULT) == (descriptors >= 1024)


def test_a_probe_of_this_machine_gets_through_whatever_comes_from_others() -> None:
    crowd = Crowd(ManualClock())
    joined: list[Any] = [
        _Connection() for number in range(500) if crowd.joined(_Connection(), f"192.0.2.{number % 250}")
    ]
    assert len(joined) == DEFAULT.connections - DEFAULT.for_loopback
    probes = [_Connection() for _ in range(20)]
    got_in = [each for each in probes if crowd.joined(each, "127.0.0.1")]
    assert len(got_in) == DEFAULT.for_loopback
    crowd.left(got_in[0])
    assert crowd.joined(_Connection(), "::1")


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::{:x}"])
def test_one_address_does_not_take_all_the_room(address: str) -> None:
    crowd = Crowd(ManualClock())
    joined = [crowd.joined(_Connection(), address.format(number)) for number in range(100)]
    assert joined == [True] * DEFAULT.of_one + [False] * (100 - DEFAULT.of_one)


class _Connection:
    def __init__(self, idleness: int = 0) -> None:
        self.idleness = idleness
        self.is_cut = False

    def check_time(self, now: float) -> None:
        pass

    def cut(self) -> None:
        self.is_cut = True
