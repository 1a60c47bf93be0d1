"""A host has one port, at all of its addresses."""

from __future__ import annotations

import errno
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from price_keeper.errors import ListenFailed
from price_keeper.server.sockets import MAX_BIND_ATTEMPTS, bind_sockets

ADDRESSES = ("127.0.0.1", "127.0.0.2", "::1")  # as `localhost` has several on most machines, though not on all


class Machine:
    """What the system's sockets do, with ports that the test takes: a real port may be taken by any program."""

    def __init__(self, taken: dict[str, set[int]], missing: frozenset[str] = frozenset()) -> None:
        self.taken, self.missing = taken, missing
        self.open: list[Any] = []
        self.offered = 40_000

    def bind(self, host: str, port: int) -> int:
        if host in self.missing:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        if not port:
            self.offered += 1
            port = self.offered
        if port in self.taken.get(host, set()):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        return port


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine({})

    class Socket:
        def __init__(self, family: int, kind: int) -> None:
            self.name: tuple[str, int] | None = None
            made.open.append(self)

        def setblocking(self, flag: bool) -> None: ...

        def setsockopt(self, *option: int) -> None: ...

        def bind(self, address: tuple[Any, ...]) -> None:
            self.name = (address[0], made.bind(*address[:2]))

        def getsockname(self) -> tuple[str, int] | None:
            return self.name

        def close(self) -> None:
            made.open.remove(self)

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        families = {address: socket.AF_INET6 if ":" in address else socket.AF_INET for address in ADDRESSES}
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for address, family in families.items()]

    monkeypatch.setattr("price_keeper.server.sockets.socket", SimpleNamespace(**{**vars(socket), "socket": Socket}))
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return made


def names(sockets: list[socket.socket]) -> list[tuple[str, int]]:
    return [each.getsockname() for each in sockets]


async def test_free_port_is_the_same_at_every_address(machine: Machine) -> None:
    assert names(await bind_sockets("localhost", 0)) == [(address, 40_001) for address in ADDRESSES]


async def test_port_taken_at_a_later_address_is_skipped_and_closed(machine: Machine) -> None:
    machine.taken |= {"127.0.0.2": {40_001, 40_002}, "::1": {40_003}}
    sockets = await bind_sockets("localhost", 0)
    assert names(sockets) == [(address, 40_004) for address in ADDRESSES]
    assert machine.open == sockets


async def test_port_search_is_bounded(machine: Machine) -> None:
    machine.taken["::1"] = set(range(65_536))
    with pytest.raises(ListenFailed, match=r"^cannot listen on localhost:0: Address already in use$"):
        await bind_sockets("localhost", 0)
    assert machine.offered == 40_000 + MAX_BIND_ATTEMPTS
    assert machine.open == []


async def test_given_port_taken_at_one_address_is_refused_at_once(machine: Machine) -> None:
    machine.taken["127.0.0.2"] = {8080}
    with pytest.raises(ListenFailed, match=r"^cannot listen on localhost:8080: Address already in use$"):
        await bind_sockets("localhost", 8080)
    assert machine.open == []


async def test_address_that_this_machine_lacks_is_left_out(machine: Machine) -> None:
    machine.missing = frozenset({"127.0.0.2", "::1"})
    sockets = await bind_sockets("localhost", 0)
    assert names(sockets) == [("127.0.0.1", 40_001)]
    assert machine.open == sockets


@pytest.mark.parametrize(
    ("host", "words"),
    [("192.0.2.1", r"192\.0\.2\.1:0: Cannot assign"), ("2001:db8::1", r"\[2001:db8::1\]:0: "), ("no.invalid", ": ")],
)
async def test_unusable_address_is_reported_in_one_line(host: str, words: str) -> None:
    with pytest.raises(ListenFailed, match=f"^cannot listen on .*{words}"):
        await bind_sockets(host, 0)


async def test_taken_port_is_not_shared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(ListenFailed, match="Address already in use"):
        await bind_sockets("127.0.0.1", holder.getsockname()[1])
