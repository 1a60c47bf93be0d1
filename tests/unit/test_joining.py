"""What is kept of answers for those who ask again, and that it stays within its bounds."""

from __future__ import annotations

import random

import pytest

from proxy.forwarding import joining as limits
from proxy.forwarding.joining import CALL_BYTES, Joining, Shared


class Nobody:
    """A responder that only counts."""

    has_started = is_gone = False

    def __init__(self) -> None:
        self.size = 0
        self.is_finished = False

    def attach(self, flow: object) -> None: ...

    def start(self, *_: object) -> None: ...

    def write(self, data: bytes) -> None:
        self.size += len(data)

    def flush(self) -> None: ...

    def finish(self) -> None:
        self.is_finished = True

    def abort(self) -> None: ...


def test_what_is_kept_in_all_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_BYTES_IN_ALL", 20 * (CALL_BYTES + 1064))
    joining = Joining(lambda: 0.0)

    def call(key: int) -> Shared:
        shared = joining.share(key, Nobody())
        shared.start(200, (), None)
        shared.write(b"x" * 1000)
        return shared

    for key in range(30):
        call(key).finish()
    assert list(joining._calls) == list(range(10, 30))
    under_way = [call(key) for key in range(100, 130)]  # they count from their first byte, and nobody's are taken away
    assert joining.kept_bytes <= limits.KEPT_BYTES_IN_ALL
    assert list(joining._calls) == list(range(100, 120))
    late = Nobody()
    assert not joining.join(125, late)
    assert joining.join(100, late)
    for shared in under_way:
        shared.finish()
    assert (late.size, late.is_finished) == (1000, True)
    for shared in under_way:
        shared.finish()  # twice is once
        shared.abort()
    joining.now = lambda: limits.KEPT_SECONDS + 1
    call(1).finish()
    assert (list(joining._calls), joining.kept_bytes) == ([1], CALL_BYTES + 1064)


def test_random_use_leaves_nothing_behind() -> None:
    """Whatever becomes of calls, in any order, the bytes counted are those of the calls that can be joined."""
    chance, time = random.Random(3), 0.0
    joining = Joining(lambda: time)
    under_way: list[Shared] = []
    for _ in range(20_000):
        time += chance.random()
        match chance.randrange(6):
            case 0:
                under_way.append(joining.share(chance.randrange(50), Nobody()))
                if chance.random() < 0.9:
                    under_way[-1].start(chance.choice((200, 200, 500)), (), None)
            case 1 | 2 if under_way:
                chance.choice(under_way).write(b"x" * chance.randrange(300_000))
            case 3 if under_way:
                under_way.pop(chance.randrange(len(under_way))).finish()
            case 4 if under_way:
                under_way.pop(chance.randrange(len(under_way))).abort()
            case _:
                joining.join(chance.randrange(50), Nobody())
        kept = joining._calls.values()
        assert joining.kept_bytes == sum(CALL_BYTES + shared.kept_bytes for shared in kept)
        assert all(shared.is_joinable for shared in kept)
    assert sum(shared.is_joinable for shared in joining._finished) <= len(joining._calls) <= 50
