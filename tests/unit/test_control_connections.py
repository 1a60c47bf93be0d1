"""Which connections the control port keeps: by address, by activity, and by free slots."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.control.control_connections import (
    DEFAULT_PORT_LIMITS,
    ConnectionRegistry,
    ControlPortLimits,
    SlotClass,
    fit_port_limits,
)

from tests.support.clock import ManualClock
from tests.support.effort import tries


def test_full_registry_closes_oldest_idle_connection() -> None:
    registry = ConnectionRegistry(
        ManualClock(), ControlPortLimits(max_connections=4, max_per_network=4, reserved_for_loopback=0)
    )
    silent, asked, busy, late = (_Connection() for _ in range(4))
    new_connections = [_Connection() for _ in range(4)]
    for each in (silent, asked, busy, late):
        assert registry.add(each, "192.0.2.1")
    registry.mark_active(asked)
    assert registry.acquire_slot(busy, SlotClass.ADMIN)
    for each, gone in zip(new_connections[:3], (silent, late, asked), strict=True):
        assert registry.add(each, "127.0.0.1")
        assert gone.is_cut
        registry.remove(gone)  # as its transport tells in its time
    registry.release_slot(busy)
    assert registry.add(new_connections[3], "127.0.0.1")
    assert busy.is_cut
    assert not any(each.is_cut for each in new_connections)


def test_full_address_closes_its_own_connections_only() -> None:
    registry = ConnectionRegistry(
        ManualClock(), ControlPortLimits(max_connections=10, max_per_network=2, reserved_for_loopback=0)
    )
    others, own = [_Connection() for _ in range(2)], [_Connection() for _ in range(2)]
    for address, connections in (("192.0.2.1", others), ("192.0.2.2", own)):
        assert all(registry.add(each, address) for each in connections)
    assert registry.add(_Connection(), "192.0.2.2")
    assert [each.is_cut for each in (*others, *own)] == [False, False, True, False]


def test_remote_connections_do_not_displace_local_ones() -> None:
    registry = ConnectionRegistry(
        ManualClock(), ControlPortLimits(max_connections=6, max_per_network=6, reserved_for_loopback=2)
    )
    here, elsewhere = [_Connection() for _ in range(2)], [_Connection() for _ in range(5)]
    for address, connections in (("127.0.0.1", here), ("192.0.2.1", elsewhere)):
        for each in connections:
            assert registry.add(each, address)
    assert [each.is_cut for each in (*here, *elsewhere)] == [False, False, True, True, True, False, False]


def test_idle_local_connections_take_no_more_than_reserved() -> None:
    """All of 127.0.0.0/8 is here, so a share for each address is no bound."""
    registry = ConnectionRegistry(
        ManualClock(), ControlPortLimits(max_connections=8, max_per_network=2, reserved_for_loopback=2)
    )
    stay = [_Connection() for _ in range(8)]
    assert all(registry.add(each, f"127.0.0.{number}") for number, each in enumerate(stay, 1))
    assert all(registry.add(_Connection(), f"192.0.2.{number}") for number in range(8))
    assert [each.is_cut for each in stay] == [True] * 6 + [False] * 2


# Places.


def test_each_slot_class_leaves_slots_to_others() -> None:
    registry = ConnectionRegistry(
        ManualClock(), ControlPortLimits(max_connections=64, max_per_network=32, reserved_for_loopback=0)
    )

    def held(share: SlotClass, address: str = "192.0.2.1") -> int:
        """How many more there is room for."""
        found = 0
        while registry.add(each := _Connection(), address) and registry.acquire_slot(each, share):
            found += 1
        return found

    assert held(SlotClass.UNVERIFIED) == 16
    assert held(SlotClass.RECEIVING_BODY) == 8
    assert held(SlotClass.CLIENT) == 2
    assert held(SlotClass.ADMIN) == 2
    assert registry.add(_Connection(), "192.0.2.1")
    assert held(SlotClass.CLIENT, "192.0.2.2") == 24
    assert held(SlotClass.ADMIN, "192.0.2.3") == 4
    assert registry.add(_Connection(), "192.0.2.4")


def test_busy_and_reserved_slots_leave_room_for_new_remote_connection() -> None:
    registry = ConnectionRegistry(ManualClock())
    for _ in range(DEFAULT_PORT_LIMITS.reserved_for_loopback):
        assert registry.add(_Connection(), "127.0.0.1")
    places = 0
    for number in range(2 * DEFAULT_PORT_LIMITS.max_connections):
        each = _Connection()
        assert registry.add(each, f"192.0.2.{number % 250}")
        places += registry.acquire_slot(each, SlotClass.ADMIN)
    assert places == 14 * (DEFAULT_PORT_LIMITS.max_connections - 2 * DEFAULT_PORT_LIMITS.reserved_for_loopback) // 16


def test_slot_is_released_after_one_request() -> None:
    registry = ConnectionRegistry(
        ManualClock(), ControlPortLimits(max_connections=16, max_per_network=4, reserved_for_loopback=0)
    )
    own = [_Connection() for _ in range(4)]
    assert [registry.add(each, "192.0.2.1") and registry.acquire_slot(each, SlotClass.CLIENT) for each in own] == [
        True
    ] * 3 + [False]
    assert registry.acquire_slot(own[0], SlotClass.CLIENT)  # it has one
    registry.release_slot(own[0])
    assert registry.acquire_slot(own[3], SlotClass.CLIENT)
    registry.remove(own[1])
    assert not registry.acquire_slot(own[1], SlotClass.CLIENT)  # a closed connection gets no slot


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "hold", "hold", "heard", "release", "left"]),
        st.integers(0, 200),
        st.sampled_from([*(f"192.0.2.{n}" for n in range(4)), "127.0.0.1", "127.0.0.2", "2001:db8::1"]),
        st.sampled_from(SlotClass),
    ),
    max_size=200,
)


@settings(max_examples=tries(200))
@given(_STEPS, st.integers(0, 2000))
def test_new_connection_is_accepted_without_closing_busy_one(
    steps: list[tuple[str, int, str, SlotClass]], descriptors: int
) -> None:
    """Whatever was done before: so a probe is read, and so is the head of an administrator."""
    limits = fit_port_limits(descriptors)
    registry = ConnectionRegistry(ManualClock(), limits)
    here: list[_Connection] = []
    at_work: set[_Connection] = set()
    for step, number, address, share in steps:
        each = here[number % len(here)] if here else None
        if step == "join" or each is None:
            here.append(_Connection())
            assert registry.add(here[-1], address)
        elif step == "hold":
            if registry.acquire_slot(each, share):
                at_work.add(each)
        elif step == "heard":
            registry.mark_active(each)
        elif step == "release":
            registry.release_slot(each)
            at_work.discard(each)
        else:
            registry.remove(each)
            at_work.discard(each)
            here.remove(each)
        here = [each for each in here if not each.is_cut]
        assert not any(each.is_cut for each in at_work)
        assert len(here) <= limits.max_connections


@pytest.mark.parametrize("descriptors", [0, 64, 96, 256, 1024, 65_536])
def test_few_descriptors_are_not_all_used(descriptors: int) -> None:
    fitted = fit_port_limits(descriptors)
    assert fitted.max_connections <= max(8, descriptors / 8)
    assert 2 * fitted.max_per_network <= fitted.max_connections
    assert 0 < fitted.reserved_for_loopback < fitted.max_per_network
    assert (fitted == DEFAULT_PORT_LIMITS) == (descriptors >= 1024)


def test_local_probe_is_accepted_during_remote_flood() -> None:
    registry = ConnectionRegistry(ManualClock())
    for number in range(500):
        others = _Connection()
        assert registry.add(others, f"192.0.2.{number % 250}")
        registry.acquire_slot(others, SlotClass.ADMIN)
    probes = [_Connection() for _ in range(20)]
    assert all(registry.add(each, "127.0.0.1") for each in probes)
    assert not any(each.is_cut for each in probes)
    assert registry.add(_Connection(), "::1")


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::{:x}"])
def test_one_address_does_not_fill_registry(address: str) -> None:
    registry = ConnectionRegistry(ManualClock())
    joined = [_Connection() for _ in range(100)]
    for number, each in enumerate(joined):
        assert registry.add(each, address.format(number))
    assert [each.is_cut for each in joined] == [True] * (100 - DEFAULT_PORT_LIMITS.max_per_network) + [
        False
    ] * DEFAULT_PORT_LIMITS.max_per_network


class _Connection:
    is_cut = False

    def check_timeouts(self, now: float) -> None:
        pass

    def abort(self) -> None:
        self.is_cut = True
