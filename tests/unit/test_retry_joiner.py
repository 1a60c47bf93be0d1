"""What is kept of answers for those who ask again, and that it stays within its bounds."""

from __future__ import annotations

import asyncio
import random

import pytest
from bedrock_simulator import event_frames
from price_keeper.exchange import Header
from price_keeper.upstream import retry_joiner as limits
from price_keeper.upstream.retry_joiner import (
    CALL_OVERHEAD_BYTES,
    PIECE_OVERHEAD_BYTES,
    RetryJoiner,
    SharedResponse,
)


class Nobody:
    """A responder that only counts."""

    has_started = is_disconnected = False

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


def test_kept_responses_are_bounded_and_oldest_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TOTAL_BYTES", 20 * (CALL_OVERHEAD_BYTES + 1000 + 2 * PIECE_OVERHEAD_BYTES))
    joining = RetryJoiner(lambda: 0.0)

    def call(key: int) -> SharedResponse:
        shared = joining.open_shared(key, Nobody())
        shared.start(200, (), None)
        shared.write(b"x" * 1000)
        return shared

    for key in range(30):
        call(key).finish()
    assert list(joining._calls) == list(range(10, 30))
    under_way = [call(key) for key in range(100, 130)]  # they count from their first byte, and are not evicted
    assert joining.kept_bytes <= limits.MAX_TOTAL_BYTES
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
    joining.now = lambda: limits.RESPONSE_TTL_SECONDS + 1
    call(1).finish()
    asyncio.run(joining.drop_expired())
    assert (list(joining._calls), joining.kept_bytes) == (
        [1],
        CALL_OVERHEAD_BYTES + 1000 + 2 * PIECE_OVERHEAD_BYTES,
    )


def test_random_use_keeps_byte_count_exact() -> None:
    """Whatever happens to calls, in any order, the bytes counted belong to calls that can be joined."""
    chance, time = random.Random(3), 0.0
    joining = RetryJoiner(lambda: time)
    under_way: list[SharedResponse] = []
    for _ in range(20_000):
        time += chance.random()
        match chance.randrange(6):
            case 0:
                under_way.append(joining.open_shared(chance.randrange(50), Nobody()))
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
        assert joining.kept_bytes == sum(shared.kept_bytes for shared in kept)
        assert all(shared.is_joinable for shared in kept)
    assert sum(shared.is_joinable for shared in joining._finished) <= len(joining._calls) <= 50


class Flow:
    """What feeds a call that was sent; it only notes that its caller left."""

    def __init__(self) -> None:
        self.is_left = False

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def on_stalled(self, seconds: float) -> None: ...

    def on_disconnected(self) -> None:
        self.is_left = True


def finished(joining: RetryJoiner, key: int, headers: list[Header], *parts: bytes) -> SharedResponse:
    shared = joining.open_shared(key, Nobody())
    shared.start(200, headers, None)
    for part in parts:
        shared.write(part)
    shared.finish()
    return shared


def test_headers_count_as_kept_bytes() -> None:
    joining = RetryJoiner(lambda: 0.0)
    head = [(b"x-long", b"y" * 5000)] * 10
    finished(joining, 1, head, b"body")
    packed = 10 * (len("x-long") + 5000) + 19  # and what parts them
    assert joining.kept_bytes == CALL_OVERHEAD_BYTES + packed + 4 + 2 * PIECE_OVERHEAD_BYTES
    too_long = [(b"x-long", b"y" * limits.MAX_RESPONSE_BYTES)]
    finished(joining, 2, too_long)
    assert list(joining._calls) == [1]


class HeadRecorder(Nobody):
    def start(self, *head: object) -> None:
        self.head = head


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"x-empty", b"")],
        [(b"content-type", b"a: b, c"), (b"x-twice", b" 1 "), (b"x-twice", b""), (b"x", b"\xff:")],
    ],
)
def test_joined_response_has_the_same_head(headers: list[Header]) -> None:
    joining = RetryJoiner(lambda: 0.0)
    finished(joining, 1, headers, b"body")
    late = HeadRecorder()
    assert joining.join(1, late)
    assert late.head == (200, headers, None)


async def test_old_responses_expire_without_new_calls() -> None:
    time = 0.0
    joining = RetryJoiner(lambda: time)
    finished(joining, 1, [], b"body")
    time = limits.RESPONSE_TTL_SECONDS
    await joining.drop_expired()
    assert list(joining._calls) == [1]
    time += 1
    await joining.drop_expired()
    assert (joining._calls, joining.kept_bytes, len(joining._finished)) == ({}, 0, 0)


FRAMES = [(b"content-type", b"application/vnd.amazon.eventstream")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
TEXT = event_frames.encode_event("contentBlockDelta", {"delta": {"text": ":message-type exception"}})
FAILED = event_frames.encode_exception("throttlingException", "slow down")


@pytest.mark.parametrize(
    ("headers", "parts", "is_kept"),
    [
        (FRAMES, [TEXT, TEXT], True),
        (FRAMES, [TEXT, FAILED], False),
        (FRAMES, [TEXT + FAILED[:30], FAILED[30:]], False),
        (FRAMES, [FAILED[index : index + 1] for index in range(len(FAILED))], False),
        (EVENTS, [b'data: {"a":1}\n\n', b"data: [DO", b"NE]\n\n"], True),
        (EVENTS, [b'data: {"a":1}\n\n', b'data: {"error":{}}\n\n'], False),
        ([(b"content-type", b"Application/VND.Amazon.EventStream")], [TEXT, FAILED], False),
        ([(b"content-type", b"Text/Event-Stream")], [b'data: {"a":1}\n\n', b'data: {"error":{}}\n\n'], False),
        ([(b"content-type", b"application/json")], [FAILED], True),
        ([], [], True),
    ],
)
def test_failed_stream_is_not_replayed(headers: list[Header], parts: list[bytes], is_kept: bool) -> None:
    joining = RetryJoiner(lambda: 0.0)
    finished(joining, 1, headers, *parts)
    assert joining.join(1, Nobody()) == is_kept
    assert (joining.kept_bytes > 0) == is_kept


def test_unsent_call_stays_for_waiting_callers() -> None:
    joining = RetryJoiner(lambda: 0.0)
    first, second, flow = Left(), Left(), Flow()
    shared = joining.open_shared(1, first)
    first.leave()
    assert shared.is_disconnected
    assert joining.join(1, second)
    assert not shared.is_disconnected
    shared.attach(flow)
    second.leave()
    assert not shared.is_disconnected  # a paying caller may return
    assert not flow.is_left


class Left(Nobody):
    """One that can leave."""

    def attach(self, flow: object) -> None:
        self.flow = flow

    def leave(self) -> None:
        self.is_disconnected = True
        self.flow.on_disconnected()  # type: ignore[attr-defined]


def test_call_without_response_cannot_be_joined() -> None:
    joining = RetryJoiner(lambda: 0.0)
    for begin in (False, True):
        reader, flow = Cut(), Flow()
        shared = joining.open_shared(1, reader)
        if begin:
            shared.attach(flow)
            shared.start(200, (), None)
        shared.abort()
        assert (reader.is_cut, flow.is_left) == (True, begin)
        assert not joining.join(1, Nobody())
        assert (joining._calls, joining.kept_bytes) == ({}, 0)
        shared.abort()


class Cut(Nobody):
    is_cut = False

    def abort(self) -> None:
        self.is_cut = True
