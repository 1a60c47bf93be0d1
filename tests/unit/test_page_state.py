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


async def test_all_who_ask_at_once_share_one_answer_for_a_while() -> None:
    shared, asked = SingleFlightCache[int](2.0), Asked()
    waiting = [asyncio.create_task(shared.get_or_load("a", asked, 0.0)) for _ in range(100)]
    await asyncio.sleep(0)
    asked.gate.set()
    assert await asyncio.gather(*waiting) == [1] * 100
    assert await shared.get_or_load("a", asked, 1.9) == 1
    assert await shared.get_or_load("b", asked, 1.9) == 2
    assert await shared.get_or_load("a", asked, 2.0) == 3


async def test_a_slow_answer_is_not_asked_for_twice() -> None:
    shared, asked = SingleFlightCache[int](2.0), Asked()
    first = asyncio.create_task(shared.get_or_load("a", asked, 0.0))
    await asyncio.sleep(0)
    second = asyncio.create_task(shared.get_or_load("a", asked, 60.0))
    await asyncio.sleep(0)
    asked.gate.set()
    assert await asyncio.gather(first, second) == [1, 1]


async def test_a_failure_is_shared_as_well_and_one_who_leaves_takes_nothing_from_the_others() -> None:
    shared, asked = SingleFlightCache[int](2.0), Asked(ValueError("away"))
    leaving, staying = (asyncio.create_task(shared.get_or_load("a", asked, 0.0)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    asked.gate.set()
    for wait in (staying, shared.get_or_load("a", asked, 1.0)):
        with pytest.raises(ValueError, match="away"):
            await wait
    assert asked.times == 1


async def test_what_is_kept_is_bounded() -> None:
    shared, asked = SingleFlightCache[int](1.0), Asked()
    asked.gate.set()
    for number in range(3 * MAX_CACHE_ENTRIES):
        await shared.get_or_load(number, asked, number / 1000)
        assert len(shared._entries) <= MAX_CACHE_ENTRIES


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


def test_listeners_are_bounded_and_clients_keep_no_administrator_out() -> None:
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
