"""Of the data port's connections one address elsewhere has at most half, and this machine as many as there are."""

from __future__ import annotations

import pytest
from price_keeper.clock import SystemClock
from price_keeper.exchange import Request, Responder
from price_keeper.server.listener import Listener
from price_keeper.server.server_limits import DEFAULT_LIMITS, UNLIMITED_DESCRIPTORS, ServerLimits, fit_to_descriptors
from price_keeper.tasks import Tasks


class Connection:
    protocol = "unknown"
    open_streams = 0

    def check_timeouts(self, now: float) -> None: ...

    def drain(self) -> None: ...

    def abort(self) -> None: ...


async def nothing(_: Request, __: Responder) -> None: ...


@pytest.mark.parametrize(
    ("one", "same", "another"),
    [
        ("203.0.113.7", "203.0.113.7", "203.0.113.8"),
        ("203.0.113.7", "::ffff:203.0.113.7", "::ffff:203.0.113.8"),
        ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"),
    ],
)
async def test_one_address_has_at_most_half_of_connections(one: str, same: str, another: str) -> None:
    async with Tasks(SystemClock()) as tasks:
        listener = Listener(nothing, SystemClock(), tasks, ServerLimits(connections=10, connections_per_network=3))
        connections = [Connection() for _ in range(3)]
        for each in connections:
            assert listener.count_surplus(one) <= 0
            listener.add_connection(each, one)
        assert listener.count_surplus(one) == listener.count_surplus(same) == 1
        assert listener.count_surplus(another) <= 0
        assert "or 3 from one address" in listener.too_many_connections.message
        listener.add_connection(late := Connection(), same)
        assert listener.count_surplus(one) == 2
        for each in (late, *connections):
            listener.remove_connection(each)
            listener.remove_connection(each)  # as a newcomer that has become what it is
        assert listener.count_surplus(one) <= 0
        assert not listener._connections_by_network


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", ""])
async def test_local_programs_share_all_connections(address: str) -> None:
    async with Tasks(SystemClock()) as tasks:
        listener = Listener(nothing, SystemClock(), tasks, ServerLimits(connections=10, connections_per_network=3))
        for _ in range(10):
            assert listener.count_surplus(address) <= 0
            listener.add_connection(Connection(), address)
        assert listener.count_surplus(address) == 1


def test_share_of_address_follows_from_descriptors() -> None:
    assert fit_to_descriptors(UNLIMITED_DESCRIPTORS).connections_per_network == DEFAULT_LIMITS.connections // 2
    few = fit_to_descriptors(1024)
    assert few.connections_per_network == few.connections // 2
