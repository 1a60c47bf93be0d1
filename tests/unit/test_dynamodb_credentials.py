"""AWS credentials for the store: newer ones are looked for as often as it helps, and not more often."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from price_keeper.provider_chain import RENEW_INTERVAL_SECONDS, FindCredentials
from price_keeper.stores.dynamodb_credentials import MAX_DOUBLINGS, RETRY_SECONDS, StoreCredentials

from tests.support.clock import ManualClock


class Chains:
    """Each finds what has its own number."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> FindCredentials:
        self.made += 1
        found = SimpleNamespace(access_key=f"KEY{self.made}", account_id=None)
        return lambda: found


async def _used(renewed: StoreCredentials) -> Any:
    return (await renewed.get_frozen_credentials()).access_key


async def test_refused_credentials_rebuild_chain_once_for_all() -> None:
    clock = ManualClock()
    renewed = StoreCredentials(Chains(), clock.monotonic)
    assert [await _used(renewed) for _ in range(3)] == ["KEY1"] * 3
    for _ in range(50):
        renewed.on_refused()
    assert [await _used(renewed) for _ in range(3)] == ["KEY2"] * 3
    await clock.advance(RENEW_INTERVAL_SECONDS)
    assert await _used(renewed) == "KEY2"  # by the same chain, which has not been refused


async def test_repeated_refusals_back_off_renewal() -> None:
    clock, chains = ManualClock(), Chains()
    renewed, reads, made = StoreCredentials(chains, clock.monotonic), list[int](), 0
    for second in range(400):
        await _used(renewed)
        if chains.made > made:
            made = chains.made
            reads.append(second)
        renewed.on_refused()
        await clock.advance(1)
    waits = [later - earlier for earlier, later in pairwise(reads)]
    doubled = [int(RETRY_SECONDS) * 2**n for n in range(1, MAX_DOUBLINGS + 1)]
    assert waits == [
        1,
        *(min(wait, int(RENEW_INTERVAL_SECONDS)) for wait in doubled),
        *[int(RENEW_INTERVAL_SECONDS)] * 4,
    ]


@pytest.mark.parametrize("is_refused", [False, True])
async def test_last_credentials_stay_when_no_others_exist(is_refused: bool) -> None:
    clock, found = ManualClock(), [SimpleNamespace(access_key="KEY", account_id=None)]
    renewed = StoreCredentials(lambda: lambda: found.pop() if found else None, clock.monotonic)
    assert await _used(renewed) == "KEY"
    if is_refused:
        renewed.on_refused()
    await clock.advance(RENEW_INTERVAL_SECONDS)
    assert await _used(renewed) == "KEY"
