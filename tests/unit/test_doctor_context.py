"""What several checks of doctor need is loaded once."""

from __future__ import annotations

import asyncio

from price_keeper.doctor.doctor_context import OnceLoaded

from tests.support.clock import settle


async def test_once_loaded_callers_share_a_failure_and_the_next_load() -> None:
    failures: list[Exception] = [OSError("away")]
    gate = asyncio.Event()
    loads = 0

    async def load() -> int:
        nonlocal loads
        loads += 1
        await gate.wait()
        if failures:
            raise failures.pop()
        return loads

    once = OnceLoaded(load)
    callers = [asyncio.create_task(once.get()) for _ in range(3)]
    await settle()
    gate.set()
    assert [str(each) for each in await asyncio.gather(*callers, return_exceptions=True)] == ["away"] * 3
    assert once.loaded == []
    assert await asyncio.gather(*(once.get() for _ in range(3))) == [2, 2, 2]
    assert (await once.get(), loads, once.loaded) == (2, 2, [2])
