"""Messages that wait for one another: none is lost, none overtakes another, and none waits beyond its turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

import pytest
from price_keeper.server.write_batcher import MAX_BATCH_BYTES, MAX_BATCH_WRITES, WriteBatcher

Written = list[tuple[str, bytes]]


def place(written: Written, name: str) -> Callable[[bytes], None]:
    return lambda data: written.append((name, data))


def busy() -> WriteBatcher:
    outbox = WriteBatcher()
    outbox.is_busy = True
    return outbox


async def test_idle_batcher_writes_immediately() -> None:
    outbox, written = WriteBatcher(), Written()
    outbox.write(place(written, "a"), b"1")
    assert written == [("a", b"1")]


async def test_busy_batcher_writes_at_end_of_turn() -> None:
    outbox, written = busy(), Written()
    outbox.write(place(written, "a"), b"1")
    outbox.write(place(written, "b"), b"2")
    assert written == []
    await asyncio.sleep(0)
    assert written == [("a", b"1"), ("b", b"2")]
    outbox.write(place(written, "a"), b"3")  # and so in every turn
    await asyncio.sleep(0)
    assert written[2:] == [("a", b"3")]


async def test_write_after_busy_turn_overtakes_nothing() -> None:
    outbox, written = busy(), Written()
    write = place(written, "a")
    outbox.write(write, b"1")
    outbox.is_busy = False
    outbox.write(write, b"2")
    assert written == []
    outbox.flush()
    assert written == [("a", b"1"), ("a", b"2")]
    outbox.write(write, b"3")
    assert written[2:] == [("a", b"3")]


async def test_batch_size_is_bounded() -> None:
    outbox, written = busy(), Written()
    for number in range(MAX_BATCH_WRITES + 1):
        assert written == []
        outbox.write(place(written, "a"), b"%d" % number)
        if number + 1 == MAX_BATCH_WRITES:
            break
    assert [data for _, data in written] == [b"%d" % number for number in range(MAX_BATCH_WRITES)]
    outbox.write(place(written, "b"), b"the next")  # and the flush that was due at the end is not the last one
    await asyncio.sleep(0)
    assert written[-1] == ("b", b"the next")


async def test_batch_bytes_are_bounded() -> None:
    outbox, written = busy(), Written()
    half = bytes(MAX_BATCH_BYTES // 2)
    for number in range(6):
        outbox.write(place(written, "a"), half)
        assert len(written) == number + number % 2
    outbox.write(place(written, "b"), b"short")  # written bytes do not count any longer
    assert len(written) == 6
    await asyncio.sleep(0)
    assert written[-1] == ("b", b"short")


@pytest.mark.parametrize("failure", [RuntimeError, OSError, AttributeError])  # the last one over TLS, closed twice
async def test_closed_destination_does_not_affect_others(failure: type[Exception]) -> None:
    outbox, written = busy(), Written()

    def gone(_: bytes) -> None:
        raise failure

    for write in (place(written, "a"), gone, place(written, "b")):
        outbox.write(write, b"x")
    outbox.flush()
    assert written == [("a", b"x"), ("b", b"x")]
    outbox.flush()
    assert len(written) == 2


async def test_write_during_flush_is_written() -> None:
    outbox, written = busy(), Written()

    def answers(data: bytes) -> None:
        written.append(("a", data))
        if data == b"1":
            outbox.write(answers, b"2")

    outbox.write(answers, b"1")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert written == [("a", b"1"), ("a", b"2")]


@pytest.mark.parametrize("seed", range(20))
async def test_each_destination_gets_its_data_in_order(seed: int) -> None:
    chance, outbox, written, expected = random.Random(seed), WriteBatcher(), Written(), Written()
    for number in range(300):
        name, data = chance.choice("abc"), b"%d" % number
        what = chance.randrange(10)
        outbox.is_busy = chance.random() < 0.7
        if what == 0:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert written == expected
        elif what == 1:  # as everything does that is not put
            outbox.flush()
            partial(place(written, name), data)()
            expected.append((name, data))
            assert written == expected
        else:
            outbox.write(place(written, name), data)
            expected.append((name, data))
            assert written == expected[: len(written)]
            assert len(expected) - len(written) < MAX_BATCH_WRITES
    outbox.flush()
    assert written == expected
