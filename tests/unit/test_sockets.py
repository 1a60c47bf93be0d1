"""A host has one port, at all of its addresses."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from proxy.errors import ListenFailed
from proxy.surface.sockets import bound


@contextmanager
def closing(sockets: list[socket.socket]) -> Iterator[list[socket.socket]]:
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


@pytest.fixture
def _two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `localhost` is on most machines, though not on all."""

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        kinds = [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET, ("127.0.0.2", port))]
        kinds += [(socket.AF_INET6, ("::1", port, 0, 0))] if socket.has_ipv6 else []
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in kinds]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.usefixtures("_two_addresses")
async def test_a_free_port_is_the_same_at_every_address() -> None:
    with closing(await bound("localhost", 0)) as sockets:
        assert len(sockets) >= 2
        assert len({each.getsockname()[1] for each in sockets}) == 1


@pytest.mark.usefixtures("_two_addresses")
async def test_a_port_that_is_free_at_one_address_alone_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    bind = socket.socket.bind

    class Crowded(socket.socket):
        def bind(self, address: Any) -> None:
            if address[0] == "127.0.0.2" and len(taken) < 3:
                taken.append(address)
                raise OSError(errno.EADDRINUSE, "taken")
            bind(self, address)

    monkeypatch.setattr(socket, "socket", Crowded)
    with closing(await bound("localhost", 0)) as sockets:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        assert len(taken) == 3


@pytest.mark.usefixtures("_two_addresses")
async def test_an_address_that_this_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = socket.socket.bind

    class Without(socket.socket):
        def bind(self, address: Any) -> None:
            if address[0] != "127.0.0.1":
                raise OSError(errno.EADDRNOTAVAIL, "not here")
            bind(self, address)

    monkeypatch.setattr(socket, "socket", Without)
    with closing(await bound("localhost", 0)) as sockets:
        assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("host", "words"),
    [("192.0.2.1", r"192\.0\.2\.1:0: Cannot assign"), ("2001:db8::1", r"\[2001:db8::1\]:0: "), ("no.invalid", ": ")],
)
async def test_what_cannot_be_listened_on_is_one_clear_line(host: str, words: str) -> None:
    with pytest.raises(ListenFailed, match=f"^cannot listen on .*{words}"):
        await bound(host, 0)


async def test_a_port_that_is_taken_is_not_shared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(ListenFailed, match="Address already in use"):
        await bound("127.0.0.1", holder.getsockname()[1])
