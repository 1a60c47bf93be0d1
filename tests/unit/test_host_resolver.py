"""Where a host is: one lookup for all concurrent callers, each of which may give up alone."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from price_keeper.upstream import connection_pool
from price_keeper.upstream.connection_pool import HostResolver


class Resolver:
    """Answers on command, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        self.answers: Any = [(socket.AF_INET, 1, 6, "", (f"127.0.0.{n}", 80)) for n in (1, 2, 1)]

    def __call__(self, host: str, *_: Any) -> Any:
        self.asked.append(host)
        self.may_answer.wait(10)
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    resolver = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    yield resolver
    resolver.may_answer.set()


async def test_concurrent_resolves_share_one_lookup(resolver: Resolver) -> None:
    name = HostResolver("bedrock.test", 80)
    asking = [asyncio.ensure_future(name.resolve()) for _ in range(50)]
    await asyncio.sleep(0)
    resolver.may_answer.set()
    assert await asyncio.gather(*asking) == [["127.0.0.1", "127.0.0.2"]] * 50
    assert resolver.asked == ["bedrock.test"]
    await name.resolve()
    assert len(resolver.asked) == 2  # a later caller gets what holds by then


async def test_cancelled_resolve_does_not_affect_others(resolver: Resolver) -> None:
    name = HostResolver("bedrock.test", 80)
    patient = asyncio.ensure_future(name.resolve())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await name.resolve()
    resolver.may_answer.set()
    assert await patient == ["127.0.0.1", "127.0.0.2"]


async def test_hanging_lookup_is_given_up_and_not_joined_later(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "CONNECT_TIMEOUT_SECONDS", 0.01)
    name = HostResolver("bedrock.test", 80)
    with pytest.raises(TimeoutError):
        await name.resolve()
    monkeypatch.undo()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(socket.AF_INET, 1, 6, "", ("127.0.0.9", 80))])
    async with asyncio.timeout(5):
        assert await name.resolve() == ["127.0.0.9"]


async def test_failed_lookup_is_shared_and_not_cached(resolver: Resolver) -> None:
    name = HostResolver("bedrock.test", 80)
    resolver.answers = socket.gaierror(socket.EAI_AGAIN, "try again")
    resolver.may_answer.set()
    for found in await asyncio.gather(name.resolve(), name.resolve(), return_exceptions=True):
        assert isinstance(found, socket.gaierror)
    resolver.answers = [(socket.AF_INET, 1, 6, "", ("127.0.0.9", 80))]
    assert await name.resolve() == ["127.0.0.9"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "fe80::1%lo"])
async def test_ip_address_needs_no_lookup(address: str, resolver: Resolver) -> None:
    assert await HostResolver(address, 80).resolve() == [address]
    assert resolver.asked == []
