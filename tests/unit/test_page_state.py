"""Many who ask at once share one answer, whatever becomes of it, and little is kept."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from price_keeper.control.api_errors import ApiError
from price_keeper.control.api_types import Principal
from price_keeper.control.control_connections import fit_port_limits
from price_keeper.control.page.page_state import (
    MAX_ADMIN_PAGES,
    MAX_CACHE_ENTRIES,
    MAX_CLIENT_PAGES,
    MAX_PAGES_PER_CLIENT,
    PageSubscriptions,
    SingleFlightCache,
)

from tests.support.clock import ManualClock, settle


class Asked:
    def __init__(self, failure: Exception | None = None) -> None:
        self.times = 0
        self.gate = asyncio.Event()
        self._failure = failure

    async def __call__(self) -> int:
        self.times += 1
        await self.gate.wait()
        if self._failure is not None:
            raise self._failure
        return self.times


async def test_page_cache_concurrent_callers_share_one_load_for_its_ttl() -> None:
    clock, asked = ManualClock(), Asked()
    cache = SingleFlightCache[int](2.0, clock.monotonic)
    waiting = [asyncio.create_task(cache.get_or_load("a", asked)) for _ in range(100)]
    await clock.advance(0.5)
    asked.gate.set()
    assert await asyncio.gather(*waiting) == [1] * 100
    await clock.advance(1.4)
    assert await cache.get_or_load("a", asked) == 1
    assert await cache.get_or_load("b", asked) == 2
    await clock.advance(0.1)  # two seconds after the load began
    assert await cache.get_or_load("a", asked) == 3


async def test_page_cache_load_slower_than_its_ttl_is_joined_and_not_kept() -> None:
    clock, asked = ManualClock(), Asked()
    cache = SingleFlightCache[int](2.0, clock.monotonic)
    first = asyncio.create_task(cache.get_or_load("a", asked))
    await clock.advance(60)
    second = asyncio.create_task(cache.get_or_load("a", asked))
    await settle()
    asked.gate.set()
    assert await asyncio.gather(first, second) == [1, 1]
    assert await cache.get_or_load("a", asked) == 2


async def test_page_cache_failure_is_kept_and_a_caller_that_leaves_takes_nothing_from_the_others() -> None:
    clock, asked = ManualClock(), Asked(ValueError("away"))
    cache = SingleFlightCache[int](2.0, clock.monotonic)
    leaving, staying = (asyncio.create_task(cache.get_or_load("a", asked)) for _ in range(2))
    await settle()
    leaving.cancel()
    await settle()
    asked.gate.set()
    with pytest.raises(ValueError, match="away"):
        await staying
    await clock.advance(1)
    with pytest.raises(ValueError, match="away"):
        await cache.get_or_load("a", asked)
    assert asked.times == 1


async def test_page_cache_full_evicts_entries() -> None:
    clock, asked = ManualClock(), Asked()
    cache = SingleFlightCache[int](1.0, clock.monotonic)
    asked.gate.set()
    for number in range(3 * MAX_CACHE_ENTRIES):
        await cache.get_or_load(number, asked)
        assert len(cache._outcomes) <= MAX_CACHE_ENTRIES
    assert len(cache._outcomes) == MAX_CACHE_ENTRIES


ADMIN = Principal("admin", is_admin=True)


class Pages:
    def __init__(self, listeners: PageSubscriptions) -> None:
        self.listeners = listeners
        self.open_now, self.refusals = ExitStack(), set[tuple[int, str]]()

    def taken(self, principal: Principal) -> int:
        for count in range(1000):
            try:
                self.open_now.enter_context(self.listeners.subscribe(principal))
            except ApiError as failure:
                self.refusals.add((failure.status, failure.headers["Retry-After"]))
                return count
        raise AssertionError("no bound")


def test_listeners_are_bounded_and_leave_room_for_administrators() -> None:
    pages = Pages(PageSubscriptions())
    listeners, taken = pages.listeners, pages.taken
    assert taken(Principal("org-1", "1")) == MAX_PAGES_PER_CLIENT
    others = sum(taken(Principal(f"org-{number}", str(number))) for number in range(2, 50))
    assert others == MAX_CLIENT_PAGES - MAX_PAGES_PER_CLIENT
    assert taken(ADMIN) == MAX_ADMIN_PAGES
    assert len(listeners) == MAX_ADMIN_PAGES + MAX_CLIENT_PAGES
    assert pages.refusals == {(503, "30")}
    pages.open_now.close()
    assert (len(listeners), len(listeners._clients)) == (0, 0)
    assert taken(ADMIN) == MAX_ADMIN_PAGES


@pytest.mark.parametrize("descriptors", [0, 64, 200, 256, 512, 1024])
def test_pages_leave_one_address_room_for_probes_and_people(descriptors: int) -> None:
    """All have one address behind a proxy on this machine, and so may they."""
    limits = fit_port_limits(descriptors)
    pages = Pages(PageSubscriptions(limits))
    clients = sum(pages.taken(Principal(f"org-{number}", str(number))) for number in range(50))
    assert clients >= 1
    assert pages.taken(ADMIN) >= 1
    assert len(pages.listeners) <= limits.max_per_network * 5 / 8
